"""Policy "optireduce": transfers bounded in time (OptiReduce, NSDI 2025, arXiv 2310.06993).

From the paper: transpose all-reduce (route="sharded"); a hard bound tB, the 95th percentile of the
times of warm-up rounds; an early time-out tC once the last-percentile marker of every sender has
been seen; a randomised Hadamard transform, which spreads what is lost; skip or halt on excessive
loss. The receiver's credit takes the place of its dynamic incast (docs/design.md).

gradwire's own: the warm-up is the first `warmup` steps of the job, without a limit of time, instead
of 20 rounds over TCP. Times are per bucket, and are the agreed ones of the slowest worker. tC is a
share of the moving average of whole pushes' times. The share starts at 10 %, doubles up to 50 %
after steps that lost more than 0.1 %, and shrinks by a point after those that lost less than
0.01 %. A region's bound is `excess`; a larger loss is reported, and the guard acts (settings
`floor` and `guard`), which halts training after `halt_after` such steps in a row. After the early
time-out or tB a region closes with whatever has arrived.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from gradwire.core.agreed import Phase
from gradwire.core.checks import SMALLEST_BOUND, is_number, is_whole
from gradwire.core.errors import ConfigError
from gradwire.core.plan import CloseStep, TransferPlan, check_choice
from gradwire.core.report import StepReport
from gradwire.policies.base import REPLICATED_PULLS, SHARED_ORDERS, PlanContext, Policy
from gradwire.policies.parts.regions import pool
from gradwire.policies.parts.timing import MovingAverages, quantile

WEIGHT = 0.1
"""Weight of the newest time in the moving average behind tC."""

SMALLEST_SHARE, LARGEST_SHARE = 0.01, 0.50
MUCH_LOSS, LITTLE_LOSS = 1e-3, 1e-4


@dataclass
class OptiReduce(Policy):
    """Waits for everything until tC after the tail markers, or until tB, then closes.

    Attributes:
        warmup: Steps without a limit of time from which tB is learned. Unit: steps. Allowed: 1 or
            more.
        quantile: The quantile of their times that is tB. Unit: share of the times. Allowed: [1e-9,
            1).
        excess: Share of a region above which a loss is excessive. Unit: share of the elements.
            Allowed: [1e-9, 1).
        hadamard: Whether the gradient is transformed. Allowed: True or False.
        halt_after: Steps in a row below the guard's floor (1 - excess) that end training; 0 for
            never. Unit: steps. Allowed: 0 or more.
        order: Order of the chunks within a push. Allowed: "shuffled", "sequential".
        pull: How results come back: "exact", or "committed", where all workers leave the same part
            out. Allowed: "exact", "committed".
    """

    name: ClassVar[str] = "optireduce"
    resting_phase: ClassVar[Phase] = "tolerant"

    warmup: int = 20
    quantile: float = 0.95
    excess: float = 0.1
    hadamard: bool = True
    halt_after: int = 10
    order: str = "shuffled"
    pull: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("warmup", 1), ("halt_after", 0)):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise ConfigError.of(name, value, f"a number of steps, {least} or more")
        for name in ("quantile", "excess"):
            value = getattr(self, name)
            if not is_number(value) or not SMALLEST_BOUND <= value < 1:
                raise ConfigError.of(
                    name, value, f"a number above 0 and below 1, {SMALLEST_BOUND:g} at the least"
                )
        if not isinstance(self.hadamard, bool):
            raise ConfigError.of("hadamard", self.hadamard, "True or False")
        check_choice("order", self.order, SHARED_ORDERS)
        check_choice("pull", self.pull, REPLICATED_PULLS)
        self._steps = 0
        self._warm: dict[int, list[float]] = {}  # times of whole pushes of the warm-up by bucket
        self._average = MovingAverages(WEIGHT)
        self._share = 0.10

    @property
    def floor(self) -> float:
        """The guard's floor: a step may lose the share `excess`."""
        return 1.0 - self.excess

    def limits(self, bucket: int) -> tuple[float, float] | None:
        """Returns tB and tC of a bucket in seconds; None during the warm-up."""
        times = self._warm.get(bucket)
        if self._steps < self.warmup or not times:
            return None
        bound = quantile(times, self.quantile)
        return bound, self._share * self._average.means.get(bucket, bound)

    def plan(self, context: PlanContext) -> TransferPlan:
        """Makes one region per tensor (small ones pooled) that closes by time."""
        limits = self.limits(context.bucket)
        schedule = [CloseStep("open", "worker", 0.0, 1.0)]
        if limits is not None:
            hard, early = limits
            schedule.append(CloseStep("tail", "all", early, 0.0))
            schedule.append(CloseStep("open", "all", hard, 0.0))
        return context.plan(
            pool(context.tensors, self.excess, context.chunk_elements),
            spend="late",
            schedule=tuple(schedule),
            order=self.order,
            pull=self.pull,
            transform="hadamard" if self.hadamard else "none",
        )

    def observe(self, report: StepReport) -> None:
        """Learns the limits from what all ranks agreed on."""
        super().observe(report)
        summary = report.agreed
        whole = {b: t for b, t in enumerate(summary.pushes) if 0.0 < t < math.inf}
        for bucket, push in whole.items():  # pushes are those of the step before
            # DDP rebuilds its buckets after the first step, so one may be new after the warm-up.
            if self._steps <= self.warmup or bucket not in self._warm:
                self._warm.setdefault(bucket, []).append(push)
        self._average.observe(whole)
        self._steps += 1
        if summary.lost is not None and self._steps > self.warmup:
            if summary.lost > MUCH_LOSS:
                self._share = min(LARGEST_SHARE, 2.0 * self._share)
            elif summary.lost < LITTLE_LOSS:
                self._share = max(SMALLEST_SHARE, self._share - 0.01)

    def state_dict(self) -> dict[str, object]:
        """Returns what was learned."""
        return {
            "steps": self._steps,
            "warm": {bucket: list(times) for bucket, times in self._warm.items()},
            "average": asdict(self._average),
            "share": self._share,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        read = self._read(state, "steps", "warm", "average", "share")
        average = read.part("average")
        average.keys(("weight", "means"))
        self._steps = read.whole("steps")
        self._warm = read.part("warm").lists_by_bucket()
        self._average = MovingAverages(WEIGHT, average.part("means").by_bucket())
        self._share = read.number("share", SMALLEST_SHARE, LARGEST_SHARE)
