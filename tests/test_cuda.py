"""Gradients on CUDA devices: streams, encodings, DDP, FSDP2, hosts and process groups.

Two and more ranks share one device, over gloo and loopback.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
from ddp_jobs import average_of, batch, gradients, local_gradients, model, set_drop, wrap
from own_state import own_state
from ranks import Ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LATE = 40_000_000
"""Cycles of a kernel that keeps a stream busy for some 20 ms."""


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, GRADWIRE_PEER_TIMEOUT="20", GRADWIRE_RENDEZVOUS_TIMEOUT="30") as ranks:
        yield ranks


# ---------------------------------------------------------------------------- streams


def late(rank: int, world: int, side: bool = False, exact: bool = True) -> dict[str, float]:
    """Gradients are computed long after they were queued, and read right after the backward."""
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        reference, net = model().cuda(), model().cuda()
        ddp = wrap(net)
        attachment = gradwire.attach(ddp, "reliable")
        for step in range(5):
            x = batch(rank, step).cuda()
            expected = average_of(local_gradients(reference, x).cpu())
            net.zero_grad()
            torch.cuda._sleep(LATE)
            ddp(x).square().mean().backward()
            copies = gradients(net)  # queued behind the results
            torch.cuda._sleep(LATE // 4)
            net.zero_grad()  # frees what a copy to the host may still read
            torch.randn(1_000_000, device="cuda")
            rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-7)
            torch.testing.assert_close(copies.cpu(), expected, rtol=rtol, atol=atol)
        counters = attachment.counters()
        attachment.detach()
    return counters


@pytest.mark.parametrize("side", [False, True])
def test_results_are_ordered_with_the_stream_that_computes(two: Ranks, side: bool) -> None:
    two.run(late, side=side)


class Sends(gradwire.policies.Reliable):
    """Exact sums of encoded values."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.encoding = encoding

    def plan(self, context: Any) -> Any:
        return replace(super().plan(context), encoding=self.encoding)


def steps_without_a_wait(rank: int, world: int, encoding: str) -> None:
    """torch raises where a call has the host wait for the device."""
    net = model().cuda()
    ddp = wrap(net)
    attachment = gradwire.attach(ddp, Sends(encoding), error_feedback=encoding != "f32")
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    batches = [batch(rank, step).cuda() for step in range(8)]
    try:
        for step, x in enumerate(batches):
            if step == 4:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert attachment.step == len(batches)
    attachment.detach()


@pytest.mark.parametrize("encoding", ["f32", "f16", "int8"])
def test_a_step_does_not_wait_for_the_device(two: Ranks, encoding: str) -> None:
    two.run(steps_without_a_wait, encoding=encoding)


def moments(rank: int, world: int) -> bytes:
    """What nobody delivered is the optimizer's first moment, computed late on a side stream."""
    with torch.cuda.stream(torch.cuda.Stream()):
        net = model().cuda()
        ddp = wrap(net)
        optimizer = torch.optim.Adam(net.parameters(), 1e-3, betas=(0.5, 0.9))
        attachment = gradwire.attach(
            ddp, "mlt", p=0.5, spend="lost", fill="momentum", optimizer=optimizer, datagram=400
        )
        for step in range(6):
            optimizer.zero_grad()
            set_drop(attachment, 0.0 if step < 2 else 0.4)
            known = [optimizer.state[p] for p in net.parameters() if step >= 2]
            before = [state["exp_avg"].clone() for state in known]
            ddp(batch(0, step).cuda()).square().mean().backward()
            if step >= 2:
                fresh = local_gradients(twin := _copy(net), batch(0, step).cuda())
                del twin
                kept = torch.cat([moment.flatten() for moment in before])
                got = gradients(net)
                close = torch.isclose(got, fresh, rtol=1e-3, atol=1e-6) | (got == kept)
                assert close.all()
                assert attachment.report().delivered < 1.0
            torch.cuda._sleep(LATE)
            optimizer.step()
        got = gradients(net).cpu().numpy().tobytes()
        attachment.detach()
    return bytes(got)


