"""Policy "mlt": one fixed bound for every tensor, agreed before training (MLT, NSDI 2024).

MLT's load balancing and its priorities live in the switch and are no part of this; gradwire
carries its bounded-loss receive. Lost gradients become zero, as there. MLT's lost *parameters* keep
the last iteration's value; in a gradient all-reduce a result that did not arrive is a zero gradient
at that worker, which then keeps its parameters: our interpretation (pull="lossy"). control="probe"
is the software form of MLT that DBLP's paper measures against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.phases import Phase
from gradwire.plans import TransferPlan, check_bound, pool
from gradwire.policies.base import PlanContext, Policy
from gradwire.policies.control import settle_options

__all__ = ["MLT"]


@dataclass
class MLT(Policy):
    """A fixed bound per tensor.

    p: the bound, in [0, 1); 0.008 is the paper's for EfficientNet-B0 (ResNet-50: 0.024).
    spend: "anything" closes as soon as 1 - p has arrived. control: "stream", or "probe" for the
    published passes of probe, bitmap and stop. order, pull: None means what control says,
    "shuffled" and "exact" or "sequential" and "lossy"; pull="lossy" lets replicas drift apart.
    fill: docs/design.md.
    """

    name: ClassVar[str] = "mlt"
    resting_phase: ClassVar[Phase] = "tolerant"

    p: float = 0.008
    spend: str = "anything"
    fill: str = "zero"
    order: str | None = None
    pull: str | None = None
    control: str = "stream"

    def __post_init__(self) -> None:
        check_bound("p", self.p)
        self._answers = settle_options(self.control, self.spend, self.fill, self.order, self.pull)
        self.order, self.pull = self._answers["order"], self._answers["pull"]

    def plan(self, context: PlanContext) -> TransferPlan:
        """One region per tensor (small ones pooled), closed at 1 - p."""
        return context.plan(
            pool(context.tensors, self.p, context.chunk_elements),
            **self._answers,
        )
