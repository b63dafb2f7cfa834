"""This is the one model of a run: samples and records, what is computed of them, and results.

`runs.jsonl` and `results.json` are these classes as JSON (`as_json`), which the reader of scenarios
reads back (`gradwire_lab.scenario.reader.build`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.core.report import finite
from gradwire_lab.network.bursts import BurstRecord
from gradwire_lab.scenario.mark import SCOPES, Map
from gradwire_lab.scenario.network import Loss, Rivals, Topology
from gradwire_lab.scenario.reader import MISSING, key
from gradwire_lab.scenario.work import Model, Work

__all__ = [
    "FORMAT",
    "KIND",
    "Calibration",
    "CellResult",
    "CellRun",
    "Event",
    "Judgement",
    "Kernel",
    "MarkedCell",
    "Quantities",
    "Record",
    "Results",
    "Summary",
    "Times",
    "Track",
    "as_json",
]


KIND, FORMAT = "gradwire lab", 2
"""What `results.json` says that it is."""


def as_json(value: Any) -> dict[str, Any]:
    """Return one of these classes as JSON can hold it; non-finite numbers become null."""
    table: dict[str, Any] = finite(asdict(value))
    return table


# ------------------------------------------------------------------ what a run leaves behind


@dataclass(frozen=True)
class Event:
    """An event was done to the network, at a moment of ``time.monotonic()``."""

    at: float
    what: str


@dataclass
class Track:
    """A track holds one contestant's samples in one cell and seed; its lists run parallel.

    Attributes:
        starts: moments, in seconds of ``time.monotonic()``.
        seconds: how long each took, until the last rank was done.
        spans: the start and the end of each turn.
        job_s: seconds of the timed rounds or steps in all, computation included.
        delivered: for each sample, the share of each worker's gradients that counted.
        layers: mean delivered share by layer, over samples and workers.
        bytes: UDP payload bytes that all workers sent.
        wire_bytes: the bytes that all workers and servers sent in `wire_rounds` rounds, as their
            ports count them: with headers, repeats and ACKs; 0 if they were not counted.
        wire_rounds: see `wire_bytes`; of training, warm-up included.
        packets: the packets that all workers sent.
        retransmissions: how many of these packets repeated earlier ones.
        push_s: seconds of the slowest worker's push; empty for TCP.
        passes: rounds of probes that the slowest worker needed; empty without probes.
        critical: whether the phase was critical; empty where there are no phases.
        losses: step, seconds trained and held-out loss after each turn of training.
        fingerprints: hashes of each rank's weights after training.
        reports: what the contestant's ranks reported at the end.
    """

    starts: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    job_s: float = 0.0
    delivered: list[list[float]] = field(default_factory=list)
    layers: dict[str, float] = field(default_factory=dict)
    bytes: list[int] = field(default_factory=list)
    wire_bytes: int = 0
    wire_rounds: int = 0
    packets: list[int] = field(default_factory=list)
    retransmissions: list[int] = field(default_factory=list)
    push_s: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    critical: list[bool] = field(default_factory=list)
    losses: list[tuple[int, float, float | None]] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        start: float,
        seconds: float,
        counters: Sequence[Mapping[str, Any]],
        shares: dict[str, list[float]],
    ) -> None:
        """Add a sample, and the delivered shares by layer to `shares`.

        Args:
            counters: what each worker's transport counted; none where it counts nothing.
            shares: by layer, of all samples and workers so far.
        """
        self.starts.append(start)
        self.seconds.append(seconds)
        if not counters:
            return
        self.delivered.append([each["delivered"] for each in counters])
        self.bytes.append(sum(each["bytes"] for each in counters))
        self.packets.append(sum(each["packets"] for each in counters))
        self.retransmissions.append(sum(each["retransmissions"] for each in counters))
        self.push_s.append(max(each["push_s"] for each in counters))
        if passes := max(each["passes"] for each in counters):
            self.passes.append(passes)
        for each in counters:
            for layer, share in each["layers"].items():
                shares.setdefault(layer, []).append(share)

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Return seconds trained and held-out loss; JSON's null was a loss that was no number."""
        return [(now, math.nan if loss is None else loss) for _, now, loss in self.losses]


