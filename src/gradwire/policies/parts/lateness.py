"""PushHistory: the time after which a push is late, learned from the times of earlier pushes.

This is gradwire's own. Loss detection notices a chunk that the network dropped, but not a worker
that stalls, a link that is cut for a while, or other traffic that takes half of it. These show in
pushes that take longer than usual. A push is late once it exceeds the upper quartile of the last
whole pushes by four times the distance between median and upper quartile, and by two round trips at
least, in which a single loss can be repaired. Thus a quarter of those pushes may have been delayed
themselves. Every number is agreed, hence the same on all ranks.

Where fewer than half of the last pushes were whole, nothing is late: either the network has become
slower for good, and waiting reveals the new times, or the loss is so heavy that it alone decides.

Pushes in other encodings take other times, so each share of float32's bytes has its own history.
Until it is long enough that of the next larger share stands in for it, whose pushes take longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.core.agreed import Summary
from gradwire.core.errors import ConfigError
from gradwire.core.saved_state import State
from gradwire.policies.parts.timing import PathEstimate, quantile

WINDOW = 20
"""Number of the last steps that count."""

SPREADS = 4.0
ROUND_TRIPS = 2.0
LONGEST_S = 3600.0
"""The longest delay that a schedule takes, in seconds."""


Pushes = dict[int, list[float]]
"""The last push times by bucket, in seconds, infinite where a push was not whole."""


@dataclass
class PushHistory:
    """The last push times by the share of float32's bytes that was sent, and by bucket.

    Attributes:
        pushes: Push times in seconds, by share and bucket.
    """

    path: PathEstimate = field(default_factory=PathEstimate)
    pushes: dict[float, Pushes] = field(default_factory=dict)

    def observe(self, summary: Summary, share: float = 1.0) -> None:
        """Takes the agreed push times of the step before, which sent this share of the bytes."""
        self.path.observe(summary)
        known = self.pushes.setdefault(_rounded(share), {})
        for bucket, push in enumerate(summary.pushes):
            if push > 0.0:
                known[bucket] = [*known.get(bucket, []), push][-WINDOW:]

    def late_after(self, bucket: int, share: float = 1.0) -> float | None:
        """Returns the seconds after which a bucket's push is late; None while not known."""
        shares = sorted(each for each in self.pushes if each >= _rounded(share))
        of_shares = (self.pushes[each].get(bucket, []) for each in shares)
        known = next((times for times in of_shares if len(times) >= WINDOW / 2), [])
        whole = [push for push in known if push < math.inf]
        if len(whole) < WINDOW / 2 or self.path.rtprop_s is None:
            return None
        median, high = quantile(whole, 0.5), quantile(whole, 0.75)
        margin = max(SPREADS * (high - median), ROUND_TRIPS * self.path.rtprop_s)
        return min(high + margin, LONGEST_S)

    def state_dict(self) -> dict[str, Any]:
        return {
            "pushes": {
                repr(share): {bucket: list(times) for bucket, times in known.items()}
                for share, known in self.pushes.items()
            },
            "path": [self.path.rtprop_s, self.path.btlbw],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        read = State(state, "state['phases']['pushes']")
        read.keys(("pushes", "path"))
        path = read.values["path"]
        if not isinstance(path, (list, tuple)) or len(path) != 2:
            raise read.wrong("path", "[RTprop, BtlBw]")
        estimate = dict(zip(("rtprop_s", "btlbw"), path, strict=True))
        self.path = PathEstimate.read(State(estimate, read.at("path")))
        shares = read.part("pushes")
        self.pushes = {
            _share(text, shares): {
                bucket: times[-WINDOW:]
                for bucket, times in shares.part(text).lists_by_bucket().items()
            }
            for text in shares.values
        }


def _rounded(share: float) -> float:
    """Rounds a share, so that several buckets of one encoding have the same."""
    return round(share, 6)


def _share(text: object, read: State) -> float:
    try:
        share = float(text) if isinstance(text, str) else math.nan
    except ValueError:
        share = math.nan
    if not 0.0 < share < math.inf:
        raise ConfigError.about(
            f"{read.name}",
            f"key {text!r}: the share of float32's bytes is needed, as in '0.5'",
            setting=f"{read.name}[{text!r}]",
            value=text,
        )
    return share
