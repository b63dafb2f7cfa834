"""Checks of the numbers among the values that users give.

A setting that was computed is often a numpy scalar or a tensor without dimensions; it is taken for
the number that it holds. Booleans are no numbers, and neither are NaN, infinities, and integers too
large for a float.
"""

from __future__ import annotations

import math
import sys
from typing import TypeGuard

from gradwire.core.errors import ConfigError

SMALLEST_BOUND = 1e-9
"""The smallest bound beside 0.

No transfer has as many chunks as a smaller bound needs before one of them may be lost."""


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


def check_bound(name: str, value: object) -> None:
    """Checks that a bound is a number in [0, 1) that some transfer could spend."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError.of(name, value, "a bound is a number in [0, 1)")
    if 0.0 < value < SMALLEST_BOUND:
        raise ConfigError.of(name, value, f"a bound is 0, or {SMALLEST_BOUND:g} at the least")


def check_share(name: str, value: object) -> None:
    """Checks that `value` is a number in [0, 1); raises ConfigError otherwise."""
    if not is_number(value) or not 0.0 <= value < 1.0:
        raise ConfigError.of(name, value, "a number in [0, 1)")
