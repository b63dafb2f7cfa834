"""Policy "netsenseml": compresses only under congestion (NetSenseML, Euro-Par 2025).

From the paper (arXiv 2506.16235): quantisation and compression follow the network by the
bandwidth-delay product, all ranks agree on the smallest ratio, and the ratio's constants are those
of its code. Nothing is lost on the way, as the bound is 0. `gradwire.policies.parts.compression`
says where the signal, the encodings and the start-up differ, and why. Error feedback, which the
original lacks, is on, because top-k is biased without it. Dense steps (ratio 1) are plain exact
sums.

The original code prunes weights before it selects elements, and keeps a momentum memory. Both are
options here, off by default, in gradwire's own interpretation. `prune` excludes the gradient
elements of each tensor's smallest weights from top-k (`gradwire.training.feedback.pruning`). It
saves no bytes, since the ratio sets top-k's share, and what is held back stays in the residual
until the network is free again; so it serves comparisons only. `momentum` moves the optimizer's
momentum to the workers, before the selection (`gradwire.training.feedback.velocity`), and is meant
for an optimizer without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gradwire.core.checks import check_share, is_number
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan, check_choice
from gradwire.core.report import StepReport
from gradwire.policies.base import FeedbackNeed, PlanContext, Policy, topk_needs_feedback
from gradwire.policies.parts.compression import (
    FLOOR,
    INT8,
    CompressionRatio,
    congested,
    encoding_for,
)


@dataclass
class NetSenseML(Policy):
    """Dense while the network is free, else f16, int8 and top-k as far as congestion asks.

    Attributes:
        start: Ratio of the first step, which doubles each step until the first congestion. Unit:
            share of the dense bytes. Allowed: [0.005, 1].
        share: Share of the bandwidth-delay product that the data in flight may take. Unit: share.
            Allowed: (0, 1].
        compress: The last encoding: "topk", which needs error feedback and stops at int8 where
            there are servers, or "int8". Allowed: "topk", "int8".
        prune: Share of each tensor's elements, those of its smallest weights, that top-k excludes;
            norm layers and biases are exempt. Unit: share of the elements. Allowed: [0, 1); 0 with
            compress="int8".
        momentum: Momentum of the workers' memory, for an optimizer without momentum. Allowed: [0,
            1).
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
        self._ratio = CompressionRatio(max(floor, float(self.start)), self.start < 1.0, floor)
        self._congested = False

    @property
    def ratio(self) -> float:
        """The share of the dense bytes that the next step may send."""
        return self._ratio.ratio

    @property
    def congested(self) -> bool:
        """Whether this worker's last step met congestion; all ranks agree on it with the next."""
        return self._congested

    def fit(self, tensors: Mapping[str, int] | None) -> None:
        """Makes int8 the last encoding beside servers, which keep no residuals of results."""
        if self.servers:
            self._ratio.stop_at(INT8)

    def needs_feedback(self) -> FeedbackNeed | None:
        """Returns the need of top-k, or of the momentum memory; see Policy."""
        return topk_needs_feedback(self.compress, self.compressions) or super().needs_feedback()

    def plan(self, context: PlanContext) -> TransferPlan:
        """Makes one exact region in the encoding that the ratio asks for."""
        encoding, kept = encoding_for(self._ratio.ratio)
        whole = TransferPlan.whole(context.elements, scale=1.0 / context.world_size)
        pruned = self.prune if encoding == "topk" else 0.0
        return replace(whole, encoding=encoding, kept=kept, pruned=pruned)

    def observe(self, report: StepReport) -> None:
        """Updates the ratio by the agreed flag, and decides whether this step was congested."""
        super().observe(report)
        self._ratio.observe(report.agreed)
        self._congested = congested(report, self.share)

    def state_dict(self) -> dict[str, object]:
        """Returns the ratio, and this worker's view of its last step."""
        return {"ladder": self._ratio.state_dict(), "congested": self._congested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        read = self._read(state, "ladder", "congested")
        self._congested = read.flag("congested")
        self._ratio.load_state_dict(state["ladder"])
