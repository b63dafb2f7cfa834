"""This benchmark runs the engine in virtual time on networks of many kinds, and tells what it costs
itself and everybody else there: times over the header ideal, and the share of its own packets that
queues and policers drop.

Everything is computed, so a seed gives the same figures on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from gradwire.core.errors import GradwireError
from gradwire.sim.fabric import Fabric, Link
from gradwire.transport.native import load_engine
from gradwire_lab.contest.measure import header_ideal
from gradwire_lab.network.presets import MAX_FRAME

GIGABIT = 125e6
"""Bytes per second."""
HOST_QUEUE = 4 << 20
"""Bytes that wait in a host whose uplink is busy."""
WARM_UP = 0.3
"""Seconds before the first op, in which ranks meet."""
LONGEST = 120
"""Times of the header ideal, at least seconds, after which an op counts as not done."""


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

    def fabric(self, seed: int) -> Fabric:
        """Makes the network; hosts and timers are late, and a send call takes time."""
        fabric = Fabric(
            self.ranks,
            servers=self.servers,
            seed=seed,
            link=self.link,
            host_delay=10e-6,
            host_jitter=60e-6,
            send_time=2e-6,
            datagram_bytes=1472,
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
        payload: Bytes sent over the bytes of the ops, headers and acknowledgements included.
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
    before = _totals(fabric)
    for op in range(cell.ops):
        if op == cell.ops - cell.judged:
            before = _totals(fabric)
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
    after = _totals(fabric)
    sent, dropped, sent_bytes, received, acks = (
        now - then for now, then in zip(after, before, strict=True)
    )
    found.drops = dropped / sent
    hops = cell.ranks if cell.servers else 2 * (cell.ranks - 1)
    found.payload = sent_bytes / (4 * cell.elements * hops * cell.judged)
    found.acks = acks / received
    return found


def _totals(fabric: Fabric) -> tuple[float, ...]:
    hosts = range(fabric.workers + fabric.servers)
    counters = [fabric.counters(host) for host in hosts]
    links = [fabric.link_counters(host, way) for host in hosts for way in ("up", "down")]
    return (
        sum(each["packets_sent"] for each in counters),
        sum(each["dropped_by_socket"] for each in counters)
        + sum(each["dropped_queue"] + each["dropped_policer"] for each in links),
        sum(each["bytes_sent"] for each in counters),
        sum(each["packets_received"] for each in counters),
        sum(each["acks_sent"] for each in counters),
    )


def _failure(fabric: Fabric, op: int) -> str:
    for worker in range(fabric.workers):
        done = fabric.completion(worker, op)
        if done is None or not done.ok:
            return "not done" if done is None else done.error
    return ""


# ---------------------------------------------------------------------------- the networks


def rate_text(rate: float) -> str:
    """Return a rate as people write it."""
    return f"{rate / GIGABIT:g} Gbit/s"


def size_text(size: int) -> str:
    """Return a size as people write it."""
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB"


def grid(
    rates: Iterable[float] = (0.1, 1, 10, 25), ranks: Iterable[int] = (2, 4, 8, 16)
) -> Iterator[Cell]:
    """Yield racks: rates in Gbit/s, ranks, uplinks as fast as the ports and ten times, queues."""
    for rate in (each * GIGABIT for each in rates):
        for count in ranks:
            least = int(max(16 << 10, 100e-6 * rate, 2 * MAX_FRAME * (count - 1)))
            queues = [least, 2 * least, int(1e-3 * rate), int(4e-3 * rate)]
            for uplink in (1, 10):
                for queue in sorted({size for size in queues if size >= least}):
                    yield Cell(
                        "grid",
                        f"{rate_text(rate)}, {count} ranks, uplinks x {uplink}, queue "
                        f"{size_text(queue)}",
                        count,
                        Link(rate=rate, queue=queue),
                        4 if rate <= GIGABIT else 25,
                        uplink=Link(rate=uplink * rate, queue=HOST_QUEUE),
                    )


def small() -> Iterator[Cell]:
    """Yield ports with smaller queues than a rack's switch has."""
    for rate, queue, ranks in ((1, 8, 2), (1, 16, 8), (10, 64, 4), (10, 128, 8), (25, 256, 4)):
        for uplink in (1, 10):
            yield Cell(
                "small",
                f"{rate} Gbit/s, {ranks} ranks, uplinks x {uplink}, queue {queue} KiB",
                ranks,
                Link(rate=rate * GIGABIT, queue=queue << 10),
                4 if rate == 1 else 25,
                uplink=Link(rate=uplink * rate * GIGABIT, queue=HOST_QUEUE),
            )


def policers() -> Iterator[Cell]:
    """Yield policers of 1 Gbit/s on links of 10 Gbit/s, on the hosts' way out and in."""
    plain = Link(rate=10 * GIGABIT, queue=HOST_QUEUE)
    policed = Link(rate=10 * GIGABIT, queue=HOST_QUEUE, police_rate=GIGABIT, police_burst=64 << 10)
    for ranks in (2, 4):
        for way, up, down in (("out", policed, plain), ("in", plain, policed)):
            name = f"policer of 1 Gbit/s on the way {way}, {ranks} ranks"
            yield Cell("policers", name, ranks, down, 25, uplink=up, rate=GIGABIT)


def incast() -> Iterator[Cell]:
    """Yield pushes of many workers into one port."""
    for workers in (16, 64):
        yield Cell(
            "incast",
            f"push of {workers} workers, 1 Gbit/s, queue 64 KiB",
            workers,
            Link(rate=GIGABIT, queue=64 << 10),
            0.5,
            uplink=Link(rate=GIGABIT, queue=HOST_QUEUE),
            servers=1,
        )


