"""A network of the user's own, from options of `gradwire bench networks`."""

from __future__ import annotations

import math
from dataclasses import replace

import typer

from gradwire.sim.fabric import Link
from gradwire_lab.bench.network_groups import HOST_QUEUE
from gradwire_lab.bench.networks import GIGABIT, Cell
from gradwire_lab.bench.options import bounded, need_memory

__all__ = ["OPTIONS", "own"]

_RATES_GBITS = 1e-6, 1000.0
_QUEUES_KIB = 1.5, float((1 << 21) - 1)
"""A queue holds a packet, and its bytes are counted in 32 bits."""
_UPLINKS = 1e-3, 1e3
_MOST_ROUND_TRIP_MS = 10_000.0
_MOST_RANKS = 1024
_PATH_BYTES = 64e3
"""What a rank keeps of each other rank: 62 KB, of 256 ranks."""
OPTIONS = ("rate", "queue", "uplinks", "round_trip", "loss", "ranks", "size")
"""Options of a network of one's own, which has a rate."""


def own(
    rate: float,
    queue: float,
    uplinks: float,
    round_trip: float,
    loss: float,
    ranks: int,
    size: float,
    processes: int = 1,
) -> Cell:
    """Return a network of the user's own, which so many processes run at a time.

    Raises:
        typer.BadParameter: it cannot be.
    """
    bounded("--rate", rate, *_RATES_GBITS, " Gbit/s")
    bounded("--queue", queue, *_QUEUES_KIB, " KiB")
    bounded("--uplinks", uplinks, *_UPLINKS, " times the ports' rate")
    bounded("--round-trip", round_trip, 0, _MOST_ROUND_TRIP_MS, " ms")
    bounded("--ranks", ranks, 2, _MOST_RANKS, "")
    if not 0 <= loss < 100:
        raise typer.BadParameter(f"{loss:g}: 0 to below 100", param_hint="--loss")
    if not 4e-6 <= size < math.inf:
        why = f"{size:g}: a buffer has at least one element, 4e-6 MB"
        raise typer.BadParameter(why, param_hint="--size")
    beside = processes * _PATH_BYTES * ranks**2
    need_memory("--ranks", 0, beside)
    need_memory("--size", processes * size * 1e6 * ranks, beside)
    try:
        link = Link(
            rate=rate * GIGABIT,
            queue=int(queue * 1024),
            delay=round_trip * 1e-3 / 4,
            loss=1.0 - math.sqrt(1.0 - loss / 100),
        )
        name = (
            f"{rate:g} Gbit/s, {ranks} ranks, uplinks x {uplinks:g}, queue {queue:g} KiB, "
            f"{round_trip:g} ms, loss {loss:g} %, {size:g} MB"
        )
        uplink = Link(
            rate=uplinks * link.rate,
            queue=max(link.queue, HOST_QUEUE),
            delay=link.delay,
            loss=link.loss,
        )
        cell = Cell("own", name, ranks, link, size, uplink=uplink, ops=8, judged=4)
        replace(cell, ranks=2).fabric(seed=0)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return cell
