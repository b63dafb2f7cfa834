"""What policies by time learn from the agreed summaries: the path's estimates, and push times."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.core.agreed import Summary
from gradwire.core.saved_state import State
from gradwire.policies.parts.phases import Every

__all__ = ["BestPushes", "EpochClock", "MovingAverages", "PathEstimate", "quantile"]


@dataclass
class PathEstimate:
    """RTprop (seconds) and BtlBw (bytes/s) as last agreed: the slowest rank's; None: not known."""

    rtprop_s: float | None = None
    btlbw: float | None = None

    @staticmethod
    def read(state: State) -> PathEstimate:
        """From the fields of one that was saved; raises ConfigError."""
        state.keys(("rtprop_s", "btlbw"))

        def above_0(key: str) -> float:
            return state.number(key, sys.float_info.min)

        return PathEstimate(state.optional("rtprop_s", above_0), state.optional("btlbw", above_0))

    def observe(self, summary: Summary) -> None:
        """Takes what this step's summary tells."""
        if summary.rtprop_s is not None:
            self.rtprop_s = summary.rtprop_s
        if summary.btlbw is not None:
            self.btlbw = summary.btlbw

    def transfer_s(self, payload_bytes: int, round_trips: float) -> float | None:
        """round_trips · RTprop + payload / BtlBw; None while either is not known."""
        if self.rtprop_s is None or self.btlbw is None:
            return None
        return round_trips * self.rtprop_s + payload_bytes / self.btlbw


@dataclass
class EpochClock:
    """Says when an epoch ends: every so many steps, or when a rank begins one."""

    every: Every
    steps: int = 0
    epoch: int = -1

    def observe(self, summary: Summary) -> bool:
        """Whether an epoch has ended with this step."""
        self.steps += 1
        if self.every != "epoch":
            return self.steps % self.every == 0
        began = summary.epoch > self.epoch
        first = self.epoch < 0
        self.epoch = max(self.epoch, summary.epoch)
        return began and not first


@dataclass
class BestPushes:
    """The best time of a whole push per bucket, since `take` was last called."""

    best: dict[int, float] = field(default_factory=dict)

    def observe(self, summary: Summary) -> None:
        """Takes the push times of the step before."""
        for bucket, push in enumerate(summary.pushes):
            if 0.0 < push < math.inf:
                self.best[bucket] = min(push, self.best.get(bucket, math.inf))

    def take(self) -> dict[int, float]:
        """The best times by bucket; starts anew."""
        taken, self.best = self.best, {}
        return taken


@dataclass
class MovingAverages:
    """An exponential moving average per bucket; the first value is its start."""

    weight: float
    means: dict[int, float] = field(default_factory=dict)

    def observe(self, values: Mapping[int, float]) -> None:
        """Takes one value for each of some buckets."""
        means = dict(self.means)
        for bucket, value in values.items():
            mean = means.get(bucket, value)
            means[bucket] = mean + self.weight * (value - mean)
        self.means = means


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