def far() -> Iterator[Cell]:
    """Yield jobs of which one host is elsewhere."""
    yield Cell(
        "far",
        "1 Gbit/s, 4 ranks, one of them 10 ms away",
        4,
        Link(),
        4,
        far=Link(delay=5e-3),
        ops=8,
        judged=4,
    )


def sites() -> Iterator[Cell]:
    """Yield long paths with and without loss."""
    for round_ms, queue in ((40, 256 << 10), (40, 4 << 20), (100, 256 << 10), (100, 4 << 20)):
        for loss in (0.0, 0.01, 0.05):
            link = Link(delay=round_ms * 1e-3 / 4, queue=queue, loss=loss)
            name = f"1 Gbit/s, 4 ranks, {round_ms} ms, queue {size_text(queue)}, loss {loss:.0%}"
            yield Cell("sites", name, 4, link, 4, ops=8, judged=4)


def clocks() -> Iterator[Cell]:
    """Yield hosts whose clocks run apart."""
    for ppm in (0.0, 50.0, 300.0):
        name = f"1 Gbit/s, 4 ranks, clocks ± {ppm:.0f} ppm, 25 MB back to back"
        yield Cell("clocks", name, 4, Link(), 25, ops=72, judged=60, ppm=ppm)


def known() -> Iterator[Cell]:
    """Yield the lab's networks A and B: quiet, beside bursts and steady traffic, and lossy."""
    b = Link(rate=25e6, queue=64 << 10)
    for name, link, sizes in (("A", Link(), (0.064, 1, 10)), ("B", b, (0.064, 2))):
        for ranks in (2, 4, 8):
            for size in sizes:
                ops, judged = (20, 15) if size < 1 else (6, 3)
                cell = f"{name}, {ranks} ranks, {size:g} MB"
                yield Cell("known", cell, ranks, link, size, ops=ops, judged=judged)
        yield Cell("known", f"{name}, push of 8 to one", 8, link, sizes[1] / 2, servers=1)
        bursts = {
            "rate": 4 * link.rate,
            "length": 2.5e5 * 5 / link.rate,
            "period": 25e6 / link.rate,
        }
        for ranks in (4, 8):
            cell = f"{name}, {ranks} ranks, bursts of {bursts['length'] * 1e3:g} ms"
            yield Cell("known", cell, ranks, link, sizes[-1] / 2, ops=24, judged=20, bursts=bursts)
        for share in (0.5, 0.8):
            steady = {"rate": share * link.rate, "length": 1e6}
            cell = f"{name}, 4 ranks, steady traffic of {share:.0%}"
            yield Cell("known", cell, 4, link, sizes[-1] / 2, bursts=steady)
    for loss, run in ((0.01, 1), (0.05, 10), (0.05, 1), (0.2, 1), (0.4, 1), (0.6, 1), (0.8, 5)):
        lossy = Link(loss=loss, loss_burst=run)
        cell = f"A, 4 ranks, loss {loss:.0%} in runs of {run}"
        yield Cell("known", cell, 4, lossy, 0.5, ops=8, judged=6)
    yield Cell(
        "known",
        "A, 4 ranks, a third of all packets 1 ms late",
        4,
        Link(reorder=0.3, reorder_delay=1e-3),
        2,
        ops=8,
        judged=6,
    )
    yield Cell("known", "A, 4 ranks, marks from 30 KB on", 4, Link(ecn=30_000), 4)
    for rate, queue in ((10, 4 << 20), (25, 16 << 20)):
        for ranks in (2, 4, 8):
            fast = Link(rate=rate * GIGABIT, delay=2e-6, queue=queue)
            yield Cell(
                "known", f"{rate} Gbit/s, {ranks} ranks, 1 MB", ranks, fast, 1, ops=20, judged=15
            )


GROUPS: dict[str, Callable[[], Iterator[Cell]]] = {
    "grid": grid,
    "small": small,
    "policers": policers,
    "incast": incast,
    "far": far,
    "sites": sites,
    "clocks": clocks,
    "known": known,
}


def run_networks(
    cells: list[Cell],
    seeds: int,
    jobs: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run cells, each with several seeds.

    Args:
        cells: The cells.
        seeds: Number of seeds of each.
        jobs: Number of processes.
        progress: A function that is called with the name of each cell that is done.

    Returns:
        A dict a cell with the medians over its seeds and the worst time, in the order of `cells`.
    """
    rows = []
    with ProcessPoolExecutor(jobs) as pool:
        running = [[pool.submit(_guarded, cell, seed) for seed in range(seeds)] for cell in cells]
        for cell, futures in zip(cells, running, strict=True):
            rows.append(_row(cell, [future.result() for future in futures]))
            progress(cell.name)
    return rows


def _guarded(cell: Cell, seed: int) -> Outcome:
    try:
        return run_cell(cell, seed)
    except (GradwireError, AssertionError, ValueError) as error:
        return Outcome(failure=f"seed {seed}: {error}")


def _row(cell: Cell, outcomes: list[Outcome]) -> dict[str, Any]:
    row: dict[str, Any] = {"group": cell.group, "name": cell.name}
    if failures := [each.failure for each in outcomes if each.failure]:
        return {**row, "failure": failures[0], "failed": len(failures)}
    return {
        **row,
        "first": median(each.first for each in outcomes),
        "time": median(median(each.times) for each in outcomes),
        "worst": max(max(each.times) for each in outcomes),
        "drops": median(each.drops for each in outcomes),
        "payload": median(each.payload for each in outcomes),
        "acks": median(each.acks for each in outcomes),
    }
