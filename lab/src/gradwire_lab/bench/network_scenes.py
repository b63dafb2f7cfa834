"""Scenes in virtual time that a row of ops does not show: two jobs, a rate that changes, flows of
TCP, clocks that run apart, and a minute without a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

import numpy as np

from gradwire.sim.fabric import NETWORK_A, NETWORK_B, Fabric
from gradwire.transport.native import load_engine
from gradwire_lab.bench.networks import WARM_UP, Cell, Mark, Totals, totals

TARGET = 1.3e-3
"""Seconds of queue at which congestion control aims."""
SAMPLE = 1e-3
"""Seconds from one look at the queues to the next."""
FRAME = 1514
_BESIDE_UDP = FRAME - 1472
_MEGABYTES = 25
_WAYS: tuple[Literal["up", "down"], ...] = ("up", "down")
_QUIET = Cell("", "", 4, NETWORK_A, _MEGABYTES)
_SHALLOW = replace(NETWORK_A, queue=64 << 10)


@dataclass(frozen=True)
class Scene:
    """A scene is a run with figures of its own.

    Attributes:
        group: The group that it belongs to.
        name: A line that tells it from the others of its group.
        play: A function that runs it with a seed, and returns the figures.
        marks: What they shall be.
    """

    group: str
    name: str
    play: Callable[[int], dict[str, float]]
    marks: tuple[Mark, ...]

    def figures(self, seed: int) -> dict[str, float]:
        """Run it, and return what it came to."""
        return self.play(seed)


WORDS = {
    "share": "the job's share",
    "queue": "median queue, in targets",
    "first_drops": "drops of the first job",
    "second_drops": "drops of the second job",
    "drops_halved": "drops in 20 rounds after the rate has halved",
    "drops_doubled": "drops in 20 rounds after the rate has doubled",
    "regain_halved": "seconds to 90 % of half the rate",
    "regain_doubled": "seconds to 90 % of the whole rate",
    "bytes": "the job's bytes over those of one more flow",
    "losses": "the flows' losses over those beside one more flow",
    "flows_share": "the flows' part of the port",
    "over": "time over that with clocks that agree",
    "queue_begin": "median queue at first, in targets",
    "queue_end": "median queue at the end, in targets",
    "growth": "growth of the median queue, in targets",
    "time": "time over the header ideal",
    "drops": "own drops",
}
"""Figures of scenes, in words."""
SHARES = {"drops", "first_drops", "second_drops", "drops_halved", "drops_doubled"}
"""Those that are shares of the packets."""


def figure_text(key: str, value: float) -> str:
    """Return a figure as tables have it."""
    return f"{100 * value:.2f} %" if key in SHARES else f"{value:.2f}"


def _left(until: float, fabric: Fabric) -> bool:
    """Return whether a fabric's time is before another, which counts nanoseconds."""
    return until - fabric.now > 1e-9


class Job:
    """A job sums one buffer after another for as long as its clock runs."""

    def __init__(self, cell: Cell, seed: int, beside: Fabric | None = None) -> None:
        """Make its network, or join that of another job, and let the ranks meet."""
        self.cell = cell
        self.fabric = cell.fabric(seed, beside)
        self._plan = load_engine().Plan(elements=cell.elements, regions=[(0, cell.elements, 0.0)])
        random = np.random.default_rng(seed)
        self._values = [
            random.standard_normal(cell.elements, dtype=np.float32) for _ in range(cell.ranks)
        ]
        self._op = 0
        self._begun = self.fabric.now + WARM_UP
        self.times: list[tuple[float, float]] = []
        self._begin()

    def _begin(self) -> None:
        self.fabric.all_reduce(self._op, self._plan, self._values, at=self._begun)

    def turn(self) -> None:
        """Begin the next op where one has ended."""
        for worker in range(self.cell.ranks):
            done = self.fabric.completion(worker, self._op)
            if done is None:
                return
            if not done.ok:
                raise ValueError(f"op {self._op}: {done.error}")
        end = max(self.fabric.finished_at(worker, self._op) for worker in range(self.cell.ranks))
        self.times.append((end, (end - self._begun) / self.cell.ideal))
        self.fabric.forget()
        self._op += 1
        self._begun = self.fabric.now
        self._begin()

    def run(self, until: float) -> None:
        """Run alone."""
        while _left(until, self.fabric):
            self.fabric.run(until, check=False)
            self.turn()

    def run_beside(self, other: Job, until: float) -> None:
        """Run together with another job on the same ports."""
        while _left(until, self.fabric) or _left(until, other.fabric):
            self.fabric.run_beside(other.fabric, until, check=False)
            self.turn()
            other.turn()

    def queues(self) -> list[float]:
        """Return how long what waits takes to leave, of each way of each port, in targets."""
        return [
            self.fabric.link_counters(host, way)["queue_bytes"] / self.cell.link.rate / TARGET
            for host in range(self.cell.ranks)
            for way in _WAYS
        ]

    def received(self, host: int | None = None) -> float:
        """Return the bytes on the wire that have arrived at a host, or at all."""
        hosts = range(self.cell.ranks) if host is None else [host]
        counters = [self.fabric.counters(each) for each in hosts]
        return sum(
            each["bytes_received"] + _BESIDE_UDP * each["packets_received"] for each in counters
        )

    def watch(self, until: float, other: Job | None = None) -> float:
        """Run, and return the median of the queue that is the longest of all ports by median."""
        samples = []
        while _left(until, self.fabric):
            stop = min(until, self.fabric.now + SAMPLE)
            if other is None:
                self.run(stop)
            else:
                self.run_beside(other, stop)
            samples.append(self.queues())
        return float(max(map(median, zip(*samples, strict=True))))