def _copy(net: nn.Module) -> nn.Module:
    twin = model().cuda()
    twin.load_state_dict(net.state_dict())
    return twin


def test_moments_are_read_behind_the_step_that_wrote_them(two: Ranks) -> None:
    first, second = two.run(moments)
    assert first == second


# ---------------------------------------------------------------------------- DDP


def balances(rank: int, world: int, encoding: str) -> None:
    """What was applied and what is owed add up to what was computed."""
    net = model().cuda()
    ddp = wrap(net)
    attachment = gradwire.attach(ddp, Sends(encoding), error_feedback=True)
    total = torch.zeros(sum(p.numel() for p in net.parameters()))
    applied = torch.zeros_like(total)
    reference = model().cuda()
    for step in range(12):
        x = batch(rank, step).cuda()
        total += average_of(local_gradients(reference, x).cpu())
        net.zero_grad()
        ddp(x).square().mean().backward()
        applied += gradients(net).cpu()
    residuals = own_state(attachment.state_dict())["residuals"]
    owed = torch.cat([residuals[name].flatten() for name, _ in net.named_parameters()])
    assert owed.any()
    torch.testing.assert_close(applied + average_of(owed), total, rtol=1e-4, atol=2e-5)
    attachment.detach()


@pytest.mark.parametrize("encoding", ["f16", "int8"])
def test_books_balance(two: Ranks, encoding: str) -> None:
    two.run(balances, encoding=encoding)


def scaled(rank: int, world: int) -> bytes:
    """A scaler skips a step that overflowed on one rank, on all."""
    net = model().cuda()
    ddp = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=100)
    attachment = gradwire.attach(
        ddp, "netsenseml", start=0.3, optimizer=optimizer, scaler=scaler, error_feedback=True
    )
    for step in range(6):
        optimizer.zero_grad()
        before = gradients_of(net)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = ddp(batch(rank, step).cuda()).float().square().mean()
        if step == 3 and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step == 3:
            assert torch.equal(before, gradients_of(net))
    assert scaler.get_scale() == 512.0
    assert torch.isfinite(gradients_of(net)).all()
    got = gradients_of(net).cpu().numpy().tobytes()
    attachment.detach()
    return bytes(got)


