"""ChunkBook: one value per chunk of each bucket, which outlives a bucket's layout.

DDP rebuilds its buckets, and plans cut them into other chunks. Values are carried over to the
chunks that then hold the same elements, and saved by parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import ConfigError
from gradwire.core.regions import TensorSlot
from gradwire.transport.native import ChunkGrid

LARGEST = (1 << 32) - 1
"""Largest number of elements in one run of equal values."""

Values = NDArray[Any]


class ChunkBook:
    """Values of the chunks of buckets; thread-safe. Subclasses define their kind.

    Chunks of a new layout take the largest of the values that their elements had.
    """

    what: ClassVar[str]
    """Name of the values, in the plural; it is also their key in a state."""
    allowed: ClassVar[str]
    """What a state's values may be, as text."""
    dtype: ClassVar[type[np.generic]]
    unknown: ClassVar[float]
    """The value of a chunk of which nothing is known."""
    runs_dtype: ClassVar[type[np.generic]]
    """Type of (elements, value) in a state."""

    def __init__(self) -> None:
        self._kept: dict[tuple[TensorSlot, ...], tuple[ChunkGrid, Values]] = {}
        self._known: set[str] = set()  # the tensors that any layout has
        self._mutex = threading.Lock()  # buckets begin and end on different threads

    @staticmethod
    def sound(values: Values) -> bool:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Values]:
        """Returns the values by parameter name, for parameters that have any.

        Each array has the shape [runs, 2]: one (elements, value) per run of equal values, in the
        order of the elements.
        """
        with self._mutex:
            spread: dict[str, Values] = {}
            for slots, (grid, values) in self._kept.items():  # the newest comes last and wins
                elements = grid.per_element(values)
                for slot in slots:
                    spread[slot.key] = elements[slot.offset : slot.offset + slot.length]
        return {
            name: _runs(values).astype(self.runs_dtype)
            for name, values in spread.items()
            if (values != self.unknown).any()
        }

    def load_state_dict(self, state: Mapping[str, Values]) -> None:
        loaded: dict[tuple[TensorSlot, ...], tuple[ChunkGrid, Values]] = {}
        for name, each in state.items():
            runs = np.asarray(each)
            sound = runs.ndim == 2 and runs.shape[1] == 2 and len(runs) > 0
            sound = sound and np.can_cast(runs.dtype, self.runs_dtype, "same_kind")
            lengths = runs[:, 0] if sound else runs
            sound = sound and bool(((lengths >= 1) & (lengths <= LARGEST)).all())
            sound = sound and bool((lengths == np.floor(lengths)).all())
            if not sound or not self.sound(runs[:, 1]):
                raise ConfigError.about(
                    f"{self.what} of parameter {name!r}",
                    f"{self.allowed} of shape [runs, 2]",
                    setting=f"{self.what} of parameter {name!r}",
                    value=runs,
                )
            lengths = lengths.astype(np.int64)
            none = np.zeros(len(runs), np.uint32)
            offsets = (np.cumsum(lengths) - lengths).astype(np.uint64)
            grid = ChunkGrid(offsets, lengths.astype(np.uint32), none, none)
            slot = TensorSlot(name, 0, int(lengths.sum()))
            loaded[(slot,)] = (grid, runs[:, 1].astype(self.dtype))
        with self._mutex:
            self._kept = loaded
            self._known = {slot.key for slots in loaded for slot in slots}

    def _open(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> Values:
        """Returns a bucket's values, which may be changed; the mutex must be held."""
        known = self._kept.get(slots)
        if known is not None and known[0] is grid:
            return known[1]
        values = np.full(len(grid), self.unknown, self.dtype)
        names = {slot.key for slot in slots}
        if known is None and names.isdisjoint(self._known):  # as in a first step
            self._kept[slots] = (grid, values)
            self._known |= names
            return values
        if self._kept:
            starts = grid.offsets[grid.rising].astype(np.intp)
            values[grid.rising] = np.maximum.reduceat(self._elements(slots), starts)
        self._kept.pop(slots, None)
        self._kept[slots] = (grid, values)  # the newest comes last
        self._known |= names
        self._drop_outdated()
        return values

    def _drop_outdated(self) -> None:
        """Drops layouts all of whose parameters newer layouts hold.

        DDP rebuilds its buckets one after another, and each finds its values in the old layouts.
        """
        newer: set[str] = set()
        for key in reversed(list(self._kept)):
            names = {slot.key for slot in key}
            if names <= newer:
                del self._kept[key]
            newer |= names

    def _elements(self, slots: tuple[TensorSlot, ...]) -> Values:
        elements = np.full(sum(slot.length for slot in slots), self.unknown, self.dtype)
        wanted = {slot.key: slot for slot in slots}
        for key, (grid, values) in self._kept.items():
            if not any(slot.key in wanted for slot in key):
                continue
            spread = grid.per_element(values)
            for slot in key:
                new = wanted.get(slot.key)
                if new is None:
                    continue
                if new.length != slot.length:
                    raise ConfigError.about(
                        f"{self.what} of parameter {slot.key!r} are of {slot.length} elements, "
                        f"the parameter has {new.length}",
                        "the state is of another model",
                        setting=f"{self.what} of parameter {slot.key!r}",
                        value=slot.length,
                    )
                elements[new.offset : new.offset + new.length] = spread[
                    slot.offset : slot.offset + slot.length
                ]
        return elements


def _runs(values: Values) -> Values:
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    lengths = np.diff(np.append(starts, len(values)))
    return np.stack([lengths, values[starts]], axis=1)
