"""Warnings that name the line of the user's script that they are about."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

INSIDE = ("gradwire", "torch", "threading")
"""Packages between a user's line and the warning."""


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns of a user's line, or of who calls the caller on a thread that none has started."""
    level = 1
    above: FrameType | None = sys._getframe(1)
    while above is not None and _package(above) in INSIDE:
        level, above = level + 1, above.f_back
    warnings.warn(text, category, stacklevel=3 if above is None else 1 + level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
