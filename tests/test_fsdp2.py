"""attach() on models under fully_shard in real processes, over gloo and loopback."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from ddp_jobs import (
    Transformer,
    average_gradients,
    average_of,
    batch,
    loss_of,
    sentence,
    set_drop,
)
from own_state import own_state
from ranks import Failed, Ranks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="attach takes modules under fully_shard from torch 2.9 on"
)
BY_FSDP = torch.__version__ >= "2.10"
"""Whether torch has the `replicate` that is made of fully_shard, with a mesh of one dimension."""

WIDTHS = (64, 131, 70, 97)  # no number of ranks divides them all


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, GRADWIRE_PEER_TIMEOUT="20", GRADWIRE_RENDEZVOUS_TIMEOUT="20") as ranks:
        yield ranks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third, last = WIDTHS
    return nn.Sequential(
        nn.Linear(first, second),
        nn.Tanh(),
        nn.Linear(second, third),
        nn.LayerNorm(third),
        nn.Linear(third, last),
    )


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def shard(net: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def whole(tensors: Any) -> torch.Tensor:
    """Sharded tensors as one flat tensor, which every rank gets."""
    return torch.cat([tensor.full_tensor().flatten() for tensor in tensors])


def gradients(net: nn.Module) -> torch.Tensor:
    return whole(parameter.grad for parameter in net.parameters())


def gradients_of(net: nn.Module) -> torch.Tensor:
    """The gradients of the parameters that have one."""
    return whole(p.grad for p in net.parameters() if p.grad is not None)


def local(net: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """This rank's gradient of an unsharded model with the same parameters."""
    net.zero_grad()
    for x in inputs:
        net(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def backward(net: nn.Module, x: torch.Tensor) -> None:
    net.zero_grad()
    net(x).square().mean().backward()


# ---------------------------------------------------------------------------- a transformer


def trains(rank: int, world: int, steps: int) -> None:
    """A twin of the whole model takes the average in the order of ranks on each rank."""
    twin, net = Transformer(), Transformer()
    mesh = mesh_of(world)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    attachment = gradwire.attach(net, "reliable")
    ours = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        tokens = sentence(rank, step)
        average_gradients(twin, tokens)
        ours.zero_grad()
        loss_of(net, tokens).backward()
        theirs.step()
        ours.step()
    for sharded, parameter in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), parameter)  # type: ignore[attr-defined]
    report = attachment.report()
    assert (report.step, report.buckets, report.delivered) == (steps - 1, 4, 1.0)
    attachment.detach()


def test_training_equals_the_rank_order_average_to_the_bit(two: Ranks) -> None:
    two.run(trains, steps=6)


@pytest.mark.slow
def test_fifty_steps_of_four_ranks_equal_it_too(four: Ranks) -> None:
    four.run(trains, steps=50, timeout=300)


# ---------------------------------------------------------------------------- FSDP2's ways


def ways(rank: int, world: int) -> None:
    mesh, twin = mesh_of(world), model()

    def check(
        net: Any, inputs: int = 1, factor: float = 1.0, run: Any = None, after: bool = True
    ) -> None:
        attachment = gradwire.attach(net, "reliable")
        for step in range(2):
            given = [batch(rank, 10 * step + each) for each in range(inputs)]
            net.zero_grad()
            (run or (lambda given: backward(net, given[0])))(given)
            expected = average_of(local(twin, *given)) * factor
            assert torch.equal(gradients(net), expected)
            assert attachment.step == step + 1
        attachment.detach()
        if after:  # torch has its own reduce-scatter back
            backward(net, batch(rank, 5))
            expected = average_of(local(twin, batch(rank, 5)))
            torch.testing.assert_close(gradients(net), expected, rtol=1e-5, atol=1e-7)

    check(shard(model(), mesh))
    check(shard(model(), mesh, reshard_after_forward=False))
    net = shard(model(), mesh)
    for module in (net, net[0], net[2]):
        module.set_gradient_divide_factor(world / 2)
    check(net, factor=2.0, after=False)  # Gloo itself takes no such factor
    net = shard(model(), mesh)

    def accumulates(given: list[torch.Tensor]) -> None:
        net.set_requires_gradient_sync(False)
        net(given[0]).square().mean().backward()
        net.set_requires_gradient_sync(True)
        net(given[1]).square().mean().backward()

    check(net, inputs=2, run=accumulates)

    def again(given: list[torch.Tensor]) -> None:
        checkpoint(net, given[0], use_reentrant=False).square().mean().backward()

    check(net, run=again)
    partly = model()  # only some layers are sharded: no module is the root of all
    for layer in (partly[0], partly[2]):
        fully_shard(layer, mesh=mesh)
    attachment = gradwire.attach(partly, "reliable")
    for _ in range(2):
        backward(partly, batch(rank, 0))
    assert (attachment.step, attachment.report().buckets) == (2, 2)
    attachment.detach()


def test_each_way_to_shard_gives_the_average(two: Ranks) -> None:
    two.run(ways)


