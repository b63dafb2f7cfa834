"""A failure that a training loop catches: nothing that follows trains on in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import batch, model, wrap
from ranks import Ranks

WRAPPERS = ["ddp", "fully_shard"]
if torch.__version__ < "2.9":
    WRAPPERS.remove("fully_shard")
RESETS = hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state")


def wrapped(wrapper: str, net: Any, **options: Any) -> Any:
    if wrapper == "ddp":
        return wrap(net)
    for layer in (net[0], net[2]):
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = net(batch(rank, step)).square().mean()
    return loss


def stepped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """What an optimizer steps; a module may have other parameters after a failure."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    return torch.cat([getattr(p, "_local_tensor", p).detach().flatten() for p in held])


def refused(call: Callable[[], object]) -> gradwire.GradwireError:
    with pytest.raises(gradwire.GradwireError) as error:
        call()
    return error.value


def goes_on_after_a_failure(rank: int, world: int, wrapper: str, first: str) -> None:
    net = wrapped(wrapper, model())
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (net, model()))
    attachment = gradwire.attach(net, "reliable")
    loss_of(net, rank, 0).backward()
    ours.step()
    before = stepped(ours)
    earlier = loss_of(net, rank, 1)
    attachment.grad_scale = 2.0 + rank  # the scales differ, which is a failure on all ranks
    with pytest.raises(RuntimeError):
        loss_of(net, rank, 1).backward()
    uses = {
        "step": ours.step,
        "forward": lambda: loss_of(net, rank, 2),
    }
    for name in (first, *uses, *uses):
        error = refused(uses[name])
        assert isinstance(error, gradwire.TransferError)
        assert (error.step, error.cause) == (1, "plan")
    if wrapper == "fully_shard":  # DDP reduces one backward pass of the last forward pass
        with pytest.raises(RuntimeError):
            earlier.backward()
    for parameter in (p for group in theirs.param_groups for p in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    theirs.step()  # another model's
    assert torch.equal(before, stepped(ours))
    attachment.detach()
    ours.step()
    if wrapper == "ddp" or RESETS:
        if wrapper == "fully_shard":
            net.reset_iter_state()
        attachment = gradwire.attach(net, "reliable")
        ours.zero_grad()
        loss_of(net, rank, 1).backward()
        ours.step()
        assert attachment.step == 1
        attachment.detach()


@pytest.mark.parametrize("first", ["step", "forward"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_failure_is_raised_by_all_that_follows(two: Ranks, wrapper: str, first: str) -> None:
    two.run(goes_on_after_a_failure, wrapper=wrapper, first=first)


def bad_batch(_: torch.Tensor) -> None:
    raise ZeroDivisionError("a bad batch")


def loses_a_batch(rank: int, world: int, here: list[int], resets: bool) -> None:
    """An exception of the user's own ends a backward pass on these ranks, whose loops go on."""
    # Without gathers in the backward pass, in which a rank would wait for the others in Gloo.
    net = wrapped("fully_shard", model(), reshard_after_forward=False)
    ours = torch.optim.SGD(net.parameters(), 0.1)
    attachment = gradwire.attach(net, "reliable", timeout=300.0)
    loss_of(net, rank, 0).backward()
    ours.step()
    dist.barrier()  # otherwise the failure may reach a rank that waits for the end of this step
    before = stepped(ours)
    ours.zero_grad()
    out = net(batch(rank, 1))
    if rank in here:
        out.register_hook(bad_batch)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        if not resets:
            for use in (ours.step, lambda: net(batch(rank, 2)), ours.step):
                refused(use)
    else:  # waits for the others' gradients, and hears why they do not come
        with pytest.raises(RuntimeError, match="rank 0 reports"):
            out.sum().backward()
        error = refused(lambda: net(batch(rank, 2)))
        assert isinstance(error, gradwire.TransferError)
        assert error.rank == 0
    if resets:
        net.reset_iter_state()
        loss_of(net, rank, 2).backward()
        ours.step()
        assert attachment.step == 2
    assert torch.equal(before, stepped(ours)) is not resets
    attachment.detach()


@pytest.mark.skipif("fully_shard" not in WRAPPERS, reason="needs torch 2.9")
@pytest.mark.parametrize("here", [[0], [0, 1]], ids=["one rank", "all ranks"])
def test_torch_is_not_left_half_way_through_a_pass(here: list[int], two: Ranks) -> None:
    two.run(loses_a_batch, here=here, resets=False)


@pytest.mark.skipif(not RESETS, reason="needs a torch with reset_iter_state")
def test_all_ranks_go_on_after_an_error_of_their_own_once_torch_is_reset(two: Ranks) -> None:
    two.run(loses_a_batch, here=[0, 1], resets=True)


def on_another_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def is_used_meanwhile(rank: int, world: int) -> None:
    """Other threads use optimizers and the model in the middle of each backward pass."""
    net = wrapped("fully_shard", model(), reshard_after_forward=False)
    ours = torch.optim.SGD(net.parameters(), 0.1)
    nothing = torch.optim.SGD(net.parameters(), 0.0)
    theirs = torch.optim.SGD(model().parameters(), 0.1)
    attachment = gradwire.attach(net, "reliable")

    def use(_: torch.Tensor) -> None:
        for step in (theirs.step, nothing.step):
            on_another_thread(step)
        with torch.no_grad():
            on_another_thread(lambda: net[2](torch.zeros(1, net[2].in_features)))

    def watch(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        out.register_hook(use)

    net[0].register_forward_hook(watch)  # the other layers are reduced before
    for step in range(3):
        ours.zero_grad()
        loss_of(net, rank, step).backward()
        ours.step()
    assert attachment.step == 3
    assert attachment.report().buckets == 3
    attachment.detach()


@pytest.mark.skipif("fully_shard" not in WRAPPERS, reason="needs torch 2.9")
def test_what_other_threads_do_in_a_backward_pass_changes_nothing(two: Ranks) -> None:
    two.run(is_used_meanwhile)


def loses_a_batch_under_ddp(
    rank: int, world: int, cap: float, first: str, hosts: str | bool
) -> None:
    """An exception of the user's own ends rank 0's backward pass, and its loop goes on."""
    net = DistributedDataParallel(model(), bucket_cap_mb=cap)
    ours = torch.optim.SGD(net.parameters(), 0.1)
    attachment = gradwire.attach(net, "reliable", timeout=300.0, hosts=hosts)
    for step in range(2):  # DDP makes its buckets anew after the first one
        ours.zero_grad()
        loss_of(net, rank, step).backward()
        ours.step()
    dist.barrier()  # otherwise the failure may reach a rank that waits for the end of these steps
    before = stepped(ours)
    uses = {"step": ours.step, "forward": lambda: loss_of(net, rank, 3)}

    def watch(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        out.register_hook(bad_batch)

    if rank == 0:
        net.module[0].register_forward_hook(watch)  # the other layers' gradients are there before
    caught = pytest.raises(ZeroDivisionError if rank == 0 else RuntimeError)
    with caught as raised:
        loss_of(net, rank, 2).backward()
    assert rank == 0 or "a backward pass ended before" in str(raised.value)
    for name in (first, *uses, *uses):
        refused(uses[name])
    assert torch.equal(before, stepped(ours))
    attachment.detach()


@pytest.mark.parametrize("hosts", ["auto", False])
@pytest.mark.parametrize(
    ("cap", "first"), [(0.003, "step"), (0.003, "forward"), (100.0, "step")]
)  # with one bucket torch has begun, and gradwire has not
def test_ddp_is_not_left_half_way_through_a_pass(
    two: Ranks, cap: float, first: str, hosts: str | bool
) -> None:
    two.run(loses_a_batch_under_ddp, cap=cap, first=first, hosts=hosts)


class Heads(nn.Module):
    """Two layers, each with an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 100), nn.Linear(64, 100)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


def takes_several_passes(rank: int, world: int) -> None:
    """Steps whose parts come in two backward passes, with other work between and within them."""
    net, other = DistributedDataParallel(Heads(), bucket_cap_mb=0.003), wrap(model())
    ours = torch.optim.SGD(net.parameters(), 0.1)
    nothing = torch.optim.SGD(net.parameters(), 0.0)
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    attachments = [gradwire.attach(each, "reliable") for each in (net, other)]

    def use(_: torch.Tensor) -> None:
        for step in (theirs.step, nothing.step):
            on_another_thread(step)

    for step in range(4):
        ours.zero_grad()
        with net.no_sync():
            sum(each.sum() for each in net(batch(rank, step))).backward()
        one, two = net(batch(rank, step))
        one.sum().backward()
        theirs.step()
        with torch.no_grad():
            net(batch(rank, step))
        loss_of(other, rank, step).backward()
        theirs.step()
        two.sum().backward()
        ours.step()
        ours.zero_grad()
        x = batch(rank, step).requires_grad_()
        x.register_hook(use)
        sum(each.sum() for each in net(x)).backward()
        ours.step()
    net(batch(rank, 4))  # without a backward pass
    ours.step()
    assert [each.step for each in attachments] == [8, 4]
    assert not net._forward_pre_hooks
    for each in attachments:
        each.detach()


def test_steps_of_several_passes_go_on(two: Ranks) -> None:
    two.run(takes_several_passes)
