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
BUCKET_KIB = 64.0
"""What a policer lets pass at once, unless something else is asked for."""
_UPLINKS = 1e-3, 1e3
_MOST_ROUND_TRIP_MS = 10_000.0
_MOST_RANKS = 1024
_PATH_BYTES = 64e3
"""What a rank keeps of each other rank: 62 KB, of 256 ranks."""
OPTIONS = (
    *("rate", "queue", "uplinks", "round_trip", "loss"),
    *("policer_out", "policer_in", "bucket", "ranks", "size"),
)
"""Options of a network of one's own, which has a rate."""


def own(
    rate: float,
    queue: float,
    uplinks: float,
    round_trip: float,
    loss: float,
    ranks: int,
    size: float,
    policer_out: float | None = None,
    policer_in: float | None = None,
    bucket: float = BUCKET_KIB,
    processes: int = 1,
) -> Cell:
    """Return a network of the user's own.

    Args:
        rate: Gbit/s of each port.
        queue: KiB of each port.
        uplinks: the hosts' rate over the ports'.
        round_trip: milliseconds between two hosts.
        loss: of the path between two hosts, in per cent.
        ranks: how many.
        size: MB of each rank's buffer.
        policer_out: Gbit/s that a policer lets pass on each host's way out; None for no policer.
        policer_in: the same on the way in.
        bucket: KiB that a policer lets pass at once.
        processes: how many run at a time, each with memory of its own.

    Raises:
        typer.BadParameter: it cannot be.
    """
    bounded("--rate", rate, *_RATES_GBITS, " Gbit/s")
    bounded("--queue", queue, *_QUEUES_KIB, " KiB")
    bounded("--uplinks", uplinks, *_UPLINKS, " times the ports' rate")
    bounded("--round-trip", round_trip, 0, _MOST_ROUND_TRIP_MS, " ms")
    ways = (("out", policer_out), ("in", policer_in))
    policers = {way: each for way, each in ways if each is not None}
    for way, each in policers.items():
        bounded(f"--policer-{way}", each, *_RATES_GBITS, " Gbit/s")
    bounded("--bucket", bucket, *_QUEUES_KIB, " KiB")
    if not policers and bucket != BUCKET_KIB:
        why = "it is a policer's, which needs --policer-out or --policer-in"
        raise typer.BadParameter(why, param_hint="--bucket")
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
        uplink = replace(link, rate=uplinks * link.rate, queue=max(link.queue, HOST_QUEUE))
        name = (
            f"{rate:g} Gbit/s, {ranks} ranks, uplinks x {uplinks:g}, queue {queue:g} KiB, "
            f"{round_trip:g} ms, loss {loss:g} %, {size:g} MB"
        )
        for way, each in policers.items():
            name += f", policer of {each:g} Gbit/s and {bucket:g} KiB on the way {way}"
        cell = Cell(
            "own",
            name,
            ranks,
            _policed(link, policer_in, bucket),
            size,
            uplink=_policed(uplink, policer_out, bucket),
            ops=8,
            judged=4,
            rate=min(link.rate, uplink.rate, *(each * GIGABIT for each in policers.values())),
        )
        replace(cell, ranks=2).fabric(seed=0)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return cell


def _policed(link: Link, rate: float | None, bucket: float) -> Link:
    """Return a link with a policer before it that lets so many Gbit/s pass, or without one."""
    if rate is None:
        return link
    return replace(link, police_rate=rate * GIGABIT, police_burst=int(bucket * 1024))
