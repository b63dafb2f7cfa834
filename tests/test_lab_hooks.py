"""The communication hooks that the lab's rivals use, and TCP's congestion control on Gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire_lab.contest.congestion_control import choose_congestion_control, open_sockets
from ranks import Ranks

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
    from gradwire_lab.run.hooks import TopK, topk_hook

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


def hooked(rank: int, world: int, name: str, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A large matrix' gradient by a hook, and what it should be, in the last of some steps."""
    from gradwire_lab.run.hooks import hook_of

    torch.manual_seed(0)
    module = torch.nn.Linear(64, 64, bias=False)
    ddp = DistributedDataParallel(module)
    state, hook = hook_of(name, dist.group.WORLD)
    ddp.register_comm_hook(state, hook)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(32, 64, generator=generator)
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()
        local = torch.autograd.grad(module(inputs).square().mean(), module.weight)[0]
        dist.all_reduce(local)
    assert module.weight.grad is not None
    return module.weight.grad.clone(), local / world


def test_the_rivals_hooks_are_those_that_scenarios_name(ranks: Ranks) -> None:
    for found, wanted in ranks.run(hooked, name="none", steps=1):
        torch.testing.assert_close(found, wanted)
    for found, wanted in ranks.run(hooked, name="fp16", steps=1):
        assert 1e-5 < float((found - wanted).norm() / wanted.norm()) < 1e-3
    first, second = ranks.run(hooked, name="powersgd", steps=6)
    assert torch.equal(first[0], second[0])
    assert int(torch.linalg.matrix_rank(first[0], rtol=1e-4)) == 2
    assert int(torch.linalg.matrix_rank(first[1], rtol=1e-4)) > 30


def paced(rank: int, world: int, overlap: bool) -> tuple[list[list[float]], bool]:
    """The shares of its computation that a step waits for before its buckets set out."""
    from gradwire_lab.run.trainee import OverlappingDDP, Pace, PacedDDP
    from gradwire_lab.training.startline import StartLine, memory

    class Noting(Pace):
        shares: ClassVar[list[float]] = []

        def wait(self, share: float) -> None:
            self.shares.append(share)

    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    line = StartLine(memory(1), 0, 1)
    if overlap:
        ddp: Any = OverlappingDDP(module, line, Noting(), bucket_cap_mb=0.02)
    else:
        ddp = PacedDDP(module, line, Noting())
    ddp.register_comm_hook(dist.group.WORLD, allreduce_hook)
    steps = []
    for _ in range(3):
        Noting.shares.clear()
        ddp(torch.ones(2, 64)).sum().backward()
        steps.append(list(Noting.shares))
    return steps, ddp.ready <= ddp.start < ddp.end


def test_with_overlap_buckets_set_out_while_the_rest_is_computed(ranks: Ranks) -> None:
    for steps, timed in ranks.run(paced, overlap=False):
        assert steps == [[1.0]] * 3
        assert timed
    for steps, timed in ranks.run(paced, overlap=True):
        last = steps[-1]
        assert len(last) > 1
        assert last == pytest.approx(
            [1 / 3 + 2 / 3 * (n + 1) / len(last) for n in range(len(last))]
        )
        assert timed


def trained(rank: int, world: int, gamma: float, trials: int = 0) -> list[float]:
    """The learning rates of a training of six steps, and of those before it."""
    from gradwire_lab.run.trainee import LabTrainee
    from gradwire_lab.scenario.contestant import Contestant
    from gradwire_lab.scenario.work import Model
    from gradwire_lab.training.recipe import Recipe
    from gradwire_lab.training.startline import StartLine, memory
    from gradwire_lab.training.text import SYMBOLS, Text

    sizes = {"width": 8, "layers": 1, "heads": 1, "context": 8, "batch": 1}
    text = Text(torch.arange(400) % SYMBOLS, torch.arange(400) % SYMBOLS, 1)
    contestant = Contestant(name="gloo", transport="gloo", congestion_control="cubic")
    trainee = LabTrainee(
        contestant,
        Model(**sizes, gamma=gamma),
        Recipe(**sizes, learning_rate=0.5, rise=2),
        text,
        rank,
        StartLine(memory(1), 0, 1),
        steps=6,
        trials=trials,
    )
    seen = []
    for _ in range(trials + 6):
        trainee.block(1, 0.0, lambda _: None)
        seen.append(float(trainee.optimizer.param_groups[0]["lr"]))
    return seen


def test_the_learning_rate_falls_where_a_third_of_training_begins(ranks: Ranks) -> None:
    for rates in ranks.run(trained, gamma=0.1):
        assert rates == pytest.approx([0.25, 0.5, 0.05, 0.05, 0.005, 0.005])
    for rates in ranks.run(trained, gamma=1.0):
        assert rates == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5, 0.5])
    for rates in ranks.run(trained, gamma=0.1, trials=3):
        assert rates == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5, 0.05, 0.05, 0.005, 0.005])


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
