"""Runs go together only if the same gradwire made them on the same kind of machine."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradwire
from gradwire import __version__
from gradwire.core.environment import FREE_PREFIXES, PREFIX
from gradwire_lab.contest.measure import environment

__all__ = ["READERS", "build", "commit", "machine", "settings_outside"]

READERS = (
    "gradwire/cli.py",
    "gradwire/sim",
    "gradwire_lab/command.py",
    "gradwire_lab/contest/intervals.py",
    "gradwire_lab/report",
    "gradwire_lab/run/journal.py",
    "gradwire_lab/run/marks.py",
    "gradwire_lab/run/results.py",
    "gradwire_lab/run/summary.py",
    "gradwire_lab/run/voice.py",
    "gradwire_lab/scenario/keys.py",
    "gradwire_lab/scenario/mark.py",
    "gradwire_lab/scenario/reader.py",
    "gradwire_lab/scenario/short.py",
    "gradwire_lab/study",
)
"""Parts that only read scenarios or results, so that no measured number depends on them."""

_PACKAGES = (Path(gradwire.__file__).parent, Path(__file__).resolve().parents[1])
_GIT_SECONDS = 5.0


def build() -> str:
    """Return version and fingerprint of what measures, as it is on the disk now.

    The fingerprint is of the engine and of both packages without `READERS`. It is of the disk
    because each cell starts new processes, which load the code from there.
    """
    digest = hashlib.sha256()
    engine = importlib.util.find_spec("gradwire._engine")
    if engine is not None and engine.origin is not None:
        digest.update(Path(engine.origin).read_bytes())
    for path in sorted(path for package in _PACKAGES for path in package.rglob("*.py")):
        package = next(each for each in _PACKAGES if path.is_relative_to(each))
        name = path.relative_to(package.parent).as_posix()
        if not any(name == each or name.startswith(f"{each}/") for each in READERS):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


@functools.lru_cache(maxsize=1)
def commit() -> str | None:
    """Return the commit of the checkout that gradwire runs from; None where it is installed."""
    try:
        for command in (
            # A repository around an installation does not count.
            ["ls-files", "--error-unmatch", "__init__.py"],
            ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        ):
            found = subprocess.run(
                ["git", "-C", str(_PACKAGES[0]), *command],
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
    """Describe the machine and its software, without what changes by the minute."""
    return {name: value for name, value in environment().items() if name != "load"}


def settings_outside(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the GRADWIRE_* variables that are settings of every contestant of gradwire."""
    variables = os.environ if environ is None else environ
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(PREFIX) and not name.startswith(FREE_PREFIXES) and value.strip()
    }
