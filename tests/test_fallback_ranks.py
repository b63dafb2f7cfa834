"""on_failure="host" in real processes: engines lose their sockets, and ranks fail or die."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import gradwire
from ddp_jobs import batch, fingerprint, model, wrap
from ranks import Failed, Gone, Ranks

OPTIONS: dict[str, Any] = {
    "policy": "reliable",
    "peer_timeout": 2.0,
    "rendezvous_timeout": 10.0,
    "timeout": 30.0,
}
LONGEST_S = 60.0
"""Seconds within which the ranks are back on an engine."""


def udp_sockets() -> list[int]:
    """The descriptors of this process's UDP sockets, which are the engine's."""
    table = Path("/proc/net/udp").read_text() + Path("/proc/net/udp6").read_text()
    inodes = {line.split()[9] for line in table.splitlines() if line.split()[9].isdigit()}
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:[") and target[8:-1] in inodes:
                found.append(int(entry.name))
    return found


def cut() -> None:
    """Puts other sockets in the place of the engine's, so that nothing reaches it."""
    for descriptor in udp_sockets():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            os.dup2(other.fileno(), descriptor)


def steps_of(report: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(report).read_text().splitlines()]


def trains_on(rank: int, world: int, report: str, victim: int = 1) -> tuple[bytes, bytes]:
    """Trains until the ranks have gone over and are back; returns this, and it undisturbed."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    options = {**OPTIONS, "on_failure": "host", "report": report}
    attachment = gradwire.attach(ddp, **options)
    steps, back = 0, torch.zeros(1)
    ending = time.monotonic() + LONGEST_S
    while not back:
        if steps == 2 and rank == victim:
            cut()
        optimizer.zero_grad()
        ddp(batch(rank, steps)).square().mean().backward()
        optimizer.step()
        steps += 1
        if rank == 0:
            sent = [each["bytes"] for each in steps_of(report)]
            back = torch.tensor([float(0 in sent and sent[-1] > 0)])
            assert back or time.monotonic() < ending, sent
            time.sleep(0.02 if sent[-1] == 0 else 0.0)  # over the host until an engine opens
        dist.broadcast(back, 0)
    attachment.detach()
    ours = fingerprint(ddp)
    attached = gradwire.attach(fresh := wrap(model()), policy="reliable")
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        fresh(batch(rank, step)).square().mean().backward()
        optimizer.step()
    attached.detach()
    return ours, fingerprint(fresh)


def test_a_lost_path_is_survived_and_an_engine_opened_again(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.run(trains_on, report=str(tmp_path / "steps.jsonl"))
    assert len({each for outcome in outcomes for each in outcome}) == 1


def fails(rank: int, world: int, kind: str, victim: int = 1) -> tuple[str, float]:
    """Fails in the second step; returns what this rank is told, and after how many seconds."""
    ddp = wrap(model())
    gradwire.attach(ddp, **{**OPTIONS, "timeout": 8.0}, on_failure="host")
    ddp(batch(rank, 0)).square().mean().backward()
    dist.barrier()
    loss = ddp(batch(rank, 1)).square().mean()
    if rank == victim and kind == "dies":
        os._exit(1)
    if rank == victim and kind == "raises":
        next(iter(ddp.parameters())).register_hook(lambda _: 1 / 0)
    began = time.monotonic()
    with pytest.raises((RuntimeError, ZeroDivisionError)) as failed:
        loss.backward()
    return str(failed.value), time.monotonic() - began


def test_a_rank_that_dies_is_named_as_without_it() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.outcomes(fails, kind="dies")
    assert isinstance(second, Gone)
    assert not isinstance(first, Failed), first
    told, seconds = first
    assert "rank 1" in told
    assert seconds < 60.0


def test_a_rank_that_raises_stops_all() -> None:
    with Ranks(2) as ranks:
        (first, seconds), _ = ranks.run(fails, kind="raises")
    assert "rank 1" in first
    assert seconds < 60.0


def test_ranks_that_differ_in_it_are_refused() -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(
            attaches, per_rank=[{"on_failure": "host"}, {"on_failure": "raise"}]
        )
    assert all(isinstance(each, Failed) and "on_failure" in each.text for each in outcomes)


def attaches(rank: int, world: int, on_failure: str) -> None:
    gradwire.attach(wrap(model()), **OPTIONS, on_failure=on_failure)


def shards(rank: int, world: int) -> None:
    net = torch.nn.Linear(8, 8)
    fully_shard(net)
    gradwire.attach(net, **OPTIONS, on_failure="host")


@pytest.mark.skipif(torch.__version__ < "2.9", reason="attach takes no such modules before 2.9")
def test_models_under_fully_shard_are_refused() -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(shards)
    assert all(isinstance(each, Failed) and "on_failure" in each.text for each in outcomes)
