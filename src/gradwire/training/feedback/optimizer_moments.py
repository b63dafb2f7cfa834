"""fill="momentum": elements that nobody delivered are taken from the optimizer's first moment.

An element of the sum that no contribution reached is zero. An optimizer of Adam's family takes it
for a gradient of zero, so its first moment m shrinks, and the step with it. With this fill, which
is gradwire's own, such an element is m instead: then β m + (1 - β) m = m, and the optimizer
continues as before (except for clipping, and for weight decay that is part of the gradient). Where
the missing elements are small this removes most of the cost of leaving them out under Adam; where
they are random it may harm (docs/policies.md, "Fill").

Replicas hold the same first moments to the bit, so the results stay identical, and no further state
has to be kept, saved or sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from gradwire.core import callers
from gradwire.core.regions import TensorSlot
from gradwire.training.bucket import in_bucket_order
from gradwire.transport.native import ChunkGrid

_FAMILY = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
)

KEY = "exp_avg"
"""Key of the first moment in the state of Adam, AdamW, NAdam, RAdam, Adamax and similar ones."""


def keeps_first_moment(optimizer: object | None) -> bool:
    """Returns whether each replica's optimizer keeps a running mean of all gradients.

    Such optimizers have `betas`, the first above 0. Excluded are `ZeroRedundancyOptimizer`, whose
    replicas keep a part of the mean each, and `maximize`, where it is that of the negatives.
    """
    if any(family.__name__ == "ZeroRedundancyOptimizer" for family in type(optimizer).__mro__):
        return False
    groups = getattr(optimizer, "param_groups", [])
    return bool(groups) and all(
        "betas" in g and float(g["betas"][0]) > 0.0 and not g.get("maximize") for g in groups
    )


def is_of_adams_family(optimizer: object | None) -> bool:
    """Returns whether it is an optimizer of torch whose first moment is the mean of gradients."""
    return isinstance(optimizer, _FAMILY) and keeps_first_moment(optimizer)


class FirstMoments:
    """The first moments of a module's optimizers, in the order of buckets."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._warned = False

    def fill(
        self,
        slots: Sequence[TensorSlot],
        parameters: Sequence[torch.Tensor],
        result: NDArray[np.float32],
        grid: ChunkGrid,
        missing: NDArray[np.bool_],
        scale: float,
    ) -> None:
        """Writes first moments into a bucket's result where chunks are missing.

        Parameters with which their optimizer has not stepped keep zeros.

        Args:
            missing: bool for each chunk of the grid.
            scale: What gradients are multiplied by (a loss scaler's).
        """
        lost = grid.rising[missing[grid.rising]]
        starts = grid.offsets[lost].astype(np.intp)
        ends = starts + grid.lengths[lost]
        filled = [parameter for parameter in parameters if parameter.numel()]
        for slot, parameter in zip(slots, filled, strict=True):
            first = np.searchsorted(ends, slot.offset, side="right")
            last = np.searchsorted(starts, slot.offset + slot.length)
            moment = self._moment(parameter, slot.length) if first < last else None
            if moment is not None:
                grid.write(result, lost[first:last], moment, slot.offset, scale)

    def _moment(self, parameter: torch.Tensor, length: int) -> NDArray[np.float32] | None:
        """Returns a parameter's first moment as its slot of that many elements lays it out."""
        states = ((each, each.state.get(parameter)) for each in self._optimizers)
        owner, state = next((found for found in states if found[1]), (None, None))
        if owner is None or state is None:
            return None
        moment = state.get(KEY)
        if not isinstance(moment, torch.Tensor) or moment.shape != parameter.shape:
            self._warn(owner)
            return None
        moment = moment.detach()
        if isinstance(moment, DTensor):  # of fully_shard, whose shards end with padding
            values = moment.to_local().flatten()
        else:
            values = in_bucket_order(moment, parameter)
        flat = torch.zeros(length)
        flat[: values.numel()] = values
        found: NDArray[np.float32] = flat.numpy()
        return found

    def _warn(self, owner: torch.optim.Optimizer) -> None:
        if not self._warned:
            self._warned = True
            callers.warn(
                f"fill='momentum' with optimizer={type(owner).__name__}: its state has "
                f"no {KEY!r}, so what is missing stays zero; use fill='zero' or 'mean'",
            )