def gradients_of(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()


def test_a_scaler_skips_a_step_that_overflowed_on_one_rank(two: Ranks) -> None:
    first, second = two.run(scaled)
    assert first == second


def resumes(rank: int, world: int) -> None:
    """A job that goes on from its state computes what the other would have."""

    def run(steps: range, state: Any = None) -> tuple[torch.Tensor, Any]:
        net = model().cuda()
        ddp = wrap(net)
        attachment = gradwire.attach(ddp, Sends("int8"), error_feedback=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        if state is not None:
            net.load_state_dict(state[0])
            attachment.load_state_dict(state[1])
        for step in steps:
            optimizer.zero_grad()
            ddp(batch(rank, step).cuda()).square().mean().backward()
            optimizer.step()
        kept = {name: values.clone() for name, values in net.state_dict().items()}
        saved = attachment.state_dict()
        attachment.detach()
        return gradients_of(net), (kept, saved)

    _, state = run(range(5))
    resumed, _ = run(range(5, 10), state)
    assert torch.isfinite(resumed).all()
    everybody = [torch.empty_like(resumed).cpu() for _ in range(world)]
    dist.all_gather(everybody, resumed.cpu())
    assert all(torch.equal(everybody[0], other) for other in everybody)


def test_a_state_with_the_devices_part_resumes(two: Ranks) -> None:
    two.run(resumes)


# ---------------------------------------------------------------------------- FSDP2

WIDTHS = (64, 131, 70, 97)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third, last = WIDTHS
    return nn.Sequential(
        nn.Linear(first, second), nn.Tanh(), nn.Linear(second, third), nn.Linear(third, last)
    )


def shard(net: Any, world: int, **options: Any) -> Any:
    mesh = init_device_mesh("cuda", (world,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def own(tensors: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    """The shards of these tensors that a rank has, rows of the first dimension."""
    parts = [tensor.chunk(world)[rank] for tensor in tensors]
    return torch.cat([part.flatten() for part in parts])


def sharded(rank: int, world: int, reduced: str) -> None:
    """Two steps accumulate nothing, and a slow stream changes nothing."""
    kind = getattr(torch, reduced)
    twin, net = (
        layers().cuda(),
        shard(layers().cuda(), world, mp_policy=MixedPrecisionPolicy(reduce_dtype=kind)),
    )
    attachment = gradwire.attach(net, "reliable")
    for step in range(4):
        x = batch(rank, step).cuda()
        twin.zero_grad()
        twin(x).square().mean().backward()
        grads = [average_of(p.grad.to(kind).cpu()).to(kind).float() for p in twin.parameters()]
        net.zero_grad()
        torch.cuda._sleep(LATE)
        net(x).square().mean().backward()
        got = torch.cat([p.grad.to_local().flatten() for p in net.parameters()]).cpu()
        if reduced == "float16":  # torch divides before and after
            torch.testing.assert_close(got, own(grads, rank, world), rtol=2e-3, atol=1e-6)
        else:
            assert torch.equal(got, own(grads, rank, world))
    assert (attachment.step, attachment.report().delivered) == (4, 1.0)
    attachment.detach()


@pytest.mark.parametrize("reduced", ["float32", "bfloat16", "float16"])
def test_sharded_gradients_are_the_average(two: Ranks, reduced: str) -> None:
    two.run(sharded, reduced=reduced)


def sharded_lossy(rank: int, world: int, policy: str, options: dict[str, Any]) -> None:
    net = shard(layers().cuda(), world)
    attachment = gradwire.attach(net, policy, **options)
    set_drop(attachment, 0.05, 4.0)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = net(batch(rank, step % 4).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert attachment.step == 20
    attachment.detach()


@pytest.mark.parametrize(
    ("policy", "options"),
    [("dblp", {"every": 3}), ("ltp", {}), ("adaptive", {}), ("mlt", {"p": 0.3})],
)
def test_shards_train_under_loss(two: Ranks, policy: str, options: dict[str, Any]) -> None:
    two.run(sharded_lossy, policy=policy, options=options)


# ---------------------------------------------------------------------------- hosts

PAIRS = (0, 0, 1, 1)
ports = itertools.count(28_700)


def cable(network: Any) -> None:
    network.cable(0, 1, "eth0")
    for host in (0, 1):
        network.address(host, "eth0", f"10.0.0.{host + 1}", 24)


def join_group(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://10.0.0.1:{port}", rank=rank, world_size=world
    )


def test_ranks_of_a_host_sum_first(namespaces: None) -> None:
    from host_ranks import HostRanks

    with HostRanks(
        cable,
        places=PAIRS,
        names=[f"host{place}" for place in PAIRS],
        GRADWIRE_PEER_TIMEOUT="20",
        GRADWIRE_RENDEZVOUS_TIMEOUT="30",
        GLOO_SOCKET_IFNAME="eth0",
    ) as ranks:
        ranks.run(join_group, port=next(ports))
        counters = ranks.run(late, exact=False)  # another order of the sum
    assert [bool(each) for each in counters] == [True, False, True, False]


# ---------------------------------------------------------------------------- process group


def backend(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gradwire", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    values = torch.full((100_000,), float(rank + 1), device="cuda")
    dist.all_reduce(values)
    assert torch.equal(values.cpu(), torch.full((100_000,), world * (world + 1) / 2))
    host = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(host)
    assert torch.equal(host, values.cpu())
    dist.destroy_process_group()


def test_the_backend_gives_cuda_tensors_to_gloo() -> None:
    with Ranks(2, group=False) as ranks:
        ranks.run(backend, port=next(ports))
