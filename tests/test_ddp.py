"""attach() on real DDP modules in real processes, over gloo and loopback."""

from __future__ import annotations

import gc
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ranks import Failed, Ranks, free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.communicator import Communicator
from gradwire.plans import TransferPlan
from gradwire.policies import MLT, PlanContext
from gradwire.staging import _DirectStage

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, GRADWIRE_PEER_TIMEOUT="10", GRADWIRE_RENDEZVOUS_TIMEOUT="20") as ranks:
        yield ranks


# ---------------------------------------------------------------------------- models


class Branches(nn.Module):
    """Uses one of two branches; the other one's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.top = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        out: torch.Tensor = self.top((self.right if right else self.left)(x))
        return out


def model(dtype: torch.dtype = torch.float32, width: int = 700) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 300), nn.ReLU(), nn.Linear(300, 8)
    )
    return net.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 64, generator=chance).to(dtype)


def wrap(net: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, bucket_cap_mb=0.3, **options)


def gradients(module: nn.Module) -> torch.Tensor:
    parts = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(parts).clone()


def average_of(local: torch.Tensor) -> torch.Tensor:
    """The rank-order average of every rank's tensor, gathered by gloo, in float32."""
    everybody = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, local)
    total = everybody[0].float()
    for other in everybody[1:]:
        total = total + other.float()
    return total * torch.tensor(1.0 / len(everybody), dtype=torch.float32)


def local_gradients(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    net(x).float().square().mean().backward()
    return gradients(net)


def train(module: nn.Module, rank: int, steps: range, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        module(batch(rank, step)).square().mean().backward()
        optimizer.step()


def fingerprint(module: nn.Module) -> bytes:
    """The bytes of all parameters' sum of bits: equal if and practically only if they are."""
    import hashlib

    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def set_drop(attachment: gradwire.Attachment, rate: float, burst: float = 1.0) -> None:
    attachment._pipeline.communicator.set_drop(rate, burst, 5)


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


def owed_to_unused(rank: int, world: int) -> None:
    """A bound of 30 %: steps in turn use the left branch, then the right one on all ranks."""
    torch.manual_seed(0)
    net = Branches()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.01)
    attachment = gradwire.attach(ddp, "mlt", p=0.3, error_feedback=True, datagram=256)

    def owed() -> dict[str, torch.Tensor]:
        residuals = attachment.state_dict()["residuals"]
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
    attachment.detach()


def test_what_is_owed_to_unused_parameters_waits() -> None:
    with Ranks(2) as ranks:
        ranks.run(owed_to_unused)


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
    residuals = attachment.state_dict()["residuals"]
    assert isinstance(residuals, dict)
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
    residuals = attachment.state_dict()["residuals"]
    assert isinstance(residuals, dict)
    assert all(torch.isfinite(r).all() for r in residuals.values())
    attachment.detach()


def test_nan_is_carried_through_and_enters_no_residual(two: Ranks) -> None:
    two.run(nonfinite)


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


# ---------------------------------------------------------------------------- attaching


def detaches(rank: int, world: int) -> None:
    net = model()
    ddp = wrap(net)
    first = gradwire.attach(ddp, "reliable")
    with pytest.raises(gradwire.ConfigError, match="already attached"):
        gradwire.attach(ddp)
    train(ddp, rank, range(3))
    engine = first._pipeline.communicator._host
    first.detach()
    first.detach()
    changes: list[Callable[[], object]] = [
        first.flush,
        lambda: first.loss(1.0),
        lambda: first.epoch(3),
        lambda: setattr(first, "phase", None),
        lambda: setattr(first, "grad_scale", 2.0),
        lambda: first.load_state_dict({}),
        lambda: first.calibrate(lambda *_: torch.zeros(()), None),
    ]
    for change in changes:
        with pytest.raises(gradwire.GradwireError, match="detached: attach the module again"):
            change()
    assert first.report().step == 2
    assert first.state_dict()["step"] == 3
    reference = model()
    reference.load_state_dict(net.state_dict())
    expected = average_of(local_gradients(reference, batch(rank, 9)))
    net.zero_grad()
    ddp(batch(rank, 9)).square().mean().backward()  # over gloo
    torch.testing.assert_close(gradients(net), expected, rtol=1e-6, atol=1e-9)
    assert first.step == 3
    second = gradwire.attach(ddp, "mlt", p=0.1)
    assert second._pipeline.communicator._host is engine  # one engine per process
    train(ddp, rank, range(3, 6))
    assert second.report().step == 2
    assert second.report().policy == "mlt"
    second.detach()


def test_detach_forwards_to_the_host_group_and_attach_comes_back(two: Ranks) -> None:
    two.run(detaches)


def comes_back(rank: int, world: int) -> tuple[float, float]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(2))
    attachment.detach()
    before = attachment._pipeline.communicator.counters()["packets_sent"]
    kept = attachment if rank == 0 else None  # rank 1 lets go of the old attachment
    del attachment
    gc.collect()
    again = gradwire.attach(ddp, "mlt", p=0.1)
    del kept
    gc.collect()
    after = again._pipeline.communicator.counters()["packets_sent"]
    train(ddp, rank, range(2, 4))
    again.detach()
    return before, after


