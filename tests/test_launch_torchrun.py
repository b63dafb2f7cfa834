"""torchrun on two hosts: a job whose worker is killed goes on from its checkpoint, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from host_ranks import Builder, HostRanks
from own_state import own_state

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_torchrun.py"
HOSTS = ("10.0.0.1", "10.0.0.2")
STEPS = 10
# Nothing goes by measured times, and something is owed on a quiet network, too.
EAGER = {"GRADWIRE_POLICY": "mlt", "GRADWIRE_P": "0.2", "GRADWIRE_ERROR_FEEDBACK": "true"}
RELIABLE = {"GRADWIRE_POLICY": "reliable"}
# Runs the example; in the first life of the job a rank kills itself in its sixth step.
KILLED = f"""
import os, runpy, signal, sys
import torch
if os.environ["RANK"] == os.environ["VICTIM"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    step, steps = torch.optim.SGD.step, [0]
    def kill(*args):
        steps[0] += 1
        if steps[0] == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*args)
    torch.optim.SGD.step = kill
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def two_hosts(network: Builder) -> None:
    network.cable(0, 1)
    for host in (0, 1):
        network.address(host, "eth0", HOSTS[host], 24)


def launch(
    rank: int, world: int, script: str, folder: str, port: int, each: int, more: dict[str, str]
) -> tuple[int, str]:
    """Runs torchrun on this host, with so many ranks on each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", str(each), "--max-restarts", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{HOSTS[0]}:{port}", "--local-addr", HOSTS[rank]]
    command += [script, folder, "--steps", str(STEPS)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADWIRE_")}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        kept.pop(name, None)
    # torch's shared store keeps what an earlier life left there (pytorch#135712).
    torchs = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command,
        env={**kept, **torchs, **more, "GRADWIRE_PEER_TIMEOUT": "10"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
    )
    return done.returncode, done.stdout


def trained(
    ranks: HostRanks, script: Path, folder: Path, port: int, each: int = 1, **more: str
) -> list[dict[str, Any]]:
    """What each rank has saved in the end."""
    given = {"script": str(script), "folder": str(folder), "port": port, "each": each}
    for status, output in ranks.run(launch, timeout=230, **given, more=more):
        assert status == 0, output
    return [torch.load(folder / f"{rank}-{STEPS}.pt") for rank in range(2 * each)]


def same(one: Any, other: Any) -> bool:
    """Whether two saved states are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.timeout(600)
def test_a_job_that_is_restarted_ends_as_one_that_is_not(tmp_path: Path) -> None:
    killed = tmp_path / "killed.py"
    killed.write_text(KILLED)
    with HostRanks(two_hosts, names=HOSTS) as ranks:  # nothing resolves names there
        whole = trained(ranks, EXAMPLE, tmp_path / "whole", 29_400, **EAGER)
        restarted = trained(ranks, killed, tmp_path / "killed", 29_401, VICTIM="1", **EAGER)
    for expected, found in zip(whole, restarted, strict=True):
        owed = own_state(expected["gradwire"])
        assert own_state(found["gradwire"])["step"] == owed["step"]
        assert any(residual.any() for residual in owed["residuals"].values())
        assert same(found, expected)


@pytest.mark.timeout(900)
def test_a_job_without_loss_is_restarted_whoever_dies(tmp_path: Path) -> None:
    """Two ranks share a host: one leads it, and the other one follows."""
    killed = tmp_path / "killed.py"
    killed.write_text(KILLED)
    with HostRanks(two_hosts, names=HOSTS) as ranks:
        whole = trained(ranks, EXAMPLE, tmp_path / "whole", 29_402, 2, **RELIABLE)
        for victim in (2, 3):
            folder, port = tmp_path / str(victim), 29_403 + victim
            found = trained(ranks, killed, folder, port, 2, VICTIM=str(victim), **RELIABLE)
            assert all(map(same, found, whole)), victim
