"""The networks on which `gradwire bench networks` runs, by group, and what is asked of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from gradwire.sim.fabric import Link
from gradwire_lab.bench.network_scenes import Scene, clocks, long, rates, sharing, tcp
from gradwire_lab.bench.networks import GIGABIT, Cell, Mark
from gradwire_lab.network.presets import MAX_FRAME

HOST_QUEUE = 4 << 20
"""Bytes that wait in a host whose uplink is busy."""
ENOUGH_S = 1e-3
"""A queue of this much of the port's rate is enough for the sharper marks of a rack."""


def rate_text(rate: float) -> str:
    """Return a rate as people write it."""
    return f"{rate / GIGABIT:g} Gbit/s"


def size_text(size: int) -> str:
    """Return a size as people write it."""
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB"


RATES = (0.1, 1, 10, 25)
"""Gbit/s of a rack's ports."""
RANKS = (2, 4, 8, 16)
UPLINKS = (1, 10)
"""Rates of a rack's hosts over those of the ports."""


def grid(rates: Iterable[float] = RATES, ranks: Iterable[int] = RANKS) -> Iterator[Cell]:
    """Yield racks: rates in Gbit/s, ranks, uplinks as fast as the ports and ten times, queues."""
    for rate in (each * GIGABIT for each in rates):
        for count in ranks:
            least = int(max(16 << 10, 100e-6 * rate, 2 * MAX_FRAME * (count - 1)))
            queues = [least, 2 * least, int(1e-3 * rate), int(4e-3 * rate)]
            for uplink in UPLINKS:
                for queue in sorted({size for size in queues if size >= least}):
                    yield Cell(
                        "grid",
                        f"{rate_text(rate)}, {count} ranks, uplinks x {uplink}, queue "
                        f"{size_text(queue)}",
                        count,
                        Link(rate=rate, queue=queue),
                        4 if rate <= GIGABIT else 25,
                        uplink=Link(rate=uplink * rate, queue=HOST_QUEUE),
                        marks=_of_a_rack(rate, queue),
                    )


def _of_a_rack(rate: float, queue: int) -> tuple[Mark, ...]:
    if queue < int(ENOUGH_S * rate):
        return Mark("time", most=1.25), Mark("drops", most=0.02)
    return Mark("time", most=1.15 if rate > 10 * GIGABIT else 1.10), Mark("drops", most=0.005)


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
    """Yield policers on the hosts' way out and in, of a tenth of the links' rate."""
    marks = (Mark("time", most=1 / 0.85), Mark("drops", most=0.02))
    plain = Link(rate=10 * GIGABIT, queue=HOST_QUEUE)
    policed = Link(rate=10 * GIGABIT, queue=HOST_QUEUE, police_rate=GIGABIT, police_burst=64 << 10)
    for ranks in (2, 4):
        for way, up, down in (("out", policed, plain), ("in", plain, policed)):
            name = f"policer of 1 Gbit/s on the way {way}, {ranks} ranks"
            yield Cell("policers", name, ranks, down, 25, uplink=up, rate=GIGABIT, marks=marks)
    plain = Link(rate=GIGABIT, queue=HOST_QUEUE)
    policed = replace(plain, police_rate=0.1 * GIGABIT, police_burst=64 << 10)
    for ranks in (2, 4):
        name = f"policer of 0.1 Gbit/s on the way out, {ranks} ranks"
        rate = 0.1 * GIGABIT
        yield Cell("policers", name, ranks, plain, 4, uplink=policed, rate=rate, marks=marks)
    plain = Link(rate=10 * GIGABIT, queue=HOST_QUEUE, delay=2.5e-3)
    policed = replace(plain, police_rate=GIGABIT, police_burst=64 << 10)
    name = "policer of 1 Gbit/s on the way out, 2 ranks, 10 ms"
    cell = Cell("policers", name, 2, plain, 25, uplink=policed, rate=GIGABIT, marks=marks)
    yield cell
    yield replace(cell, name=f"{name}, after ten sums", ops=20, judged=10)


def incast() -> Iterator[Cell]:
    """Yield pushes of many workers into one port, and a sum of as many ranks."""
    few_acks = Mark("acks", most=0.1)
    for workers in (16, 64):
        yield Cell(
            "incast",
            f"push of {workers} workers, 1 Gbit/s, queue 64 KiB",
            workers,
            Link(rate=GIGABIT, queue=64 << 10),
            0.5,
            uplink=Link(rate=GIGABIT, queue=HOST_QUEUE),
            servers=1,
            marks=(
                *(Mark("time", most=1.05), Mark("drops", most=0.02)),
                *((few_acks,) if workers == 64 else ()),
            ),
        )
    yield Cell(
        "incast",
        "all-reduce of 64 ranks, 1 Gbit/s, queue 256 KiB",
        64,
        Link(),
        2.4,
        ops=4,
        judged=2,
        marks=(few_acks,),
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
        marks=(Mark("time", most=1.8),),
    )


def sites() -> Iterator[Cell]:
    """Yield long paths with and without loss."""
    for round_ms, queue in ((40, 256 << 10), (40, 4 << 20), (100, 256 << 10), (100, 4 << 20)):
        for loss, most, payload in (
            (0.0, 2.0 if round_ms == 40 else 3.3, None),
            (0.01, 2.8 if round_ms == 40 else 5.0, 1.15),
            (0.05, 3.5 if round_ms == 40 else 7.0, 1.6),
        ):
            link = Link(delay=round_ms * 1e-3 / 4, queue=queue, loss=loss)
            marks = [Mark("time", most=most)]
            if payload is not None:
                marks.append(Mark("payload", most=payload))
            name = f"1 Gbit/s, 4 ranks, {round_ms} ms, queue {size_text(queue)}, loss {loss:.0%}"
            yield Cell("sites", name, 4, link, 4, ops=8, judged=4, marks=tuple(marks))


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


GROUPS: dict[str, Callable[[], Iterator[Cell] | Iterator[Scene]]] = {
    "grid": grid,
    "small": small,
    "policers": policers,
    "incast": incast,
    "far": far,
    "sites": sites,
    "clocks": clocks,
    "long": long,
    "sharing": sharing,
    "rates": rates,
    "tcp": tcp,
    "known": known,
}
"""The groups by name."""
