"""The raw samples of a cell are kept contestant by contestant."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from gradwire.core.checks import is_number
from gradwire.core.report import finite
from gradwire_lab.network.bursts import BurstRecord
from gradwire_lab.run.faults import Event

__all__ = ["CellRun", "Track", "cell_run_of", "cell_run_table"]


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
    losses: list[tuple[int, float, float]] = field(default_factory=list)
    fingerprints: list[str] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


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


def cell_run_table(run: CellRun) -> dict[str, Any]:
    """Write a run as JSON; non-finite numbers become null."""
    table: dict[str, Any] = finite(asdict(run))
    return table


def cell_run_of(table: dict[str, Any]) -> CellRun:
    """Read the run that `cell_run_table` wrote.

    Raises:
        TypeError, KeyError, ValueError: the table is no run.
    """
    fields = {
        **table,
        "tracks": {name: _track_of(track) for name, track in table["tracks"].items()},
        "bursts": [BurstRecord(**each) for each in table["bursts"]],
        "events": [Event(**each) for each in table["events"]],
        "lossy": [(start, stop) for start, stop in table["lossy"]],
        "rivals": [(at, count) for at, count in table["rivals"]],
    }
    return CellRun(**fields)


_NUMBERS = ("starts", "seconds", "bytes", "packets", "retransmissions", "push_s", "passes")


def _track_of(table: dict[str, Any]) -> Track:
    numbers = [value for name in _NUMBERS for value in table[name]]
    numbers += [table["job_s"], *table["layers"].values(), *chain.from_iterable(table["delivered"])]
    if not all(map(is_number, numbers)):
        raise TypeError("samples that are no numbers")
    fields = {
        **table,
        "spans": [(start, stop) for start, stop in table["spans"]],
        "losses": [  # null stands for a loss that was no number
            (step, seconds, math.nan if loss is None else loss)
            for step, seconds, loss in table["losses"]
        ],
    }
    return Track(**fields)
