"""This benchmark hashes all replicas after real DDP jobs through real loss: they must be alike."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from gradwire_lab.contest.measure import environment
from gradwire_lab.contest.ranks import Ranks
from gradwire_lab.network.addresses import STORE_PORT
from gradwire_lab.network.bursts import BurstTraffic
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import BURSTS, NETWORKS, Burst

HOSTS = 4
BOUND = 0.2
TIMEOUT = 600.0


def run_replicas(network: str, steps: int, pull: str) -> dict[str, Any]:
    """Train on four hosts while bursts hit one port; compare the parameters' hashes.

    Args:
        network: name of the standard network.
        steps: the number of steps of training.
        pull: "exact" or "committed".

    Raises:
        LabUnavailable: this machine cannot make namespaces.
        RankError: a rank failed; the message names it.
    """
    preset, usual = NETWORKS[network], BURSTS[network]
    # Bursts come twice as often as the standard ones, so that nearly every step loses something.
    burst = Burst(usual.rate, usual.on, usual.period / 2)
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(Network(HOSTS, preset, extra_hosts=1))
        stack.enter_context(BurstTraffic(net, burst, target=1))
        configs = [
            {
                "rank": rank,
                "world": HOSTS,
                "store_host": net.address(0),
                "store_port": STORE_PORT,
                "pull": pull,
                "bound": BOUND,
            }
            for rank in range(HOSTS)
        ]
        worker = "gradwire_lab.bench.replicas_worker"
        ranks = stack.enter_context(Ranks(net.spawn, worker, configs))
        deadline = time.monotonic() + TIMEOUT
        ranks.gather(deadline)
        answers = ranks.ask({"command": "train", "steps": steps}, deadline)
        ranks.ask({"command": "close"}, deadline)
    return {
        "case": "replicas",
        "network": network,
        "pull": pull,
        "bound": BOUND,
        "identical": len({answer["hash"] for answer in answers}) == 1,
        "ranks": answers,
        "environment": environment(),
    }
