"""StepReport, the report of one step, and the JSONL file to which each adds one line."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.core import callers
from gradwire.core.agreed import Phase, Summary
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan, encoded_share
from gradwire.core.regions import TensorSlot
from gradwire.core.slowest import SlowestBucket
from gradwire.core.transfer_report import TransferReport
from gradwire.core.words import count, seconds, share

FORMAT = 2
"""The format of the lines of a report file, which they name; format 1 named none."""


@dataclass(frozen=True)
class RegionReport:
    """One region of a step.

    Attributes:
        name: Name of the region.
        bound: Its bound.
        effective_bound: Its bound rounded down to whole chunks.
        delivered: Fraction of this worker's elements that counted.
    """

    name: str
    bound: float
    effective_bound: float
    delivered: float


@dataclass(frozen=True, repr=False)
class StepReport:
    """One training step as this rank saw it.

    `print(report)` shows it in three lines; `line()` is the line of a report file.

    The fields step, policy, phase, buckets, elements, critical_share, verdict, encoding,
    encoded_share, guard, attachment, workers, agreed and the bounds are the same on all ranks.

    Attributes:
        step: The step.
        rank: This rank.
        policy: Name of the policy.
        phase: Phase of the step.
        bound: Largest bound of any region.
        effective_bound: Largest effective bound of any region.
        delivered: Fraction of all elements of this worker that counted.
        applied: Fraction of the chunks that had a result.
        regions: The regions in bucket order.
        buckets: Number of buckets.
        elements: Number of elements of all buckets.
        bytes: UDP payload that this worker sent, in bytes.
        packets: Datagrams that this worker sent.
        retransmissions: Those of them that were sent again.
        push_s: Duration of the slowest bucket's push in seconds.
        pull_s: Duration of the slowest bucket's pull in seconds.
        comm_s: Seconds from the first bucket's start to the last bucket's result.
        rtprop_s: Smallest round-trip time seen, in seconds.
        btlbw: Bandwidth of the bottleneck in bytes per second, 0 while it is not known.
        critical_share: Share of the steps so far that were critical.
        verdict: "phases", or "fixed bound" when no phase was detected since the start.
        exceeded: Names of the regions whose loss exceeded their bound.
        agreed: What all ranks agreed on in this step.
        guard: "resent" or "skipped" for a step that delivered too little, "strict" for one made
            exact because the loss rose, else "".
        period_s: Seconds from the start of the step before to the start of this one, computation
            included; 0 for the first.
        passes: Passes of the push that took the most; 0 under control "stream".
        exposed_s: Seconds from the last bucket's start, when no computation is left, to the step's
            end.
        encoded_share: Bytes that the encodings sent relative to float32; above 1 where a step was
            sent again.
        attachment: Number, from 0, of the attachment among those that share its engine, for files
            to which several write.
        workers: Number of workers.
        slowest: What the slowest bucket waited for; None where no transfer was needed.
        encoding: Encodings of its buckets, as in "int8", or "f32, int8" where they differ.
    """

    step: int
    rank: int
    policy: str
    phase: Phase
    bound: float = 0.0
    effective_bound: float = 0.0
    delivered: float = 1.0
    applied: float = 1.0
    regions: tuple[RegionReport, ...] = ()
    buckets: int = 0
    elements: int = 0
    bytes: int = 0
    packets: int = 0
    retransmissions: int = 0
    push_s: float = 0.0
    pull_s: float = 0.0
    comm_s: float = 0.0
    rtprop_s: float = 0.0
    btlbw: float = 0.0
    critical_share: float = 1.0
    verdict: str = "fixed bound"
    exceeded: tuple[str, ...] = ()
    agreed: Summary = field(default_factory=lambda: Summary(0))
    guard: str = ""
    period_s: float = 0.0
    passes: int = 0
    exposed_s: float = 0.0
    encoded_share: float = 1.0
    attachment: int = 0
    workers: int = 1
    slowest: SlowestBucket | None = None
    encoding: str = ""

    def __repr__(self) -> str:
        shown = ("step", "rank", "policy", "phase", "delivered", "comm_s")
        return f"StepReport({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)}, …)"

    def __str__(self) -> str:
        kept = f"delivered {share(self.delivered)}, may lose {share(self.bound)} at most"
        notes = [f"guard: {self.guard}"] if self.guard else []
        if self.exceeded:
            notes.append(f"beyond their bound: {count(len(self.exceeded), 'region')}")
        path = f"round trip {seconds(self.rtprop_s)}"
        if self.btlbw:
            path += f", {self.btlbw / 1e6:.3g} MB/s"
        return "\n".join(
            (
                f"step {self.step} of rank {self.rank}: "
                + ", ".join([f"{self.policy}, {self.phase} phase", kept, *notes]),
                f"  sent: {self.bytes / 1e6:.3g} MB for {self.elements:,} elements in "
                f"{count(self.buckets, 'bucket')}, {count(self.packets, 'packet')}, "
                f"{self.retransmissions:,} again",
                f"  time: {seconds(self.comm_s)} from first to last bucket, "
                f"{seconds(self.exposed_s)} of it with nothing left to compute; {path}",
            )
        )

    def with_phases(self, critical_share: float, verdict: str) -> StepReport:
        """Returns the same report with the phase detector's view of the run so far."""
        return replace(self, critical_share=critical_share, verdict=verdict)

    def line(self) -> str:
        """Returns the report as one line of JSON; non-finite numbers become null."""
        values = {each.name: getattr(self, each.name) for each in fields(StepReport)}
        values |= {"regions": (), "agreed": asdict(self.agreed)}
        values |= {"slowest": self.slowest and vars(self.slowest)}
        regions = [vars(region) for region in self.regions]
        values = {"format": FORMAT, **finite(values), "regions": regions}
        return json.dumps(values, allow_nan=False, separators=(",", ":"))


