"""Checks that a model is a DDP module whose gradients DDP hands over to a communication hook."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.errors import ConfigError

_WRAPPED = ("_orig_mod", "_forward_module")
"""The names under which torch.compile and Lightning's Fabric keep the module that they wrap."""
_OTHERS = (
    "gradwire carries the gradients that DistributedDataParallel averages and those that "
    "fully_shard scatters; wrap the model so in place of {}"
)
_ADVICE = (
    (
        "torch.nn",
        "DataParallel",
        "use DistributedDataParallel, with a process for each device, in place of DataParallel",
    ),
    ("torch.distributed", "FullyShardedDataParallel", _OTHERS.format("FSDP")),
    ("torch.distributed._composable.replicate", "DDP", _OTHERS.format("replicate")),
    (
        "deepspeed",
        "DeepSpeedEngine",
        "DeepSpeed averages gradients itself and hands none over; train with "
        "DistributedDataParallel in place of it",
    ),
    (
        "lightning",
        "LightningModule",
        "Lightning's strategy wraps it: give trainer.strategy.model, in on_train_start of a "
        "callback",
    ),
)
"""Advice by package (a part of its name) and class; subclasses come first."""


def unwrapped(model: object) -> object:
    """Returns the DDP module in a model with wrappers of frameworks, else what they all wrap."""
    while isinstance(model, torch.nn.Module) and not isinstance(model, DistributedDataParallel):
        held = (model._modules.get(name) for name in _WRAPPED)
        inner = next((module for module in held if module is not None), None)
        if inner is None:
            break
        model = inner
    return model


def ddp_of(found: object) -> DistributedDataParallel:
    """Returns the DDP module that was given."""
    if isinstance(found, DistributedDataParallel):
        return found
    kind = type(found).__name__
    raise ConfigError.about(
        f"attach(model) with a {kind}", _advice(found), setting="model", value=kind
    )


def check_hands_over(model: DistributedDataParallel) -> None:
    if getattr(model, "_use_python_reducer", False):
        raise python_reducer()
    if getattr(model, "_delay_all_reduce_params", None):
        raise ConfigError.about(
            "delay_all_reduce_named_params of DistributedDataParallel",
            "DDP averages those gradients apart and hands them to no communication hook; leave it "
            "out",
            setting="delay_all_reduce_named_params",
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise ConfigError.about(
            "optimizers that step in the backward pass (_apply_optimizer_in_backward)",
            "DDP gives them its own communication hook; call optimizer.step() after the backward "
            "pass instead",
            setting="optimizer",
        )


def python_reducer() -> ConfigError:
    """Makes the error of a DDP module that was made under torch's setting "python_reducer"."""
    return ConfigError.of(
        "torch._dynamo.config.optimize_ddp",
        "python_reducer",
        "DDP then averages each gradient by itself and hands no buckets over; set 'ddp_optimizer', "
        "torch's default, before the module is wrapped in DistributedDataParallel",
    )


def _advice(found: object) -> str:
    """Returns what to do with an object that is no DDP module."""
    if not isinstance(found, torch.nn.Module):
        return "give the module that DistributedDataParallel returned"
    for name, module in found.named_modules():
        if isinstance(module, DistributedDataParallel):
            return f"it holds a DDP module, which is the one to give: attach(model.{name})"
    classes = [(kind.__module__, kind.__name__) for kind in type(found).__mro__]
    for package, name, advice in _ADVICE:
        if any(package in home and name == own for home, own in classes):
            return advice
    advice = "wrap it first, as in model = DistributedDataParallel(model)"
    if dist.is_initialized() and dist.get_world_size() > 1:
        return advice
    return f"{advice}; a framework wraps none where it finds one process"