def test_attach_comes_back_to_the_open_engine_whoever_holds_the_old_attachment(
    two: Ranks,
) -> None:
    for before, after in two.run(comes_back):
        assert after >= before > 0


def foreign(rank: int, world: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp = wrap(model())
    ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(gradwire.ConfigError, match="already has the communication hook 'allreduc"):
        gradwire.attach(ddp)
    other = wrap(model())
    other._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(gradwire.ConfigError, match="one hook for its whole life"):
        gradwire.attach(other)
    with pytest.raises(gradwire.ConfigError, match="a Sequential: wrap it first"):
        gradwire.attach(model())  # type: ignore[arg-type]


def test_a_foreign_hook_is_an_error(two: Ranks) -> None:
    two.run(foreign)


def bare(rank: int, world: int) -> None:
    net, reference = model(), model()
    ddp = wrap(net)
    ddp.register_comm_hook(gradwire.HookState("reliable"), gradwire.comm_hook)
    for step in range(3):
        expected = average_of(local_gradients(reference, batch(rank, step)))
        net.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        assert torch.equal(gradients(net), expected)
    wrong = wrap(model())
    wrong.register_comm_hook(None, gradwire.comm_hook)
    with pytest.raises(Exception, match="HookState"):
        wrong(batch(rank, 0)).square().mean().backward()


def test_the_bare_hook_opens_when_first_used(two: Ranks) -> None:
    two.run(bare)


def disagrees(rank: int, world: int) -> str:
    ddp = wrap(model())
    with pytest.raises(gradwire.RendezvousError) as raised:
        gradwire.attach(ddp, "mlt", p=0.1 * (rank + 1))
    train(ddp, rank, range(1))  # the module works on, over gloo
    attachment = gradwire.attach(ddp, "mlt", p=0.1)
    train(ddp, rank, range(1, 2))
    attachment.detach()
    return str(raised.value)


def test_another_policy_on_a_rank_is_named_by_all(two: Ranks) -> None:
    for message in two.run(disagrees):
        assert "rank 1 has mlt.p=0.2, rank 0 has mlt.p=0.1" in message


def pickles(rank: int, world: int) -> None:
    import copy
    import pickle

    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    train(ddp, rank, range(1))
    state = pickle.loads(pickle.dumps(ddp._comm_hooks[0][1]))
    assert state.active
    twin = copy.deepcopy(ddp.module)
    assert fingerprint(twin) == fingerprint(ddp.module)
    attachment.detach()


def test_the_hooks_state_can_be_pickled_with_its_module(two: Ranks) -> None:
    two.run(pickles)


# ---------------------------------------------------------------------------- order of ops


class SlowStage(_DirectStage):
    """Waits for its copy, as if the bucket lay on a CUDA device."""

    waits = True
    delay_s = 0.0

    def host(self) -> NDArray[np.float32]:
        time.sleep(self.delay_s)
        self.delay_s = 0.0
        return super().host()


def slow(attachment: gradwire.Attachment, delay_s: float) -> None:
    def stage(index: int, buffer: torch.Tensor, encode: object = None) -> SlowStage:
        made = SlowStage(buffer)
        made.delay_s = delay_s
        return made

    attachment._pipeline._stages.stage = stage  # type: ignore[method-assign]


def two_at_once(rank: int, world: int, staged: int) -> None:
    """The first model's copies are the slow ones on rank 0, the second one's on rank 1."""
    nets, references = [model(), model()], [model(), model()]
    ddps = [wrap(net) for net in nets]
    attachments = [gradwire.attach(ddp, "reliable", timeout=20) for ddp in ddps]
    for number, attachment in enumerate(attachments[:staged]):
        slow(attachment, 0.03 if number == rank else 0.0)
    for step in range(3):
        x = batch(rank, step)
        expected = [
            average_of(local_gradients(net, sign * x))
            for net, sign in zip(references, (1, -1), strict=True)
        ]
        for net in nets:
            net.zero_grad()
        losses = [ddp(sign * x).square().mean() for ddp, sign in zip(ddps, (1, -1), strict=True)]
        sum(losses, start=torch.zeros(())).backward()
        for net, want in zip(nets, expected, strict=True):
            assert torch.equal(gradients(net), want)
    for attachment in attachments:
        attachment.detach()


@pytest.mark.parametrize("staged", [0, 1, 2])
def test_two_models_in_one_backward_keep_their_gradients_apart(two: Ranks, staged: int) -> None:
    """However long their copies take on each rank, and if only one of them has any."""
    two.run(two_at_once, staged=staged)


def swapped(rank: int, world: int) -> str:
    """Each rank sends the buckets of another model first: what an unordered backward would do."""
    ddps = [wrap(model()), wrap(model())]
    attachments = [gradwire.attach(ddp, "reliable", timeout=20) for ddp in ddps]
    assert [a._pipeline._number for a in attachments] == [0, 1]

    def backward() -> None:
        for ddp in ddps if rank == 0 else reversed(ddps):
            ddp.require_forward_param_sync = False
            ddp(batch(rank, 0)).square().mean().backward()

    with pytest.raises(RuntimeError) as raised:
        backward()
    for attachment in attachments:
        attachment.detach()
    return str(raised.value)


def test_ops_in_another_order_are_an_error_and_no_sum() -> None:
    with Ranks(2, GRADWIRE_PEER_TIMEOUT="10", GRADWIRE_RENDEZVOUS_TIMEOUT="20") as ranks:
        messages = ranks.run(swapped)
    assert all("plan" in message and "rank" in message for message in messages)


def numbers(rank: int, world: int) -> list[int]:
    def attach() -> gradwire.Attachment:
        return gradwire.attach(wrap(model()), "reliable")

    first, second = attach(), attach()
    seen = [first._pipeline._number, second._pipeline._number]
    first.detach()
    third = attach()
    first.detach()  # again: no harm to the third
    fourth = attach()
    seen += [third._pipeline._number, fourth._pipeline._number]
    for attachment in (second, third, fourth):
        attachment.detach()
    wrong = wrap(model())
    with pytest.raises(gradwire.RendezvousError):
        gradwire.attach(wrong, "mlt", p=0.1 * (rank + 1))
    last = attach()
    seen.append(last._pipeline._number)
    last.detach()
    return seen


def test_attachments_are_numbered_alike_and_numbers_come_back(two: Ranks) -> None:
    first, second = two.run(numbers)
    assert first == second
    lowest = first[0]  # the bare hook of another test may still hold one
    assert [number - lowest for number in first] == [0, 1, 0, 2, 0]


# ---------------------------------------------------------------------------- lossy training


@dataclass
class Encoded(MLT):
    """A bounded loss and an encoding; names no published system."""

    name: ClassVar[str] = "encoded"
    encoding: str = "f16"
    kept: float = 1.0

    def plan(self, context: PlanContext) -> TransferPlan:
        return replace(super().plan(context), encoding=self.encoding, kept=self.kept)


ENCODINGS = {
    "f16": {"encoding": "f16"},
    "bf16": {"encoding": "bf16"},
    "int8": {"encoding": "int8"},
    "topk": {"encoding": "topk", "kept": 0.05},
}


def replicas(rank: int, world: int, steps: int, **options: Any) -> tuple[bytes, Any]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, **options)
    set_drop(attachment, 0.03, 4.0)
    try:
        train(ddp, rank, range(steps), lr=0.01)
    finally:
        set_drop(attachment, 0.0)
    report = attachment.report()
    attachment.detach()
    return fingerprint(ddp), (report.delivered, report.bound, report.verdict, report.step)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "dblp", "pull": "exact"},
        {"policy": "dblp", "pull": "committed"},
        {"policy": "dblp", "control": "probe", "pull": "exact"},
        {"policy": "dblp", "spend": "lost", "error_feedback": True},
        {"policy": "mlt", "p": 0.2, "pull": "committed", "error_feedback": True},
        {"policy": "mlt", "p": 0.2, "fill": "mean"},
        {"policy": "mlt", "p": 0.2, "priority": "both", "class_dscp": True},
        {"policy": "dblp", "p_low": {"*.weight": 0.1, "*": 0.0}, "every": 3},
        {"policy": "ltp", "every": 5},
        {"policy": "optireduce", "warmup": 5, "floor": 0.0},
        {"policy": "netsenseml", "share": 0.01},
        {"policy": "adaptive", "every": 5},
        {"policy": "plot", "table": {"0.*": 0.05, "*.weight": 0.3}},
        {"policy": "dblp", "detector": "paper", "every": 3, "eta": 0.01},
        {"policy": "reliable"},
        {"policy": Encoded(p=0.2, encoding="f16"), "error_feedback": True},
        {"policy": Encoded(p=0.2, encoding="int8", pull="committed")},
        {"policy": Encoded(p=0.1, encoding="topk", kept=0.1), "error_feedback": True},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_replicas_stay_bit_identical_under_loss(two: Ranks, options: dict[str, Any]) -> None:
    (first, report), (second, _) = two.run(replicas, steps=40, timeout=120, **options)
    assert first == second
    delivered, bound, _, step = report
    assert step == 39
    if options["policy"] not in ("ltp", "optireduce"):  # by time: the deadline may exceed the bound
        assert delivered >= 1 - bound - 1e-9


