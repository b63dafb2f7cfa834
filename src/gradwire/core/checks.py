"""Checks of what counts as a number among the values that users give.

A setting that was computed is often a numpy scalar or a tensor without dimensions; it is taken for
the number that it holds. Booleans are no numbers, and neither are NaN, infinities, and integers too
large for a float.
"""

from __future__ import annotations

import math
import sys
from typing import TypeGuard

__all__ = ["is_number", "is_whole", "plain"]


def plain(value: object) -> object:
    """Returns the Python value of a numpy scalar, or of an array or tensor without dimensions.

    Any other value is returned as it is.
    """
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        try:
            held: object = item()
        except (RuntimeError, ValueError):  # a tensor without data (device "meta")
            return value
        return held
    return value


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether this is a finite Python number (`plain` makes one)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= sys.float_info.max


def is_whole(value: object) -> TypeGuard[int]:
    """Returns whether this is a whole Python number (`plain` makes one)."""
    return isinstance(value, int) and not isinstance(value, bool)
