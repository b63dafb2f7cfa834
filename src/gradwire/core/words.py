"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def seconds(value: float) -> str:
    """Returns a duration with its unit; "–" for NaN."""
    if math.isnan(value):
        return "–"
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def share(value: float) -> str:
    """Returns a share in per cent, 100 % and 0 % for whole ones alone; "–" for NaN."""
    if math.isnan(value):
        return "–"
    if value in (0, 1):
        return f"{value:.0%}".replace("%", " %")
    return f"{min(max(100 * value, 0.001), 99.9):.3g} %"


def numbered(of: str, numbers: Sequence[object]) -> str:
    """Names things by their numbers: "rank 1", "ranks 0, 2"."""
    return f"{of}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def count(number: int, of: str) -> str:
    return f"{number:,} {of}{'' if number == 1 else 's'}"
