"""Where gradwire pays: its exact sums in virtual time beside an estimate of TCP's.

gradwire's times are computed by the engine itself. TCP's are an estimate that favours TCP: a ring
of long-lived flows at the rate that RFC 9438 gives for random loss, without slow start, idle
restarts and time-outs. Neither has a processor's time in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from gradwire.sim.fabric import Link
from gradwire_lab.bench.networks import GIGABIT, Cell, run_networks
from gradwire_lab.contest.measure import (
    FRAME_PAYLOAD,
    TCP_PAYLOAD,
    all_reduce_payload,
    header_ideal,
)
from gradwire_lab.network.presets import MAX_FRAME

RANKS = 4
ROUND_TRIPS = (0.0002, 0.001, 0.01, 0.04, 0.1)
"""Seconds of a round trip between two hosts."""
LOSSES = (0.0, 0.0001, 0.001, 0.01, 0.05)
"""Shares of the packets that the path between two hosts loses."""
SIZES = (64 << 10, 1 << 20, 16 << 20)
"""Bytes of each rank's buffer."""
QUEUE = 1 << 20
"""Bytes of a port's queue."""
SEEDS = 3

_CUBIC_C, _CUBIC_BETA = 0.4, 0.7
_MOVED = FRAME_PAYLOAD / MAX_FRAME


def cells() -> list[Cell]:
    return [
        Cell(
            "where",
            f"{size >> 10} KiB, {1000 * trip:g} ms, loss {loss:g}",
            RANKS,
            Link(delay=trip / 4, queue=QUEUE, loss=1.0 - math.sqrt(1.0 - loss)),
            size / 1e6,
            ops=6,
            judged=3,
        )
        for size in SIZES
        for trip in ROUND_TRIPS
        for loss in LOSSES
    ]


def tcp_rate(trip: float, loss: float, rate: float = GIGABIT) -> float:
    """Return the payload in bytes per second of a long TCP flow with CUBIC (RFC 9438, 5.1).

    Args:
        loss: Share of the packets that are lost, each by itself.
        rate: Bytes per second of the port, headers counted.
    """
    if loss == 0.0:
        return rate * _MOVED
    shape = _CUBIC_C * (3.0 + _CUBIC_BETA) / (4.0 * (1.0 - _CUBIC_BETA))
    cubic = math.pow(shape, 0.25) * math.pow(trip / loss, 0.75)
    reno = math.sqrt(1.5 / loss)
    return min(rate * _MOVED, max(cubic, reno) * TCP_PAYLOAD / trip)


def tcp_seconds(size: int, trip: float, loss: float) -> float:
    """Return the seconds of a ring all-reduce over TCP, an estimate that favours TCP.

    Each of 2 (N - 1) rounds sends a share of the buffer to the next rank and takes half a round
    trip, and the flows never stand still.
    """
    rounds = 2 * (RANKS - 1)
    return rounds * (size / RANKS / tcp_rate(trip, loss) + trip / 2)


def run_map(jobs: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run all networks of the map.

    Returns:
        A dict for each with size, round trip, loss, and seconds over gradwire and over TCP.
    """
    rows = run_networks(cells(), SEEDS, jobs, progress)
    places = [(size, trip, loss) for size in SIZES for trip in ROUND_TRIPS for loss in LOSSES]
    found = []
    for (size, trip, loss), row in zip(places, rows, strict=True):
        ideal = header_ideal(all_reduce_payload(size, RANKS), 8 * GIGABIT)
        ours = row["time"] * ideal if "failure" not in row else None
        theirs = tcp_seconds(size, trip, loss)
        found.append(
            {
                "bytes": size,
                "round_trip_s": trip,
                "loss": loss,
                "gradwire_s": ours,
                "tcp_s": theirs,
                "times_as_fast": None if ours is None else theirs / ours,
            }
        )
    return found
