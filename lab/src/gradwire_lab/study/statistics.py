"""Paired differences are judged by their 90 % interval beside a margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradwire_lab.contest.intervals import t_quantile

__all__ = ["Paired", "Verdict", "compare"]

Verdict = Literal["as good", "worse", "better", "open"]
"""A verdict says where the interval lies.

It is "as good" within the margin, "worse" or "better" beyond it, else "open", which more seeds
would decide.
"""


@dataclass(frozen=True)
class Paired:
    """These are differences of pairs; half is of the 90 % interval, None below two pairs."""

    pairs: int
    mean: float
    half: float | None

    @property
    def low(self) -> float:
        return self.mean - (math.inf if self.half is None else self.half)

    @property
    def high(self) -> float:
        return self.mean + (math.inf if self.half is None else self.half)

    def verdict(self, margin: float, more_is_better: bool) -> Verdict:
        """Return the verdict on an arm whose differences to lossless these are."""
        if -margin <= self.low and self.high <= margin:
            return "as good"
        if self.low > margin:
            return "better" if more_is_better else "worse"
        if self.high < -margin:
            return "worse" if more_is_better else "better"
        return "open"


def compare(values: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Return the differences value - baseline, pair by pair; at least one pair."""
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    if count < 2:
        return Paired(count, mean, None)
    variance = math.fsum((each - mean) ** 2 for each in differences) / (count - 1)
    return Paired(count, mean, t_quantile(count - 1) * math.sqrt(variance / count))