def drifting(rank: int, world: int, **options: Any) -> tuple[bytes, bytes, int]:
    """Parameters after lossy steps, the gradient of an exact step after them, and passes."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, error_feedback=True, **options)
    set_drop(attachment, 0.1, 4.0)
    try:
        train(ddp, rank, range(30), lr=0.01)
    finally:
        set_drop(attachment, 0.0)
    passes = attachment.report().passes
    attachment.flush()
    ddp.zero_grad()
    ddp(batch(rank, 30)).square().mean().backward()
    exact = gradients(ddp).numpy().tobytes()
    residuals = attachment.state_dict()["residuals"]
    assert isinstance(residuals, dict)
    assert not any(r.any() for r in residuals.values())
    attachment.detach()
    return fingerprint(ddp), exact, passes


@pytest.mark.parametrize("control", ["probe", "stream"])
def test_a_lossy_pull_lets_replicas_drift_and_a_flush_is_exact(two: Ranks, control: str) -> None:
    options = {"policy": "mlt", "p": 0.2, "control": control, "pull": "lossy"}
    first, second = two.run(drifting, timeout=120, **options)
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert (first[2] > 0) == (control == "probe")


def given_back(rank: int, world: int, **encoding: Any) -> tuple[float, float]:
    """Without an optimizer: what was applied over many steps against the true sum."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, Encoded(p=0.5, **encoding), error_feedback=True)
    reference = model()
    true = torch.zeros_like(gradients_like(reference))
    applied = torch.zeros_like(true)
    for step in range(12):
        true += average_of(local_gradients(reference, batch(rank, step)))
        if step == 11:
            attachment.flush()
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        applied += gradients(ddp)
    assert attachment.report().delivered == 1.0
    residuals = attachment.state_dict()["residuals"]
    assert isinstance(residuals, dict)
    left = sum(float(r.abs().sum()) for r in residuals.values())
    attachment.detach()
    return float((applied - true).norm() / true.norm()), left