# ---------------------------------------------------------------------------- two jobs


def sharing() -> Iterator[Scene]:
    """Yield a second job on the ports of a first, and several at once on short queues."""
    yield Scene(
        "sharing",
        "A, 2 jobs of 4 ranks, 25 MB back to back, the second 30 s later: seconds 5 to 30",
        _second_job,
        (Mark("share", least=0.35, most=0.65), Mark("queue", most=2.0)),
    )
    for count, ranks in ((2, 8), (4, 4), (4, 2)):
        yield Scene(
            "sharing",
            f"1 Gbit/s, queue 64 KiB, {count} jobs of {ranks} ranks at once, 25 MB in all",
            partial(_several_jobs, count, ranks),
            (Mark("time", most=1.25), Mark("drops", most=0.02)),
        )


def _second_job(
    seed: int, alone: float = 30.0, settled: float = 5.0, end: float = 30.0
) -> dict[str, float]:
    first = Job(_QUIET, seed)
    first.run(alone)
    second = Job(_QUIET, seed + 1000, beside=first.fabric)
    first.run_beside(second, alone + settled)
    jobs = (first, second)
    before = [(job.received(), totals(job.fabric)) for job in jobs]
    queue = first.watch(alone + end, second)
    moved = [job.received() - then for job, (then, _) in zip(jobs, before, strict=True)]
    spent = [totals(job.fabric).since(then) for job, (_, then) in zip(jobs, before, strict=True)]
    return {
        "share": moved[1] / sum(moved),
        "queue": queue,
        "first_drops": spent[0].drops,
        "second_drops": spent[1].drops,
    }


def _several_jobs(
    count: int, ranks: int, seed: int, rounds: int = 8, judged: int = 5
) -> dict[str, float]:
    cell = Cell("", "", ranks, _SHALLOW, _MEGABYTES / count)
    jobs: list[Job] = []
    for each in range(count):
        jobs.append(Job(cell, seed + 1000 * each, jobs[0].fabric if jobs else None))
    for _ in range(rounds):
        Fabric.run_together([job.fabric for job in jobs], jobs[0].fabric.now + 60)
        for job in jobs:
            job.turn()
    lasted = [max(job.times[n][1] for job in jobs) / count for n in range(rounds)]
    spent = [totals(job.fabric) for job in jobs]
    return {
        "time": median(lasted[-judged:]),
        "drops": sum(each.dropped for each in spent) / sum(each.sent for each in spent),
    }


# ---------------------------------------------------------------------------- another rate


def rates() -> Iterator[Scene]:
    """Yield a port whose rate halves while an op runs, and doubles again."""
    yield Scene(
        "rates",
        "A, 4 ranks, 25 MB, one port's rate halves in mid-op, and doubles",
        _changes,
        (
            *(Mark(f"drops_{way}", most=0.05) for way in ("halved", "doubled")),
            *(Mark(f"regain_{way}", most=1.0) for way in ("halved", "doubled")),
        ),
    )


def _changes(seed: int, calm: float = 1.5, longest: float = 3.0) -> dict[str, float]:
    job = Job(_QUIET, seed)
    found = {}
    for way, share in (("halved", 0.5), ("doubled", 1.0)):
        _to_mid_op(job, job.fabric.now + calm)
        link = replace(_QUIET.link, rate=share * _QUIET.link.rate)
        for direction in _WAYS:
            job.fabric.set_link(1, direction, link)
        found[f"drops_{way}"], found[f"regain_{way}"] = _after_change(job, link.rate, longest)
    return found


