"""What frameworks put around modules and optimizers, and what is inside."""

from __future__ import annotations

from typing import Any

import torch

MODULES = ("_orig_mod", "_forward_module")
"""The names under which torch.compile and Lightning's Fabric keep the module that they wrap."""


def inner_modules(model: object) -> list[object]:
    """Returns a module and all those that wrappers around it hold, from the outermost one on."""
    found = [model]
    while isinstance(found[-1], torch.nn.Module):
        held = (found[-1]._modules.get(name) for name in MODULES)
        inner = next((module for module in held if module is not None), None)
        if inner is None:
            break
        found.append(inner)
    return found


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that steps, inside the wrappers of Accelerate, Lightning and others.

    They keep it as `optimizer.optimizer`.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