def gradients_like(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("encoding", [{"encoding": "f32"}, *ENCODINGS.values()], ids=str)
def test_feedback_gives_everything_back_by_a_flush(two: Ranks, encoding: dict[str, Any]) -> None:
    """What was lost, and what the encoding took of pushes and of results."""
    for error, left in two.run(given_back, **encoding):
        assert error < 1e-5
        assert left == 0.0


def votes(rank: int, world: int) -> list[str]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "dblp", every=1, eta=1000.0)
    seen = []
    for step in range(9):
        if step == 4 and rank == 1:
            attachment.phase = "critical"
        if step == 6 and rank == 1:
            attachment.phase = None
        train(ddp, rank, range(step, step + 1))
        seen.append(attachment.report().phase)
    with pytest.raises(gradwire.ConfigError, match="phase='fast'"):
        attachment.phase = "fast"  # type: ignore[assignment]
    attachment.detach()
    return seen


def test_a_vote_of_one_rank_rules_all_from_the_next_step(two: Ranks) -> None:
    for seen in two.run(votes):
        assert seen == [
            "critical",
            "critical",
            "tolerant",
            "tolerant",
            "tolerant",  # the vote travels
            "critical",
            "critical",  # its withdrawal travels
            "tolerant",
            "tolerant",
        ]