@dataclass
class CellRun:
    """A cell run holds what happened in one cell with one seed.

    Attributes:
        origin: when it began, in seconds of ``time.monotonic()``.
        tracks: the tracks by contestant.
        bursts: the bursts as they were sent.
        lossy: spans of time in which links lost packets on purpose: from, to.
        events: what else was done to the network.
        rivals: what the rivals read; see `gradwire_lab.contest.rivals.RivalStreams.read`.
        link: what made the links' delay; None if they had none.
        lost: packets lost in the network, cross traffic included.
        softnet_drops: packets that the machine's processors dropped outside of any queue.
        marked: packets that switches marked CE, contestants' and cross traffic's.
        wire_failures: packets that the lab's own wires lost because the lab was late or full.
        facts: what was found out on the way: about the model, the pace, the tuned bursts.
        error: why the cell ended early; None if it did not.
    """

    origin: float
    tracks: dict[str, Track] = field(default_factory=dict)
    bursts: list[BurstRecord] = field(default_factory=list)
    lossy: list[tuple[float, float]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rivals: list[tuple[float, int]] = field(default_factory=list)
    link: str | None = None
    lost: int = 0
    marked: int = 0
    softnet_drops: int = 0
    wire_failures: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Record:
    """A record is of one run, which is one cell with one seed.

    Attributes:
        cell: its name.
        seed: the run's.
        scenario: fingerprint of the cell, see `gradwire_lab.run.journal.fingerprint`.
        date: when it began, ISO 8601, UTC.
        took_s: how long it took, set-up included.
        gradwire: version and fingerprint of what measured.
        commit: the commit of a source checkout.
        machine: the machine and its software.
        settings: GRADWIRE_* variables that were set.
        load: the load of the machine when it began.
        run: the samples.
        stolen: share of the processor time wanted meanwhile that a hypervisor gave to others; None
            if it is not known, as in some of the runs in experiments/results.
    """

    cell: str
    seed: int
    scenario: str
    date: str
    took_s: float
    gradwire: str
    commit: str | None
    machine: dict[str, Any]
    settings: dict[str, str]
    load: float
    run: CellRun
    stolen: float | None = None


@dataclass(frozen=True)
class Calibration:
    """A calibration holds what a machine carried on a cell's network, in bit/s of payload.

    All ports and uplinks were busy meanwhile.

    Attributes:
        network: what the ports are called.
        hosts: how many there were.
        wanted: what ports and uplinks would carry.
        reached: what they did.
    """

    network: str
    hosts: int
    wanted: float
    reached: float


# ------------------------------------------------------------------ what is computed of it


@dataclass(frozen=True)
class Times:
    """These numbers summarise times, in seconds; None where there are too few."""

    median_s: float | None
    mean_s: float | None
    p95_s: float | None
    p99_s: float | None
    p999_s: float | None
    max_s: float | None


@dataclass(frozen=True)
class Quantities(Times):
    """These are what marks compare, of all seeds or of one."""

    throughput_bps: float | None
    goodput_bps: float | None
    job_s: float | None
    steps_per_s: float | None
    rival_goodput_bps: float | None
    final_loss: float | None
    time_to_loss_s: float | None


@dataclass(frozen=True)
class Summary(Quantities):
    """A summary is of one contestant in one cell, all seeds together.

    Attributes:
        intervals: the 90 % interval over seeds of each quantity; None where a seed lacks it.
        bound: the share that it need not deliver.
        limit_s: the least time of the work; None of runs of another form of the cell.
        push: the times of its slowest workers' pushes; None for TCP.
        by_seed: its quantities by seed, whose JSON keys are text.
    """

    name: str
    transport: str
    samples: int
    seeds: int
    intervals: dict[str, list[float] | None]
    bound: float | None
    limit_s: float | None
    over_limit: float | None
    rate_limit_bps: float | None
    comm_share: float | None
    delivered: float | None
    delivered_min: float | None
    delivered_by_worker: list[float]
    delivered_by_layer: dict[str, float]
    bytes_per_round: float | None
    wire_bytes_per_round: float | None
    retransmitted: float | None
    push: Times | None
    critical_share: float | None
    passes_median: float | None
    passes_max: int | None
    replicas_identical: bool | None
    by_seed: dict[str, Quantities]


@dataclass(frozen=True)
class MarkedCell:
    """A mark in one of its cells.

    Attributes:
        complete: whether the cell's numbers are of all seeds.
        value: the quotient, or the difference; `by_seed` and `interval` are its own.
        cap: what the formulas allow, of marks that ask for a share of it.
        missed_by: the share of `wanted` by which it is missed; 0 or less where it is met.
        why: why the mark is open.
    """

    cell: str
    difference: bool
    complete: bool
    value: float | None = None
    by_seed: Mapping[str, float | None] = field(default_factory=dict)
    interval: list[float] | None = None
    wanted: float | None = None
    cap: float | None = None
    missed_by: float | None = None
    met: bool | None = None
    why: str | None = None


@dataclass(frozen=True)
class Judgement:
    """A judgement says whether a mark is met.

    Attributes:
        value: by the mark's scope over the known cells; None where none is known.
        interval: of the value over seeds.
        met: None if it was not measured, or if what is missing could change it.
        missed_by: the share of `wanted` by which it is missed so far; None: infinitely.
    """

    text: str
    difference: bool
    cells: list[MarkedCell]
    scope: str = key(MISSING, "of which cells", choices=[*SCOPES])
    value: float | None = None
    interval: list[float] | None = None
    wanted: float | None = None
    met: bool | None = None
    missed_by: float | None = None


# ------------------------------------------------------------------ results.json


@dataclass(frozen=True)
class CellResult:
    """A cell as results have it: its scenario, its contestants' summaries, and its runs."""

    name: str
    labels: dict[str, str]
    topology: Topology
    work: Work
    model: Model
    loss: Loss
    rivals: Rivals
    contestants: list[Summary]
    runs: list[Record]

    @property
    def counted(self) -> list[Record]:
        """Return the runs that the summaries are of: those that did not fail, or else all."""
        return [each for each in self.runs if each.run.error is None] or self.runs

    def tracks(self, name: str) -> list[Track]:
        """Return a contestant's samples in the runs that count, seed by seed."""
        found = [each.run.tracks.get(name) for each in self.counted]
        return [each for each in found if each is not None]


@dataclass(frozen=True)
class Kernel:
    """What made the network, which was the same for all contestants."""

    offloads: list[str]
    topology: list[str]
    shaper: str
    loss: list[str]
    wires: list[str]
    congestion_controls: list[str]


@dataclass(frozen=True)
class Results:
    """Results hold all of an experiment's runs: machine, kernel, numbers, samples and marks.

    Attributes:
        kind, format: what `results.json` is, for who reads it.
        elsewhere: whether another gradwire or machine made some of the runs.
        settings: GRADWIRE_* variables that were set from outside.
        seeds: those that were run, for any cell.
        missing: how many runs of the file are missing or failed.
        file: the scenario file's tables.
        left_out: why, by the name of a contestant that takes no part.
        other_forms: the cells whose runs are of another form than the file now has.
    """

    kind: str
    format: int
    scenario: str
    title: str
    published: str
    quick: bool
    date: str
    dates: tuple[str, str]
    commits: list[str]
    command: str
    machine: dict[str, Any]
    machines: list[dict[str, Any]]
    gradwire: str
    elsewhere: bool
    settings: dict[str, str]
    kernel: Kernel
    work: Work
    seeds: list[int]
    missing: int
    map: Map
    file: Mapping[str, Any]
    left_out: dict[str, str]
    calibrations: list[Calibration]
    cells: list[CellResult]
    marks: list[Judgement]
    errors: list[str]
    other_forms: list[str]
    wall_s: float
