"""PushHistory: from when on a push is late, learned from how long pushes take.

Ours; no paper's. Loss detection sees a chunk that the network dropped; it cannot see that a worker
stalls, that a link is cut for a while or that somebody else took half of it. What tells those is
that a push takes longer than pushes do here: longer than the upper quartile of its last whole
ones by four times the distance between median and that quartile (and by two round trips at least,
so that a single loss can be repaired before). Up to a quarter of those pushes may have been in
trouble themselves. Every number is agreed, hence the same on all ranks.

Where fewer than half of the last pushes were whole, nothing is late: either the network got slower
for good, and waiting teaches the new times, or loss is so heavy that loss alone decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.phases import Summary
from gradwire.policies.timing import PathEstimate, quantile
from gradwire.states import State

__all__ = ["PushHistory"]

WINDOW = 20
"""Steps that are looked back on."""

SPREADS = 4.0
ROUND_TRIPS = 2.0
LONGEST_S = 3600.0
"""The longest delay that a schedule takes."""


@dataclass
class PushHistory:
    """The last push times per bucket, infinite where a push was not whole."""

    path: PathEstimate = field(default_factory=PathEstimate)
    pushes: dict[int, list[float]] = field(default_factory=dict)

    def observe(self, summary: Summary) -> None:
        """Takes the agreed push times of the step before."""
        self.path.observe(summary)
        for bucket, push in enumerate(summary.pushes):
            if push > 0.0:
                self.pushes[bucket] = [*self.pushes.get(bucket, []), push][-WINDOW:]

    def forget(self) -> None:
        """Starts anew: pushes are about to take other times."""
        self.pushes = {}

    def late_after(self, bucket: int) -> float | None:
        """Seconds after which a bucket's push is late; None while that is not known."""
        whole = [push for push in self.pushes.get(bucket, []) if push < math.inf]
        if len(whole) < WINDOW / 2 or self.path.rtprop_s is None:
            return None
        median, high = quantile(whole, 0.5), quantile(whole, 0.75)
        margin = max(SPREADS * (high - median), ROUND_TRIPS * self.path.rtprop_s)
        return min(high + margin, LONGEST_S)

    def state_dict(self) -> dict[str, Any]:
        """The times and the path's estimates."""
        return {
            "pushes": {bucket: list(times) for bucket, times in self.pushes.items()},
            "path": [self.path.rtprop_s, self.path.btlbw],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError."""
        read = State(state, "state['phases']['pushes']")
        read.keys(("pushes", "path"))
        path = read.values["path"]
        if not isinstance(path, (list, tuple)) or len(path) != 2:
            raise read.wrong("path", "[RTprop, BtlBw]")
        estimate = dict(zip(("rtprop_s", "btlbw"), path, strict=True))
        self.path = PathEstimate.read(State(estimate, read.at("path")))
        self.pushes = {
            bucket: times[-WINDOW:]
            for bucket, times in read.part("pushes").lists_by_bucket().items()
        }