class Nested(nn.Module):
    """Computes each of its layers again in a backward pass inside of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def nested(rank: int, world: int) -> None:
    twin, net, mesh = model(), Nested(), mesh_of(world)
    for layer in (net.layers[0], net.layers[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    attachment = gradwire.attach(net, "reliable")
    for step in range(2):
        backward(net, batch(rank, step).requires_grad_())
        assert torch.equal(gradients(net), average_of(local(twin, batch(rank, step))))
        assert attachment.step == step + 1
    attachment.detach()


def test_a_step_is_one_backward_pass_with_passes_inside_of_it(two: Ranks) -> None:
    two.run(nested)


def rounded(rank: int, world: int, reduced: str) -> None:
    """What torch rounds to the type of the reduction stays rounded; f32 is not rounded."""
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[reduced]
    policy = MixedPrecisionPolicy(reduce_dtype=kind)
    twin, net = model(), shard(model(), mesh_of(world), mp_policy=policy)
    attachment = gradwire.attach(net, "reliable")
    for step in range(2):
        backward(net, batch(rank, step))
        expected = average_of(local(twin, batch(rank, step)).to(kind)).to(kind).float()
        torch.testing.assert_close(gradients(net), expected, rtol=2e-3, atol=1e-6)
        assert gradients(net).dtype == torch.float32
        if kind != torch.float16:  # torch divides those before and after
            assert torch.equal(gradients(net), expected)
    attachment.detach()


@pytest.mark.parametrize("reduced", ["float32", "bfloat16", "float16"])
def test_mixed_precision_policies_are_kept(two: Ranks, reduced: str) -> None:
    two.run(rounded, reduced=reduced)


def clipped(rank: int, world: int) -> None:
    twin, net = model(), shard(model(), mesh_of(world))
    attachment = gradwire.attach(net, "reliable")
    backward(net, batch(rank, 0))
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
    average = average_of(local(twin, batch(rank, 0)))
    torch.testing.assert_close(norm.full_tensor(), average.norm())  # type: ignore[attr-defined]
    torch.testing.assert_close(gradients(net), average * (1e-2 / average.norm()))
    attachment.detach()


def test_gradients_are_clipped_by_the_norm_of_all_shards(two: Ranks) -> None:
    two.run(clipped)


# ---------------------------------------------------------------------------- lossy policies

POLICIES: dict[str, dict[str, Any]] = {
    "dblp": {"p_low": 0.1, "p_high": 0.3},
    "adaptive": {},
    "ltp": {},
    "mlt": {"p": 0.2, "error_feedback": True},
}


def balances(rank: int, world: int, name: str) -> tuple[Any, ...]:
    """Parameters stand still, so that results and what is owed add up to all gradients."""
    twin, net = model(), shard(model(), mesh_of(world))
    attachment = gradwire.attach(net, name, datagram=256, **POLICIES[name])
    set_drop(attachment, 0.05)
    applied = gradient = torch.zeros(())
    agreed = []
    for step in range(8):
        backward(net, batch(rank, step))
        report = attachment.report()
        for region in report.regions:
            assert region.effective_bound <= region.bound
            if not report.exceeded:
                assert region.delivered >= 1.0 - region.effective_bound - 1e-9
        agreed.append((report.agreed, report.phase, report.bound, report.effective_bound))
        applied = applied + gradients(net) * world
        gradient = gradient + average_of(local(twin, batch(rank, step))) * world
    if name == "mlt":
        assert report.delivered < 0.9
        owed = whole_of(own_state(attachment.state_dict())["residuals"], twin, world)
        dist.all_reduce(owed)
        assert float(owed.abs().max()) > 1e-3
        torch.testing.assert_close(applied + owed, gradient, rtol=1e-5, atol=1e-6)
    attachment.detach()
    return tuple(agreed)


def whole_of(parts: Any, twin: nn.Module, world: int) -> torch.Tensor:
    """What is kept by shard, as one flat tensor without the shards' padding."""
    flat = []
    for name, parameter in twin.named_parameters():
        rows = torch.cat([parts[f"{name}[{rank}]"] for rank in range(world)])
        width = parameter.numel() // len(parameter)
        flat.append(rows.view(-1, width)[: len(parameter)].flatten())
    return torch.cat(flat)


@pytest.mark.parametrize("name", POLICIES)
def test_bounds_hold_and_the_books_balance(two: Ranks, name: str) -> None:
    first, second = two.run(balances, name=name)
    assert first == second


def feedback(rank: int, world: int) -> list[bool]:
    found = []
    optimizers = [None, torch.optim.SGD]
    for kind in optimizers:
        for asked in ("auto", True):
            net = shard(model(), mesh_of(world))
            optimizer = kind(net.parameters(), 0.1) if kind else None
            attachment = gradwire.attach(
                net, "mlt", p=0.2, optimizer=optimizer, error_feedback=asked, datagram=256
            )
            backward(net, batch(rank, 0))
            found.append(bool(own_state(attachment.state_dict())["residuals"]))
            attachment.detach()
    return found


def test_error_feedback_is_on_where_it_is_asked_for(two: Ranks) -> None:
    assert two.run(feedback) == [[False, True, False, True]] * 2


