"""attach() on real DDP modules in real processes, over gloo and loopback: DDP's own ways."""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import (
    Branches,
    average_of,
    batch,
    gradients,
    local_gradients,
    model,
    train,
    wrap,
)
from own_state import own_state
from ranks import Ranks, free_port

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


# ---------------------------------------------------------------------------- element types


def reduces(rank: int, world: int, name: str) -> None:
    dtype = DTYPES[name]
    reference, net = model(dtype), model(dtype)
    ddp = wrap(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attachment = gradwire.attach(ddp, "reliable")
        for step in range(3):  # buckets are rebuilt after the first
            x = batch(rank, step, dtype)
            expected = average_of(local_gradients(reference, x)).to(dtype)
            net.zero_grad()
            ddp(x).float().square().mean().backward()
            got = gradients(net)
            if dtype == torch.float64:
                torch.testing.assert_close(got, expected, rtol=3e-7, atol=1e-9)
            else:
                assert torch.equal(got, expected)
    report = attachment.report()
    assert (report.step, report.delivered, report.exceeded) == (2, 1.0, ())
    assert report.buckets > 1
    attachment.detach()


@pytest.mark.parametrize("name", list(DTYPES))
def test_each_element_type_is_averaged(two: Ranks, name: str) -> None:
    two.run(reduces, name=name)


def close_to_gloo(rank: int, world: int) -> None:
    over_gloo, over_gradwire = wrap(model()), wrap(model())
    attachment = gradwire.attach(over_gradwire, "reliable")
    train(over_gloo, rank, range(20))
    train(over_gradwire, rank, range(20))
    for a, b in zip(over_gloo.parameters(), over_gradwire.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    attachment.detach()


def test_reliable_training_is_close_to_gloo(two: Ranks) -> None:
    two.run(close_to_gloo)


def float64_warns(rank: int, world: int) -> list[str]:
    ddp = wrap(model(torch.float64))
    attachment = gradwire.attach(ddp, "reliable")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ddp(batch(rank, 0, torch.float64)).square().mean().backward()
    attachment.detach()
    return [str(w.message) for w in caught if "float64" in str(w.message)]


def test_float64_says_once_that_it_is_rounded(two: Ranks) -> None:
    for messages in two.run(float64_warns):
        assert len(messages) == 1


def on_cuda(rank: int, world: int, name: str) -> None:
    """Both ranks share the first device; gloo is the host group."""
    dtype = DTYPES[name]
    reference, net = model(dtype).cuda(), model(dtype).cuda()
    ddp = wrap(net)
    attachment = gradwire.attach(ddp, "reliable")
    for step in range(4):
        x = batch(rank, step, dtype).cuda()
        expected = average_of(local_gradients(reference, x).cpu()).to(dtype)
        net.zero_grad()
        ddp(x).float().square().mean().backward()
        assert torch.equal(gradients(net).cpu(), expected)
    attachment.detach()
    lossy = wrap(model(dtype).cuda())
    attachment = gradwire.attach(lossy, "mlt", p=0.3, error_feedback=True)
    for step in range(20):
        lossy.zero_grad()
        lossy(batch(rank, step, dtype).cuda()).float().square().mean().backward()
    got = gradients(lossy).cpu()
    everybody = [torch.empty_like(got) for _ in range(world)]
    dist.all_gather(everybody, got)
    assert torch.equal(everybody[0], everybody[1])
    assert attachment.report().delivered < 0.95
    attachment.detach()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_buckets_on_a_cuda_device(name: str) -> None:
    with Ranks(2) as ranks:
        ranks.run(on_cuda, name=name)


# ---------------------------------------------------------------------------- DDP's ways


def no_sync(rank: int, world: int) -> None:
    reference, net = model(), model()
    ddp = wrap(net)
    attachment = gradwire.attach(ddp, "reliable")
    for step in range(3):
        x, y = batch(rank, 2 * step), batch(rank, 2 * step + 1)
        reference.zero_grad()
        for part in (x, y):
            reference(part).square().mean().backward()
        expected = average_of(gradients(reference))
        net.zero_grad()
        with ddp.no_sync():
            ddp(x).square().mean().backward()
        ddp(y).square().mean().backward()
        torch.testing.assert_close(gradients(net), expected, rtol=1e-6, atol=1e-8)
        assert attachment.step == step + 1
    attachment.detach()


def test_accumulated_gradients_travel_once(two: Ranks) -> None:
    two.run(no_sync)


def unused(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = Branches()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.01)
    attachment = gradwire.attach(ddp, "mlt", p=0.1, error_feedback=True)
    for step in range(6):
        net.zero_grad(set_to_none=True)
        right = (step + rank) % 2 == 0 if step < 4 else True  # then the left one on no rank
        ddp(batch(rank, step), right).square().mean().backward()
        if step >= 4:
            assert net.left.weight.grad is None
        else:
            assert net.left.weight.grad is not None
        everybody = [torch.empty_like(net.top.weight.grad) for _ in range(world)]
        dist.all_gather(everybody, net.top.weight.grad)
        assert torch.equal(everybody[0], everybody[1])
    attachment.detach()


def test_unused_parameters_are_found(two: Ranks) -> None:
    two.run(unused)


def owed_to_unused(rank: int, world: int, bare: bool) -> None:
    """A bound of 30 %: steps in turn use the left branch, then the right one on all ranks."""
    torch.manual_seed(0)
    net = Branches()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.01)
    options: dict[str, Any] = {"p": 0.3, "error_feedback": True, "datagram": 256}
    if bare:
        state = gradwire.HookState("mlt", model=net, find_unused_parameters=True, **options)
        ddp.register_comm_hook(state, gradwire.comm_hook)
        assert pickle.loads(pickle.dumps(state)).find_unused_parameters
    else:
        gradwire.attach(ddp, "mlt", **options)
        state = ddp._comm_hooks[0][1]

    def owed() -> dict[str, torch.Tensor]:
        residuals = state.pipeline.state_dict()["residuals"]
        assert isinstance(residuals, dict)
        return {name: values.clone() for name, values in residuals.items()}

    waited = 0
    for step in range(8):
        before = owed()
        net.zero_grad(set_to_none=True)
        right = step // 2 % 2 == 0
        ddp(batch(rank, step), right).square().mean().backward()
        after = owed()
        idle, used = ("left.weight", "right.weight") if right else ("right.weight", "left.weight")
        if idle in before:
            assert torch.equal(after[idle], before[idle])
            waited += bool(before[idle].any())
        assert after[used].any()
    assert waited
    state.deactivate()


@pytest.mark.parametrize("bare", [False, True])
def test_what_is_owed_to_unused_parameters_waits(bare: bool) -> None:
    with Ranks(2) as ranks:
        ranks.run(owed_to_unused, bare=bare)


def static_graph(rank: int, world: int) -> None:
    reference, net = model(), model()
    ddp = wrap(net, static_graph=True)
    attachment = gradwire.attach(ddp, "reliable")
    for step in range(4):
        expected = average_of(local_gradients(reference, batch(rank, step)))
        net.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        assert torch.equal(gradients(net), expected)
    attachment.detach()


def test_a_static_graph(two: Ranks) -> None:
    two.run(static_graph)


def rebuilt(rank: int, world: int) -> list[list[str]]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.2, error_feedback=True)
    seen = []
    for step in range(3):
        train(ddp, rank, range(step, step + 1))
        seen.append([region.name for region in attachment.report().regions])
    names = {name for name, _ in ddp.module.named_parameters()}
    residuals = own_state(attachment.state_dict())["residuals"]
    assert set(residuals) == names
    attachment.detach()
    return seen


