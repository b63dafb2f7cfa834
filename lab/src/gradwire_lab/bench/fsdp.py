"""This benchmark times steps of a sharded model (FSDP2) under bursts, and checks what they lose."""

from __future__ import annotations

from typing import Any

from gradwire_lab.contest.job import Job, turns
from gradwire_lab.contest.measure import environment, percentile
from gradwire_lab.network.bursts import BurstTraffic
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import BURSTS, NETWORKS

HOSTS = 4
CONTESTANTS = {"gloo": "off", "dblp": "dblp", "ltp": "ltp", "adaptive": "adaptive"}
"""The policies by the contestants' names; with "off" torch and Gloo carry the gradients."""
TIMEOUT = 900.0


def run_fsdp(network: str, steps: int, replicas: int, block: int = 10) -> dict[str, Any]:
    """Train on four hosts while bursts hit one port, by contestants that take turns.

    Args:
        replicas: the number of replicas, which divides the number of hosts. With 1 gradwire
            carries the reduce-scatter; with more Gloo does, and gradwire averages over replicas.
        block: steps of one contestant before the next has its turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    found: dict[str, dict[str, Any]] = {}
    worker = "gradwire_lab.bench.fsdp_worker"
    with (
        Network(HOSTS, NETWORKS[network], extra_hosts=1) as net,
        BurstTraffic(net, BURSTS[network], target=1),
        Job(net, worker, TIMEOUT, replicas=replicas, policies=CONTESTANTS) as job,
    ):
        for name, count in turns(CONTESTANTS, steps, block):
            seconds[name] += job.time("train", name=name, steps=count)
        for name in CONTESTANTS:
            answers = job.ask("found", name=name)
            shards = HOSTS // replicas
            found[name] = {
                "identical": all(
                    answers[rank]["hash"] == answers[rank % shards]["hash"] for rank in range(HOSTS)
                ),
                "agreed": len({answer["agreed"] for answer in answers}) == 1,
                "beyond_bound": max(answer["beyond_bound"] for answer in answers),
                "exceeded_steps": max(answer["exceeded_steps"] for answer in answers),
                "delivered_mean": min(answer["delivered_mean"] for answer in answers),
                "delivered_least": min(answer["delivered_least"] for answer in answers),
            }
    return {
        "case": "fsdp",
        "network": network,
        "hosts": HOSTS,
        "replicas": replicas,
        **job.facts,
        "contestants": {
            name: {
                "steps": len(seconds[name]),
                "median_seconds": percentile(seconds[name], 50),
                "p90_seconds": percentile(seconds[name], 90),
                "max_seconds": max(seconds[name]),
                "seconds": seconds[name],
                **found[name],
            }
            for name in CONTESTANTS
        },
        "environment": environment(),
    }
