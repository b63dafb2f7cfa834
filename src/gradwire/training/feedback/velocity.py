"""VelocityBook: the momentum of a worker that selects what it sends (momentum correction).

Where only the largest elements of a gradient are sent, an optimizer's momentum gets those that
waited late and at once. Deep Gradient Compression (ICLR 2018, arXiv 1712.01887, section 3)
therefore keeps the momentum at the worker, before the selection: velocity = momentum · velocity +
gradient, and velocities are what is sent or stays in the residual. The velocity of an element that
was selected is reset (momentum factor masking), so that it does not act twice.

Under f32, f16 or int8 nothing is selected and all elements are sent, so no velocity is reset, which
equals SGD with momentum. Resetting all of them would leave no momentum.
"""

from __future__ import annotations

import numpy as np

from gradwire.core.regions import TensorSlot
from gradwire.training.feedback.flat import FlatArray, FlatBook, blocks


class VelocityBook(FlatBook):
    """The velocities of one rank by parameter name."""

    kind = "velocity"

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = np.float32(momentum)

    def advance(self, slots: tuple[TensorSlot, ...], bucket: FlatArray) -> None:
        """Replaces a bucket's fresh gradient by its velocity, in place.

        Values that are not finite are sent, and leave a velocity of 0.
        """
        velocity = self.open(slots, bucket.size)
        velocity *= self.momentum
        velocity += bucket
        np.copyto(bucket, velocity)
        for part in blocks(velocity):
            np.copyto(part, 0.0, where=~np.isfinite(part))

    def mask(self, slots: tuple[TensorSlot, ...], left: FlatArray) -> None:
        """Resets the velocities of elements of which nothing is left to send."""
        for part, rest in zip(blocks(self.values(slots)), blocks(left), strict=True):
            np.copyto(part, 0.0, where=rest == 0.0)
