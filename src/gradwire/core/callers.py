"""The line of the user's script that a warning is about."""

from __future__ import annotations

import sys
from types import FrameType

INSIDE = ("gradwire", "torch", "threading")
"""Packages between a user's line and the warning."""


def user_level() -> int:
    """Returns the `stacklevel` with which `warnings.warn` names the user's line.

    On a thread that no user's line has started it names the caller of whoever warns.
    """
    level, frame = 1, sys._getframe(1)
    above: FrameType | None = frame
    while above is not None:
        package = str(above.f_globals.get("__name__", "")).partition(".")[0]
        if package not in INSIDE:
            return level
        level, above = level + 1, above.f_back
    return 2
