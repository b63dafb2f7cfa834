"""This benchmark runs the engine in virtual time on networks of many kinds, and tells what it costs
itself and everybody else there: times over the header ideal, and the share of its own packets that
queues and policers drop.

Everything is computed, so a seed gives the same figures on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np

from gradwire.core.errors import GradwireError
from gradwire.sim.fabric import Fabric, Link
from gradwire.transport.native import load_engine
from gradwire_lab.contest.measure import header_ideal

GIGABIT = 125e6
"""Bytes per second."""
HEADER = 28
"""Bytes of a packet's own header."""
HOSTS: dict[str, Any] = {"host_delay": 10e-6, "host_jitter": 60e-6, "send_time": 2e-6}
"""How late hosts and their timers are, and what a send call takes, in seconds."""
WARM_UP = 0.3
"""Seconds before the first op, in which ranks meet."""
LONGEST = 120
"""Times of the header ideal, at least seconds, after which an op counts as not done."""


@dataclass(frozen=True)
class Mark:
    """A mark says what a figure of a row shall be.

    Attributes:
        figure: The figure's key in the row.
        most: What it is at most; None for no bound.
        least: What it is at least; None for no bound.
    """

    figure: str
    most: float | None = None
    least: float | None = None

    def met(self, value: float) -> bool:
        """Return whether a figure is within the bounds."""
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class Cell:
    """One network, and the ops that run on it.

    Attributes:
        group: The group that it belongs to.
        name: A line that tells it from the others of its group.
        ranks: Number of workers.
        link: Every direction of every port of the switch.
        megabytes: Size of each worker's buffer.
        uplink: The way out of each host; None for `link`.
        far: The link of the last worker, both directions; None for that of the others.
        servers: Number of servers; with one, workers push and nothing is pulled.
        ops: Number of ops, one after another.
        judged: The ops that count, the last ones.
        rate: Rate in bytes per second that bounds the ops; None for that of `link`.
        ppm: Clocks run apart by so many millionths, half of them fast and half slow.
        bursts: What else arrives at the port of the second host: arguments of
            `Fabric.cross_traffic`; None for nothing.
        marks: What its figures shall be.
    """

    group: str
    name: str
    ranks: int
    link: Link
    megabytes: float
    uplink: Link | None = None
    far: Link | None = None
    servers: int = 0
    ops: int = 6
    judged: int = 3
    rate: float | None = None
    ppm: float = 0.0
    bursts: Mapping[str, Any] | None = None
    marks: tuple[Mark, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
        least = 1 if self.servers else 2
        if self.ranks < least:
            raise ValueError(f"ranks is {self.ranks}; at least {least} are needed")
        if not (math.isfinite(self.megabytes) and self.elements > 0):
            raise ValueError(f"megabytes is {self.megabytes:g}; a buffer has at least one element")
        if not 0 < self.judged <= self.ops:
            raise ValueError(f"judged is {self.judged}; allowed are 1 to {self.ops}, the ops")

    def figures(self, seed: int) -> dict[str, float]:
        """Run the ops one after another."""
        found = run_cell(self, seed)
        if found.failure:
            raise ValueError(found.failure)
        return {
            "first": found.first,
            "time": median(found.times),
            "worst": max(found.times),
            "drops": found.drops,
            "payload": found.payload,
            "acks": found.acks,
        }

    @property
    def elements(self) -> int:
        """float32 elements of each worker's buffer."""
        return int(self.megabytes * 250_000)

    @property
    def ideal(self) -> float:
        """Seconds that the narrowest port is busy with an op's bytes and headers."""
        over_port = self.ranks / self.servers if self.servers else 2 * (self.ranks - 1) / self.ranks
        rate = self.rate or min(each.rate for each in (self.link, self.far or self.link))
        return header_ideal(4 * self.elements * over_port, 8 * rate)

    def fabric(self, seed: int, beside: Fabric | None = None) -> Fabric:
        """Makes the network; hosts and timers are late, and a send call takes time.

        Args:
            seed: Of all random events.
            beside: The fabric of another job on the same ports.

        Raises:
            ValueError: A link cannot be.
        """
        fabric = Fabric(
            self.ranks,
            servers=self.servers,
            seed=seed,
            link=self.link,
            **HOSTS,
            datagram_bytes=1472,
            beside=beside,
        )
        for host in range(self.ranks + self.servers):
            if self.uplink is not None:
                fabric.set_link(host, "up", self.uplink)
            if self.ppm:
                fabric.set_clock(host, self.ppm if host % 2 else -self.ppm)
        if self.far is not None:
            fabric.set_link(self.ranks - 1, "up", self.far)
            fabric.set_link(self.ranks - 1, "down", self.far)
        if self.bursts is not None:
            fabric.cross_traffic(1, start=WARM_UP, **self.bursts)
        return fabric


@dataclass
class Outcome:
    """What one run of a cell came to.

    Attributes:
        first: Time of the first op over the header ideal.
        times: Times of the judged ops over the header ideal.
        drops: Share of the endpoints' packets that queues, policers and sockets dropped, of those
            sent during the judged ops.
        payload: Bytes sent over the bytes of the ops, what went again included, headers and
            acknowledgements aside.
        acks: Acknowledgements sent for a datagram received.
        failure: Why it has no figures; "" where it has.
    """

    first: float = math.nan
    times: list[float] = field(default_factory=list)
    drops: float = math.nan
    payload: float = math.nan
    acks: float = math.nan
    failure: str = ""


def run_cell(cell: Cell, seed: int) -> Outcome:
    """Run the ops of a cell one after another."""
    random = np.random.default_rng(seed)
    values = [random.standard_normal(cell.elements, dtype=np.float32) for _ in range(cell.ranks)]
    pull = {"pull": "none"} if cell.servers else {}
    plan = load_engine().Plan(elements=cell.elements, regions=[(0, cell.elements, 0.0)], **pull)
    fabric = cell.fabric(seed)
    fabric.run(WARM_UP, until_done=False)
    found, limit = Outcome(), LONGEST * max(1.0, cell.ideal)
    before = totals(fabric)
    for op in range(cell.ops):
        if op == cell.ops - cell.judged:
            before = totals(fabric)
        begin = fabric.now
        fabric.all_reduce(op, plan, values, at=begin)
        if not fabric.run(begin + limit, check=False):
            found.failure = f"op {op} is not done after {limit:.0f} s"
            return found
        if failed := _failure(fabric, op):
            found.failure = failed
            return found
        end = max(fabric.finished_at(worker, op) for worker in range(cell.ranks))
        taken = (end - begin) / cell.ideal
        if op == 0:
            found.first = taken
        if op >= cell.ops - cell.judged:
            found.times.append(taken)
        fabric.forget()
    after = totals(fabric)
    spent = after.since(before)
    found.drops = spent.drops
    hops = cell.ranks if cell.servers else 2 * (cell.ranks - 1)
    found.payload = spent.payload / (4 * cell.elements * hops * cell.judged)
    found.acks = spent.acks / spent.received
    return found


@dataclass(frozen=True)
class Totals:
    """What the hosts of a fabric have sent and received together, in packets; payload in bytes."""

    sent: float
    dropped: float
    payload: float
    received: float
    acks: float

    def since(self, before: Totals) -> Totals:
        """Return what has been added."""
        return Totals(*(getattr(self, key) - value for key, value in asdict(before).items()))

    @property
    def drops(self) -> float:
        """The share of the packets that queues, policers and sockets dropped."""
        return self.dropped / self.sent if self.sent else 0.0


def totals(fabric: Fabric) -> Totals:
    """Return what the hosts of a fabric have sent and received so far."""
    every = [fabric.counters(host) for host in range(fabric.workers + fabric.servers)]
    sums = {key: sum(each[key] for each in every) for key in every[0]}
    return Totals(
        sent=sums["packets_sent"],
        dropped=sums["dropped_by_socket"] + sums["dropped_by_ports"],
        payload=sums["bytes_sent"] - HEADER * sums["packets_sent"],
        received=sums["packets_received"],
        acks=sums["acks_sent"],
    )


def _failure(fabric: Fabric, op: int) -> str:
    for worker in range(fabric.workers):
        done = fabric.completion(worker, op)
        if done is None or not done.ok:
            return "not done" if done is None else done.error
    return ""


# ---------------------------------------------------------------------------- many of them


class Situation(Protocol):
    """A situation has a name within its group, marks, and figures by seed."""

    @property
    def group(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def marks(self) -> tuple[Mark, ...]: ...

    def figures(self, seed: int) -> dict[str, float]:
        """Run it, and return what it came to; raises ValueError where it came to nothing."""
        ...


def run_networks(
    situations: Sequence[Situation],
    seeds: int,
    jobs: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run situations, each with several seeds.

    Args:
        situations: What is run.
        seeds: Number of seeds of each.
        jobs: Number of processes.
        progress: A function that is called with the name of each situation that is done.

    Returns:
        A dict for each with the medians of its figures over the seeds (of "worst" the largest),
        and its marks, in their order. Where a run came to no end there are no figures, and no
        mark is met.
    """
    rows = []
    with ProcessPoolExecutor(jobs) as pool:
        running = [
            [pool.submit(_guarded, each, seed) for seed in range(seeds)] for each in situations
        ]
        for situation, futures in zip(situations, running, strict=True):
            rows.append(_row(situation, [future.result() for future in futures]))
            progress(situation.name)
    return rows


def _guarded(situation: Situation, seed: int) -> dict[str, float] | str:
    try:
        return situation.figures(seed)
    except (GradwireError, AssertionError, ValueError) as error:
        return f"seed {seed}: {error}"


def _row(situation: Situation, found: list[dict[str, float] | str]) -> dict[str, Any]:
    row: dict[str, Any] = {"group": situation.group, "name": situation.name}
    figures = [each for each in found if isinstance(each, dict)]
    if failures := [each for each in found if isinstance(each, str)]:
        unmet = [{**asdict(mark), "met": False} for mark in situation.marks]
        return {**row, "failure": failures[0], "failed": len(failures), "marks": unmet}
    for key in figures[0]:
        values = [each[key] for each in figures]
        row[key] = max(values) if key == "worst" else median(values)
    row["marks"] = [{**asdict(mark), "met": mark.met(row[mark.figure])} for mark in situation.marks]
    return row