def _to_mid_op(job: Job, until: float) -> None:
    job.run(until)
    ops = len(job.times)
    while len(job.times) == ops:
        job.run(job.fabric.now + SAMPLE)
    job.run(job.fabric.now + job.cell.ideal / 2)


def _after_change(
    job: Job, rate: float, longest: float, window: float = 0.05
) -> tuple[float, float]:
    """Return the drops in 20 round trips, and the seconds until a window has 90 % of the rate."""
    changed, before = job.fabric.now, totals(job.fabric)
    round_trip = 4 * job.cell.link.delay + TARGET
    job.run(changed + 20 * round_trip)
    drops = totals(job.fabric).since(before).drops
    while job.fabric.now < changed + longest:
        arrived = job.received(1)
        began = job.fabric.now
        job.run(began + window)
        if job.received(1) - arrived >= 0.9 * rate * (job.fabric.now - began):
            return drops, job.fabric.now - changed
    return drops, longest


# ---------------------------------------------------------------------------- flows of TCP


def tcp() -> Iterator[Scene]:
    """Yield flows that yield to loss, into one port of a job."""
    for flows in (1, 4):
        yield Scene(
            "tcp",
            f"A, 4 ranks, 25 MB back to back for 60 s beside {flows} TCP into one port",
            partial(_beside_flows, flows),
            (Mark("bytes", least=0.5, most=1.5), Mark("losses", most=1.5)),
        )


def _beside_flows(flows: int, seed: int, seconds: float = 60.0) -> dict[str, float]:
    end = WARM_UP + seconds
    alone = _QUIET.fabric(seed)
    several = [alone.tcp_flow(1, start=WARM_UP) for _ in range(flows + 1)]
    alone.run(end, until_done=False)
    more = alone.flow(several.pop())["delivered_bytes"]
    usual = _lost(alone, several)
    job = Job(_QUIET, seed)
    beside = [job.fabric.tcp_flow(1, start=WARM_UP) for _ in range(flows)]
    job.run(end)
    theirs = sum(job.fabric.flow(each)["delivered_bytes"] for each in beside)
    return {
        "bytes": job.received(1) / more,
        "losses": _lost(job.fabric, beside) / usual,
        "flows_share": theirs / (_QUIET.link.rate * seconds),
        "drops": totals(job.fabric).drops,
    }


def _lost(fabric: Fabric, flows: list[int]) -> float:
    """Return the share of their packets that flows lose."""
    counters = [fabric.flow(each) for each in flows]
    return sum(each["dropped"] for each in counters) / sum(each["packets"] for each in counters)


# ---------------------------------------------------------------------------- time itself


def clocks() -> Iterator[Scene]:
    """Yield hosts whose clocks run apart."""
    for ppm in (50.0, 300.0):
        yield Scene(
            "clocks",
            f"1 Gbit/s, 4 ranks, clocks ± {ppm:.0f} ppm, 25 MB back to back for 30 s",
            partial(_apart, ppm),
            (Mark("over", most=1.03), Mark("growth", most=0.1)),
        )


def _apart(ppm: float, seed: int, seconds: float = 30.0) -> dict[str, float]:
    agreed, _ = _without_pause(_QUIET, seed, seconds)
    found, spent = _without_pause(replace(_QUIET, ppm=ppm), seed, seconds)
    return {
        "over": found["time"] / agreed["time"],
        **{key: found[key] for key in ("queue_begin", "queue_end", "growth")},
        "drops": spent.drops,
    }


def long() -> Iterator[Scene]:
    """Yield a minute of ops without a pause."""
    yield Scene(
        "long",
        "B, 4 ranks, 25 MB back to back for 60 s",
        _minute,
        (Mark("growth", most=0.1),),
    )


def _minute(seed: int) -> dict[str, float]:
    found, spent = _without_pause(replace(_QUIET, link=NETWORK_B), seed, 60.0)
    return {**found, "drops": spent.drops}


def _without_pause(cell: Cell, seed: int, seconds: float) -> tuple[dict[str, float], Totals]:
    """Run ops back to back, and compare the queues of the first third with those of the last.

    The first second does not count, in which the ranks find the rate.
    """
    job = Job(cell, seed)
    job.run(WARM_UP + 1.0)
    before = totals(job.fabric)
    begin = job.watch(WARM_UP + seconds / 3)
    job.run(WARM_UP + seconds * 2 / 3)
    end = job.watch(WARM_UP + seconds)
    figures = {
        "time": median(taken for _, taken in job.times[1:]),
        "queue_begin": begin,
        "queue_end": end,
        "growth": end - begin,
    }
    return figures, totals(job.fabric).since(before)
