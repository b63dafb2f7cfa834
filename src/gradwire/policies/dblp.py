"""Policy "dblp": the bound follows the training phase (arXiv 2605.01989)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gradwire.errors import ConfigError
from gradwire.phases import Every, PhaseDetector
from gradwire.plans import TransferPlan, check_bound, pool
from gradwire.policies.base import PlanContext, Policy, check_transfer_options

__all__ = ["DBLP"]

WIDENING = 0.40
"""The paper's distance from p_low to p_high: 40 percentage points."""


@dataclass
class DBLP(Policy):
    """p_low in critical phases, p_high elsewhere; training starts critical.

    p_low: 0.008 is the paper's for EfficientNet-B0, AlexNet and GPT-2 small (ResNet-50: 0.024).
    p_high: p_low + 0.40 unless given. eta, every, detector: see `gradwire.phases`; every=10 is
    the cadence of the authors' code, every="epoch" the paper's. spend: "anything" as in the
    paper, "lost" gives up only what the network lost (vesting). fill, order, pull:
    docs/design.md.
    """

    name: ClassVar[str] = "dblp"

    p_low: float = 0.008
    p_high: float | None = None
    eta: float = 0.5
    every: Every = 10
    detector: str = "ours"
    spend: str = "anything"
    fill: str = "zero"
    order: str = "shuffled"
    pull: str = "exact"

    def __post_init__(self) -> None:
        check_bound("p_low", self.p_low)
        if self.p_high is None:
            self.p_high = round(self.p_low + WIDENING, 12)
            if self.p_high >= 1.0:
                raise ConfigError(
                    f"p_low={self.p_low!r} without p_high: p_high would be p_low + {WIDENING:g}, "
                    "which must stay below 1; give p_high"
                )
        check_bound("p_high", self.p_high)
        if self.p_high < self.p_low:
            raise ConfigError(
                f"p_high={self.p_high!r} is below p_low={self.p_low!r}: the bound of tolerant "
                "phases may not be the stricter one"
            )
        check_transfer_options(self.spend, self.fill, self.order, self.pull)
        self.phases = PhaseDetector(self.eta, self.every, self.detector)

    def plan(self, context: PlanContext) -> TransferPlan:
        """One region per tensor (small ones pooled), closed at 1 - p(phase).

        Both phases pool for the stricter bound, so that the chunk grid stays the same.
        """
        assert self.p_high is not None
        bound = self.p_low if context.phase == "critical" else self.p_high
        regions = pool(context.tensors, self.p_low or self.p_high, context.chunk_elements)
        return TransferPlan(
            context.elements,
            tuple(replace(region, bound=bound) for region in regions),
            spend=self.spend,
            fill=self.fill,
            order=self.order,
            pull=self.pull,
            pull_bound=bound if self.pull == "committed" else 0.0,
            scale=1.0 / context.world_size,
            seed=context.seed,
        )
