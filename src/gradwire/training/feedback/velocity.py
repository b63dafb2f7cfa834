"""VelocityBook: the momentum memory of a worker that selects what it sends (momentum correction).

Where only the largest elements of a gradient travel, an optimizer's momentum sees those that waited
as one late lump. Deep Gradient Compression (ICLR 2018) therefore keeps the momentum at the worker,
before the selection: velocity = momentum · velocity + gradient, and what is sent, or waits in the
residual, are velocities. An element that was selected starts anew (momentum factor masking), so
that nothing stale goes on pushing it.

Ours: where nothing is selected, under f32, f16 or int8, all elements travel and no velocity is
masked, which is momentum SGD's own; masking there would leave no momentum at all.
"""

from __future__ import annotations

import numpy as np

from gradwire.core.plan import TensorSlot
from gradwire.training.feedback.flat import FlatArray, FlatBook, blocks

__all__ = ["VelocityBook"]


class VelocityBook(FlatBook):
    """The velocities of one rank, by parameter name. momentum: in (0, 1)."""

    kind = "velocity"

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = np.float32(momentum)

    def advance(self, slots: tuple[TensorSlot, ...], bucket: FlatArray) -> None:
        """Replaces a bucket's fresh gradient by its velocity. What is not finite passes through
        and leaves no velocity behind."""
        velocity = self.open(slots, bucket.size)
        velocity *= self.momentum
        velocity += bucket
        np.copyto(bucket, velocity)
        for part in blocks(velocity):
            np.copyto(part, 0.0, where=~np.isfinite(part))

    def mask(self, slots: tuple[TensorSlot, ...], left: FlatArray) -> None:
        """Starts the elements anew of which nothing is left to send."""
        for part, rest in zip(blocks(self.values(slots)), blocks(left), strict=True):
            np.copyto(part, 0.0, where=rest == 0.0)