def build_report(
    *,
    step: int,
    rank: int,
    policy: str,
    phase: Phase,
    transfers: Sequence[tuple[TransferPlan, TransferReport]],
    comm_s: float,
    agreed: Summary,
    critical_share: float,
    verdict: str,
    guard: str = "",
    period_s: float = 0.0,
    exposed_s: float = 0.0,
    resent: Sequence[TransferPlan] = (),
    attachment: int = 0,
    ranks: Sequence[int] = (0,),
    slots: Sequence[Sequence[TensorSlot]] = (),
) -> StepReport:
    """Joins the transfers of one step's buckets into one report.

    Args:
        step: As in StepReport, like all that follows but for these two:
        rank: See StepReport.
        policy: See StepReport.
        phase: See StepReport.
        transfers: The plan and report of each bucket, in bucket order.
        comm_s: See StepReport.
        agreed: See StepReport.
        critical_share: See StepReport.
        verdict: See StepReport.
        guard: See StepReport.
        period_s: See StepReport.
        exposed_s: See StepReport.
        resent: The plans by which buckets were sent again.
        attachment: See StepReport.
        ranks: The rank in the job of each worker.
        slots: The tensors of each bucket; none where no transfer was needed.

    Returns:
        The report of the step.
    """
    regions: list[RegionReport] = []
    exceeded: list[str] = []
    counted = elements = 0.0
    for plan, report in transfers:
        for region, effective, delivered in zip(
            plan.regions, report.effective_bounds, report.delivered, strict=True
        ):
            regions.append(RegionReport(region.name, region.bound, effective, delivered))
            counted += delivered * region.length
            elements += region.length
        exceeded.extend(plan.regions[index].name for index in report.exceeded)
    reports = [report for _, report in transfers]
    sent = [*(plan for plan, _ in transfers), *resent]
    encoded = sum(encoded_share(plan.encoding, plan.kept) * plan.elements for plan in sent)
    return StepReport(
        step=step,
        rank=rank,
        policy=policy,
        phase=phase,
        bound=max(region.bound for region in regions),
        effective_bound=max(region.effective_bound for region in regions),
        delivered=counted / elements,
        applied=float(np.mean(np.concatenate([report.applied for report in reports]))),
        regions=tuple(regions),
        buckets=len(reports),
        elements=sum(plan.elements for plan, _ in transfers),
        bytes=sum(report.bytes_sent for report in reports),
        packets=sum(report.packets_sent for report in reports),
        retransmissions=sum(report.retransmissions for report in reports),
        push_s=max(report.push_s for report in reports),
        pull_s=max(report.pull_s for report in reports),
        comm_s=comm_s,
        rtprop_s=reports[-1].rtprop_s,
        btlbw=reports[-1].btlbw,
        critical_share=critical_share,
        verdict=verdict,
        exceeded=tuple(exceeded),
        agreed=agreed,
        guard=guard,
        period_s=period_s,
        passes=max(report.passes for report in reports),
        exposed_s=exposed_s,
        encoded_share=encoded / elements,
        attachment=attachment,
        workers=len(ranks),
        slowest=SlowestBucket.of(transfers, ranks, slots) if slots else None,
        encoding=", ".join(sorted({plan.encoding for plan, _ in transfers})),
    )


class ReportWriter:
    """Appends one JSON line per step to a file.

    A path that holds "{rank}" makes every rank write a file of its own. Any other path is written
    by one rank. A file that cannot be written later on causes one warning, and training goes on
    without it.

    Args:
        path: Name of the file; "{rank}" is replaced by the rank in the job.
        rank: This rank in the job.
        first: Whether this rank writes a path without "{rank}"; None for rank 0 alone. A process
            group of some of the job's ranks passes it.

    Raises:
        ConfigError: The file cannot be opened for writing.

    Attributes:
        path: The file that this rank writes; None where it writes none.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, first: bool | None = None) -> None:
        name = str(path)
        self._mutex = threading.Lock()  # steps end on one thread, users close on another
        self.path: Path | None = None
        if "{rank}" in name:
            self.path = Path(name.replace("{rank}", str(rank)))
        elif rank == 0 if first is None else first:
            self.path = Path(name)
        try:
            self._file = None if self.path is None else self.path.open("a", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            why = getattr(error, "strerror", None) or error
            raise ConfigError.of(
                "report", name, f"{str(self.path)!r} cannot be opened for writing: {why}"
            ) from error

    @staticmethod
    def open(
        path: str | os.PathLike[str] | None, rank: int, first: bool | None = None
    ) -> ReportWriter | None:
        """Opens a writer where a path is given; raises ConfigError if that is not possible."""
        return None if path is None else ReportWriter(path, rank, first)

    def write(self, report: StepReport) -> None:
        """Appends the report's line and flushes it; warns where the file cannot be written."""
        if self._file is None:
            return
        line = report.line() + "\n"
        try:
            with self._mutex:
                if self._file is not None:
                    self._file.write(line)
                    self._file.flush()
        except OSError as error:
            callers.warn(
                f"gradwire stops writing reports to {self.path}: {error}",
            )
            self.close()

    def close(self) -> None:
        """Closes the file. Further reports are dropped, and so is what a full disk refuses."""
        with self._mutex, contextlib.suppress(OSError):
            file, self._file = self._file, None
            if file is not None:
                file.close()


def finite(value: Any) -> Any:
    """Returns a value as JSON can hold it: non-finite numbers at any depth become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
