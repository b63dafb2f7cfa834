"""The optimizers that step with the gradients of one module, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwire.core.errors import ConfigError
from gradwire.core.regions import TensorSlot

Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""What users give as `optimizer=`: one, a list of several, or None."""


NOBODY = -1
"""Stands for the optimizer of a parameter that is in none of those known."""


def several(given: Any) -> tuple[Any, ...]:
    """Returns the optimizers that a user gave, without the wrappers of frameworks."""
    if given is None:
        return ()
    if isinstance(given, (list, tuple)):
        return tuple(map(_inner, given))
    return (_inner(given),)


def _inner(optimizer: Any) -> Any:
    """Returns the optimizer that steps, inside the wrappers of Accelerate, Lightning and others.

    They keep it as `optimizer.optimizer`.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def kinds(optimizers: Sequence[object]) -> str:
    return ", ".join(type(each).__name__ for each in optimizers) or "None"


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Optimizers:
    """The optimizers of one module.

    Args:
        each: The optimizers; none where they are not known.
        need: Why one of them has to hold each trained parameter, as text; "" where it need not.
    """

    def __init__(self, each: Sequence[torch.optim.Optimizer] = (), need: str = "") -> None:
        self.each = tuple(each)
        self._need = need
        self._owners: dict[tuple[TensorSlot, ...], tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.each)

    def hold(self, parameters: Iterable[torch.Tensor]) -> bool:
        held = {id(parameter) for each in self.each for parameter in held_by(each)}
        return all(id(parameter) in held for parameter in parameters)

    def index(self, optimizer: torch.optim.Optimizer) -> int:
        return next((i for i, each in enumerate(self.each) if each is optimizer), NOBODY)

    def owners(
        self, slots: tuple[TensorSlot, ...], parameters: Sequence[torch.Tensor]
    ) -> tuple[int, ...]:
        """Returns the index of the optimizer that holds each tensor of a bucket, or NOBODY.

        Args:
            slots: The bucket's tensors; those of each shard, one shard after another, where the
                sum is scattered.
            parameters: The bucket's parameters, in order, empty ones included.
        """
        known = self._owners.get(slots)
        if known is None or (self.each and NOBODY in known):  # parameters may have been added
            holder = {id(p): i for i, each in enumerate(self.each) for p in held_by(each)}
            filled = [each for each in parameters if each.numel()]
            held = [holder.get(id(each), NOBODY) for each in filled]
            known = self._owners[slots] = tuple(held * (len(slots) // max(1, len(held))))
        assert len(known) == len(slots)
        return known

    def check(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Checks who holds these parameters, which are trained."""
        holders = [set(map(id, held_by(each))) for each in self.each]
        given = kinds(self.each)
        for name, parameter in parameters:
            count = sum(id(parameter) in each for each in holders)
            if count > 1:
                raise ConfigError.about(
                    f"optimizer={given}",
                    f"more than one holds parameter {name!r}; give those that step with this "
                    "module's gradients, each parameter in one of them",
                    setting="optimizer",
                    value=name,
                )
            if count == 0 and self._need:
                raise ConfigError.about(
                    f"optimizer={given}",
                    f"parameter {name!r} is trained and in none, and {self._need}; give all that "
                    "step with this module's gradients, as in optimizer=[first, second], or set "
                    "requires_grad=False before the module is wrapped",
                    setting="optimizer",
                    value=name,
                )
