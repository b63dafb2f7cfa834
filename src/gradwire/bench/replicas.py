"""Do replicas stay bit-identical? Real DDP jobs through real loss, then a hash on every rank."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

from gradwire.lab.bursts import BurstTraffic
from gradwire.lab.measure import environment
from gradwire.lab.network import Network
from gradwire.lab.presets import BURSTS, NETWORKS, Burst

HOSTS = 4
BOUND = 0.2
STORE_PORT = 29500
TIMEOUT = 600.0


def run_replicas(network: str, steps: int, pull: str) -> dict[str, Any]:
    """Train on four hosts while bursts hit one port; compare the parameters' hashes.

    Args:
        network: name of the standard network.
        steps: of training.
        pull: "exact" or "committed".

    Raises:
        LabUnavailable: this machine cannot make namespaces.
        RuntimeError: a rank failed; the message names it.
    """
    preset, usual = NETWORKS[network], BURSTS[network]
    # Twice as often as the standard bursts: nearly every step shall lose something.
    burst = Burst(usual.rate, usual.on, usual.period / 2)
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(Network(HOSTS, preset, extra_hosts=1))
        stack.enter_context(BurstTraffic(net, burst, target=1))
        ranks = [
            net.spawn(
                rank,
                [
                    sys.executable,
                    "-m",
                    "gradwire.bench.replicas_worker",
                    *map(str, (rank, HOSTS, net.address(0), STORE_PORT, steps, pull, BOUND)),
                ],
                env={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(HOSTS)
        ]
        answers = []
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=TIMEOUT)
            if process.returncode:
                raise RuntimeError(f"rank {rank} failed: {err.strip().splitlines()[-1:]}")
            answers.append(json.loads(out.splitlines()[-1]))
    return {
        "case": "replicas",
        "network": network,
        "pull": pull,
        "bound": BOUND,
        "identical": len({answer["hash"] for answer in answers}) == 1,
        "ranks": answers,
        "environment": environment(),
    }
