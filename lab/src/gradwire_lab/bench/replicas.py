"""This benchmark hashes all replicas after real DDP jobs through real loss: they must be alike."""

from __future__ import annotations

from typing import Any

from gradwire_lab.contest.job import Job
from gradwire_lab.contest.measure import environment
from gradwire_lab.network.bursts import BurstTraffic
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import BURSTS, NETWORKS, Burst

HOSTS = 4
BOUND = 0.2
TIMEOUT = 600.0


def run_replicas(network: str, steps: int, pull: str) -> dict[str, Any]:
    """Train on four hosts while bursts hit one port; compare the parameters' hashes."""
    preset, usual = NETWORKS[network], BURSTS[network]
    # Bursts come twice as often as the standard ones, so that nearly every step loses something.
    burst = Burst(usual.rate, usual.on, usual.period / 2)
    worker = "gradwire_lab.bench.replicas_worker"
    with (
        Network(HOSTS, preset, extra_hosts=1) as net,
        BurstTraffic(net, burst, target=1),
        Job(net, worker, TIMEOUT, pull=pull, bound=BOUND) as job,
    ):
        answers = job.ask("train", steps=steps)
    return {
        "case": "replicas",
        "network": network,
        "pull": pull,
        "bound": BOUND,
        "identical": len({answer["hash"] for answer in answers}) == 1,
        "ranks": answers,
        "environment": environment(),
    }
