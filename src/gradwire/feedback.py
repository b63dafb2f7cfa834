"""Error feedback and ages: the books of what did not count (docs/design.md, invariants 5 and 8).

A residual is what a worker's gradient still has to give: it is added before the push, and after
the push holds exactly what did not count. Residuals are float32, per rank, and belong to
parameters, because DDP rebuilds its buckets; each bucket's residuals lie in one flat array, so
that adding and clearing are single passes.

The engine overwrites the bucket with the result, so what was sent must be kept aside. The cheapest
place is the residual itself: `residual += gradient; bucket = residual` before, `residual[counted]
= 0` after: no third array and no pass more than a staging copy would cost.

Ages count for how many steps running a chunk went without counting; a chunk that reaches max_age
is critical. They are kept with and without feedback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradwire.communicator import ChunkGrid
from gradwire.errors import ConfigError
from gradwire.plans import TensorSlot, TransferReport

__all__ = ["AUTO", "AgeBook", "ResidualBook", "auto_feedback", "nonfinite_chunks"]

FloatArray = NDArray[np.float32]


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
eager 40 % it was neutral under SGD with momentum, where it makes the books balance, and hurt a
transformer under AdamW more than zero fill: a residual comes back late and at once, and an
optimizer that divides by the gradient's second moment takes the lump for variance."""


def auto_feedback(optimizer: object | None) -> bool:
    """What error_feedback="auto" means beside this optimizer; off for none and unknown ones."""
    for family in type(optimizer).__mro__:
        if family.__name__ in AUTO:
            return AUTO[family.__name__]
    return False


class ResidualBook:
    """The residuals of one rank, by parameter name."""

    def __init__(self) -> None:
        self._by_name: dict[str, FloatArray] = {}
        self._flat: dict[tuple[TensorSlot, ...], FloatArray] = {}

    def add_to(self, slots: tuple[TensorSlot, ...], bucket: FloatArray) -> None:
        """Adds the residuals to a bucket (float32, flat) and keeps aside what is now sent."""
        residual = self._open(slots, bucket.size)
        np.add(residual, bucket, out=residual)
        np.copyto(bucket, residual)

    def settle(
        self,
        slots: tuple[TensorSlot, ...],
        grid: ChunkGrid,
        report: TransferReport,
        scale: float,
    ) -> None:
        """Leaves in the residuals what did not count, and what a committed pull left with us.

        scale: what the results were multiplied by; a withheld result returns to the sum as
        result / scale.
        """
        residual = self._flat[slots]
        counted = report.counted.astype(bool)
        if counted.all():
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

    def sent(self, slots: tuple[TensorSlot, ...]) -> FloatArray:
        """What was sent for a bucket: gradient and residual, between `add_to` and `settle`."""
        return self._flat[slots]

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals (a gradient scaler has changed its scale)."""
        for values in self._by_name.values():
            values *= np.float32(factor)

    def clear(self) -> None:
        """Forgets all residuals."""
        self._by_name.clear()
        self._flat.clear()

    def norm(self) -> float:
        """The L2 norm of all residuals."""
        squares = (float(np.dot(v, v)) for v in self._by_name.values())
        return float(np.sqrt(sum(squares)))

    def state_dict(self) -> dict[str, FloatArray]:
        """A copy of the residuals, by parameter name."""
        return {name: values.copy() for name, values in self._by_name.items()}

    def load_state_dict(self, state: Mapping[str, FloatArray]) -> None:
        """Replaces the residuals by those of `state` (flat float32 arrays by name)."""
        self.clear()
        for name, values in state.items():
            self._by_name[name] = np.array(values, dtype=np.float32).reshape(-1)

    def _open(self, slots: tuple[TensorSlot, ...], elements: int) -> FloatArray:
        """The flat residual of a bucket; gathers it from its parameters when it is new."""
        flat = self._flat.get(slots)
        if flat is not None:
            return flat
        flat = np.zeros(elements, np.float32)
        names = {slot.name for slot in slots}
        for slot in slots:
            view = flat[slot.offset : slot.offset + slot.length]
            known = self._by_name.get(slot.name)
            if known is not None:
                if known.size != slot.length:
                    raise ConfigError(
                        f"residual of parameter {slot.name!r} has {known.size} elements, the "
                        f"parameter has {slot.length}: the state is of another model"
                    )
                view[:] = known
            self._by_name[slot.name] = view
        for old in [key for key in self._flat if any(slot.name in names for slot in key)]:
            del self._flat[old]
        self._flat[slots] = flat
        return flat


class AgeBook:
    """How many steps running each chunk of each bucket has not counted."""

    def __init__(self, max_age: int) -> None:
        self.max_age = max_age
        self._ages: dict[tuple[TensorSlot, ...], tuple[ChunkGrid, NDArray[np.uint8]]] = {}

    def due(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> NDArray[np.uint32]:
        """The chunks that have to count in this step."""
        return np.flatnonzero(self._open(slots, grid) >= self.max_age).astype(np.uint32)

    def settle(
        self, slots: tuple[TensorSlot, ...], grid: ChunkGrid, report: TransferReport
    ) -> None:
        """Starts anew for the chunks that counted and whose result was applied; ages the others."""
        ages = self._open(slots, grid)
        missed = (report.counted & report.applied) == 0
        ages += missed & (ages < 255)
        ages[~missed] = 0

    def _open(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> NDArray[np.uint8]:
        known = self._ages.get(slots)
        if known is not None and known[0] is grid:
            return known[1]
        ages = np.zeros(len(grid), np.uint8)
        if known is not None or self._ages:
            old = self._elements(slots)
            starts, order = _sorted_starts(grid)
            ages[order] = np.maximum.reduceat(old, starts)
        names = {slot.name for slot in slots}
        for key in [key for key in self._ages if any(slot.name in names for slot in key)]:
            del self._ages[key]
        self._ages[slots] = (grid, ages)
        return ages

    def _elements(self, slots: tuple[TensorSlot, ...]) -> NDArray[np.uint8]:
        """The age of each element of a bucket, from whatever grids the parameters last had."""
        elements = np.zeros(sum(slot.length for slot in slots), np.uint8)
        place = {slot.name: slot for slot in slots}
        for key, (grid, ages) in self._ages.items():
            if not any(slot.name in place and ages.any() for slot in key):
                continue
            spread = _per_element(grid, ages)
            for slot in key:
                new = place.get(slot.name)
                if new is not None:
                    elements[new.offset : new.offset + new.length] = spread[
                        slot.offset : slot.offset + slot.length
                    ]
        return elements


def nonfinite_chunks(grid: ChunkGrid, bucket: FloatArray) -> NDArray[np.uint32]:
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
    order = np.argsort(grid.offsets, kind="stable")
    return grid.offsets[order].astype(np.intp), order


def _per_element(grid: ChunkGrid, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Spreads one value per chunk over the chunk's elements."""
    _, order = _sorted_starts(grid)
    return np.repeat(values[order], grid.lengths[order])


def _fill_chunks(array: FloatArray, grid: ChunkGrid, chunks: NDArray[np.bool_]) -> None:
    """Sets the elements of the marked chunks to zero, whatever they held (NaN too)."""
    for first, count, offset, length in grid.runs:
        marked = chunks[first : first + count]
        if marked.any():
            array[offset : offset + count * length].reshape(count, length)[marked] = 0.0