def flushed(rank: int, world: int) -> list[tuple[bool, bool]]:
    """By step: whether this rank owes anything, and whether the exact step is still to come."""
    net = shard(model(), mesh_of(world))
    attachment = gradwire.attach(net, "mlt", p=0.4, datagram=256, error_feedback=True)
    seen = []
    for step in range(4):
        if step == 1 and rank == 1:
            attachment.flush()
        backward(net, batch(rank, step))
        state: dict[str, Any] = own_state(attachment.state_dict())
        owes = any(bool(values.any()) for values in state["residuals"].values())
        seen.append((owes, attachment.flush_pending))
    attachment.detach()
    return seen


def test_a_flush_of_one_rank_empties_the_books_of_all(two: Ranks) -> None:
    for seen in two.run(flushed):
        assert seen == [(True, False), (True, True), (False, False), (True, False)]


def guarded(rank: int, world: int) -> None:
    twin, net = model(), shard(model(), mesh_of(world))
    attachment = gradwire.attach(net, "mlt", p=0.3, floor=0.9, datagram=256)
    for step in range(2):
        backward(net, batch(rank, step))
        assert attachment.report().guard == "resent"
        assert torch.equal(gradients(net), average_of(local(twin, batch(rank, step))))
    with pytest.raises(gradwire.ConfigError) as refused:  # it adds to gradients that are there
        net(batch(rank, 2)).square().mean().backward()
    assert refused.value.setting == "guard"
    attachment.detach()


def test_the_guard_sends_a_step_again(two: Ranks) -> None:
    two.run(guarded)


