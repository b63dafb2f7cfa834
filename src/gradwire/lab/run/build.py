"""Which gradwire and which machine a run was made by: runs of others do not go together."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire import __version__
from gradwire.core.settings import FREE_PREFIXES, PREFIX
from gradwire.lab.measure import environment

__all__ = ["READERS", "build", "commit", "machine", "settings_outside"]

READERS = (
    "cli.py",
    "sim.py",
    "bench/accuracy",
    "lab/command.py",
    "lab/intervals.py",
    "lab/report",
    "lab/run/journal.py",
    "lab/run/marks.py",
    "lab/run/results.py",
    "lab/run/summary.py",
    "lab/run/voice.py",
    "lab/scenario/keys.py",
    "lab/scenario/mark.py",
    "lab/scenario/reader.py",
    "lab/scenario/short.py",
)
"""Parts of the package that read scenarios or results: no measured number depends on them."""

_PACKAGE = Path(__file__).resolve().parents[2]
_GIT_SECONDS = 5.0


def build() -> str:
    """Version and fingerprint of what measures, as it is on the disk now: the engine, and the
    package but for `READERS`. Each cell starts new processes, which take it from there."""
    digest = hashlib.sha256()
    engine = importlib.util.find_spec("gradwire._engine")
    if engine is not None and engine.origin is not None:
        digest.update(Path(engine.origin).read_bytes())
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        if not any(name == each or name.startswith(f"{each}/") for each in READERS):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


@functools.lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit of the source checkout that gradwire runs from; None where it is installed."""
    try:
        for command in (
            ["ls-files", "--error-unmatch", "__init__.py"],  # not just any repository around it
            ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        ):
            found = subprocess.run(
                ["git", "-C", str(_PACKAGE), *command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_GIT_SECONDS,
            )
            if found.returncode:
                return None
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def machine() -> dict[str, Any]:
    """The machine and its software, without what changes by the minute."""
    return {name: value for name, value in environment().items() if name != "load"}


def settings_outside(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The GRADWIRE_* variables that are settings: they act on every contestant of gradwire."""
    variables = os.environ if environ is None else environ
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIX) and not name.startswith(FREE_PREFIXES) and value.strip()
    }
