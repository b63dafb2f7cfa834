"""The fuzz targets of engine/fuzz build, and find nothing in a second each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="needs the sources")
def test_every_fuzz_target_builds_and_passes_its_corpus() -> None:
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--seconds", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JOBS": "1"}, timeout=590
    )
    assert done.returncode == 0, done.stdout + done.stderr
