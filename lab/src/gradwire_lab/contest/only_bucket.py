"""A bucket of one layer stands for what DDP hands over in a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OnlyBucket:
    """A bucket stands for the only one that DDP hands over in a step.

    Attributes:
        values: the gradients.
        layer: the parameter.
    """

    values: torch.Tensor
    layer: torch.Tensor

    def index(self) -> int:
        """Return its index."""
        return 0

    def is_last(self) -> bool:
        """Return whether no other follows."""
        return True

    def buffer(self) -> torch.Tensor:
        """Return the gradients."""
        return self.values

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return [self.layer]
