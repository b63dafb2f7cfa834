"""Policy "netsenseml": compresses only while the network hurts (NetSenseML, Euro-Par 2025).

arXiv 2506.16235. The paper's: the network is watched and quantisation and compression follow it,
by the bandwidth-delay product; all ranks agree on the smallest ratio; the ratio's constants are
those of its code. Nothing is lost on the way: the bound is 0. Where we differ, and why, is in
`gradwire.policies.congestion`: the signal, the stages, the ramp. Error feedback, which theirs
lacks, is on unless switched off: top-k is biased without it. Their weight pruning and momentum
memory are not built; dense steps (ratio 1) are plain exact sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradwire.errors import ConfigError
from gradwire.plans import TransferPlan
from gradwire.policies.base import PlanContext, Policy
from gradwire.policies.congestion import FLOOR, Ladder, congested, stage
from gradwire.telemetry import StepReport

__all__ = ["NetSenseML"]


@dataclass
class NetSenseML(Policy):
    """Dense while the network is free, else f16, int8 and top-k as far as congestion asks.

    start: the ratio of the first step, doubled each step until the first congestion. share: of
    the bandwidth-delay product that the data in flight may take.
    """

    name: ClassVar[str] = "netsenseml"
    feedback: ClassVar[bool | None] = True

    start: float = 0.1
    share: float = 0.9

    def __post_init__(self) -> None:
        for name, least in (("start", FLOOR), ("share", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not least <= value <= 1.0 or not value:
                raise ConfigError(
                    f"{name}={value!r}: a number "
                    + (f"from {least:g} to 1" if least else "above 0 and at most 1")
                )
        self._ladder = Ladder(float(self.start), self.start < 1.0)
        self._congested = False

    @property
    def ratio(self) -> float:
        """The share of the dense bytes that the next step may send."""
        return self._ladder.ratio

    @property
    def congested(self) -> bool:
        """This worker's view of its last step; all ranks' views are agreed with the next."""
        return self._congested

    def plan(self, context: PlanContext) -> TransferPlan:
        """One exact region in the encoding of the stage."""
        encoding, kept = stage(self._ladder.ratio)
        whole = TransferPlan.whole(context.elements, scale=1.0 / context.world_size)
        return replace(whole, encoding=encoding, kept=kept)

    def observe(self, report: StepReport) -> None:
        """Moves the ratio by the agreed flag; judges the step's own congestion for the next."""
        super().observe(report)
        self._ladder.observe(report.agreed)
        self._congested = congested(report, self.share)

    def state_dict(self) -> dict[str, object]:
        """The ratio, and this worker's view of its last step."""
        return {"ladder": self._ladder.state_dict(), "congested": self._congested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._ladder.load_state_dict(state["ladder"])
        self._congested = bool(state["congested"])
