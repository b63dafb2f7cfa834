"""Several DDP modules that share a backward pass, under every policy, in real processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from ddp_jobs import (
    ETHERNET,
    Branches,
    average_of,
    batch,
    fingerprint,
    gradients,
    model,
    set_drop,
    wrap,
)
from ranks import Ranks

POLICIES: dict[str, dict[str, Any]] = {
    "reliable": {},
    "mlt": {"p": 0.3},
    "dblp": {"p_low": 0.2, "detector": "layers", "every": 3},
    "ltp": {"floor": 0.9},
    "plot": {"table": {"*": 0.2}},
    "optireduce": {"warmup": 2, "floor": 0.9},
    "netsenseml": {},
    "adaptive": {},
}
RESENDS: dict[str, Any] = {"p": 0.4, "spend": "anything", "floor": 0.9}
"""Options of mlt: each step delivers less than the floor and is sent again."""


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, GRADWIRE_PEER_TIMEOUT="10", GRADWIRE_RENDEZVOUS_TIMEOUT="20") as ranks:
        yield ranks


def towers(*widths: int, **options: Any) -> list[DistributedDataParallel]:
    return [wrap(model(width=width), **options) for width in widths]


def squares(modules: Sequence[nn.Module], rank: int, step: int) -> torch.Tensor:
    """The sum of the modules' losses, which share a backward pass."""
    losses = [each(batch(rank, step + 100 * n)).square().mean() for n, each in enumerate(modules)]
    return torch.stack(losses).sum()


@contextlib.contextmanager
def attached(
    modules: Sequence[DistributedDataParallel], policy: str, **options: Any
) -> Iterator[list[gradwire.Attachment]]:
    attachments = [gradwire.attach(each, policy, **options) for each in modules]
    yield attachments
    for each in attachments:
        each.detach()


def stepping(
    modules: Sequence[nn.Module], steps: range, backward: Callable[[int], None], lr: float = 0.01
) -> None:
    """Trains modules by backward passes that they share."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=lr) for each in modules]
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(step)
        for optimizer in optimizers:
            optimizer.step()


def alike(modules: Sequence[nn.Module]) -> None:
    """Raises unless all ranks hold the same bits."""
    mine = [fingerprint(each) for each in modules]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    assert everybody == [mine] * len(everybody)


def two_towers(rank: int, world: int, policy: str, options: dict[str, Any]) -> None:
    modules = towers(700, 150)
    with attached(modules, policy, datagram=ETHERNET, **options) as attachments:
        set_drop(attachments[0], 0.02)
        stepping(modules, range(40), lambda step: squares(modules, rank, step).backward())
        set_drop(attachments[0], 0.0)
        assert [each.report().step for each in attachments] == [39, 39]
    alike(modules)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_towers_of_different_sizes(two: Ranks, policy: str) -> None:
    two.run(two_towers, policy=policy, options=POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_two_towers_on_three_ranks(three: Ranks, policy: str) -> None:
    three.run(two_towers, policy=policy, options=POLICIES[policy])


def equals_gloo(rank: int, world: int) -> None:
    modules, twins = towers(700, 150, 300), towers(700, 150, 300)
    with attached(modules, "reliable"):
        for step in range(6):
            for group in (modules, twins):
                for each in group:
                    each.zero_grad()
                squares(group, rank, step).backward()
            for module, twin in zip(modules, twins, strict=True):
                assert torch.equal(gradients(module), gradients(twin))


def test_reliable_equals_gloo_to_the_bit(two: Ranks) -> None:
    two.run(equals_gloo)


def equals_rank_order(rank: int, world: int) -> None:
    modules, references = towers(700, 150), [model(width=700), model(width=150)]
    with attached(modules, "reliable"):
        for step in range(6):
            for each in (*modules, *references):
                each.zero_grad()
            squares(references, rank, step).backward()
            squares(modules, rank, step).backward()
            for module, reference in zip(modules, references, strict=True):
                assert torch.equal(gradients(module), average_of(gradients(reference)))


def test_reliable_is_the_average_in_rank_order_on_three_ranks(three: Ranks) -> None:
    three.run(equals_rank_order)


class Pause(torch.autograd.Function):
    """Does nothing but to let time pass in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Slow(nn.Module):
    """Pauses between the gradients of its back and of its front."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front, self.back = nn.Linear(64, 2000), nn.Linear(2000, 64)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.back(Pause.apply(self.front(x).relu(), self.seconds))
        return out


def ends_between(rank: int, world: int, policy: str, options: dict[str, Any]) -> None:
    """The small module's step ends between the other's buckets on rank 0, after them on rank 1."""
    modules = [wrap(Slow(0.03 if rank == 0 else 0.0)), wrap(model(width=100))]
    with attached(modules, policy, **options) as attachments:
        stepping(modules, range(12), lambda step: squares(modules, rank, step).backward())
        if options is RESENDS:
            assert [each.report().guard for each in attachments] == ["resent"] * 2
    alike(modules)


@pytest.mark.parametrize("policy", ["adaptive", "ltp", "dblp", "mlt"])
def test_a_step_that_ends_between_the_other_modules_buckets(two: Ranks, policy: str) -> None:
    options = RESENDS if policy == "mlt" else POLICIES[policy]
    two.run(ends_between, policy=policy, options=options)


def other_order(rank: int, world: int) -> None:
    """The modules' buckets come in another order on another rank; not before DDP has rebuilt its
    buckets, which takes the process group's collectives in the forward pass."""
    modules = towers(700, 150)

    def backward(step: int) -> None:
        ordered = modules if rank == 0 or step < 3 else modules[::-1]
        losses = [each(batch(rank, step)).square().mean() for each in ordered]
        torch.stack(losses).sum().backward()

    with attached(modules, "mlt", **RESENDS) as attachments:
        stepping(modules, range(10), backward)
        assert [each.report().guard for each in attachments] == ["resent"] * 2
    alike(modules)


