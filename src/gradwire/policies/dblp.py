"""Policy "dblp": the bound follows the training phase (DBLP, arXiv 2605.01989).

From the paper: p_low in critical phases and p_low + 40 points elsewhere; a region closes as soon
as 1 - p of it has arrived (the receiver's "stop" in mid-pass); zero fill; the detector's rule and
η. control="probe" is the paper's own control, passes of probe, bitmap and stop in sequential order
with a lossy pull, under which replicas drift apart. With p_high = p_low it is the baseline of the
paper's tables. Vesting (spend="lost") is the authors' later idea. Their code runs the detector
every 10 rounds, the paper once an epoch.

gradwire's own: one bound per tensor instead of one for the whole gradient, small tensors pooled;
the shuffled order; the exact pull; the detector's default input (`gradwire.policies.parts.phases`);
leaving out the chunks with the smallest results; the options spend and fill, and a table for p_low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gradwire.core.agreed import Phase
from gradwire.core.checks import check_bound
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import TensorSlot
from gradwire.policies.base import PlanContext, Policy
from gradwire.policies.parts.phases import Every, make_detector
from gradwire.policies.parts.priorities import check_priority
from gradwire.policies.parts.probe_control import bounded_options
from gradwire.policies.parts.regions import (
    BoundTable,
    check_patterns,
    check_table,
    regions_by_tensor,
)

P_LOW = 0.008
"""The paper's bound for EfficientNet-B0, AlexNet and GPT-2 small (ResNet-50: 0.024)."""

WIDENING = 0.40
"""The paper's distance from p_low to p_high: 40 percentage points."""


PRIORITIES = ("none", "results")


