"""Times are read with ideals, percentiles, and the machine that they were taken on."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradwire_lab.network.presets import MAX_FRAME

FRAME_PAYLOAD = 1432
"""Bytes of gradient that a full frame carries in the header ideal. The figure is a convention, by
which all ratios compare; real frames carry a little more, so a ratio can fall below 1."""

GRADWIRE_PAYLOAD = 1444
"""Bytes of gradient that a full frame of gradwire carries."""

TCP_PAYLOAD = 1448
"""Bytes that a full frame of TCP carries beside its timestamps."""

CONVENTION = (
    f"the header ideal counts {FRAME_PAYLOAD:,} bytes a frame; gradwire's carry "
    f"{GRADWIRE_PAYLOAD:,} and TCP's {TCP_PAYLOAD:,}, so the least ratios of exact sums are "
    f"{FRAME_PAYLOAD / GRADWIRE_PAYLOAD:.3f} and {FRAME_PAYLOAD / TCP_PAYLOAD:.3f}"
)
"""What stands wherever ratios over the header ideal are printed."""

TAIL_ROUNDS = 1000
"""A 99th percentile of fewer rounds is not given."""


def all_reduce_payload(size: int, hosts: int, servers: int = 0) -> float:
    """Return the bytes per direction and port of an all-reduce of ``size`` bytes over hosts.

    With ``servers`` that sum as well, it is the best division of the sums between hosts and servers
    (Jiang et al., A Unified Architecture for Accelerating Distributed DNN Training, OSDI 2020,
    section 4.1). More servers than ``hosts`` gain nothing.
    """
    if hosts < 2:
        return 0.0
    used = min(servers, hosts)
    return 2 * hosts * (hosts - 1) / (hosts**2 + used * hosts - 2 * used) * size


def push_payload(size: int, workers: int) -> float:
    """Return the bytes into the server's port when every worker pushes ``size`` bytes."""
    return float(size * workers)


def header_ideal(payload: float, rate: float) -> float:
    """Return the seconds that the busiest port needs for the payload and its headers alone.

    Frames carry :data:`FRAME_PAYLOAD` bytes, whatever sends them.

    Args:
        payload: bytes per direction on the busiest port.
        rate: the rate of the port, in bits per second.
    """
    return payload * 8 / rate * MAX_FRAME / FRAME_PAYLOAD


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that is not exceeded by ``percent`` per cent of the values.

    Raises:
        ValueError: no values, or a percentage outside 0 … 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError("a percentile needs values and a percentage between 0 and 100")
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]


@dataclass(frozen=True)
class Summary:
    """A summary puts a set of rounds into a few numbers.

    Attributes:
        rounds: how many.
        ideal: the header ideal in seconds; all that follow are multiples of it.
        median: half of the rounds took no longer.
        p90: nine in ten took no longer.
        p99: ninety-nine in a hundred took no longer; None if there are too few rounds to say.
        max: the longest.
    """

    rounds: int
    ideal: float
    median: float
    p90: float
    p99: float | None
    max: float


def summarize(seconds: Sequence[float], ideal: float, tail_rounds: int = TAIL_ROUNDS) -> Summary:
    """Put times into numbers over the header ideal.

    Args:
        ideal: header ideal, in seconds.
        tail_rounds: the rounds from which on a 99th percentile is given.

    Raises:
        ValueError: there are no rounds or the ideal is not positive.
    """
    if not ideal > 0:
        raise ValueError("the header ideal must be positive")
    tail = percentile(seconds, 99) / ideal if len(seconds) >= tail_rounds else None
    return Summary(
        rounds=len(seconds),
        ideal=ideal,
        median=percentile(seconds, 50) / ideal,
        p90=percentile(seconds, 90) / ideal,
        p99=tail,
        max=max(seconds) / ideal,
    )


def softnet_drops() -> int:
    """Count the packets that this machine's CPUs dropped between two devices since it started.

    No queue of a lab network counts them. If the number grows during a measurement, the machine
    was too slow for it.
    """
    lines = Path("/proc/net/softnet_stat").read_text().splitlines()
    return sum(int(line.split()[1], 16) for line in lines)


@dataclass(frozen=True)
class ProcessorTime:
    """A processor time is what all processors spent since the machine started (/proc/stat).

    Attributes:
        wanted: ticks in which something was ready to run.
        stolen: ticks of these that a hypervisor gave to other guests.
    """

    wanted: int
    stolen: int

    def stolen_since(self, before: ProcessorTime) -> float | None:
        """Return the stolen share of the time wanted since `before`; None if none was wanted."""
        wanted = self.wanted - before.wanted
        return (self.stolen - before.stolen) / wanted if wanted > 0 else None


def processor_time(stat: str | None = None) -> ProcessorTime:
    """Read it.

    Args:
        stat: the text of /proc/stat, if not the machine's own.
    """
    text = Path("/proc/stat").read_text() if stat is None else stat
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split()[1:9])
    return ProcessorTime(user + nice + system + irq + softirq + steal, steal)


def environment() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "gradwire": _version("gradwire"),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