def test_modules_whose_order_differs_between_ranks(two: Ranks) -> None:
    two.run(other_order)


def in_threads(rank: int, world: int) -> None:
    """Two threads hand buckets over in whatever order, as autograd's threads of two devices do;
    DDP's own collectives are on a process group for each."""
    groups = [dist.new_group(range(world)) for _ in range(2)]
    modules = [
        wrap(model(width=width), process_group=group)
        for width, group in zip((700, 150), groups, strict=True)
    ]
    failures = []

    def trains(number: int) -> None:
        module = modules[number]
        try:
            stepping([module], range(12), lambda step: squares([module], rank, step).backward())
        except Exception as error:
            failures.append(error)

    with attached(modules, "mlt", **RESENDS) as attachments:
        threads = [threading.Thread(target=trains, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not failures
        counters = [each.counters()["packets_sent"] for each in attachments]
        assert [each.step for each in attachments] == [12, 12]
        assert min(counters) > 0
    alike(modules)
    for group in groups:
        dist.destroy_process_group(group)


def test_modules_that_two_threads_train(two: Ranks) -> None:
    two.run(in_threads)


def branches(rank: int, world: int) -> None:
    """Each rank uses other parameters, so that buckets are ready in another order."""
    torch.manual_seed(0)
    modules = [wrap(Branches(), find_unused_parameters=True) for _ in range(2)]

    def backward(step: int) -> None:
        losses = [
            each(batch(rank, step), bool((rank + step + n) % 2)).square().mean()
            for n, each in enumerate(modules)
        ]
        torch.stack(losses).sum().backward()

    with attached(modules, "adaptive"):
        stepping(modules, range(20), backward)
    alike(modules)


def test_modules_with_unused_parameters(two: Ranks) -> None:
    two.run(branches)


def one_optimizer(rank: int, world: int) -> None:
    """What the first module's guard skips the second one's does not, in the same pass."""
    modules = towers(700, 150)
    parameters = [p for each in modules for p in each.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    options = {"guard": "skip", "error_feedback": True, "optimizer": optimizer, **RESENDS}
    first = gradwire.attach(modules[0], "mlt", **options)
    second = gradwire.attach(modules[1], "reliable", optimizer=optimizer)
    for step in range(3):
        before = [fingerprint(each) for each in modules]
        optimizer.zero_grad()
        squares(modules, rank, step).backward()
        optimizer.step()
        assert first.report().guard == "skipped"
        assert [fingerprint(each) == was for each, was in zip(modules, before, strict=True)] == [
            True,
            False,
        ]
    first.detach()
    second.detach()
    alike(modules)


def test_a_skipped_step_beside_one_that_is_taken(two: Ranks) -> None:
    two.run(one_optimizer)


def three_modules(rank: int, world: int) -> None:
    """The second one takes part in every other step only."""
    modules = towers(300, 100, 500)

    def backward(step: int) -> None:
        part = modules if step % 2 else [modules[0], modules[2]]
        squares(part, rank, step).backward()

    with attached(modules, "adaptive") as attachments:
        stepping(modules, range(40), backward)
        assert [each.step for each in attachments] == [40, 20, 40]
    alike(modules)


def test_three_modules_one_of_which_is_absent_at_times(two: Ranks) -> None:
    two.run(three_modules)


def accumulates(rank: int, world: int) -> None:
    """The first module synchronises in every step, the second one in every third."""
    modules, references = towers(300, 100), [model(width=300), model(width=100)]
    with attached(modules, "mlt", floor=0.9, p=0.0) as attachments:
        for step in range(12):
            for first, second in (modules, references):
                first.zero_grad()
                if step % 3 == 0:
                    second.zero_grad()
            with modules[1].no_sync() if step % 3 != 2 else contextlib.nullcontext():
                squares(modules, rank, step).backward()
            squares(references, rank, step).backward()
            assert torch.equal(gradients(modules[0]), average_of(gradients(references[0])))
            if step % 3 == 2:
                assert torch.equal(gradients(modules[1]), average_of(gradients(references[1])))
        assert [each.step for each in attachments] == [12, 4]


def test_one_module_accumulates_gradients(two: Ranks) -> None:
    two.run(accumulates)


class Checkpointed(nn.Module):
    """Its layers are computed again in the backward pass, in backward passes of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 900), nn.Linear(900, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x).relu())
            return out

        out: torch.Tensor = checkpoint(inner, x.requires_grad_(), use_reentrant=True)
        return out


def reentrant(rank: int, world: int) -> None:
    """DDP waits for a module's results in a backward pass inside the shared one."""
    modules = [wrap(Checkpointed()), wrap(model(width=300)), wrap(Checkpointed())]
    with attached(modules, "mlt", **RESENDS) as attachments:
        stepping(modules, range(8), lambda step: squares(modules, rank, step).backward())
        assert [each.report().guard for each in attachments] == ["resent"] * 3
    alike(modules)


def test_modules_with_reentrant_checkpoints(two: Ranks) -> None:
    two.run(reentrant)


def gan(rank: int, world: int) -> None:
    """The discriminator learns alone, then the generator through it, which reduces both."""
    torch.manual_seed(0)
    maker = wrap(nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 64)))
    judge = wrap(model(width=300))
    modules = [maker, judge]

    def backward(step: int) -> None:
        real, noise = batch(rank, step), batch(rank, step + 100)
        judge(real).square().mean().backward()
        judge(maker(noise)).square().mean().backward()

    with attached(modules, "adaptive") as attachments:
        stepping(modules, range(40), backward, lr=0.001)
        assert [each.step for each in attachments] == [40, 80]
    alike(modules)


def test_a_generator_and_its_discriminator(two: Ranks) -> None:
    two.run(gan)


def teaches(rank: int, world: int) -> None:
    """The student learns from the teacher, which learns meanwhile."""
    teacher, student = towers(700, 100)

    def backward(step: int) -> None:
        x = batch(rank, step)
        wanted = teacher(x)
        (wanted.square().mean() + (student(x) - wanted.detach()).square().mean()).backward()

    with attached([teacher, student], "adaptive", floor=0.95):
        stepping([teacher, student], range(40), backward)
    alike([teacher, student])


def test_a_teacher_and_its_student(two: Ranks) -> None:
    two.run(teaches)
