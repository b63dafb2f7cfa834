"""The communication hooks that the lab's rivals use, and TCP's congestion control on Gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from gradwire.lab.run.endpoints import choose_congestion_control, open_sockets

WORLD = 2
SIZE = 1000


class Bucket:
    """A bucket with one vector."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def buffer(self) -> torch.Tensor:
        return self.values

    def index(self) -> int:
        return 0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def top_k(rank: int, world: int, steps: int) -> dict[str, Any]:
    from gradwire.lab.run.hooks import TopK, topk_hook

    state = TopK(dist.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    given = torch.zeros(SIZE)
    applied = torch.zeros(SIZE)
    counts = []
    for _ in range(steps):
        gradient = torch.randn(SIZE, generator=generator)
        given += gradient
        result = topk_hook(state, Bucket(gradient.clone())).wait()  # type: ignore[arg-type]
        applied += result
        counts.append(int((result != 0).sum()))
    return {
        "given": given,
        "applied": applied,
        "owed": state.residuals[0],
        "counts": counts,
    }


def test_top_k_sends_a_tenth_and_loses_nothing(ranks: Ranks) -> None:
    found = ranks.run(top_k, steps=5)
    assert torch.equal(found[0]["applied"], found[1]["applied"])  # replicas stay alike
    given = sum(each["given"] for each in found)
    owed = sum(each["owed"] for each in found)
    torch.testing.assert_close(found[0]["applied"] * WORLD + owed, given, atol=1e-4, rtol=0)
    # Each worker sends 100 of 1,000; where both chose the same element it counts once.
    assert all(100 <= count <= 200 for each in found for count in each["counts"])


def tcp(rank: int, world: int, name: str) -> set[str]:
    before = open_sockets()
    group = dist.new_group()
    dist.barrier(group=group)
    made = open_sockets() - before
    assert choose_congestion_control(made, name) >= 1
    found = set()
    for descriptor in made:
        with socket.socket(fileno=os.dup(descriptor)) as endpoint:
            if endpoint.type == socket.SOCK_STREAM and endpoint.family == socket.AF_INET:
                raw = endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                found.add(raw.split(b"\0")[0].decode())
    return found


def test_gloo_gets_the_congestion_control_asked_for(ranks: Ranks) -> None:
    assert ranks.run(tcp, name="reno") == [{"reno"}] * WORLD
