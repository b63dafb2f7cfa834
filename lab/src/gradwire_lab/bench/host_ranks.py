"""This benchmark sums over several ranks a host, and counts what passes the hosts' ports."""

from __future__ import annotations

from typing import Any

from gradwire_lab.contest.job import Job, turns
from gradwire_lab.contest.measure import (
    all_reduce_payload,
    environment,
    header_ideal,
    percentile,
)
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import NETWORKS

CONTESTANTS = ("gloo", "gradwire flat", "gradwire hosts")
TIMEOUT = 600.0


def run_host_ranks(
    network: str,
    hosts: int,
    ranks_a_host: int,
    size: int,
    rounds: int,
    block: int = 5,
) -> dict[str, Any]:
    """Measure all-reduces of all ranks, by contestants that take turns.

    Args:
        size: bytes of each rank's gradient.
        block: rounds of one contestant before the next has its turn.
    """
    preset = NETWORKS[network]
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    port_bytes = dict.fromkeys(CONTESTANTS, 0)
    worker = "gradwire_lab.bench.host_ranks_worker"
    with (
        Network(hosts, preset) as net,
        Job(net, worker, TIMEOUT, ranks_a_host, size=size) as job,
    ):
        for name, count in turns(CONTESTANTS, rounds, block):
            before = [net.port_stats(host).uplink.bytes for host in range(hosts)]
            seconds[name] += job.time("sum", name=name, rounds=count)
            after = [net.port_stats(host).uplink.bytes for host in range(hosts)]
            port_bytes[name] += max(now - then for now, then in zip(after, before, strict=True))
    ideal = header_ideal(all_reduce_payload(size, hosts), float(preset.rate))
    return {
        "case": "hosts",
        "network": network,
        "hosts": hosts,
        "ranks_a_host": ranks_a_host,
        "bytes": size,
        "rounds": rounds,
        "ideal_seconds": ideal,
        "contestants": {
            name: {
                "median_seconds": percentile(seconds[name], 50),
                "p90_seconds": percentile(seconds[name], 90),
                "port_bytes": port_bytes[name] / rounds,
                "seconds": seconds[name],
            }
            for name in CONTESTANTS
        },
        "environment": environment(),
    }
