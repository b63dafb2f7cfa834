"""One value per chunk of each bucket, that outlives a bucket's layout; by parameter in states.

DDP rebuilds its buckets, and plans cut them into other chunks: what is known of a chunk is carried
over to whatever chunks hold its elements now.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import ConfigError
from gradwire.core.plan import TensorSlot
from gradwire.transport.communicator import ChunkGrid

__all__ = ["ChunkBook"]

LARGEST = (1 << 32) - 1
"""Elements of one run of equal values."""

Values = NDArray[Any]


class ChunkBook:
    """Values of the chunks of buckets; thread-safe. Subclasses say of what kind.

    Chunks of a new layout take the largest of the values that their elements had.
    """

    what: ClassVar[str]
    """The values' name, in the plural, and the key of a state."""
    allowed: ClassVar[str]
    """What a state's values may be, in words."""
    dtype: ClassVar[type[np.generic]]
    unknown: ClassVar[float]
    """The value of a chunk of which nothing is known."""
    runs_dtype: ClassVar[type[np.generic]]
    """Of a state's (elements, value)."""

    def __init__(self) -> None:
        self._kept: dict[tuple[TensorSlot, ...], tuple[ChunkGrid, Values]] = {}
        self._mutex = threading.Lock()  # buckets begin and end on threads of their own

    @staticmethod
    def sound(values: Values) -> bool:
        """Whether a state's values are what they may be."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Values]:
        """The values by parameter name, for those that have any: of shape [runs, 2], one
        (elements, value) per run of equal values, in the order of the elements."""
        with self._mutex:
            spread: dict[str, Values] = {}
            for slots, (grid, values) in self._kept.items():  # the newest comes last and rules
                elements = grid.per_element(values)
                for slot in slots:
                    spread[slot.name] = elements[slot.offset : slot.offset + slot.length]
        return {
            name: _runs(values).astype(self.runs_dtype)
            for name, values in spread.items()
            if (values != self.unknown).any()
        }

    def load_state_dict(self, state: Mapping[str, Values]) -> None:
        """Replaces the values by those of `state`, as `state_dict` returned it.

        Raises ConfigError for other shapes and other values, and changes nothing then.
        """
        self.read(state)()

    def read(self, state: Mapping[str, Values]) -> Callable[[], None]:
        """Checks values; what is returned takes them over."""
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

        def take() -> None:
            with self._mutex:
                self._kept = loaded

        return take

    def _open(self, slots: tuple[TensorSlot, ...], grid: ChunkGrid) -> Values:
        """A bucket's values, which may be changed; the mutex must be held."""
        known = self._kept.get(slots)
        if known is not None and known[0] is grid:
            return known[1]
        values = np.full(len(grid), self.unknown, self.dtype)
        if self._kept:
            starts = grid.offsets[grid.rising].astype(np.intp)
            values[grid.rising] = np.maximum.reduceat(self._elements(slots), starts)
        self._kept.pop(slots, None)
        self._kept[slots] = (grid, values)  # the newest comes last
        self._drop_outdated()
        return values

    def _drop_outdated(self) -> None:
        """Forgets the layouts whose parameters newer ones hold, all of them: DDP rebuilds its
        buckets one after another, and each finds its values in what the old layouts still say."""
        newer: set[str] = set()
        for key in reversed(list(self._kept)):
            names = {slot.name for slot in key}
            if names <= newer:
                del self._kept[key]
            newer |= names

    def _elements(self, slots: tuple[TensorSlot, ...]) -> Values:
        """The value of each element of a bucket, from whatever grids the parameters last had."""
        elements = np.full(sum(slot.length for slot in slots), self.unknown, self.dtype)
        place = {slot.name: slot for slot in slots}
        for key, (grid, values) in self._kept.items():
            if not any(slot.name in place for slot in key):
                continue
            spread = grid.per_element(values)
            for slot in key:
                new = place.get(slot.name)
                if new is None:
                    continue
                if new.length != slot.length:
                    raise ConfigError.about(
                        f"{self.what} of parameter {slot.name!r} are of {slot.length} elements, "
                        f"the parameter has {new.length}",
                        "the state is of another model",
                        setting=f"{self.what} of parameter {slot.name!r}",
                        value=slot.length,
                    )
                elements[new.offset : new.offset + new.length] = spread[
                    slot.offset : slot.offset + slot.length
                ]
        return elements


def _runs(values: Values) -> Values:
    """(elements, value) of each run of equal values, of shape [runs, 2]."""
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    lengths = np.diff(np.append(starts, len(values)))
    return np.stack([lengths, values[starts]], axis=1)
