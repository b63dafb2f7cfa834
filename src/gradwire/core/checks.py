"""What counts as a number among the values that users give: Python's, numpy's and torch's.

A setting that was computed arrives as a numpy scalar or as a tensor without dimensions as often as
a float; it is taken for the number that it holds. Truth values are no numbers, and neither are
NaN, infinities, and integers that no float holds.
"""

from __future__ import annotations

import math
import sys
from typing import TypeGuard

__all__ = ["is_number", "is_whole", "plain"]


def plain(value: object) -> object:
    """The Python value of a numpy scalar, or of an array or tensor without dimensions; any other
    value as it is."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        try:
            held: object = item()
        except (RuntimeError, ValueError):  # a tensor that holds nothing (device "meta")
            return value
        return held
    return value


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether this is a finite number (Python's: see `plain`)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= sys.float_info.max


def is_whole(value: object) -> TypeGuard[int]:
    """Whether this is a whole number (Python's: see `plain`)."""
    return isinstance(value, int) and not isinstance(value, bool)
