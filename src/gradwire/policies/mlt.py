"""Policy "mlt": one fixed bound for every tensor, agreed before training (MLT, NSDI 2024).

MLT's load balancing and its priorities live in the switch and are no part of this; gradwire
carries its bounded-loss receive. Lost gradients become zero, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.phases import Phase
from gradwire.plans import TransferPlan, check_bound, pool
from gradwire.policies.base import PlanContext, Policy, check_transfer_options

__all__ = ["MLT"]


@dataclass
class MLT(Policy):
    """A fixed bound per tensor.

    p: the bound, in [0, 1); 0.008 is the paper's for EfficientNet-B0 (ResNet-50: 0.024).
    spend: "anything" closes as soon as 1 - p has arrived. fill, order, pull: docs/design.md.
    """

    name: ClassVar[str] = "mlt"
    resting_phase: ClassVar[Phase] = "tolerant"

    p: float = 0.008
    spend: str = "anything"
    fill: str = "zero"
    order: str = "shuffled"
    pull: str = "exact"

    def __post_init__(self) -> None:
        check_bound("p", self.p)
        check_transfer_options(self.spend, self.fill, self.order, self.pull)

    def plan(self, context: PlanContext) -> TransferPlan:
        """One region per tensor (small ones pooled), closed at 1 - p."""
        return context.plan(
            pool(context.tensors, self.p, context.chunk_elements),
            spend=self.spend,
            fill=self.fill,
            order=self.order,
            pull=self.pull,
        )
