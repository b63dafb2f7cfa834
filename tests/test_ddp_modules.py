"""Which modules attach() takes, compiled ones and copies among them, and what it says to others."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import (  # type: ignore[attr-defined]
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import (
    average_of,
    batch,
    fingerprint,
    gradients,
    local_gradients,
    model,
    train,
    wrap,
)
from own_state import own_state
from ranks import Ranks

BY_FSDP = torch.__version__ >= "2.10"
"""Whether torch has the `replicate` that is made of fully_shard, with a mesh of one dimension."""


def compiled(module: nn.Module) -> OptimizedModule:
    made = torch.compile(module, backend="aot_eager")
    assert isinstance(made, OptimizedModule)
    return made


def check_steps(
    module: nn.Module, rank: int, steps: range, attachment: gradwire.Attachment | None = None
) -> None:
    """Raises unless the gradients are the ranks' average, carried by the attachment if one is
    given."""
    reference = model()
    parameters = list(module.parameters())
    for step in steps:
        with torch.no_grad():
            for own, other in zip(reference.parameters(), parameters, strict=True):
                own.copy_(other)
        expected = average_of(local_gradients(reference, batch(rank, step)))
        module.zero_grad()
        module(batch(rank, step)).square().mean().backward()
        torch.testing.assert_close(gradients(module), expected, rtol=1e-5, atol=1e-7)
    if attachment is not None:
        assert attachment.step == len(steps)


# ---------------------------------------------------------------------------- compiled modules


class FabricModule(nn.Module):
    """A module as Lightning's Fabric wraps it."""

    def __init__(self, forward_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._forward_module(x)
        return out


def fabrics(rank: int, world: int) -> None:
    outer = FabricModule(wrap(model()))
    for module in (outer, compiled(outer)):
        attachment = gradwire.attach(module, "reliable")
        check_steps(outer, rank, range(2), attachment)
        attachment.detach()


def test_a_module_of_fabric_is_looked_through(two: Ranks) -> None:
    two.run(fabrics)


def compiled_outside(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(model())  # small buckets are not for torch's DDPOptimizer
    outer = compiled(ddp)
    for module in (outer, OptimizedModule(outer, outer.dynamo_ctx)):
        attachment = gradwire.attach(module, "reliable")
        check_steps(outer, rank, range(3), attachment)
        attachment.detach()


def test_a_compiled_ddp_module_is_looked_through(two: Ranks) -> None:
    two.run(compiled_outside)


def compiled_inside(rank: int, world: int) -> None:
    """The state of the plain model fits the compiled one, and what it owes is called as there."""
    net, options = model(), {"p": 0.3, "spend": "anything", "error_feedback": True}
    names = [name for name, _ in net.named_parameters()]
    ddp = wrap(net)
    attachment = gradwire.attach(ddp, "mlt", **options)
    train(ddp, rank, range(3))
    state = own_state(attachment.state_dict())
    attachment.detach()
    for inner in (compiled(model()), nn.Sequential(*map(compiled, model()))):
        ddp = DistributedDataParallel(inner)
        attachment = gradwire.attach(ddp, "mlt", **options)
        attachment.load_state_dict(state)
        before, after = state["residuals"], own_state(attachment.state_dict())["residuals"]
        assert sorted(before) == sorted(after) == sorted(names)
        assert all(torch.equal(before[name], after[name]) for name in names)
        train(ddp, rank, range(2))
        assert attachment.step == 5
        attachment.detach()


def test_tensors_of_a_compiled_model_are_called_as_those_of_the_plain_one(two: Ranks) -> None:
    two.run(compiled_inside)


def python_reducer(rank: int, world: int) -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp, bare = wrap(model()), wrap(model())
    for module in (ddp, compiled(ddp)):
        with pytest.raises(gradwire.ConfigError) as refused:
            gradwire.attach(module, "reliable")
        assert refused.value.setting == "torch._dynamo.config.optimize_ddp"
        assert refused.value.value == "python_reducer"
    bare.register_comm_hook(gradwire.HookState("reliable", model=bare.module), gradwire.comm_hook)
    with pytest.raises(gradwire.ConfigError) as refused:
        bare(batch(rank, 0)).square().mean().backward()
    assert refused.value.setting == "torch._dynamo.config.optimize_ddp"


def test_the_python_reducer_is_refused_by_name(two: Ranks) -> None:
    two.run(python_reducer)


def reducer_set_later(rank: int, world: int) -> None:
    """What counts is how the module was made: the setting is of no consequence afterwards."""
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        check_steps(compiled(ddp), rank, range(2), attachment)
        check_steps(ddp, rank, range(2))
    attachment.detach()


def test_the_reducer_s_setting_may_change_after_attach(two: Ranks) -> None:
    two.run(reducer_set_later)


# ---------------------------------------------------------------------------- other modules


class LightningModule(nn.Module):
    """Called as Lightning's is."""


LightningModule.__module__ = "lightning.pytorch.core.module"


class DeepSpeedEngine(nn.Module):
    """Called as DeepSpeed's is."""


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


class Wrapper(nn.Module):
    """A framework's module around a DDP module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wrap(model())


def kinds() -> dict[str, object]:
    known: dict[str, object] = {}
    if BY_FSDP:
        from torch.distributed._composable.replicate_with_fsdp import replicate as by_fsdp

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        known["replicate by FSDP"] = by_fsdp(model(), mesh=mesh)
    return known | {
        "plain": model(),
        "compiled": compiled(model()),
        "data parallel": nn.DataParallel(model()),
        "FSDP1": FullyShardedDataParallel(model(), device_id=torch.device("cpu")),
        "replicate": replicate(model()),
        "around a DDP module": Wrapper(),
        "Lightning": LightningModule(),
        "DeepSpeed": DeepSpeedEngine(),
        "no module": "model",
    }


def advised(rank: int, world: int) -> dict[str, tuple[str, object, str]]:
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, module in kinds().items():
            with pytest.raises(gradwire.ConfigError) as refused:
                gradwire.attach(module)  # type: ignore[arg-type]
            error = refused.value
            found[kind] = error.setting, error.value, error.allowed
    return found


def test_each_kind_of_module_has_its_own_advice(two: Ranks) -> None:
    first, second = two.run(advised)
    assert first == second
    assert {setting for setting, _, _ in first.values()} == {"model"}
    assert first["FSDP1"][1] == "FullyShardedDataParallel"
    assert first["no module"][1] == "str"
    words = {
        "plain": "model = DistributedDataParallel(model)",
        "compiled": "model = DistributedDataParallel(model)",
        "data parallel": "in place of DataParallel",
        "FSDP1": "in place of FSDP",
        "replicate": "in place of replicate",
        "replicate by FSDP": "hands that all-reduce to nobody",
        "around a DDP module": "attach(model.inner)",
        "Lightning": "trainer.strategy.model",
        "DeepSpeed": "DeepSpeed",
        "no module": "the module that DistributedDataParallel returned",
    }
    assert first.keys() == words.keys() - (set() if BY_FSDP else {"replicate by FSDP"})
    for kind, found in first.items():
        assert words[kind] in found[2], kind
    refused = {"FSDP1", "replicate", "around a DDP module"}
    for kind in refused:  # to wrap those would be an error, or reduce twice
        assert "DistributedDataParallel(model)" not in first[kind][2]


def delayed(rank: int, world: int) -> None:
    """Parameters whose gradients DDP reduces apart would stay with the process group."""
    net = model()
    named = list(net.named_parameters())
    ddp = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=named[:2],
        param_to_hook_all_reduce=named[2][1],
    )
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.attach(ddp)
    assert refused.value.setting == "delay_all_reduce_named_params"


def test_gradients_that_reach_no_hook_are_refused(two: Ranks) -> None:
    two.run(delayed)


# ---------------------------------------------------------------------------- optimizers


def idle_optimizers(rank: int, world: int) -> None:
    ddp = wrap(model())
    overlapped = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True
    )
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.attach(ddp, "reliable", optimizer=overlapped)
    assert refused.value.setting == "optimizer"
    assert refused.value.value == "ZeroRedundancyOptimizer"
    with pytest.raises(gradwire.ConfigError):
        gradwire.HookState("reliable", model=ddp.module, optimizer=overlapped)
    stepping = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    attachment = gradwire.attach(ddp, "reliable", optimizer=stepping)
    for step in range(2):
        stepping.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        stepping.step()
    assert attachment.step == 2
    attachment.detach()
    other = model()
    _apply_optimizer_in_backward(torch.optim.SGD, other.parameters(), {"lr": 0.1})
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.attach(wrap(other), "reliable")
    assert refused.value.setting == "optimizer"


def test_an_optimizer_whose_step_does_nothing_is_refused(two: Ranks) -> None:
    two.run(idle_optimizers)


# ---------------------------------------------------------------------------- copies


def saved(ddp: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded: DistributedDataParallel = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[DistributedDataParallel], DistributedDataParallel]] = {
    "deepcopy": copy.deepcopy,
    "save": saved,
}


def copied(rank: int, world: int, way: str, detached: bool) -> None:
    ddp = wrap(model())
    first = gradwire.attach(ddp, "mlt", p=0.0)
    check_steps(ddp, rank, range(2), first)
    if detached:
        first.detach()
    twin = COPIES[way](ddp)
    check_steps(twin, rank, range(2))  # over its process group
    second = gradwire.attach(twin, "reliable")
    assert second.policy.name == "reliable"
    check_steps(twin, rank, range(3), second)
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.attach(twin)
    assert refused.value.setting == "model"
    if not detached:
        check_steps(ddp, rank, range(2, 4))
        assert first.step == 4
        first.detach()
    second.detach()
    third = gradwire.attach(twin, "mlt", p=0.0)
    check_steps(twin, rank, range(2), third)
    third.detach()


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_attached_module_can_be_attached(two: Ranks, way: str, detached: bool) -> None:
    two.run(copied, way=way, detached=detached)


def by_hand(rank: int, world: int) -> None:
    """The bare hook stays who registered it; attach cannot take its place."""
    ddp = wrap(model())
    ddp.register_comm_hook(gradwire.HookState("reliable", model=ddp.module), gradwire.comm_hook)
    with pytest.raises(gradwire.ConfigError) as refused:
        gradwire.attach(ddp)
    assert refused.value.setting == "model"
    check_steps(ddp, rank, range(2))
    twin = copy.deepcopy(ddp)  # which has no hook any more
    attachment = gradwire.attach(twin, "reliable")
    check_steps(twin, rank, range(2), attachment)
    attachment.detach()


def test_a_hook_registered_by_hand_is_not_taken_over(two: Ranks) -> None:
    two.run(by_hand)


def copied_parts(rank: int, world: int) -> None:
    ddp = wrap(model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    attachment = gradwire.attach(ddp, "reliable", optimizer=optimizer, scaler=scaler)
    check_steps(ddp, rank, range(1), attachment)
    for part in (optimizer, scaler, attachment.policy, attachment.report(), ddp.module):
        copy.deepcopy(part)
        torch.save(part, io.BytesIO())
    communicator: Any = attachment.communicator
    for live in (attachment, communicator):
        for way in (copy.copy, copy.deepcopy, lambda each: torch.save(each, io.BytesIO())):
            with pytest.raises(TypeError, match=type(live).__name__):
                way(live)
    attachment.detach()


def test_what_is_connected_is_not_copied_and_says_so(two: Ranks) -> None:
    two.run(copied_parts)


# ---------------------------------------------------------------------------- uneven inputs


def uneven(rank: int, world: int, policy: str, options: dict[str, Any]) -> list[bytes]:
    """Rank 1 has more batches; what comes of it by gradwire, and by gloo."""
    prints = []
    for over_gradwire in (True, False):
        ddp = wrap(model())
        attachment = gradwire.attach(ddp, policy, **options) if over_gradwire else None
        with ddp.join():
            train(ddp, rank, range(3 + 4 * rank))
        if attachment is not None:
            assert attachment.step == 7
            train(ddp, rank, range(7, 9))
            assert attachment.step == 9
            attachment.detach()
        else:
            train(ddp, rank, range(7, 9))
        prints.append(fingerprint(ddp))
    return prints


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("reliable", {}),
        ("adaptive", {}),
        ("ltp", {"floor": 0.9}),
        ("mlt", {"p": 0.4, "spend": "anything", "floor": 0.9}),
        ("dblp", {"error_feedback": True}),
    ],
)
def test_uneven_inputs(two: Ranks, policy: str, options: dict[str, Any]) -> None:
    outcomes = two.run(uneven, policy=policy, options=options)
    assert outcomes[0] == outcomes[1]
    if policy == "reliable":
        assert outcomes[0][0] == outcomes[0][1]


def uneven_scaled(rank: int, world: int, steps: tuple[int, ...] = (3, 7)) -> bytes:
    """The scale grows while ranks that have joined take no step any more."""
    ddp = wrap(model())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = gradwire.attach(ddp, "adaptive", optimizer=optimizer, scaler=scaler)
    with ddp.join():
        for step in range(steps[rank]):
            optimizer.zero_grad()
            scaler.scale(ddp(batch(rank, step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert attachment.step == 7
    attachment.detach()
    return fingerprint(ddp)


def test_uneven_inputs_beside_a_scaler(two: Ranks) -> None:
    """A joined rank has no gradient, so its scale does not count."""
    first, second = two.run(uneven_scaled)
    assert first == second


def uneven_together(rank: int, world: int) -> list[bytes]:
    modules = [wrap(model()), wrap(model(width=100))]
    attachments = [gradwire.attach(each, "adaptive", floor=0.9) for each in modules]
    with torch.distributed.algorithms.Join(modules):
        for step in range(3 + 4 * rank):
            losses = [each(batch(rank, step)).square().mean() for each in modules]
            torch.stack(losses).sum().backward()
    for each in attachments:
        assert each.step == 7
        each.detach()
    return [fingerprint(each) for each in modules]


def test_uneven_inputs_of_two_modules(two: Ranks) -> None:
    first, second = two.run(uneven_together)
    assert first == second


def divided_otherwise(rank: int, world: int, batches: list[int]) -> None:
    ddp = wrap(model())
    attachment = gradwire.attach(ddp, "reliable")
    with ddp.join(divide_by_initial_world_size=True):
        train(ddp, rank, range(2))
    with (
        pytest.raises(gradwire.ConfigError) as refused,
        ddp.join(divide_by_initial_world_size=False),
    ):
        train(ddp, rank, range(batches[rank]))
    assert refused.value.setting == "divide_by_initial_world_size"
    assert refused.value.value is False
    attachment.detach()


@pytest.mark.parametrize("batches", [[2, 3], [0, 2]])
def test_a_division_by_those_who_are_left_is_refused(two: Ranks, batches: list[int]) -> None:
    two.run(divided_otherwise, batches=batches)
