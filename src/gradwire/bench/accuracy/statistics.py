"""Paired differences, their 90 % interval, and what it says beside a margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Paired", "Verdict", "compare", "t_quantile"]

Verdict = Literal["as good", "worse", "better", "open"]
"""as good: the interval lies within the margin. worse, better: beyond it. open: neither; more seeds
would tell."""

_T95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
)
_Z95 = 1.644854


def t_quantile(freedom: int) -> float:
    """The 95 % quantile of Student's t: the half width of a 90 % interval in standard errors."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom: 1 or more")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, n = _Z95, freedom  # Cornish and Fisher's expansion; right to 1e-4 from here on
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / n + second / n**2


@dataclass(frozen=True)
class Paired:
    """Differences of pairs. half: of the 90 % interval; None for fewer than two pairs."""

    pairs: int
    mean: float
    half: float | None

    @property
    def low(self) -> float:
        """Where the interval begins."""
        return self.mean - (math.inf if self.half is None else self.half)

    @property
    def high(self) -> float:
        """Where the interval ends."""
        return self.mean + (math.inf if self.half is None else self.half)

    def verdict(self, margin: float, more_is_better: bool) -> Verdict:
        """What the interval says of an arm whose differences to lossless these are."""
        if -margin <= self.low and self.high <= margin:
            return "as good"
        if self.low > margin:
            return "better" if more_is_better else "worse"
        if self.high < -margin:
            return "worse" if more_is_better else "better"
        return "open"


def compare(values: Sequence[float], baseline: Sequence[float]) -> Paired:
    """The differences value - baseline, pair by pair; at least one pair."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    if count < 2:
        return Paired(count, mean, None)
    variance = math.fsum((each - mean) ** 2 for each in differences) / (count - 1)
    return Paired(count, mean, t_quantile(count - 1) * math.sqrt(variance / count))