def drops_and_skips(rank: int, world: int) -> tuple[bytes, list[tuple[str, str]]]:
    """An optimizer given to attach: its rate's drop is critical, and it skips guarded steps."""
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    attachment = gradwire.attach(
        ddp,
        "dblp",
        optimizer=optimizer,
        every=2,
        eta=1e6,
        p_low=0.1,
        p_high=0.5,
        detector="layers",
        floor=0.8,
        guard="skip",
    )
    seen = []
    for step in range(12):
        if step == 7:
            optimizer.param_groups[0]["lr"] = 0.005
        before = fingerprint(ddp)
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
        report = attachment.report()
        assert (fingerprint(ddp) == before) == (report.guard == "skipped")
        seen.append((report.phase, report.guard))
    attachment.detach()
    optimizer.zero_grad()
    ddp(batch(rank, 12)).square().mean().backward()
    before = fingerprint(ddp)
    optimizer.step()
    assert fingerprint(ddp) != before
    return fingerprint(ddp), seen


def test_an_optimizer_is_watched_and_held_back(two: Ranks) -> None:
    (first, seen), (second, _) = two.run(drops_and_skips)
    assert first == second
    assert seen[:4] == [("critical", "")] * 4
    assert ("tolerant", "skipped") in seen[4:8]
    assert seen[8][0] == "critical"  # the drop was told in step 7


def resends(rank: int, world: int) -> list[str]:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "ltp", every=3, floor=1.0)
    seen = []
    for step in range(8):
        if step == 5:
            set_drop(attachment, 0.2, 4.0)
        train(ddp, rank, range(step, step + 1), lr=0.01)
        seen.append(attachment.report().guard)
        assert attachment.report().delivered == 1.0
    set_drop(attachment, 0.0)
    attachment.detach()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, fingerprint(ddp))
    assert everybody[0] == everybody[1]
    return seen


def test_the_guard_resends_on_all_ranks(two: Ranks) -> None:
    first, second = two.run(resends)
    assert first == second
    assert set(first) <= {"", "resent"}


def scaled(rank: int, world: int) -> None:
    """A loss scale that jumps is no change of phase, and residuals follow it."""
    ddp = wrap(model())
    attachment = gradwire.attach(
        ddp, "dblp", every=1, eta=0.5, p_low=0.4, p_high=0.5, error_feedback=True
    )
    true, applied = torch.zeros(()), torch.zeros(())
    reference = model()
    for step in range(8):
        scale = 1.0 if step < 4 else 1024.0
        attachment.grad_scale = scale
        if step == 7:
            attachment.flush()
        x = batch(rank, 0)  # the same each time: the norm stays
        true = true + average_of(local_gradients(reference, x))
        ddp.zero_grad()
        (scale * ddp(x).square().mean()).backward()
        applied = applied + gradients(ddp) / scale
        if step >= 2:
            assert attachment.phase == "tolerant"
    assert attachment.report().verdict == "fixed bound"
    assert float((applied - true).norm() / true.norm()) < 1e-4
    with pytest.raises(gradwire.ConfigError, match="grad_scale=0"):
        attachment.grad_scale = 0
    attachment.detach()