def scaled(rank: int, world: int) -> None:
    """Rank 1 overflows in one step: the shards of all ranks skip it, and the books forget it."""
    net = shard(model(), mesh_of(world))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    attachment = gradwire.attach(
        net, "mlt", p=0.3, datagram=256, optimizer=optimizer, scaler=scaler, error_feedback=True
    )

    def step(number: int, factor: float = 1.0) -> torch.Tensor:
        optimizer.zero_grad()
        scaler.scale(net(batch(rank, number)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        return whole(net.parameters())

    before = step(0)
    owed: Any = own_state(attachment.state_dict())["residuals"]
    after = step(1, float("inf") if rank == 1 else 1.0)
    assert torch.equal(before, after)
    assert scaler.get_scale() == 4.0
    assert attachment.report().agreed.nonfinite
    kept: Any = own_state(attachment.state_dict())["residuals"]
    assert all(torch.equal(owed[name], kept[name]) for name in owed)
    assert torch.isfinite(step(2)).all()
    attachment.detach()


def test_a_step_that_a_loss_scaler_skips_leaves_no_trace(two: Ranks) -> None:
    two.run(scaled)


class Two(nn.Module):
    """Two parts, which fully_shard reduces together, and the loss of each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(64, 131), nn.Linear(64, 97)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [part(x).square().mean() for part in (self.left, self.right)]


def books_by_optimizer(rank: int, world: int, passes: int) -> None:
    """As under DDP: what a scaler keeps from one of two optimizers is void in its books alone."""
    twin, net = Two(), fully_shard(Two(), mesh=mesh_of(world))
    optimizers = [torch.optim.SGD(part.parameters(), 0.0) for part in (net.left, net.right)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    attachment = gradwire.attach(
        net,
        "mlt",
        p=0.3,
        datagram=256,
        max_age=200,
        optimizer=optimizers,
        scaler=scaler,
        error_feedback=True,
    )
    true, applied = torch.zeros(2, 64 * 131 + 131), torch.zeros(2, 64 * 131 + 131)
    for step in range(10):
        void = {3: (0,), 6: (1,), 7: (0,), 8: (0, 1)}.get(step, ())
        net.zero_grad()
        twin.zero_grad()
        for number in range(passes):
            x = batch(rank, passes * step + number)
            broken = void if rank == 1 and number == passes - 1 else ()
            losses = [loss * (1.0, float("inf"))[i in broken] for i, loss in enumerate(net(x))]
            scaler.scale(losses[0] + losses[1]).backward()
            sum(twin(x)).backward()
        for index, (part, alone) in enumerate(((net.left, twin.left), (net.right, twin.right))):
            if index not in void:
                found = gradients(part) / scaler.get_scale()
                applied[index, : len(found)] += found
                here = torch.cat([p.grad.flatten() for p in alone.parameters()])
                true[index, : len(found)] += average_of(here)
        for each in optimizers:
            scaler.step(each)
        scaler.update()
    state: dict[str, Any] = own_state(attachment.state_dict())
    for index, (name, part) in enumerate(twin.named_children()):
        residuals = {
            key.removeprefix(f"{name}."): values for key, values in state["residuals"].items()
        }
        owed = average_of(whole_of(residuals, part, world)) / state["grad_scale"]
        assert owed.any()
        sums = applied[index, : len(owed)] + owed
        torch.testing.assert_close(sums, true[index, : len(owed)], rtol=1e-4, atol=1e-6)
    attachment.detach()


@pytest.mark.parametrize("passes", [1, 2])
def test_each_optimizer_that_a_scaler_skips_owes_what_was_owed(two: Ranks, passes: int) -> None:
    two.run(books_by_optimizer, passes=passes)


# ---------------------------------------------------------------------------- replicas


def off_with_replicas(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twin, net = model(), shard(model(), mesh["shard"])
    on = gradwire.attach(net, "reliable", replicas=mesh["replicate"])
    with pytest.raises(gradwire.ConfigError, match="already attached"):
        gradwire.attach(net, "off", replicas=mesh["replicate"])
    on.detach()
    gradwire.attach(net, "off", replicas=mesh["replicate"])
    backward(net, batch(rank, 0))
    expected = average_of(local(twin, batch(rank, 0)))
    torch.testing.assert_close(gradients(net), expected, rtol=1e-5, atol=1e-7)


def test_off_still_averages_over_replicas(four: Ranks) -> None:
    four.run(off_with_replicas)


def replicas(rank: int, world: int, name: str) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twin, net = model(), shard(model(), mesh["shard"])
    options = {"p": 0.2, "datagram": 256} if name == "mlt" else {}
    attachment = gradwire.attach(net, name, replicas=mesh["replicate"], **options)
    ours = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        backward(net, batch(rank, step))
        if name == "reliable":
            twin.load_state_dict({n: p.full_tensor() for n, p in net.named_parameters()})
            expected = average_of(local(twin, batch(rank, step)))
            torch.testing.assert_close(gradients(net), expected, rtol=1e-5, atol=1e-7)
        ours.step()
    report = attachment.report()
    assert (report.step, report.buckets) == (3, 3)
    assert report.delivered == 1.0 if name == "reliable" else 0.8 <= report.delivered < 0.9
    attachment.detach()
    backward(net, batch(rank, 9))
    after = gradients(net)
    gradwire.attach(net, "reliable", replicas=mesh["replicate"]).detach()
    return torch.cat([whole(net.parameters()), after]).detach()


@pytest.mark.parametrize("name", ["reliable", "mlt"])
def test_replicas_outside_of_the_mesh_stay_identical(four: Ranks, name: str) -> None:
    results = four.run(replicas, name=name)
    assert all(torch.equal(results[0], other) for other in results[1:])


def accumulates(rank: int, world: int, name: str) -> tuple[float, float]:
    """The bytes of two steps of three micro-batches, of which the last averages, and of one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twin, net = model(), shard(model(), mesh["shard"])
    attachment = gradwire.attach(net, name, replicas=mesh["replicate"])
    called: list[int] = []
    if name == "reliable":
        net[0].weight.register_post_accumulate_grad_hook(lambda _: called.append(1))
    sent = []
    for count in (3, 1):
        before = attachment.counters()["bytes_sent"]
        for step in range(2):
            given = [batch(rank, 10 * step + each) for each in range(count)]
            net.zero_grad()
            for each in given:
                net.set_requires_all_reduce(each is given[-1])
                assert all(p.grad is None for p in net.parameters())
                net(each).square().mean().backward()
            expected = average_of(local(twin, *given))
            torch.testing.assert_close(gradients(net), expected, rtol=1e-5, atol=1e-7)
        dist.barrier()
        sent.append(attachment.counters()["bytes_sent"] - before)
    assert attachment.step == 4
    assert len(called) == (4 if name == "reliable" else 0)
    attachment.detach()
    return sent[0], sent[1]


@pytest.mark.parametrize("name", ["reliable", "ltp"])
def test_micro_batches_that_average_nothing_are_added_to_the_one_that_does(
    four: Ranks, name: str
) -> None:
    for several, one in four.run(accumulates, name=name):
        assert several < 2.0 * one  # packets may be sent again, and nothing else


def forgets(rank: int, world: int) -> None:
    """The last micro-batch gives no gradient to what an earlier one has given one to."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(Branches(), mesh=mesh["shard"])
    ours = torch.optim.SGD(net.parameters(), 0.1)
    attachment = gradwire.attach(net, "reliable", replicas=mesh["replicate"])
    for used in ("left right", "right"):
        net.set_requires_all_reduce(used == "right")
        net(torch.ones(2, 8), used).backward()
    with pytest.raises(gradwire.ConfigError) as error:
        ours.step()
    assert error.value.value == "left.weight"
    net(torch.ones(2, 8), "left right").backward()
    ours.step()
    assert torch.equal(net.left.bias.grad.full_tensor(), torch.full((9,), 4.0))
    attachment.detach()


def test_a_step_that_forgets_a_micro_batch_is_an_error(four: Ranks) -> None:
    four.run(forgets)


def drops(rank: int, world: int) -> None:
    """A micro-batch is dropped, and a parameter that it gave a gradient to is frozen."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(Branches(), mesh=mesh["shard"])
    ours = torch.optim.SGD(net.parameters(), 0.1)
    attachment = gradwire.attach(net, "reliable", replicas=mesh["replicate"])
    net.set_requires_all_reduce(False)
    net(torch.ones(2, 8), "left").backward()
    net.set_requires_all_reduce(True)
    for trains in (False, True):
        net.left.requires_grad_(trains)
        ours.zero_grad()
        net(torch.ones(2, 8), "left right" if trains else "right").backward()
        ours.step()
    assert torch.equal(net.left.bias.grad.full_tensor(), torch.full((9,), 2.0))
    attachment.detach()


def test_what_micro_batches_gave_to_frozen_parameters_is_let_go(two: Ranks) -> None:
    two.run(drops)


def filled(rank: int, world: int) -> torch.Tensor:
    """What no replica delivered is the first moment of this rank's own shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = shard(model(), mesh["shard"])
    ours = torch.optim.AdamW(net.parameters(), 0.01)
    attachment = gradwire.attach(
        net,
        "mlt",
        p=0.4,
        datagram=256,
        optimizer=ours,
        replicas=mesh["replicate"],
        fill="momentum",
        error_feedback=False,
    )
    taken = 0
    for step in range(3):
        backward(net, batch(rank, step))
        for parameter in net.parameters():
            gradient = parameter.grad.to_local()
            if step:
                moment = ours.state[parameter]["exp_avg"].to_local()
                taken += int(((gradient == moment) & (moment != 0)).sum())
        ours.step()
    assert taken > 100
    attachment.detach()
    return whole(net.parameters()).detach()


def test_what_is_missing_is_filled_from_a_sharded_optimizer(four: Ranks) -> None:
    results = four.run(filled)
    assert all(torch.equal(results[0], other) for other in results[1:])


# ---------------------------------------------------------------------------- the example


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_example_trains(processes: str) -> None:
    script = Path(__file__).parent.parent / "examples" / "train_fsdp2.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [
            *torchrun,
            "--nproc-per-node",
            processes,
            str(script),
            "--policy",
            "dblp",
            "--steps",
            "21",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(line.split()[3]) for line in run.stdout.splitlines() if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]


# ---------------------------------------------------------------------------- bad input


class Taken:
    def allocate(self, *size: Any, **options: Any) -> torch.Tensor:
        raise NotImplementedError


def refused(rank: int, world: int) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}

    def attach(case: str, net: nn.Module, policy: str = "reliable", **options: Any) -> None:
        with pytest.raises(gradwire.ConfigError) as error:
            gradwire.attach(net, policy, **options)
        found[case] = error.value.setting, str(error.value)

    mesh = mesh_of(world)
    two_dimensions = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    attach("HSDP", shard(model(), two_dimensions))
    if BY_FSDP:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        attach("replicate", replicate(model(), mesh=mesh))
    attach("mixed", nn.ModuleList([shard(model(), mesh), DistributedDataParallel(model())]))
    attach("DDP", DistributedDataParallel(model()), replicas=two_dimensions["replicate"])
    net = shard(model(), mesh)
    attach("2-D", net, replicas=two_dimensions)
    attach("no mesh", net, replicas="replicate")
    attach("servers", net, route="server", servers=1)
    attach("hosts", net, hosts=True)
    attach("results", net, "dblp", priority="results")
    attach("pruned", net, "netsenseml", compress="topk", prune=0.1, error_feedback=True)
    attach("memory", fully_shard(nn.Linear(2000, 2000), mesh=mesh), memory_limit=1 << 20)
    halves = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    attach("converted", shard(model(), mesh, mp_policy=halves), "ltp")
    halves = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    attach("divided", shard(model(), mesh, mp_policy=halves), "optireduce")
    summed = shard(model(), mesh)
    summed[2].set_force_sum_reduction_for_comms(True)
    attach("summed", summed, "mlt", p=0.1, floor=0.5)
    offload = CPUOffloadPolicy(pin_memory=False)
    attach("offloaded", shard(model(), mesh, offload_policy=offload), "ltp")
    hooked = shard(model(), mesh)
    hooked[3].weight.register_post_accumulate_grad_hook(lambda _: None)
    attach("hooked", hooked, "ltp")
    attach("replicas", shard(model(), mesh, offload_policy=offload), "ltp", replicas=mesh)
    attachment = gradwire.attach(net, "reliable")
    attach("attached", net)
    attachment.detach()
    net[0].set_custom_reduce_scatter(Taken())
    attach("taken", net)
    return found


def test_what_torch_or_gradwire_cannot_do_is_refused_by_name(two: Ranks) -> None:
    first, second = two.run(refused)
    assert first == second
    settings = {
        "HSDP": ("model", 'replicas=mesh["replicate"]'),
        "replicate": ("model", "DistributedDataParallel"),
        "mixed": ("model", "DDP module"),
        "DDP": ("replicas", "fully_shard"),
        "2-D": ("replicas", "mesh['replicate']"),
        "no mesh": ("replicas", "'replicate'"),
        "servers": ("route", "sharded"),
        "hosts": ("hosts", "shard"),
        "results": ("priority", "shard"),
        "pruned": ("prune", "shard"),
        "memory": ("memory_limit", "the model's own parameters"),
        "converted": ("guard", "torch.bfloat16"),
        "divided": ("guard", "divides"),
        "summed": ("guard", "'2'"),
        "offloaded": ("guard", "CPU"),
        "hooked": ("guard", "hook"),
        "replicas": ("guard", "CPU"),
        "attached": ("model", "detach()"),
        "taken": ("model", "Taken"),
    }
    assert first.keys() == settings.keys() - (set() if BY_FSDP else {"replicate"})
    for case in first:
        setting, word = settings[case]
        assert first[case][0] == setting, case
        assert word in first[case][1], case


def differs(rank: int, world: int, case: str) -> None:
    sharded, ddp = shard(model(), mesh_of(world)), DistributedDataParallel(model())
    if case == "policy":
        gradwire.attach(sharded, "mlt", p=0.1 if rank else 0.2)
    elif case == "wrapper":
        gradwire.attach(ddp if rank else sharded, "reliable")
    else:
        if rank:
            sharded[0].set_custom_reduce_scatter(Taken())
        gradwire.attach(sharded, "reliable")


@pytest.mark.parametrize("case", ["policy", "wrapper", "failure"])
def test_a_difference_between_ranks_is_an_error_on_all(two: Ranks, case: str) -> None:
    words = {"policy": "mlt.p", "wrapper": "wrapper", "failure": "Taken"}
    for outcome in two.outcomes(differs, case=case):
        assert isinstance(outcome, Failed)
        assert words[case] in outcome.text


# ---------------------------------------------------------------------------- groups of modules


def together(rank: int, world: int) -> Any:
    twin, net, mesh = model(), model(), mesh_of(world)
    fully_shard([net[0], net[2], net[3]], mesh=mesh)
    fully_shard(net, mesh=mesh)
    attachment = gradwire.attach(net, "mlt", p=0.2, datagram=256, error_feedback=True)
    backward(net, batch(rank, 0))
    assert attachment.report().buckets == 2
    names = set(own_state(attachment.state_dict())["residuals"])
    assert names == {f"{n}[{r}]" for n, _ in twin.named_parameters() for r in range(world)}
    attachment.detach()
    backward(net, batch(rank, 1))
    expected = average_of(local(twin, batch(rank, 1)))
    torch.testing.assert_close(gradients(net), expected, rtol=1e-5, atol=1e-7)
    net[0].set_force_sum_reduction_for_comms(True)
    with pytest.raises(gradwire.ConfigError) as error:
        gradwire.attach(net, "ltp")
    return str(error.value)


def test_modules_that_are_sharded_together_are_one_group(two: Ranks) -> None:
    first, second = two.run(together)
    assert first == second
    assert all(f"'{name}'" in first for name in "023")


# ---------------------------------------------------------------------------- ignored parameters


class Beside(nn.Module):
    """A layer beside a parameter that fully_shard is told to ignore."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTHS[0], 70)
        self.beside = nn.Embedding(8, 70, sparse=kind == "sparse")
        if kind == "complex":
            self.beside.weight = nn.Parameter(torch.ones(8, 70, dtype=torch.complex64))
        elif kind == "meta":
            self.beside.to("meta")
        self.beside.requires_grad_(kind != "frozen")
        self.used = kind in ("sparse", "frozen")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x + self.beside(torch.arange(len(x)) % 8).real if self.used else x


def lines_of(call: Any) -> list[str]:
    """What gradwire logs during a call."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gradwire")
    log.addHandler(handler)
    try:
        call()
    finally:
        log.removeHandler(handler)
    return lines


def forgets_replicas(rank: int, world: int, shards: int) -> list[str]:
    shape = (world // shards, shards)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    net = fully_shard(model(), mesh=mesh["shard"])

    def attach() -> None:
        gradwire.attach(net, "reliable").detach()

    return lines_of(attach)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_gradients_that_not_all_ranks_average_are_warned_of(four: Ranks, shards: int) -> None:
    first, *others = four.run(forgets_replicas, shards=shards)
    told = [line for line in first if "replicas=" in line]
    assert len(told) == (shards < 4)
    assert not any("replicas=" in line for lines in others for line in lines)


def ignores(rank: int, world: int, kind: str) -> list[str]:
    twin, net = Beside(kind), Beside(kind)
    fully_shard(net, mesh=mesh_of(world), ignored_params={net.beside.weight})
    attachments: list[gradwire.Attachment] = []
    lines = lines_of(lambda: attachments.append(gradwire.attach(net, "reliable")))
    backward(net, batch(rank, 0))
    backward(twin, batch(rank, 0))
    expected = average_of(twin.layer.weight.grad)
    assert torch.equal(whole([net.layer.weight.grad]), expected.flatten())
    attachments[0].detach()
    return lines


@pytest.mark.parametrize("kind", ["sparse", "complex", "meta", "frozen"])
def test_parameters_that_fully_shard_ignores_are_not_looked_at(two: Ranks, kind: str) -> None:
    lines, others = two.run(ignores, kind=kind)
    assert others == []
    assert ["beside.weight" in line for line in lines] == ([] if kind == "frozen" else [True])


class Branches(nn.Module):
    """Three layers of which a forward pass uses some; two have the same size."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.other = nn.Linear(width, width + 1), nn.Linear(width, width + 1)
        self.right = nn.Linear(width, width + 3)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        return sum(getattr(self, name)(x).sum() for name in names.split())  # type: ignore[return-value]


def partial(rank: int, world: int) -> None:
    """The gradients are told apart though `left` and `other` have the same size."""
    net = fully_shard(Branches(), mesh=mesh_of(world))
    attachment = gradwire.attach(net, "mlt", p=0.3)
    names = []
    for used in ("right", "left right other", "left", "other"):
        net.zero_grad()
        net(torch.ones(2, 8), used).backward()
        names.append({region.name for region in attachment.report().regions})
        assert [n for n, p in net.named_parameters() if p.grad is None and n[:4] in used] == []
    assert names == [
        {"right.weight … right.bias"},
        {"left.weight … right.bias"},
        {"left.weight … left.bias"},
        {"other.weight … other.bias"},
    ]
    attachment.detach()


def test_parameters_without_a_gradient_are_left_out(two: Ranks) -> None:
    two.run(partial)


class Heads(nn.Module):
    """A body and two heads, all of which run; a loss may leave some of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTHS[0], 70)
        self.first, self.second = nn.Linear(70, 9), nn.Linear(70, 9)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        x = self.body(x)
        if "body" not in used:
            x = x.detach().requires_grad_()
        outputs = {"first": self.first(x), "second": self.second(x)}
        return sum(out.sum() for name, out in outputs.items() if name in used)  # type: ignore[return-value]


def alike(rank: int, world: int, name: str) -> None:
    """All ranks leave a group out, and where torch has a call for it, each another parameter."""
    twin, net = Heads(), Heads()
    twin.load_state_dict(net.state_dict())
    for each in (net.body, net.first, net.second, net):
        fully_shard(each, mesh=mesh_of(world))
    attachment = gradwire.attach(net, name)
    for step, used in enumerate(("body first", "body second", "body first")):
        for each in (twin, net):
            each.zero_grad()
            each(batch(rank, step), used).backward()
        assert (attachment.step, attachment.report().buckets) == (step + 1, 2)
        expected = average_of(
            torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
        )
        torch.testing.assert_close(gradients_of(net), expected, rtol=1e-5, atol=1e-5)
    attachment.detach()
    branches = fully_shard(Branches(), mesh=mesh_of(world))
    if hasattr(branches, "set_reduce_scatter_unused_params"):
        branches.set_reduce_scatter_unused_params(True)
        attachment = gradwire.attach(branches, name)
        branches(torch.ones(2, 8), "left" if rank else "other right").backward()
        assert torch.equal(branches.left.bias.grad.full_tensor(), torch.full((9,), 1.0))
        attachment.detach()


@pytest.mark.parametrize("name", ["reliable", "ltp"])
def test_ranks_may_all_leave_the_same_group_out(two: Ranks, name: str) -> None:
    two.run(alike, name=name)


def uses(rank: int, world: int, kind: str, used: list[str]) -> dict[str, Any]:
    net: Any = Branches() if kind == "parameters" else Heads()
    if kind == "groups":
        for each in (net.body, net.first, net.second):
            fully_shard(each, mesh=mesh_of(world), reshard_after_forward=False)
    fully_shard(net, mesh=mesh_of(world), reshard_after_forward=False)
    attachment = gradwire.attach(net, "mlt", p=0.1)
    x = torch.ones(2, 8) if kind == "parameters" else batch(rank, 0)
    net(x, used[0]).backward()
    with pytest.raises(gradwire.TransferError) as error:
        net(x, used[rank]).backward()
    attachment.detach()
    return {**vars(error.value), "text": str(error.value)}


@pytest.mark.parametrize(
    ("kind", "used", "odd", "words"),
    [
        ("parameters", ["left right", "left"], 1, "'right.weight', 'right.bias'"),
        ("parameters", ["left", "other"], 0, "set_reduce_scatter_unused_params(True)"),
        ("groups", ["body first second", "body second"], 1, "the parameters of 'body'"),
        ("groups", ["body first second", "first second"], 1, "nothing more"),
    ],
)
def test_ranks_that_use_different_parameters_all_say_which(
    two: Ranks, kind: str, used: list[str], odd: int, words: str
) -> None:
    first, second = two.run(uses, kind=kind, used=used)
    assert first == second
    assert (first["cause"], first["rank"], first["step"]) == ("plan", odd, 1)
    assert words in first["text"]


# ---------------------------------------------------------------------------- requires_grad


def swapped(rank: int, world: int, replicated: bool) -> None:
    """Two adapters of one size: neither gets what the other one is owed."""
    net = Branches(64)

    def train(name: str) -> None:
        net.requires_grad_(False)
        getattr(net, name).requires_grad_(True)

    train("left")
    options: dict[str, Any] = {"error_feedback": True}
    mesh = mesh_of(world)
    if replicated:
        both = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        mesh, options["replicas"] = both["shard"], both["replicate"]
    fully_shard(net, mesh=mesh)
    attachment = gradwire.attach(net, "mlt", p=0.3, datagram=256, **options)

    def step(name: str, factor: float) -> torch.Tensor:
        train(name)
        net.zero_grad()
        (net(batch(rank, 0), name) * factor).backward()
        return gradients_of(getattr(net, name))

    def owed() -> Any:
        return own_state(attachment.state_dict())["residuals"]

    applied, before = step("left", 1.0), owed()
    assert {name.partition(".")[0] for name in before} == {"left"}
    assert sum(float(each.abs().sum()) for each in before.values()) > 0.0
    attachment.flush()
    assert not step("other", 0.0).any()
    assert {region.name for region in attachment.report().regions} == {"other.weight … other.bias"}
    after = owed()
    assert all(torch.equal(before[name], after[name]) for name in before)
    applied = applied + step("left", 0.0)  # the step after the next one is exact
    torch.testing.assert_close(applied, step_alone(rank, world), rtol=1e-4, atol=1e-5)
    attachment.detach()


def step_alone(rank: int, world: int) -> torch.Tensor:
    twin = Branches(64)
    twin(batch(rank, 0), "left").backward()
    return average_of(torch.cat([p.grad.flatten() for p in twin.left.parameters()]))


@pytest.mark.parametrize("replicated", [False, True])
def test_adapters_of_one_size_that_take_turns_keep_their_own_residuals(
    two: Ranks, replicated: bool
) -> None:
    two.run(swapped, replicated=replicated)


def one_sided(rank: int, world: int, case: str) -> dict[str, Any]:
    """Rank 1 alone freezes, trains or synchronises other parameters from the third step on."""
    net, options = Heads() if "unused" in case else model(), {}
    mesh = mesh_of(world)
    if "replicas" in case:
        both = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
        mesh, options["replicas"] = both["shard"], both["replicate"]
    layer = net.second if "unused" in case else net[0]
    layer.requires_grad_("thaw" not in case)
    for each in net.children():
        if any(True for _ in each.parameters()):
            fully_shard(each, mesh=mesh, reshard_after_forward=False)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    ours = torch.optim.SGD(net.parameters(), 0.1)
    attachment = gradwire.attach(net, "reliable", optimizer=ours, **options)

    def step(number: int) -> None:
        net.zero_grad()
        given = ("body first",) if "unused" in case else ()
        net(batch(rank, number), *given).square().mean().backward()
        ours.step()

    step(0)
    step(1)
    if rank == 1 and "sync" in case:
        layer.set_requires_gradient_sync(False)
    elif rank == 1:
        layer.requires_grad_("thaw" in case)
    held: list[Any] = ours.param_groups[0]["params"]
    before = [each.to_local().clone() for each in held]
    start = time.monotonic()
    with pytest.raises(gradwire.TransferError) as error:
        step(2)
    with pytest.raises(gradwire.GradwireError, match="stopped"):
        ours.step()
    assert time.monotonic() - start < 10.0
    assert all(map(torch.equal, before, [each.to_local() for each in held]))
    attachment.detach()
    return {**vars(error.value), "text": str(error.value)}


@pytest.mark.parametrize(
    "case", ["freeze", "freeze unused", "freeze replicas", "thaw", "thaw replicas", "sync"]
)
def test_what_trains_on_some_ranks_only_stops_all_before_any_steps(two: Ranks, case: str) -> None:
    first, second = two.run(one_sided, case=case)
    assert first == second
    odd = 0 if "thaw" in case else 1
    assert (first["cause"], first["rank"], first["step"]) == ("plan", odd, 2)
    name = "second" if "unused" in case else "0"
    assert f"rank {odd} does not train '{name}.weight', '{name}.bias'" in first["text"]


TRAINED = ("4", "2 4", "0 2 3 4", "0 3", "2 4")
FOLLOWS: dict[str, dict[str, Any]] = {
    "reliable": {},
    "adaptive": {},
    "mlt": {"p": 0.2, "priority": "layer"},
    "dblp": {"p_low": {"4.*": 0.1, "*": 0.05}, "p_high": 0.3},
}


def thaws(rank: int, world: int, name: str) -> None:
    twin, net = model(), shard(model(), mesh_of(world))

    def train(layers: str) -> None:
        for each in (twin, net):
            each.requires_grad_(False)
            for layer in layers.split():
                each[int(layer)].requires_grad_(True)

    train(TRAINED[0])
    attachment = gradwire.attach(net, name, **FOLLOWS[name])
    for step, layers in enumerate(TRAINED):
        train(layers)
        backward(net, batch(rank, step))
        expected = average_of(local(twin, batch(rank, step)))
        trained = gradients_of(net)
        assert trained.shape == expected.shape
        if name == "reliable":
            assert torch.equal(trained, expected)
        assert attachment.step == step + 1
    attachment.detach()


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_is_frozen_and_unfrozen_is_followed(two: Ranks, name: str) -> None:
    two.run(thaws, name=name)


def cannot_follow(rank: int, world: int, case: str) -> tuple[str, str]:
    rows = 40_000 if case == "memory" else 8
    net: Any = nn.Sequential(nn.Embedding(rows, 64, sparse=case == "sparse"), nn.Linear(64, 8))
    net[0].requires_grad_(False)
    fully_shard(net, mesh=mesh_of(world))
    options: dict[str, Any] = {}
    if case == "policy":
        options = {"p_low": {"1.*": 0.001}, "p_high": 0.002}
    elif case == "memory":
        options = {"memory_limit": 1 << 20}
    elif case == "optimizer":
        ours = torch.optim.SGD(net[1].parameters(), 0.1)
        options = {"guard": "skip", "floor": 0.5, "error_feedback": True, "optimizer": ours}
    attachment = gradwire.attach(net, "dblp", **options)
    net(torch.arange(8)).sum().backward()
    net[0].requires_grad_(True)
    with pytest.raises(gradwire.ConfigError) as error:
        net(torch.arange(8)).sum().backward()
    attachment.detach()
    return error.value.setting, str(error.value)


@pytest.mark.parametrize(
    ("case", "word"),
    [
        ("sparse", "sparse=False"),
        ("policy", "p_high"),
        ("optimizer", "SGD"),
        ("memory", "memory_limit"),
    ],
)
def test_what_cannot_be_followed_is_an_error_by_name(two: Ranks, case: str, word: str) -> None:
    first, second = two.run(cannot_follow, case=case)
    assert first == second
    assert first[0] == "0.weight"
    assert word in first[1]
