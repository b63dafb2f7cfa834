"""Policy "reliable": nothing is lost, and sums in rank order are reproducible to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.plan import TransferPlan
from gradwire.policies.base import PlanContext, Policy


@dataclass
class Reliable(Policy):
    """Every chunk of every worker counts (docs/policies.md). It has no options."""

    name: ClassVar[str] = "reliable"
    feedback: ClassVar[bool | None] = False  # all elements count, so no residual arises

    def plan(self, context: PlanContext) -> TransferPlan:
        """Makes one region over the whole bucket with bound 0, averaged."""
        scale = 1.0 / context.world_size
        return TransferPlan.whole(context.elements, scale=scale, seed=context.seed)
