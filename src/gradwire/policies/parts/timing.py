"""Estimates from the agreed summaries for policies by time: the path, and times of pushes."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.core.agreed import Summary
from gradwire.core.saved_state import State
from gradwire.policies.parts.phases import Every


@dataclass
class PathEstimate:
    """RTprop and BtlBw of the slowest rank, as last agreed.

    Attributes:
        rtprop_s: Round-trip time in seconds; None while it is not known.
        btlbw: Bandwidth of the bottleneck in bytes per second; None while it is not known.
    """

    rtprop_s: float | None = None
    btlbw: float | None = None

    @staticmethod
    def read(state: State) -> PathEstimate:
        state.keys(("rtprop_s", "btlbw"))

        def above_0(key: str) -> float:
            return state.number(key, sys.float_info.min)

        return PathEstimate(state.optional("rtprop_s", above_0), state.optional("btlbw", above_0))

    def observe(self, summary: Summary) -> None:
        if summary.rtprop_s is not None:
            self.rtprop_s = summary.rtprop_s
        if summary.btlbw is not None:
            self.btlbw = summary.btlbw

    def transfer_s(self, payload_bytes: int, round_trips: float) -> float | None:
        """Returns round_trips · RTprop + payload / BtlBw in seconds; None while not known."""
        if self.rtprop_s is None or self.btlbw is None:
            return None
        return round_trips * self.rtprop_s + payload_bytes / self.btlbw


@dataclass
class EpochClock:
    """Detects the end of an epoch: after so many steps, or when a rank begins the next.

    Attributes:
        every: Steps of an epoch, or "epoch" for those that the ranks begin.
        steps: Number of steps so far.
        epoch: The newest epoch begun, -1 for none.
    """

    every: Every
    steps: int = 0
    epoch: int = -1

    def observe(self, summary: Summary) -> bool:
        """Takes a step's summary; returns whether an epoch has ended with this step."""
        self.steps += 1
        if self.every != "epoch":
            return self.steps % self.every == 0
        began = summary.epoch > self.epoch
        first = self.epoch < 0
        self.epoch = max(self.epoch, summary.epoch)
        return began and not first


@dataclass
class BestPushes:
    """The shortest time of a whole push per bucket, since `take` was last called.

    Attributes:
        best: The times in seconds by bucket.
    """

    best: dict[int, float] = field(default_factory=dict)

    def observe(self, summary: Summary) -> None:
        for bucket, push in enumerate(summary.pushes):
            if 0.0 < push < math.inf:
                self.best[bucket] = min(push, self.best.get(bucket, math.inf))

    def take(self) -> dict[int, float]:
        taken, self.best = self.best, {}
        return taken


@dataclass
class MovingAverages:
    """An exponential moving average per bucket, which starts with the first value.

    Attributes:
        weight: Weight of the newest value.
    """

    weight: float
    means: dict[int, float] = field(default_factory=dict)

    def observe(self, values: Mapping[int, float]) -> None:
        means = dict(self.means)
        for bucket, value in values.items():
            mean = means.get(bucket, value)
            means[bucket] = mean + self.weight * (value - mean)
        self.means = means


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest of the values that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
