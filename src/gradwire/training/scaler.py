"""SkipWatch: notices that a loss scaler has kept an optimizer from a step.

A scaler decides for each optimizer by all of its gradients: those of several backward passes where
they are summed, those of other modules, and those of parameters that nobody averages. A pipeline
sees in its own results that a pass is not finite. In any other case the scale falls although the
optimizer has not stepped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from gradwire.training.optimizers import NOBODY, Optimizers


@dataclass
class Waiting:
    """The gradients that wait for a step of one optimizer.

    Attributes:
        scale: What they are multiplied by.
        keys: The names under which values of their parameters are kept.
        flushes: Whether they include all that was owed, because the user asked for it.
        stepped: Whether the optimizer has stepped since.
    """

    scale: float
    keys: set[str] = field(default_factory=set)
    flushes: bool = False
    stepped: bool = False


class SkipWatch:
    """Knows which gradients wait for a step of their optimizer."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._waiting: dict[int, Waiting] = {}

    def wait(self, owner: int, keys: Collection[str], scale: float, *, flushes: bool) -> None:
        """Notes gradients of a step that begins.

        Args:
            owner: Who holds their parameters (`Optimizers.owners`).
        """
        waiting = self._waiting.setdefault(owner, Waiting(scale))
        waiting.scale = scale
        waiting.keys.update(keys)
        waiting.flushes = waiting.flushes or flushes

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that an optimizer steps; a fused one does nothing where `found_inf` is set."""
        void = getattr(optimizer, "found_inf", None)
        waiting = self._waiting.get(self._optimizers.index(optimizer))
        if waiting is not None and (void is None or not float(void)):
            waiting.stepped = True

    def overflowed(self, owner: int) -> Waiting | None:
        """Removes and returns what waits for an optimizer, which will not step with it."""
        return self._waiting.pop(owner, None)

    def skipped(self, scale: float) -> list[Waiting]:
        """Removes and returns what optimizers have been kept from, now that this is the scale."""
        return self._remove(
            owner
            for owner, each in self._waiting.items()
            if owner != NOBODY and not each.stepped and scale < each.scale
        )

    def settled(self, scale: float, *, joined: bool) -> list[Waiting]:
        """Removes and returns what waits no longer when another step begins.

        Args:
            joined: Whether this rank has joined, so that its optimizers step no more.
        """
        return self._remove(
            owner
            for owner, each in self._waiting.items()
            if joined or owner == NOBODY or each.stepped or scale != each.scale
        )

    def _remove(self, owners: Iterable[int]) -> list[Waiting]:
        return [self._waiting.pop(owner) for owner in list(owners)]