def test_a_gradient_scaler_is_followed(two: Ranks) -> None:
    two.run(scaled)


def overflows(rank: int, world: int) -> None:
    """A step that a scaler skips for one rank's overflow takes nothing of what was owed."""
    ddp, reference = wrap(model()), model()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    attachment = gradwire.attach(
        ddp,
        "mlt",
        p=0.5,
        spend="anything",
        error_feedback=True,
        optimizer=optimizer,
        scaler=scaler,
    )
    true, applied, scales = torch.zeros(()), torch.zeros(()), []
    for step in range(9):
        if step == 8:
            attachment.flush()
        x = batch(rank, step)
        optimizer.zero_grad()
        loss = ddp(x).square().mean() * (1e38 if (step, rank) == (4, 1) else 1.0)
        scaler.scale(loss).backward()
        found = gradients(ddp)
        scales.append(attachment.grad_scale)
        assert bool(found.isfinite().all()) == (step != 4)
        if step != 4:
            true = true + average_of(local_gradients(reference, x))
            applied = applied + found / scales[-1]
        scaler.step(optimizer)
        scaler.update()
    assert scales == [1024.0] * 3 + [2048.0] * 2 + [1024.0] * 3 + [2048.0]
    assert float((applied - true).norm() / true.norm()) < 1e-4
    attachment.detach()


def test_a_step_that_a_scaler_skips_owes_what_was_owed(two: Ranks) -> None:
    two.run(overflows)


def test_what_is_no_scaler_is_refused() -> None:
    with pytest.raises(
        gradwire.ConfigError, match=r"scaler=1024: a torch\.amp\.GradScaler, or None"
    ):
        gradwire.HookState("reliable", scaler=1024)  # type: ignore[arg-type]


def resumes(rank: int, world: int) -> tuple[bytes, bytes]:
    options: dict[str, Any] = {"policy": "dblp", "every": 3, "error_feedback": True, "p_low": 0.2}
    straight = wrap(model())
    attachment = gradwire.attach(straight, **options)
    train(straight, rank, range(4))
    train(straight, rank, range(4, 12))
    attachment.detach()
    stopped = wrap(model())
    attachment = gradwire.attach(stopped, **options)
    train(stopped, rank, range(4))
    state = attachment.state_dict()
    attachment.detach()
    resumed = wrap(model())
    resumed.module.load_state_dict(stopped.module.state_dict())
    attachment = gradwire.attach(resumed, **options)
    attachment.load_state_dict(state)
    train(resumed, rank, range(4, 12))
    assert attachment.step == 12
    attachment.detach()
    with pytest.raises(gradwire.GradwireError, match="detached"):
        attachment.load_state_dict(state)
    return fingerprint(straight), fingerprint(resumed)


def test_a_resumed_run_decides_as_the_first_would(two: Ranks) -> None:
    (_, first), (_, second) = two.run(resumes)
    assert first == second


def ages_resume(rank: int, world: int) -> None:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.5)
    train(ddp, rank, range(3))
    state = attachment.state_dict()
    ages = state["ages"]
    assert isinstance(ages, dict)
    assert ages
    sizes = {name: p.numel() for name, p in ddp.module.named_parameters()}
    assert all(int(runs[:, 0].sum()) == sizes[name] for name, runs in ages.items())
    attachment.detach()
    attachment = gradwire.attach(ddp, "mlt", p=0.5)
    attachment.load_state_dict(state)
    again = attachment.state_dict()["ages"]
    assert isinstance(again, dict)
    assert {name: runs.tolist() for name, runs in again.items()} == {
        name: runs.tolist() for name, runs in ages.items()
    }
    attachment.flush()
    train(ddp, rank, range(3, 4))
    assert attachment.state_dict()["ages"] == {}
    del state["ages"]  # as saved before ages were
    attachment.load_state_dict(state)
    attachment.detach()


def test_ages_are_saved_and_emptied_with_the_residuals(two: Ranks) -> None:
    two.run(ages_resume)


