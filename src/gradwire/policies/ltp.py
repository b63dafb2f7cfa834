"""Policy "ltp": Early Close with a learned threshold (LTP, IWQoS 2023, arXiv 2305.04279).

From the paper: out-of-order transmission and acknowledgement; the three send queues (critical,
normal, retransmission; docs/policies.md says how the engine's differ); Early Close that adapts to
the network; Bubble Filling (zeros in place of what is missing, payloads of whole floats); loss on
the gather only and a reliable way back. The engine offers all of these to every plan; this module
is Early Close.

gradwire's own, where the paper is silent (docs/policies.md): the threshold T_lt starts at
1.5·RTprop + size/BtlBw, where size is that of a whole step, whose buckets share the path. Later it
is the shortest time in which everything arrived in the last epoch. From T_lt on 80 % are enough; at
T_lt + slack the transfer ends at once, critical chunks excepted. T_lt is per bucket, and its clock
starts with each worker's first arrival, so that slow computation does not shorten the deadline.
Chunks go in a shuffled order, so that a deadline does not always cut the same ones. All numbers
come from the agreed summary, so all ranks write the same plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from gradwire.core.agreed import Phase
from gradwire.core.checks import SMALLEST_BOUND, is_number
from gradwire.core.errors import ConfigError
from gradwire.core.plan import CloseStep, TransferPlan, check_choice
from gradwire.core.report import StepReport
from gradwire.policies.base import REPLICATED_PULLS, SHARED_ORDERS, PlanContext, Policy
from gradwire.policies.parts.phases import Every, check_every
from gradwire.policies.parts.regions import pool
from gradwire.policies.parts.timing import BestPushes, EpochClock, PathEstimate

SLACKS = {"lan": 0.030, "wan": 0.100}
"""Seconds from the threshold to the deadline, in a data centre and on a wide-area network."""

LONGEST_SLACK = 600.0
LONGEST_DELAY = 3600.0
"""The longest delay that a schedule may have, in seconds."""

ROUND_TRIPS = 1.5

FLOOR = 0.5


@dataclass
class LTP(Policy):
    """Waits for everything until T_lt, then for `fraction` of it, and ends at T_lt + slack.

    While RTprop and BtlBw are not known, everything is waited for.

    Attributes:
        fraction: The share that is enough from T_lt on. Unit: share of the gradient. Allowed:
            [1e-9, 1).
        slack: Time after T_lt at which a transfer ends: "lan" (30 ms), "wan" (100 ms) or a number.
            Unit: seconds. Allowed: "lan", "wan" or [0, 600].
        every: Length of an epoch, after which T_lt is updated: a number of steps, or "epoch" for
            the epochs that `attachment.epoch(n)` begins. Unit: steps. Allowed: 1 or more, or
            "epoch".
        order: Order of the chunks within a push. Allowed: "shuffled", "sequential".
        pull: How results come back: "exact", or "committed", where all workers leave the same part
            out. Allowed: "exact", "committed".
    """

    name: ClassVar[str] = "ltp"
    resting_phase: ClassVar[Phase] = "tolerant"

    fraction: float = 0.8
    slack: float | Literal["lan", "wan"] = "lan"
    every: Every = 100
    order: str = "shuffled"
    pull: str = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.fraction) or not SMALLEST_BOUND <= self.fraction < 1.0:
            raise ConfigError.of(
                "fraction",
                self.fraction,
                f"a number above 0 and below 1, {SMALLEST_BOUND:g} at the least",
            )
        named = isinstance(self.slack, str) and self.slack in SLACKS
        if not named and (not is_number(self.slack) or not 0.0 <= self.slack <= LONGEST_SLACK):
            raise ConfigError.of(
                "slack", self.slack, f"'lan', 'wan' or seconds from 0 to {LONGEST_SLACK:g}"
            )
        check_every("every", self.every)
        check_choice("order", self.order, SHARED_ORDERS)
        check_choice("pull", self.pull, REPLICATED_PULLS)
        self._path = PathEstimate()
        self._clock = EpochClock(self.every)
        self._pushes = BestPushes()
        self._learned: dict[int, float] = {}  # T_lt of the last epoch by bucket
        self._step_bytes = 0

    def plan(self, context: PlanContext) -> TransferPlan:
        """Makes one region per tensor (small ones pooled) that closes by count and time."""
        bound = round(1.0 - self.fraction, 12)
        return context.plan(
            pool(context.tensors, bound, context.chunk_elements),
            spend="late",
            schedule=self._schedule(self.threshold(context.bucket)),
            order=self.order,
            pull=self.pull,
        )

    @property
    def floor(self) -> float:
        """The guard's floor: half of a step. gradwire's own."""
        return FLOOR

    def threshold(self, bucket: int) -> float | None:
        """Returns T_lt of a bucket in seconds; None while it is not known."""
        return self._learned.get(bucket, self._estimate())

    def observe(self, report: StepReport) -> None:
        """Learns T_lt from what all ranks agreed on."""
        super().observe(report)
        summary = report.agreed
        self._step_bytes = 4 * report.elements
        self._path.observe(summary)
        self._pushes.observe(summary)
        if self._clock.observe(summary):
            self._learn(len(summary.pushes))

    def state_dict(self) -> dict[str, object]:
        """Returns what was learned."""
        return {
            "path": asdict(self._path),
            "clock": asdict(self._clock),
            "best": dict(self._pushes.best),
            "learned": dict(self._learned),
            "step_bytes": self._step_bytes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        read = self._read(state, "path", "clock", "best", "learned", "step_bytes")
        clock = read.part("clock")
        clock.keys(("every", "steps", "epoch"))
        self._path = PathEstimate.read(read.part("path"))
        self._clock = EpochClock(self.every, clock.whole("steps"), clock.whole("epoch", -1))
        self._pushes = BestPushes(read.part("best").by_bucket())
        self._learned = read.part("learned").by_bucket()
        self._step_bytes = read.whole("step_bytes")

    def _schedule(self, threshold: float | None) -> tuple[CloseStep, ...]:
        everything = CloseStep("first_arrival", "worker", 0.0, 1.0)
        if threshold is None:
            return (everything,)
        slack = SLACKS[self.slack] if isinstance(self.slack, str) else self.slack
        threshold = min(threshold, LONGEST_DELAY - slack)
        return (
            everything,
            CloseStep("first_arrival", "worker", threshold, self.fraction),
            CloseStep("first_arrival", "worker", threshold + slack, 0.0),
        )

    def _estimate(self) -> float | None:
        return self._path.transfer_s(self._step_bytes, ROUND_TRIPS)

    def _learn(self, buckets: int) -> None:
        """Updates T_lt; after an epoch without a whole push it does not become shorter."""
        best = self._pushes.take()
        estimate = self._estimate()
        learned = {}
        for bucket in range(buckets):
            known = [t for t in (self._learned.get(bucket), estimate) if t is not None]
            if bucket in best:
                learned[bucket] = best[bucket]
            elif known:
                learned[bucket] = max(known)
        self._learned = learned
