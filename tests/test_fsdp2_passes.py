"""What a step is under fully_shard: one backward pass that reduces, whatever runs inside of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import gradwire
from ddp_jobs import average_of, batch, gradients, model, wrap
from own_state import own_state
from ranks import Ranks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="attach takes modules under fully_shard from torch 2.9 on"
)


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Opaque:
    """An output that nobody but the model looks into."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Stored(torch.autograd.Function):
    """Runs a backward pass inside of the backward pass, without computing anything again."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        out: torch.Tensor = ctx.y.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        torch.autograd.backward(ctx.y, given)
        return None, ctx.x.grad


class Nested(nn.Module):
    """Has the gradients of each layer computed in a backward pass inside of the backward pass.

    Args:
        kind: How, and what the model returns.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = model(width=70)
        self.kind = kind

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if "stored" in self.kind:
                x = Stored.apply(layer, x)  # type: ignore[no-untyped-call]
            elif "block method" in self.kind:
                x = checkpoint(getattr(layer, "compute", layer), x, use_reentrant=True)
            else:
                x = checkpoint(layer, x, use_reentrant=True)
        return x

    def forward(self, x: torch.Tensor) -> Any:
        x = self.run(x)
        if "opaque" in self.kind:
            return Opaque(x)
        return Output(x) if "dataclass" in self.kind else x

    def back(self, rank: int, step: int) -> None:
        self.zero_grad()
        x = batch(rank, step).requires_grad_()
        out = self.run(x) if "root method" in self.kind else self(x)
        getattr(out, "logits", out).square().mean().backward()


def shard(kind: str) -> Any:
    net = Nested(kind)
    for layer in (net.layers[0], net.layers[2], net.layers[4]):
        fully_shard(layer)
        layer.compute = layer.forward
        register_fsdp_forward_method(layer, "compute")
    if "no root" not in kind:
        fully_shard(net)
        register_fsdp_forward_method(net, "run")
    return net


def whole(net: nn.Module) -> torch.Tensor:
    """The gradients of all ranks' shards."""
    return torch.cat([p.grad.full_tensor().flatten() for p in net.parameters()])  # type: ignore


def nested(rank: int, world: int, kind: str) -> None:
    twin, net = model(width=70), shard(kind)
    attachment = gradwire.attach(net, "reliable")
    for step in range(2):
        net.back(rank, step)
        twin.zero_grad()
        twin(batch(rank, step)).square().mean().backward()
        assert torch.equal(whole(net), average_of(gradients(twin)))
        assert attachment.step == step + 1
    assert attachment.report().buckets == 3
    attachment.detach()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    options = {"guard": "skip", "floor": 0.95, "error_feedback": True, "datagram": 256}
    attachment = gradwire.attach(net, "mlt", p=0.3, optimizer=optimizer, **options)
    before = [parameter.to_local().clone() for parameter in net.parameters()]
    net.back(rank, 2)
    optimizer.step()
    assert attachment.report().guard == "skipped"
    after = [parameter.to_local() for parameter in net.parameters()]
    assert all(map(torch.equal, before, after))
    attachment.flush()
    for step in (3, 4):  # the call goes with the first one
        net.back(rank, step)
    owed: Any = own_state(attachment.state_dict())["residuals"]
    assert owed
    assert not attachment.flush_pending
    assert not any(values.any() for values in owed.values())
    attachment.detach()


@pytest.mark.parametrize(
    "kind",
    [
        "tensor",
        "dataclass",
        "opaque",
        "root method",
        "block method dataclass",
        "block method root method",
        "no root opaque",
        "stored",
        "stored root method",
    ],
)
def test_a_step_is_one_backward_pass_with_passes_inside_of_it(two: Ranks, kind: str) -> None:
    two.run(nested, kind=kind)


def unseen(rank: int, world: int) -> None:
    net = shard("no root stored")
    attachment = gradwire.attach(net, "reliable")
    with pytest.raises(gradwire.ConfigError) as refused:
        net.back(rank, 0)
    assert (refused.value.setting, refused.value.value) == ("model", "the parameters of 'layers.4'")
    attachment.detach()


def test_a_step_whose_end_cannot_be_seen_is_refused(two: Ranks) -> None:
    two.run(unseen)


def by_hand(rank: int, world: int) -> None:
    """Reduces as torch's pipeline schedules do."""
    net = shard("tensor")
    attachment = gradwire.attach(net, "reliable")
    net.set_requires_gradient_sync(False)
    net.set_is_last_backward(False)
    net.set_reshard_after_backward(False)
    net.back(rank, 0)
    net.set_requires_gradient_sync(True)
    with pytest.raises(gradwire.ConfigError) as refused:
        net.layers[2]._get_fsdp_state()._fsdp_param_group.post_backward()
    assert (refused.value.setting, refused.value.value) == ("model", "the parameters of 'layers.2'")
    attachment.detach()


def test_what_is_reduced_outside_of_a_backward_pass_is_refused(two: Ranks) -> None:
    two.run(by_hand)


