"""Error feedback and ages: the books of what did not count (docs/design.md, invariants 5 and 8).

A residual is what a worker's gradient still has to give: it is added before the push, and after
the push holds exactly what did not count, an encoding's error included. Residuals are float32, per
rank, and belong to parameters, because DDP rebuilds its buckets; each bucket's residuals lie in one
flat array, so that adding and clearing are single passes.

The engine overwrites the bucket with the result, so what was sent must be kept aside. The cheapest
place is the residual itself: `residual += gradient; bucket = residual` before, `residual[counted]
= 0` after: no third array and no pass more than a staging copy would cost.

Ages count for how many steps running a chunk went without counting; a chunk that reaches max_age
is critical. They are kept with and without feedback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwire.core.plan import TensorSlot, TransferReport
from gradwire.training.feedback.chunked import ChunkBook
from gradwire.training.feedback.flat import FlatArray, FlatBook, blocks
from gradwire.transport.communicator import ChunkGrid

__all__ = ["AUTO", "AgeBook", "ResidualBook", "auto_feedback", "nonfinite_chunks"]

KeepError = Callable[[FlatArray, NDArray[np.uint8]], None]
"""Leaves in what was sent, in place, what did not count of it: all of a chunk that did not, and
what the encoding took of one that did. Called with what was sent and the report's `counted`."""


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
"""error_feedback="auto" by optimizer family: the first class of the optimizer's ancestry in here.

At a few per cent of loss it made no difference. At an eager 40 % it took two thirds of the price
away under SGD and doubled it for a transformer under AdamW (ten seeds each, docs/policies.md): a
residual comes back late and at once, and an optimizer that divides by the gradient's second moment
takes the lump for variance. The other families follow these two by kind."""


def auto_feedback(optimizer: object | None) -> bool:
    """What error_feedback="auto" means beside this optimizer; off for none and unknown ones."""
    for family in type(optimizer).__mro__:
        if family.__name__ in AUTO:
            return AUTO[family.__name__]
    return False


class ResidualBook(FlatBook):
    """The residuals of one rank, by parameter name."""

    kind = "residual"

    def __init__(self) -> None:
        super().__init__()
        self._clean: set[tuple[TensorSlot, ...]] = set()
        self._mutex = threading.Lock()  # of that: buckets begin and end on threads of their own

    def clean(self, slots: tuple[TensorSlot, ...]) -> bool:
        """Whether nothing is owed for a bucket of this layout; False where that is not known."""
        with self._mutex:
            return slots in self._clean

    def mark_dirty(self, slots: tuple[TensorSlot, ...]) -> None:
        """Notes that somebody wrote into the bucket's values."""
        with self._mutex:
            self._clean.discard(slots)

    def open(self, slots: tuple[TensorSlot, ...], elements: int) -> FlatArray:
        """See `FlatBook.open`: of the layouts that a new one replaces nothing is known any more."""
        known = slots in self._flat
        flat = super().open(slots, elements)
        if not known:
            with self._mutex:
                self._clean &= self._flat.keys()
        return flat

    def clear(self) -> None:
        """Forgets all values."""
        super().clear()
        with self._mutex:
            self._clean.clear()

    def add_to(self, slots: tuple[TensorSlot, ...], bucket: FlatArray) -> None:
        """Adds the residuals to a bucket (float32, flat) and keeps aside what is now sent."""
        residual = self.open(slots, bucket.size)
        np.add(residual, bucket, out=residual)
        np.copyto(bucket, residual)

    def add(self, slots: tuple[TensorSlot, ...], values: FlatArray) -> None:
        """Adds what is owed for a bucket of this layout and was kept elsewhere."""
        residual = self.open(slots, values.size)
        residual += values
        self.mark_dirty(slots)

    def settle(
        self,
        slots: tuple[TensorSlot, ...],
        grid: ChunkGrid,
        report: TransferReport,
        scale: float,
        keep_error: KeepError | None = None,
    ) -> None:
        """Leaves in the residuals what did not count, and what stays with us of the results that
        we aggregated: those a committed pull withheld, and what their encoding took.

        scale: what the results were multiplied by; what is kept of one returns to the sum as
        result / scale. keep_error: for plans with an encoding, see `KeepError`.
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

    def sent(self, slots: tuple[TensorSlot, ...]) -> FlatArray:
        """What was sent for a bucket: gradient and residual, between `add_to` and `settle`."""
        return self.values(slots)

    def norm(self) -> float:
        """The L2 norm of all residuals."""
        squares = (float(np.dot(v, v)) for v in self._by_name.values())
        return float(np.sqrt(sum(squares)))


class AgeBook(ChunkBook):
    """How many steps running each chunk of each bucket has not counted; thread-safe."""

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
        """Whether these are ages."""
        return bool(((values >= 0) & (values <= 255)).all())

    def due(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> NDArray[np.uint32]:
        """The chunks that have to count in this step: their ids, in rising order."""
        with self._mutex:
            return np.flatnonzero(self._open(slots, grid) >= self.max_age).astype(np.uint32)

    def settle(
        self, slots: tuple[TensorSlot, ...], grid: ChunkGrid, report: TransferReport
    ) -> None:
        """Starts anew for the chunks that counted and whose result was applied; ages the others."""
        missed = (report.counted & report.applied) == 0
        with self._mutex:
            if not self._kept and not missed.any():
                return  # nothing has an age, and nothing gets one
            ages = self._open(slots, grid)
            ages += missed & (ages < 255)
            ages[~missed] = 0


def nonfinite_chunks(grid: ChunkGrid, bucket: FlatArray) -> NDArray[np.uint32]:
    """The chunks that hold a NaN or an infinity; they are critical, so that nobody loses one."""
    bad = ~np.isfinite(bucket)
    starts, order = _sorted_starts(grid)
    hit = np.logical_or.reduceat(bad, starts)
    return np.sort(order[hit]).astype(np.uint32)


def join_chunks(parts: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32] | None:
    """The union of several lists of chunks, sorted; None when it is empty."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return None
    return np.unique(np.concatenate(filled)).astype(np.uint32)


def _sorted_starts(grid: ChunkGrid) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The chunks' offsets in rising order, and which chunk each belongs to."""
    return grid.offsets[grid.rising].astype(np.intp), grid.rising


def _fill_chunks(array: FlatArray, grid: ChunkGrid, chunks: NDArray[np.bool_]) -> None:
    """Sets the elements of the marked chunks to zero, whatever they held (NaN too)."""
    for first, count, offset, length in grid.runs:
        marked = chunks[first : first + count]
        if marked.any():
            array[offset : offset + count * length].reshape(count, length)[marked] = 0.0