@dataclass
class DBLP(Policy):
    """Bound p_low in critical phases, p_high elsewhere; training starts critical.

    Attributes:
        p_low: One bound, or a table of bounds by tensor-name pattern such as {"head.*": 0.0, "*":
            0.02}. The first pattern that matches applies, and 0.008 where none does. A pattern that
            matches nothing is an error. Unit: share of the elements. Allowed: [0, 1), or a table of
            such bounds.
        p_high: Bound of tolerant phases; None for each tensor's p_low + 0.40. Unit: share of the
            elements. Allowed: [0, 1), `p_low` or more, or None.
        eta: Relative change of the gradient's norm that makes a phase critical. Unit: share.
            Allowed: above 0.
        every: Time between two decisions of the detector: a number of steps (10 in the authors'
            code), or "epoch" for each `attachment.epoch(n)`, as in the paper. Unit: steps. Allowed:
            1 or more, or "epoch".
        detector: What the detector of phases looks at: "ours" is the mean norm of the workers' own
            gradients, "paper" the norm of one applied gradient, and "layers" the first of these for
            each layer, which has a phase of its own. Allowed: "ours", "paper", "layers".
        spend: Which missing chunks may be given up: "anything" as in the paper, or "lost", only
            what the network lost. Allowed: "anything", "lost".
        fill: What takes the place of a missing contribution: "zero" as in the paper; "mean" divides
            by the number of contributions that arrived; "momentum" does so too, and takes elements
            without any contribution from the optimizer. None means "momentum" where
            attach(optimizer=…) has an optimizer of Adam's family, regions close on the smallest
            results and there is no error feedback, else "zero". Allowed: "zero", "mean", "momentum"
            or None.
        order: Order of the chunks within a push; None means "shuffled", or "sequential" with
            control="probe". Allowed: "shuffled", "sequential" or None.
        pull: How results come back: "exact", "committed", where all workers leave the same part
            out, or "lossy", under which replicas drift apart; None means "exact", or "lossy" with
            control="probe". Allowed: "exact", "committed", "lossy" (needs control="probe") or None.
        control: "stream", or "probe" for the paper's passes of probe, bitmap and stop. Allowed:
            "stream", "probe".
        priority: "results" sends chunks with large last results first, which are the same on all
            workers, and so leaves out those with small ones; "none" goes by order alone, as the
            paper. None means "results" where regions close as soon as enough has arrived and
            replicas stay the same, unless order is given; else "none". Allowed: "none", "results"
            or None.
    """

    name: ClassVar[str] = "dblp"

    p_low: float | dict[str, float] = P_LOW
    p_high: float | None = None
    eta: float = 0.5
    every: Every = 10
    detector: str = "ours"
    spend: str = "anything"
    fill: str | None = None
    order: str | None = None
    pull: str | None = None
    control: str = "stream"
    priority: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.p_low, Mapping):
            check_table("p_low", self.p_low)
        else:
            check_bound("p_low", self.p_low)
        table = self.p_low if isinstance(self.p_low, Mapping) else {"*": self.p_low}
        self._low = BoundTable(table, P_LOW)
        largest = max(table.values())
        if self.p_high is None:
            if largest + WIDENING >= 1.0:
                raise ConfigError.of(
                    "p_low",
                    self.p_low,
                    f"p_high would be p_low + {WIDENING:g}, which must stay below 1; give p_high",
                    beside="without p_high",
                )
        else:
            check_bound("p_high", self.p_high)
            if self.p_high < largest:
                raise ConfigError.of(
                    "p_high",
                    self.p_high,
                    "the bound of tolerant phases must be p_low or more",
                    beside=f"is below p_low={self.p_low!r}",
                )
        self._answers()
        check_priority(self._priority(), PRIORITIES, self.control, self.order, self.pull)
        self.phases = make_detector(self.eta, self.every, self.detector)

    def fit(self, tensors: Mapping[str, int] | None) -> None:
        """Checks the patterns of p_low against the model's names, and p_high against its bounds.

        Raises:
            ConfigError: No model is known, a pattern matches no tensor, or p_high is below a bound.
        """
        if not isinstance(self.p_low, Mapping):
            return
        if tensors is None:
            raise ConfigError.of(
                "p_low",
                self.p_low,
                "it needs the tensors' names: give the hook HookState(model=…)",
                beside="without a model",
            )
        check_patterns("p_low", self.p_low, list(tensors))
        for name in tensors:
            low = self._low(name)
            if self.p_high is not None and self.p_high < low:
                raise ConfigError.of(
                    "p_high",
                    self.p_high,
                    "the bound of tolerant phases must be p_low or more",
                    beside=f"is below p_low={low!r} of tensor {name!r}, which no pattern matches",
                )

    def plan(self, context: PlanContext) -> TransferPlan:
        """Makes one region per tensor (small ones pooled), which closes at 1 - p(phase).

        Both phases pool for the stricter bound, so that the chunk grid stays the same.
        """
        low = [self._low(slot.name) for slot in context.tensors]
        high = [self._widened(bound) for bound in low]
        regions = regions_by_tensor(
            context.tensors,
            [
                strict if self._phase_of(slot, context) == "critical" else loose
                for slot, strict, loose in zip(context.tensors, low, high, strict=True)
            ],
            low if any(low) else high,
            context.chunk_elements,
        )
        answers = self._answers()
        if self.ranks_results:
            answers["order"] = "priority"
        return context.plan(regions, **answers)

    def options(self) -> dict[str, object]:
        """Returns the options, with order, pull and priority decided, which the ranks compare."""
        answers = self._answers()
        meant = {"order": answers["order"], "pull": answers["pull"], "priority": self._priority()}
        return {**super().options(), **meant}

    def _answers(self) -> dict[str, Any]:
        fill = "zero" if self.fill is None else self.fill
        return bounded_options(self.control, self.spend, fill, self.order, self.pull)

    @property
    def fill_beside_adam(self) -> str:
        """The fill beside Adam: "momentum" only where what is left out is small, else "zero".

        Where the missing chunks are random, fill "momentum" may harm (docs/policies.md, "Fill").
        """
        return "momentum" if self.ranks_results and self.spend == "anything" else "zero"

    @property
    def loosest_bound(self) -> float:
        """The bound of tolerant phases; 0 where a table of p_low gives each tensor its own."""
        if isinstance(self.p_low, Mapping):
            return self.p_high or 0.0
        return self._widened(self.p_low)

    @property
    def ranks_results(self) -> bool:
        """Whether chunks are ranked by the magnitudes of their last results."""
        return self._priority() == "results"

    def _priority(self) -> str:
        if self.priority is not None:
            return self.priority
        eager = self.control == "stream" and self.spend == "anything" and self.order is None
        if self.scattered:
            return "none"
        return "results" if eager and self.pull != "lossy" else "none"

    def _phase_of(self, slot: TensorSlot, context: PlanContext) -> Phase:
        if self.detector != "layers" or self.phases is None:
            return context.phase
        return self.phases.phase_of(slot.layer)

    def _widened(self, p_low: float) -> float:
        return round(p_low + WIDENING, 12) if self.p_high is None else self.p_high
