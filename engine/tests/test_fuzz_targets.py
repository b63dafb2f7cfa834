"""The fuzz targets of engine/fuzz and the programs of engine/tests fit the engine, and each target
builds and finds nothing in a second."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "engine" / "fuzz").glob("*.cc"))
PROGRAMS = sorted((ROOT / "engine" / "tests").glob("*.cc"))
COMPILER = shutil.which(os.environ.get("CXX") or "c++") or ""


@pytest.mark.skipif(not COMPILER, reason="needs a compiler")
@pytest.mark.parametrize("source", [*SOURCES, *PROGRAMS], ids=lambda source: source.stem)
def test_a_program_fits_the_engine(source: Path) -> None:
    command = [COMPILER, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'engine'}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="needs the sources")
def test_every_fuzz_target_builds_and_passes_its_corpus() -> None:
    targets = [source.stem for source in SOURCES if source.stem != "driver"]
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--seconds", "1", *targets]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JOBS": "1"}, timeout=590
    )
    assert done.returncode == 0, done.stdout + done.stderr