# ---------------------------------------------------------------------------- chunked losses


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(64, 70), nn.Tanh(), nn.Linear(70, 64))
        self.head = nn.Linear(64, 101)

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        out: torch.Tensor = getattr(self, part)(x)
        return out


def chunked(net: Any, rank: int, step: int, synchronises: str) -> None:
    """The head has a backward pass for each chunk, and the body has one of its own."""
    hidden = net(batch(rank, step), "body")
    given = hidden.detach().requires_grad_()
    chunks = given.chunk(4)
    for number, chunk in enumerate(chunks):
        if synchronises == "the last chunk":
            net.head.set_requires_gradient_sync(number == len(chunks) - 1)
        (net(chunk, "head").square().mean() / len(chunks)).backward()
    hidden.backward(given.grad)


def sharded_parts() -> Any:
    net = Parts()
    for part in (net.body, net.head):
        fully_shard(part)
    return fully_shard(net)


def flushed(rank: int, world: int, synchronises: str, steps: int, done: int) -> None:
    """What is owed and what was applied add up, and nothing is owed once all have had a flush."""
    net, twin = sharded_parts(), Parts()
    attachment = gradwire.attach(net, "mlt", p=0.4, datagram=256, error_feedback=True)
    applied = gradient = torch.zeros(())
    for step in range(6):
        if step == 3 and rank == 0:
            attachment.flush()
        for each in (net, twin):
            each.zero_grad()
        chunked(net, rank, step, synchronises)
        chunked(twin, rank, step, "no chunk")
        applied = applied + whole(net)
        gradient = gradient + average_of(gradients(twin))
        assert attachment.step == steps * (step + 1)
        owed: Any = own_state(attachment.state_dict())["residuals"]
        assert len(owed) == 6 * world
        empty = not any(values.any() for values in owed.values())
        assert empty is (step == done)
        assert attachment.flush_pending is (3 <= step < done)
        if empty:
            torch.testing.assert_close(applied, gradient, rtol=1e-5, atol=1e-6)
    attachment.detach()


@pytest.mark.parametrize(
    ("synchronises", "steps", "done"),
    [("the last chunk", 2, 4), ("each chunk", 5, 3)],  # the call goes with the first step
)
def test_a_flush_reaches_all_parts_of_a_model(
    two: Ranks, synchronises: str, steps: int, done: int
) -> None:
    two.run(flushed, synchronises=synchronises, steps=steps, done=done)


def skips(rank: int, world: int) -> None:
    """The guard withdraws the head's step, and the body's, and the optimizer skips both."""
    net = sharded_parts()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    options = {"guard": "skip", "floor": 0.95, "error_feedback": True, "datagram": 256}
    attachment = gradwire.attach(net, "mlt", p=0.3, optimizer=optimizer, **options)
    before = [parameter.to_local().clone() for parameter in net.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        chunked(net, rank, step, "the last chunk")
        assert attachment.report().guard == "skipped"
        optimizer.step()
        after = [parameter.to_local() for parameter in net.parameters()]
        assert all(map(torch.equal, before, after))
    attachment.flush()
    for step in (2, 3):  # the call goes with the first one
        optimizer.zero_grad()
        chunked(net, rank, step, "the last chunk")
    optimizer.step()
    after = [parameter.to_local() for parameter in net.parameters()]
    assert not any(map(torch.equal, before, after))
    attachment.detach()


def test_the_guard_skips_each_part_of_a_model_whose_step_it_withdraws(two: Ranks) -> None:
    two.run(skips)


# ---------------------------------------------------------------------------- one process

POLICIES: dict[str, dict[str, Any]] = {
    "reliable": {},
    "mlt": {"p": 0.2, "error_feedback": True},
    "ltp": {},
    "adaptive": {},
}


def alone(rank: int, world: int, policy: str) -> None:
    """One process under fully_shard sees what it sees under DDP."""
    found = []
    for wrapper in ("ddp", "fully_shard"):
        net: Any = wrap(model()) if wrapper == "ddp" else fully_shard(model())
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        attachment = gradwire.attach(net, policy, optimizer=optimizer, **POLICIES[policy])
        seen: list[Any] = []
        for step in range(4):
            optimizer.zero_grad()
            loss = net(batch(rank, step)).square().mean()
            attachment.loss(loss)
            if step == 2:
                attachment.flush()
            loss.backward()
            optimizer.step()
            assert attachment.flush_pending is (step == 2)  # the call goes with a step
            report = attachment.report()
            seen += [attachment.step, report.step, report.agreed.loss, report.delivered]
        values = [getattr(p, "_local_tensor", p).detach().flatten() for p in net.parameters()]
        found.append((seen, torch.cat(values)))
        attachment.detach()
        net(batch(rank, 9)).square().mean().backward()
    (steps, parameters), (others, theirs) = found
    assert steps == others
    assert torch.equal(parameters, theirs)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_process_sees_what_it_sees_under_ddp(one: Ranks, policy: str) -> None:
    one.run(alone, policy=policy)
