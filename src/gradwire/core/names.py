"""What a model's tensors are called: alike with and without compilation and checkpoints.

`torch.compile` and activation checkpointing put a module into another one, which adds a part to the
names of all its tensors. A table, a pattern or a saved state would fit one of both models only, so
these parts are left out.
"""

from __future__ import annotations

import torch

__all__ = ["WRAPPED", "named_parameters", "plain_name"]

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
"""What compiled modules, and torch's checkpoint and offload wrappers, call the module inside."""


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The model's parameters by name, in its order; the names are those of the model without
    wrappers, or the model's own where two would be the same then."""
    own = dict(model.named_parameters())
    plain = {plain_name(name): parameter for name, parameter in own.items()}
    return plain if len(plain) == len(own) else own


def plain_name(name: str) -> str:
    """A tensor's or module's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)
