"""How large the last result of each chunk was: what all replicas know alike of a gradient to come.

A policy whose priorities go by it leaves out the same chunks on all workers, so that the pull
shrinks with the push, and those that had least to say when they were last heard. Ours; MLT's
magnitudes are each worker's own (`gradwire.policies.mlt`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwire.core.plan import TensorSlot, TransferReport
from gradwire.training.feedback.chunked import ChunkBook
from gradwire.transport.communicator import ChunkGrid

__all__ = ["MagnitudeBook"]


class MagnitudeBook(ChunkBook):
    """The mean magnitude of each chunk's last result; thread-safe.

    Infinite for a chunk that was never heard of, or whose result was not finite.
    """

    what = "magnitudes"
    allowed = "numbers (elements, magnitude), none below 0,"
    dtype = np.float32
    unknown = float("inf")
    runs_dtype = np.float64

    @staticmethod
    def sound(values: NDArray[np.float64]) -> bool:
        """Whether these are magnitudes."""
        return bool((values >= 0.0).all())

    def of(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> NDArray[np.float32] | None:
        """A bucket's magnitudes, one per chunk; None while nothing is known of it."""
        with self._mutex:
            known: NDArray[np.float32] = self._open(slots, grid).copy()
        return known if np.isfinite(known).any() else None

    def note(
        self,
        slots: tuple[TensorSlot, ...],
        grid: ChunkGrid,
        report: TransferReport,
        result: NDArray[np.float32],
        scale: float,
    ) -> None:
        """Takes those of the chunks that anybody's contribution reached.

        result: a bucket's, float32, one value per element. scale: what gradients are multiplied by
        (a loss scaler's).
        """
        fresh = grid.mean_magnitudes(result) / np.float32(scale)
        with self._mutex:
            np.copyto(self._open(slots, grid), fresh, where=report.applied != 0)
