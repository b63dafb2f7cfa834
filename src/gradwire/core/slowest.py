"""SlowestBucket, which says in a step's report what the step waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.core.names import Names
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import TensorSlot
from gradwire.core.transfer_report import TransferReport


@dataclass(frozen=True)
class SlowestBucket:
    """The bucket of a step whose transfer took longest, and what it waited for at this worker.

    Times are seconds since the start of its transfer here. A name is "rank 3", "server 0", or ""
    for none. What queued or was lost is the most of any bucket of the step.

    Attributes:
        bucket: Its index.
        layers: Names of its first and its last tensor.
        encoding: The encoding that the policy chose for it.
        kept: Share of the elements that encoding "topk" kept.
        spend: What the policy let it leave out, one of "nothing", "anything", "lost".
        total_s: Duration of its transfer.
        out_s: Until this worker's contributions were decided at all endpoints, and those of the
            others here.
        began: The last worker to begin it.
        began_s: When that was.
        pushed: The worker whose contribution completed this worker's share of the sum; "" where
            time closed it, or where servers sum.
        pushed_s: When the share was complete.
        pulled: Who sent the last results.
        pulled_s: When they came.
        queued: Who had sent the packet that queued longest on its way here.
        queued_s: How long it queued.
        resent: To whom most packets were sent again.
        resent_packets: How many.
        missed: From whom most packets were not there when a later one arrived.
        missed_packets: How many.
        burst: With whom most packets were lost one after another.
        burst_packets: How many.
    """

    bucket: int
    layers: tuple[str, str]
    encoding: str
    kept: float
    spend: str
    total_s: float
    out_s: float
    began: str
    began_s: float
    pushed: str
    pushed_s: float
    pulled: str
    pulled_s: float
    queued: str
    queued_s: float
    resent: str
    resent_packets: int
    missed: str
    missed_packets: int
    burst: str
    burst_packets: int

    @staticmethod
    def of(
        transfers: Sequence[tuple[TransferPlan, TransferReport]],
        ranks: Sequence[int],
        slots: Sequence[Sequence[TensorSlot]],
    ) -> SlowestBucket:
        """Finds the slowest bucket of a step.

        Args:
            transfers: The plan and report of each bucket, in bucket order.
            ranks: The rank in the job of each worker.
            slots: The tensors of each bucket.
        """
        name = Names(ranks).name
        index = max(range(len(transfers)), key=lambda each: transfers[each][1].total_s)
        plan, report = transfers[index]
        waits = report.waits
        every = [each.waits for _, each in transfers]
        queued, resent, missed, burst = (
            max((getattr(each, kind) for each in every), key=lambda most: most.value)
            for kind in ("queued", "resent", "missed", "burst")
        )
        return SlowestBucket(
            bucket=index,
            layers=(slots[index][0].name, slots[index][-1].name),
            encoding=plan.encoding,
            kept=plan.kept,
            spend=plan.spend,
            total_s=report.total_s,
            out_s=report.push_s,
            began=name(waits.began.endpoint),
            began_s=waits.began.value,
            pushed=name(waits.pushed.endpoint),
            pushed_s=waits.pushed.value,
            pulled=name(waits.pulled.endpoint),
            pulled_s=waits.pulled.value,
            queued=name(queued.endpoint),
            queued_s=queued.value,
            resent=name(resent.endpoint),
            resent_packets=int(resent.value),
            missed=name(missed.endpoint),
            missed_packets=int(missed.value),
            burst=name(burst.endpoint),
            burst_packets=int(burst.value),
        )
