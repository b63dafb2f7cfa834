"""The ratio of NetSenseML: how much compression the network's congestion asks for.

The rule (arXiv 2506.16235 and its code): while the data in flight exceed 0.9 of the
bandwidth-delay product (BDP), the ratio shrinks by the factor 0.95, down to 0.005; else it grows by
0.001, up to 1, which is dense. All ranks use the smallest of their ratios.

The signal differs. The original takes a transfer's own duration for the round-trip time, so a
transfer that fills the link always looks congested, and the ratio decays on an idle link. Here
RTprop comes from acknowledgements and BtlBw from the delivery rate, and the data in flight are the
mean over the step by Little's law: bytes sent per step time (computation included) times RTprop. So
a step is congested if it would keep a free link busy for more than 0.9 of its time, and one that
hides behind computation is not.

Two more things are gradwire's own. The encodings (dense, f16, int8, top-k) are chosen by the bytes
that they leave, indices included. And the ratio doubles in each step until the first congestion,
which sets it to half of the ratio that congested the network; a job with slow dense steps would
otherwise need many of them to reach its ratio by twentieths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.agreed import Summary
from gradwire.core.plan import TOPK_SHARE
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State

SHRINK, GROW, FLOOR = 0.95, 0.001, 0.005

INT8 = 0.25
"""The smallest ratio that needs no top-k."""
RAMP = 2.0


def congested(report: StepReport, share: float) -> bool:
    """Returns whether this worker's data in flight exceed `share` of its path's BDP.

    RTprop is a factor of both sides, so it is left out.

    Returns:
        True for congestion; False, too, while the path is not known.
    """
    if report.period_s <= 0.0 or report.btlbw <= 0.0:
        return False
    return report.bytes / report.period_s > share * report.btlbw


@dataclass
class CompressionRatio:
    """The agreed ratio of bytes that a step may send to dense ones.

    Attributes:
        ratio: The ratio, in [floor, 1].
        ramping: Whether it still doubles in each step.
        floor: The smallest ratio.
    """

    ratio: float = 0.1
    ramping: bool = True
    floor: float = FLOOR

    def __post_init__(self) -> None:
        self._judged = self.ratio

    def stop_at(self, floor: float) -> None:
        """Raises the smallest ratio to `floor`, where smaller ones could not be sent."""
        self.floor = max(self.floor, floor)
        self.ratio = max(self.ratio, self.floor)

    def observe(self, summary: Summary) -> None:
        """Takes the agreed flag: one congested rank is enough, so all keep the smallest ratio.

        The flag is about the step before the one that has just ended.
        """
        judged, self._judged = self._judged, self.ratio
        if summary.congested:
            lower = judged / RAMP if self.ramping else self.ratio * SHRINK
            self.ratio = max(self.floor, lower)
            self.ramping = False
        elif self.ramping:
            self.ratio = min(1.0, self.ratio * RAMP)
            self.ramping = judged < 1.0
        else:
            self.ratio = min(1.0, self.ratio + GROW)

    def state_dict(self) -> dict[str, Any]:
        return {"ratio": self.ratio, "ramping": self.ramping, "judged": self._judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        read = State(state, "state['phases']['ladder']")
        read.keys(("ratio", "ramping", "judged"))
        ratio = max(self.floor, read.number("ratio", FLOOR, 1.0))
        judged = read.number("judged", FLOOR, 1.0)
        self.ratio, self.ramping, self._judged = ratio, read.flag("ramping"), judged


def encoding_for(ratio: float) -> tuple[str, float]:
    """Returns the mildest encoding that sends at most `ratio` of the dense bytes.

    Args:
        ratio: Bytes relative to dense ones, in (0, 1].

    Returns:
        The encoding, and the share of elements that it keeps.
    """
    if ratio >= 1.0:
        return "f32", 1.0
    if ratio >= 0.5:
        return "f16", 1.0
    if ratio >= INT8:
        return "int8", 1.0
    return "topk", max(ratio, FLOOR) / TOPK_SHARE
