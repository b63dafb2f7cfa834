"""A contestant of a race is one way to move a buffer; each kind has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOWER_HALVES, _UPPER_HALVES = slice(0, None, 2), slice(1, None, 2)


class Contestant(Protocol):
    """A contestant is one way to move a buffer; every rank of a race has one instance."""

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Connect, before anything is timed.

        Args:
            store: shared by this contestant's ranks and nobody else.
        """

    def run_round(self, buffer: torch.Tensor) -> Mapping[str, Any] | None:
        """Move the buffer once: this is what is timed.

        Args:
            buffer: one-dimensional, float32, filled anew before each round.

        Returns:
            What is worth knowing about this round, as JSON, or None.
        """

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check the result of a round.

        Args:
            buffer: the buffer as `run_round` left it, or a part of it.
            inputs: the value that each rank's buffer was filled with.

        Raises:
            ValueError: it is not what it should be.
        """

    def report(self) -> dict[str, Any]:
        """Return whatever else is worth knowing since `setup`, as JSON."""

    def close(self) -> None:
        """Let go of everything."""


def as_bfloats(buffer: torch.Tensor) -> torch.Tensor:
    """Return the memory of a float32 buffer as bfloat16."""
    return buffer.view(torch.bfloat16)


def upper_halves(buffer: torch.Tensor) -> torch.Tensor:
    """Return the bfloat16 that were the upper halves of float32, as float32.

    Raises:
        ValueError: one that was a lower half, and 0 on all ranks, is not 0.
    """
    values = as_bfloats(buffer)
    if bool(values[_LOWER_HALVES].any()):
        raise ValueError("bfloat16: the sum of zeros is not 0 everywhere")
    return values[_UPPER_HALVES].float()
