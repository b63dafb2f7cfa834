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
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwire.communicator import ChunkGrid
from gradwire.errors import ConfigError
from gradwire.flat_book import FlatArray, FlatBook
from gradwire.plans import TensorSlot, TransferReport

__all__ = ["AUTO", "AgeBook", "ResidualBook", "auto_feedback", "nonfinite_chunks"]

LARGEST = (1 << 32) - 1
"""Elements of one run of equal ages."""

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

Still to be measured on more tasks. So far: at a few per cent of loss it made no difference; at an
eager 40 % it halved the cost under SGD with momentum (three seeds, intervals that overlap), and
hurt a transformer under AdamW more than zero fill: a residual comes back late and at once, and an
optimizer that divides by the gradient's second moment takes the lump for variance."""


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

    def clean(self, slots: tuple[TensorSlot, ...]) -> bool:
        """Whether nothing is owed for a bucket of this layout; False where that is not known."""
        return slots in self._clean

    def soil(self, slots: tuple[TensorSlot, ...]) -> None:
        """Notes that somebody wrote into the bucket's values."""
        self._clean.discard(slots)

    def open(self, slots: tuple[TensorSlot, ...], elements: int) -> FlatArray:
        """See `FlatBook.open`: of the layouts that a new one replaces nothing is known any more."""
        flat = super().open(slots, elements)
        self._clean &= self._flat.keys()
        return flat

    def clear(self) -> None:
        """Forgets all values."""
        super().clear()
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
        self.soil(slots)

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
            self._clean.add(slots)
        else:
            self.soil(slots)
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
            part += report.result_error / np.float32(scale)

    def sent(self, slots: tuple[TensorSlot, ...]) -> FlatArray:
        """What was sent for a bucket: gradient and residual, between `add_to` and `settle`."""
        return self.values(slots)

    def norm(self) -> float:
        """The L2 norm of all residuals."""
        squares = (float(np.dot(v, v)) for v in self._by_name.values())
        return float(np.sqrt(sum(squares)))


class AgeBook:
    """How many steps running each chunk of each bucket has not counted; thread-safe."""

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self._ages: dict[tuple[TensorSlot, ...], tuple[ChunkGrid, NDArray[np.uint8]]] = {}
        self._mutex = threading.Lock()  # buckets begin and end on threads of their own

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
            if not self._ages and not missed.any():
                return  # nothing has an age, and nothing gets one
            ages = self._open(slots, grid)
            ages += missed & (ages < 255)
            ages[~missed] = 0

    def state_dict(self) -> dict[str, NDArray[np.int64]]:
        """The ages by parameter name, for those that have any: int64 of shape [runs, 2], one
        (elements, age) per run of equal ages, in the order of the elements."""
        with self._mutex:
            spread: dict[str, NDArray[np.uint8]] = {}
            for slots, (grid, ages) in self._ages.items():  # the newest comes last and rules
                elements = grid.per_element(ages)
                for slot in slots:
                    spread[slot.name] = elements[slot.offset : slot.offset + slot.length]
        return {name: _runs(values) for name, values in spread.items() if values.any()}

    def load_state_dict(self, state: Mapping[str, NDArray[np.int64]]) -> None:
        """Replaces the ages by those of `state`, as `state_dict` returned it.

        Raises ConfigError for other shapes and for ages beyond 255, and changes nothing then.
        """
        self.read(state)()

    def read(self, state: Mapping[str, NDArray[np.int64]]) -> Callable[[], None]:
        """Checks ages; what is returned takes them over."""
        loaded: dict[tuple[TensorSlot, ...], tuple[ChunkGrid, NDArray[np.uint8]]] = {}
        for name, values in state.items():
            runs = np.asarray(values)
            sound = runs.ndim == 2 and runs.shape[1] == 2 and np.issubdtype(runs.dtype, np.integer)
            sound = sound and len(runs) > 0 and _within(runs[:, 0], 1, LARGEST)
            if not sound or not _within(runs[:, 1], 0, 255):
                raise ConfigError(
                    f"ages of parameter {name!r}: integers of shape [runs, 2], (elements, age)"
                )
            lengths = runs[:, 0].astype(np.int64)
            none = np.zeros(len(runs), np.uint32)
            offsets = (np.cumsum(lengths) - lengths).astype(np.uint64)
            grid = ChunkGrid(offsets, lengths.astype(np.uint32), none, none)
            slot = TensorSlot(name, 0, int(lengths.sum()))
            loaded[(slot,)] = (grid, runs[:, 1].astype(np.uint8))

        def take() -> None:
            with self._mutex:
                self._ages = loaded

        return take

    def _open(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> NDArray[np.uint8]:
        known = self._ages.get(slots)
        if known is not None and known[0] is grid:
            return known[1]
        ages = np.zeros(len(grid), np.uint8)
        if self._ages:
            old = self._elements(slots)
            starts, order = _sorted_starts(grid)
            ages[order] = np.maximum.reduceat(old, starts)
        self._ages.pop(slots, None)
        self._ages[slots] = (grid, ages)  # the newest comes last
        self._drop_outdated()
        return ages

    def _drop_outdated(self) -> None:
        """Forgets the layouts whose parameters newer ones hold, all of them: DDP rebuilds its
        buckets one after another, and each finds its ages in what the old layouts still say."""
        newer: set[str] = set()
        for key in reversed(list(self._ages)):
            names = {slot.name for slot in key}
            if names <= newer:
                del self._ages[key]
            newer |= names

    def _elements(self, slots: tuple[TensorSlot, ...]) -> NDArray[np.uint8]:
        """The age of each element of a bucket, from whatever grids the parameters last had."""
        elements = np.zeros(sum(slot.length for slot in slots), np.uint8)
        place = {slot.name: slot for slot in slots}
        for key, (grid, ages) in self._ages.items():
            if not any(slot.name in place for slot in key):
                continue
            spread = grid.per_element(ages)
            for slot in key:
                new = place.get(slot.name)
                if new is None:
                    continue
                if new.length != slot.length:
                    raise ConfigError(
                        f"ages of parameter {slot.name!r} are of {slot.length} elements, the "
                        f"parameter has {new.length}: the state is of another model"
                    )
                elements[new.offset : new.offset + new.length] = spread[
                    slot.offset : slot.offset + slot.length
                ]
        return elements


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


def _runs(values: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(elements, value) of each run of equal values, as int64 of shape [runs, 2]."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
    lengths = np.diff(np.append(starts, len(values)))
    return np.stack([lengths, values[starts]], axis=1).astype(np.int64)


def _within(values: NDArray[np.int64], low: int, high: int) -> bool:
    return bool(((values >= low) & (values <= high)).all())


def _fill_chunks(array: FlatArray, grid: ChunkGrid, chunks: NDArray[np.bool_]) -> None:
    """Sets the elements of the marked chunks to zero, whatever they held (NaN too)."""
    for first, count, offset, length in grid.runs:
        marked = chunks[first : first + count]
        if marked.any():
            array[offset : offset + count * length].reshape(count, length)[marked] = 0.0
