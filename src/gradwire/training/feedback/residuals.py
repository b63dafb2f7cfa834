"""Error feedback and ages: the books of what did not count (docs/design.md, invariants 5 and 8).

A residual is the part of a worker's gradients that has not counted yet. It is added to the bucket
before the push, and after the push it holds exactly what did not count, errors of the encoding
included. Residuals are float32 and each rank's own. They belong to parameters, because DDP rebuilds
its buckets; those of a bucket lie in one flat array, so that adding and clearing are single passes.

The engine overwrites the bucket with the result, so what was sent has to be kept elsewhere. It is
kept in the residual itself: `residual += gradient; bucket = residual` before the transfer and
`residual[counted] = 0` after it need no third array, and no pass beyond that of a copy.

An age is the number of steps in a row in which a chunk did not count; a chunk that reaches max_age
is critical. Ages are kept with and without feedback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwire.core.regions import TensorSlot
from gradwire.core.transfer_report import TransferReport
from gradwire.training.feedback.chunked import ChunkBook
from gradwire.training.feedback.flat import FlatArray, FlatBook, blocks
from gradwire.transport.native import ChunkGrid

KeepError = Callable[[FlatArray, NDArray[np.uint8]], None]
"""Replaces what was sent, in place, by the part that did not count; also takes `counted`.

That is all of a chunk that did not count, and the encoding's error in one that did."""


AUTO = {
    "SGD": True,
    "Adam": False,
    "AdamW": False,
    "Adamax": False,
    "NAdam": False,
    "RAdam": False,
    "Adagrad": False,
    "Adadelta": False,
    "RMSprop": False,
    "Rprop": False,
}
"""error_feedback="auto" by optimizer: the first class of the optimizer's ancestry that is listed.

docs/policies.md has the measurements for SGD and AdamW, and the other families follow these two by
kind. A residual arrives late and at once, which an optimizer that divides by the gradient's second
moment takes for variance. Under heavy loss feedback therefore costs accuracy there."""


def auto_feedback(optimizer: object | None) -> bool:
    """Returns what error_feedback="auto" means beside an optimizer; False for none and unknown."""
    for family in type(optimizer).__mro__:
        if family.__name__ in AUTO:
            return AUTO[family.__name__]
    return False


class ResidualBook(FlatBook):
    kind = "residual"

    def __init__(self) -> None:
        super().__init__()
        self._clean: set[tuple[TensorSlot, ...]] = set()
        self._mutex = threading.Lock()  # guards `_clean`: buckets begin and end on other threads

    def clean(self, slots: tuple[TensorSlot, ...]) -> bool:
        with self._mutex:
            return slots in self._clean

    def mark_dirty(self, slots: tuple[TensorSlot, ...]) -> None:
        with self._mutex:
            self._clean.discard(slots)

    def mark_changed(self, keys: Collection[str]) -> None:
        with self._mutex:
            self._clean -= {each for each in self._clean if any(slot.key in keys for slot in each)}

    def open(self, slots: tuple[TensorSlot, ...], elements: int) -> FlatArray:
        """Returns a bucket's flat array (`FlatBook.open`); of new layouts nothing is known."""
        known = slots in self._flat
        flat = super().open(slots, elements)
        if not known:
            with self._mutex:
                self._clean &= self._flat.keys()
        return flat

    def clear(self) -> None:
        super().clear()
        with self._mutex:
            self._clean = set()

    def add_to(self, slots: tuple[TensorSlot, ...], bucket: FlatArray) -> None:
        """Adds the residuals to a bucket (float32, flat), and keeps what is now sent."""
        residual = self.open(slots, bucket.size)
        np.add(residual, bucket, out=residual)
        np.copyto(bucket, residual)

    def settle(
        self,
        slots: tuple[TensorSlot, ...],
        grid: ChunkGrid,
        report: TransferReport,
        scale: float,
        keep_error: KeepError | None = None,
    ) -> None:
        """Updates the residuals by a report: they then hold what did not count.

        They also take what this rank keeps of the results that it aggregated: those that a
        committed pull withheld, and the encoding's error.

        Args:
            scale: Factor of the results; a result is returned to the sum as result / scale.
            keep_error: For plans with an encoding; see `KeepError`.
        """
        residual = self.values(slots)
        counted = report.counted.astype(bool)
        whole = keep_error is None and bool(counted.all())
        if whole and not len(report.withheld_chunks) and not len(report.result_error):
            with self._mutex:
                self._clean.add(slots)
        else:
            self.mark_dirty(slots)
        if keep_error is not None:
            keep_error(residual, report.counted)
        elif whole:
            residual.fill(0.0)
        else:
            _fill_chunks(residual, grid, counted)
        if len(report.withheld_chunks):
            at = 0
            for chunk in report.withheld_chunks:
                begin, length = int(grid.offsets[chunk]), int(grid.lengths[chunk])
                values = report.withheld_values[at : at + length]
                if np.isfinite(values).all():
                    residual[begin : begin + length] += values / np.float32(scale)
                at += length
        if len(report.result_error):
            begin = report.error_offset
            part = residual[begin : begin + len(report.result_error)]
            for mine, error in zip(blocks(part), blocks(report.result_error), strict=True):
                mine += error / np.float32(scale)


class AgeBook(ChunkBook):
    """The number of steps in a row in which each chunk did not count; thread-safe."""

    what = "ages"
    allowed = "integers (elements, age), no age beyond 255,"
    dtype = np.uint8
    unknown = 0
    runs_dtype = np.int64

    def __init__(self, max_age: int) -> None:
        super().__init__()
        self.max_age = max_age

    @staticmethod
    def sound(values: NDArray[np.int64]) -> bool:
        return bool(((values >= 0) & (values <= 255)).all())

    def due(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> NDArray[np.uint32]:
        """Returns the ids of the chunks that have to count in this step, rising."""
        with self._mutex:
            return np.flatnonzero(self._open(slots, grid) >= self.max_age).astype(np.uint32)

    def settle(
        self, slots: tuple[TensorSlot, ...], grid: ChunkGrid, report: TransferReport
    ) -> None:
        """Resets the ages of chunks that counted and whose result was applied; ages the others."""
        missed = (report.counted & report.applied) == 0
        with self._mutex:
            if not self._kept and not missed.any():
                return  # no chunk has an age, and none gets one
            ages = self._open(slots, grid)
            ages += missed & (ages < 255)
            ages[~missed] = 0


def nonfinite_chunks(grid: ChunkGrid, bucket: FlatArray) -> NDArray[np.uint32]:
    """Returns the chunks that hold a NaN or an infinity; as critical ones they cannot be lost."""
    bad = ~np.isfinite(bucket)
    order = grid.rising
    hit = np.logical_or.reduceat(bad, grid.offsets[order].astype(np.intp))
    return np.sort(order[hit]).astype(np.uint32)


def join_chunks(parts: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32] | None:
    filled = [part for part in parts if len(part)]
    if not filled:
        return None
    return np.unique(np.concatenate(filled)).astype(np.uint32)


def _fill_chunks(array: FlatArray, grid: ChunkGrid, chunks: NDArray[np.bool_]) -> None:
    """Sets the elements of the marked chunks to zero, even where they are NaN."""
    for first, count, offset, length in grid.runs:
        marked = chunks[first : first + count]
        if marked.any():
            array[offset : offset + count * length].reshape(count, length)[marked] = 0.0
