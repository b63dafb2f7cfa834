"""This benchmark shows how soon a fresh job finds its rate: its third sum over its late ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gradwire_lab.bench.cases import gradwire_all_reduce
from gradwire_lab.bench.transport_grid import NETWORKS as FAST
from gradwire_lab.contest.measure import environment, percentile
from gradwire_lab.contest.race import Race
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import NETWORKS as STANDARD

NETWORKS = {"A": STANDARD["A"], **FAST}
SUMS = 40
THIRD, LATE = 2, slice(29, 40)
"""The sums that are compared, as indices."""


def run_start(
    network: str,
    ranks: int,
    size: int,
    jobs: int,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Start jobs one after another, each of which sums exactly, with fresh engines.

    Args:
        size: bytes of each rank's buffer.
        progress: a function that is called with a line of text at each job.

    Returns:
        What `gradwire bench start --json` prints; the packets lost are those of a job at the ports,
        where these have queues.
    """
    entry = gradwire_all_reduce("exact")
    found: list[dict[str, Any]] = []
    with Network(ranks, NETWORKS[network]) as hosts:
        for job in range(jobs):
            if progress is not None:
                progress(f"{network}: job {job + 1} of {jobs}")
            before = _lost(hosts)
            with Race(hosts, [entry], size) as race:
                rounds = race.run(SUMS, block=SUMS, warm_up=0)[entry.name]
            seconds = [each.seconds for each in rounds]
            late = percentile(seconds[LATE], 50)
            found.append(
                {
                    "first": seconds[0],
                    "third": seconds[THIRD],
                    "late": late,
                    "third_over_late": seconds[THIRD] / late,
                    "packets_lost_at_ports": _lost(hosts) - before,
                    "seconds": seconds,
                }
            )
    return {
        "case": "start",
        "network": asdict(NETWORKS[network]),
        "ranks": ranks,
        "bytes": size,
        "third_over_late": percentile([job["third_over_late"] for job in found], 50),
        "jobs": found,
        "environment": environment(),
    }


def _lost(hosts: Network) -> int:
    """Return the packets lost at the ports so far; ports without a rate count none."""
    return hosts.lost_packets() if hosts.preset.rate else 0