def test_rebuilt_buckets_keep_their_parameters_names(two: Ranks) -> None:
    first, second, third = two.run(rebuilt)[0]
    assert first != second  # DDP did rebuild
    assert second == third
    assert any("2.weight" in name for name in second)


def nonfinite(rank: int, world: int) -> None:
    ddp = wrap(model())
    attachment = gradwire.attach(
        ddp, "dblp", p_low=0.3, p_high=0.3, error_feedback=True, every=1, eta=100.0
    )
    for step in range(8):
        ddp.zero_grad()
        x = batch(rank, step)
        if step == 5 and rank == 1:
            x[0, 0] = float("nan")
        ddp(x).square().mean().backward()
        whole = torch.isfinite(gradients(ddp)).all().item()
        assert whole == (step != 5)
        if step == 5:
            first = next(iter(ddp.module.parameters())).grad
            assert first is not None
            assert torch.isnan(first).any()
            assert attachment.report().agreed.nonfinite
            assert attachment.phase == "critical"
    residuals = own_state(attachment.state_dict())["residuals"]
    assert all(torch.isfinite(r).all() for r in residuals.values())
    attachment.detach()


def test_nan_is_carried_through_and_enters_no_residual(two: Ranks) -> None:
    two.run(nonfinite)


class Hollow(torch.nn.Module):
    """Uses a parameter without elements first, so that its gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.none = torch.nn.Parameter(torch.empty(0))
        self.wide = torch.nn.Linear(64, 5000)
        self.top = torch.nn.Linear(5000, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.wide(x + self.none.sum()))
        return out


def hollow(rank: int, world: int, policy: str, options: dict[str, Any]) -> list[int]:
    net, reference = Hollow(), Hollow()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.1)
    attachment = gradwire.attach(ddp, policy, **options)
    for step in range(5):
        expected = average_of(local_gradients(reference, batch(rank, step)))
        net.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        assert torch.equal(gradients(net), expected)
        assert attachment.report().step == step
    attachment.detach()
    sizes = str(ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes"))
    return [int(size) for size in sizes.split(",")]


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("reliable", {}),
        ("adaptive", {"p_low": 0.0, "p_high": 0.0, "compress": "never"}),
        ("mlt", {"floor": 1.0}),
    ],
)
def test_a_bucket_without_elements_is_answered(
    two: Ranks, policy: str, options: dict[str, Any]
) -> None:
    for sizes in two.run(hollow, policy=policy, options=options):
        assert sizes[-1] == 0  # of the rebuilt buckets the last one is empty
        assert sizes[0] > 0


def alone(rank: int, world: int) -> None:
    os.environ["MASTER_PORT"] = str(free_port())
    net, reference = model(), model()
    x = batch(0, 0)
    expected = local_gradients(reference, x)
    dist.init_process_group("gloo", rank=0, world_size=1)
    ddp = wrap(net)
    attachment = gradwire.attach(ddp, "dblp", error_feedback=True)
    for _ in range(3):
        net.zero_grad()
        ddp(x).square().mean().backward()
        assert torch.equal(gradients(net), expected)
    assert attachment.report().delivered == 1.0
    attachment.detach()
    dist.destroy_process_group()


def test_world_size_1() -> None:
    with Ranks(1, group=False) as one:
        one.run(alone)