def reports(rank: int, world: int, path: str) -> None:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "mlt", p=0.2, report=path)
    with pytest.raises(gradwire.GradwireError, match="no step"):
        attachment.report()
    for wrong in ("0.5", None, torch.zeros(2), True, 1j):
        with pytest.raises(gradwire.ConfigError, match="a number, or a tensor that holds one"):
            attachment.loss(wrong)  # type: ignore[arg-type]
    for wrong in (-1, 0.5, "1", True, 10**400):
        with pytest.raises(gradwire.ConfigError, match=r"epoch=.*: a whole number from 0"):
            attachment.epoch(wrong)  # type: ignore[arg-type]
    attachment.epoch(np.int64(0))  # type: ignore[arg-type]
    for wrong in (0.0, float("nan"), "1", True, 10**400):
        with pytest.raises(gradwire.ConfigError, match=r"grad_scale=.*: a finite number above 0"):
            attachment.grad_scale = wrong  # type: ignore[assignment]
    attachment.grad_scale = torch.tensor([1.0]).squeeze()  # type: ignore[assignment]
    for step in range(3):
        attachment.loss(torch.tensor([float(rank)], requires_grad=True))
        train(ddp, rank, range(step, step + 1))
    assert attachment.report().agreed.loss == 0.5
    attachment.detach()


def test_every_step_writes_a_line(two: Ranks, tmp_path: Path) -> None:
    two.run(reports, path=str(tmp_path / "steps.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["rank"] == 0
        assert line["bytes"] > 0
        assert line["packets"] > 0
        assert 0 < line["push_s"] <= line["comm_s"]
        assert line["rtprop_s"] > 0
        assert line["btlbw"] >= 0  # 0: not known yet
        assert line["bound"] == 0.2
        assert 0 < line["effective_bound"] <= 0.2
        assert all(region["delivered"] >= 0.8 for region in line["regions"])


def subgroup(rank: int, world: int) -> int:
    groups = [dist.new_group([each]) for each in range(world)]
    pair = dist.new_group(list(range(world)))
    single = DistributedDataParallel(model(), process_group=groups[rank])
    attachment = gradwire.attach(single, "reliable")
    expected = local_gradients(model(), batch(rank, 0))
    single(batch(rank, 0)).square().mean().backward()
    assert torch.equal(gradients(single), expected)
    attachment.detach()
    both = DistributedDataParallel(model(), process_group=pair)
    attachment = gradwire.attach(both, "reliable")
    train(both, rank, range(2))
    attachment.detach()
    communicator: Communicator = attachment._pipeline.communicator
    return communicator.world_size


def test_groups_with_other_members_are_apart(two: Ranks) -> None:
    assert two.run(subgroup) == [2, 2]


def no_report(rank: int, world: int, path: str) -> tuple[str, str]:
    ddp = wrap(model())
    with pytest.raises((gradwire.ConfigError, gradwire.RendezvousError)) as raised:
        gradwire.attach(ddp, "mlt", p=0.2, report=path)
    attachment = gradwire.attach(ddp, "mlt", p=0.2)  # the module is none the worse
    train(ddp, rank, range(2))
    attachment.detach()
    return type(raised.value).__name__, str(raised.value)


def test_a_report_that_one_rank_cannot_open_fails_on_all_before_the_first_step(two: Ranks) -> None:
    for name in ("steps.jsonl", "{rank}.jsonl"):
        path = f"/no/such/folder/{name}"
        started = time.monotonic()
        outcomes = two.run(no_report, path=path)
        assert time.monotonic() - started < 10
        for rank, (kind, message) in enumerate(outcomes):
            assert f"report={path!r}" in message
            assert "cannot be opened for writing: No such file or directory" in message
            if rank == 0 or "{rank}" in name:
                assert kind == "ConfigError"
            else:
                assert (kind, message[:13]) == ("RendezvousError", "rank 0 failed")


def fails(rank: int, world: int) -> None:
    raise OSError("no such luck")


def test_a_failure_in_a_rank_is_reported_by_the_harness(two: Ranks) -> None:
    outcome = two.outcomes(fails)[0]
    assert isinstance(outcome, Failed)
