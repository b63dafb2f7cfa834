"""MagnitudeBook: the magnitude of each chunk's last result, which all replicas know.

A policy that sets priorities by it leaves out the same chunks on all workers, so the pull shrinks
with the push, and these chunks are those with the smallest last results. It is gradwire's own;
MLT's magnitudes are each worker's own (`gradwire.policies.mlt`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwire.core.regions import TensorSlot
from gradwire.core.transfer_report import TransferReport
from gradwire.training.feedback.chunked import ChunkBook
from gradwire.transport.native import ChunkGrid


class MagnitudeBook(ChunkBook):
    """The mean magnitude of each chunk's last result; thread-safe.

    It is infinite for a chunk whose result was not finite, or that has had none.
    """

    what = "magnitudes"
    allowed = "numbers (elements, magnitude), none below 0,"
    dtype = np.float32
    unknown = float("inf")
    runs_dtype = np.float64

    @staticmethod
    def sound(values: NDArray[np.float64]) -> bool:
        return bool((values >= 0.0).all())

    def of(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> NDArray[np.float32] | None:
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
        """Takes the magnitudes of chunks that any contribution reached."""
        fresh = grid.mean_magnitudes(result) / np.float32(scale)
        with self._mutex:
            np.copyto(self._open(slots, grid), fresh, where=report.applied != 0)
