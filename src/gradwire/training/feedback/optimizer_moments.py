"""fill="momentum": what nobody delivered is taken from the optimizer's first moment.

An element of the sum that no contribution reached is zero, which an optimizer of Adam's family
takes for a gradient of zero: its first moment m shrinks, and the step with it. Ours: such an
element is m, so that m = β m + (1 - β) m stands still and the optimizer goes on as it went (but
for clipping, and weight decay that is part of the gradient). Where what is left out is small this
takes away most of what leaving out costs under Adam; where it is drawn at random it may do harm
(docs/policies.md, "Fill").

Replicas hold the same first moments, to the bit, so what they apply stays identical; there is no
state of our own to keep, save or send.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.plan import TensorSlot
from gradwire.training.bucket import in_bucket_order
from gradwire.transport.communicator import ChunkGrid

__all__ = ["FirstMoments", "is_of_adams_family", "keeps_first_moment"]

_FAMILY = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
)

KEY = "exp_avg"
"""Of an optimizer's state: Adam, AdamW, NAdam, RAdam, Adamax, and others that follow them."""


def keeps_first_moment(optimizer: object | None) -> bool:
    """Whether each replica's optimizer keeps a running mean of all gradients: those that have
    `betas`, the first above 0.

    False for `ZeroRedundancyOptimizer`, whose replicas keep a part of it each, and with `maximize`,
    where the mean is that of the gradients' negatives.
    """
    if any(family.__name__ == "ZeroRedundancyOptimizer" for family in type(optimizer).__mro__):
        return False
    groups = getattr(optimizer, "param_groups", [])
    return bool(groups) and all(
        "betas" in g and float(g["betas"][0]) > 0.0 and not g.get("maximize") for g in groups
    )


def is_of_adams_family(optimizer: object | None) -> bool:
    """Whether it is one of torch's whose first moment is known to be the mean of the gradients."""
    return isinstance(optimizer, _FAMILY) and keeps_first_moment(optimizer)


class FirstMoments:
    """The first moments of one optimizer, in the order of buckets."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
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
        """Writes them into a bucket's result where chunks are missing.

        parameters: the bucket's, in order, empty ones included. result: one entry per element.
        missing: one per chunk of the grid. scale: what gradients are multiplied by (a loss
        scaler's). A parameter that the optimizer has not stepped with keeps zeros.
        """
        lost = grid.rising[missing[grid.rising]]
        starts = grid.offsets[lost].astype(np.intp)
        ends = starts + grid.lengths[lost]
        filled = [parameter for parameter in parameters if parameter.numel()]
        for slot, parameter in zip(slots, filled, strict=True):
            first = np.searchsorted(ends, slot.offset, side="right")
            last = np.searchsorted(starts, slot.offset + slot.length)
            moment = self._moment(parameter) if first < last else None
            if moment is not None:
                grid.write(result, lost[first:last], moment, slot.offset, scale)

    def _moment(self, parameter: torch.Tensor) -> NDArray[np.float32] | None:
        state = self._optimizer.state.get(parameter)
        if not state:
            return None
        moment = state.get(KEY)
        if not isinstance(moment, torch.Tensor) or moment.shape != parameter.shape:
            self._warn()
            return None
        flat: NDArray[np.float32] = (
            in_bucket_order(moment.detach(), parameter).to("cpu", torch.float32).numpy()
        )
        return flat

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"fill='momentum' with optimizer={type(self._optimizer).__name__}: its state has "
                f"no {KEY!r}, so what is missing stays zero; use fill='zero' or 'mean'",
                RuntimeWarning,
                stacklevel=2,
            )
