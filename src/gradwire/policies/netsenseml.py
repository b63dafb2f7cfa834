"""Policy "netsenseml": compresses only while the network hurts (NetSenseML, Euro-Par 2025).

arXiv 2506.16235. The paper's: the network is watched and quantisation and compression follow it,
by the bandwidth-delay product; all ranks agree on the smallest ratio; the ratio's constants are
those of its code. Nothing is lost on the way: the bound is 0. Where we differ, and why, is in
`gradwire.policies.parts.ladder`: the signal, the stages, the ramp. Error feedback, which theirs
lacks, is on: top-k is biased without it. Dense steps (ratio 1) are plain exact sums.

Their code prunes weights before it selects, and keeps a momentum memory. Both are options here,
off by default, and what they mean is ours: `prune` holds back the gradient elements of each
tensor's smallest weights from top-k (`gradwire.training.feedback.pruning`). It saves no bytes, as
top-k's share is given by the ratio, and what is held back waits in the residual until the network
is free again; so it is for those who compare. `momentum` moves the optimizer's momentum to the
workers, before the selection (`gradwire.training.feedback.velocity`), and only makes sense with an
optimizer that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradwire.core.checks import is_number
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan, check_choice, check_share
from gradwire.core.report import StepReport
from gradwire.policies.base import PlanContext, Policy
from gradwire.policies.parts.ladder import FLOOR, INT8, Ladder, congested, stage

__all__ = ["NetSenseML"]


@dataclass
class NetSenseML(Policy):
    """Dense while the network is free, else f16, int8 and top-k as far as congestion asks.

    start: the ratio of the first step, doubled each step until the first congestion. share: of
    the bandwidth-delay product that the data in flight may take. compress: how far it goes,
    "topk" (needs error feedback; beside servers it stops at int8) or "int8". prune: the share of
    each tensor's elements, those of its smallest weights, that top-k passes over; in [0, 1), norm
    layers and biases excepted. momentum: of the workers' momentum memory, in [0, 1); for an
    optimizer without momentum.
    """

    name: ClassVar[str] = "netsenseml"
    feedback: ClassVar[bool | None] = True
    compressions: ClassVar[tuple[str, ...]] = ("topk", "int8")

    start: float = 0.1
    share: float = 0.9
    compress: str = "topk"
    prune: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("start", FLOOR), ("share", 0.0)):
            value = getattr(self, name)
            if not is_number(value) or not least <= value <= 1.0 or not value:
                span = f"from {least:g} to 1" if least else "above 0 and at most 1"
                raise ConfigError.of(name, value, f"a number {span}")
        check_choice("compress", self.compress, self.compressions)
        check_share("prune", self.prune)
        check_share("momentum", self.momentum)
        if self.prune and self.compress != "topk":
            raise ConfigError.of(
                "prune",
                self.prune,
                "only compress='topk' selects among elements",
                beside=f"with compress={self.compress!r}",
            )
        floor = FLOOR if self.compress == "topk" else INT8
        self._ladder = Ladder(max(floor, float(self.start)), self.start < 1.0, floor)
        self._congested = False

    @property
    def ratio(self) -> float:
        """The share of the dense bytes that the next step may send."""
        return self._ladder.ratio

    @property
    def congested(self) -> bool:
        """This worker's view of its last step; all ranks' views are agreed with the next."""
        return self._congested

    def prepare(self, tensors: Mapping[str, int] | None) -> None:
        """Beside servers int8 is the last stage: they keep no residuals of results."""
        if self.servers:
            self._ladder.stop_at(INT8)

    def plan(self, context: PlanContext) -> TransferPlan:
        """One exact region in the encoding of the stage."""
        encoding, kept = stage(self._ladder.ratio)
        whole = TransferPlan.whole(context.elements, scale=1.0 / context.world_size)
        pruned = self.prune if encoding == "topk" else 0.0
        return replace(whole, encoding=encoding, kept=kept, pruned=pruned)

    def observe(self, report: StepReport) -> None:
        """Moves the ratio by the agreed flag; judges the step's own congestion for the next."""
        super().observe(report)
        self._ladder.observe(report.agreed)
        self._congested = congested(report, self.share)

    def state_dict(self) -> dict[str, object]:
        """The ratio, and this worker's view of its last step."""
        return {"ladder": self._ladder.state_dict(), "congested": self._congested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError."""
        read = self._read(state, "ladder", "congested")
        self._congested = read.flag("congested")
        self._ladder.load_state_dict(state["ladder"])
