"""One report per step: StepReport, and the JSONL file that takes one line of each."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.core.agreed import Phase, Summary
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan, TransferReport, encoded_share

__all__ = ["RegionReport", "ReportWriter", "StepReport", "build_report", "finite"]


@dataclass(frozen=True)
class RegionReport:
    """One region: its bound, the bound after rounding to whole chunks, and what arrived.

    delivered: fraction of this worker's elements that counted.
    """

    name: str
    bound: float
    effective_bound: float
    delivered: float


@dataclass(frozen=True)
class StepReport:
    """One training step as this rank saw it.

    The same on all ranks: step, policy, phase, the bounds, buckets and elements (of all buckets),
    critical_share, verdict, encoded_share, guard, attachment and `agreed`; the rest is each rank's
    own.

    packets, retransmissions: datagrams that this worker sent, and of them those sent again.
    regions: in bucket order. bound and effective_bound: the largest of any region. delivered:
    fraction of all elements of this worker that counted; applied: fraction of the chunks that had a
    result. bytes: UDP payload sent by this worker. push_s, pull_s: of the slowest bucket. comm_s:
    from the first bucket's start to the last bucket's result; exposed_s: from the last bucket's
    start, when there is nothing left to compute, to the step's end. rtprop_s: smallest round-trip
    time seen; btlbw: bytes/s, 0 while it is not known yet. exceeded: names of the regions whose
    loss exceeded their bound. critical_share: of the steps so far; verdict: "phases", or "fixed
    bound" when nothing has fired since the start. guard: "resent" or "skipped" for a step that
    delivered too little, "strict" for one made exact because the loss rose, else "". period_s: from
    the start of the step before to the start of this one, computation included; 0 for the first.
    passes: of the push that took the most; 0 under control "stream". encoded_share: what the
    encodings sent of float32's bytes; above 1 where a step was sent again. attachment: the number,
    from 0, of the attachment among those that share its engine, for files that several write.
    """

    step: int
    rank: int
    policy: str
    phase: Phase
    bound: float
    effective_bound: float
    delivered: float
    applied: float
    regions: tuple[RegionReport, ...]
    buckets: int
    elements: int
    bytes: int
    packets: int
    retransmissions: int
    push_s: float
    pull_s: float
    comm_s: float
    rtprop_s: float
    btlbw: float
    critical_share: float
    verdict: str
    exceeded: tuple[str, ...]
    agreed: Summary
    guard: str = ""
    period_s: float = 0.0
    passes: int = 0
    exposed_s: float = 0.0
    encoded_share: float = 1.0
    attachment: int = 0

    def with_phases(self, critical_share: float, verdict: str) -> StepReport:
        """The same report with the detector's words on the run so far."""
        return replace(self, critical_share=critical_share, verdict=verdict)

    def line(self) -> str:
        """The report as one line of JSON; non-finite numbers become null."""
        return json.dumps(finite(asdict(self)), allow_nan=False, separators=(",", ":"))


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
) -> StepReport:
    """Joins the transfers of one step's buckets, in bucket order, into one report.

    resent: plans by which buckets were sent again.
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
    )


class ReportWriter:
    """Appends one JSON line per step to a file.

    Rank 0 writes `path`, or whoever is the `first` of a process group of some of the job's ranks;
    the other ranks write only when `path` holds "{rank}", which every rank then replaces by its own
    in the job. A file that cannot be written is a ConfigError when it is opened and
    one warning later on: training goes on without it.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, first: bool | None = None) -> None:
        name = str(path)
        self._mutex = threading.Lock()  # steps end on one thread, and users close on another
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
        """A writer where a path is given; raises ConfigError for one that cannot be opened."""
        return None if path is None else ReportWriter(path, rank, first)

    def write(self, report: StepReport) -> None:
        """Appends the report's line and flushes it."""
        if self._file is None:
            return
        line = report.line() + "\n"
        try:
            with self._mutex:
                if self._file is not None:
                    self._file.write(line)
                    self._file.flush()
        except OSError as error:
            warnings.warn(
                f"gradwire stops writing reports to {self.path}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self.close()

    def close(self) -> None:
        """Closes the file; further reports are dropped. What a full disk does not take is lost."""
        with self._mutex, contextlib.suppress(OSError):
            file, self._file = self._file, None
            if file is not None:
                file.close()


def finite(value: Any) -> Any:
    """A value as JSON can hold it: non-finite numbers, however deep in it, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value
