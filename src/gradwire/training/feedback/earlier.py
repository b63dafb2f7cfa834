"""Earlier: the values of a book from before the gradients that no optimizer has taken yet.

A loss scaler may keep an optimizer from a step. All gradients that were summed for that step are
void then, those of every backward pass since the optimizer last stepped. What was kept for the
parameters of that optimizer has to be what it was before the first of these passes.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from gradwire.core.regions import TensorSlot
from gradwire.training.feedback.flat import FlatBook


class Earlier:
    """Copies of a book's values, by parameter."""

    def __init__(self, book: FlatBook) -> None:
        self.book = book
        self._copies = FlatBook()
        self._kept: set[str] = set()  # those whose copies are in use

    def keep(self, slots: tuple[TensorSlot, ...], elements: int) -> None:
        """Copies the values of a bucket before they change, unless earlier ones are kept."""
        new = [slot for slot in slots if slot.key not in self._kept]
        if not new:
            return
        values, copies = self.book.open(slots, elements), self._copies.open(slots, elements)
        if len(new) == len(slots):
            np.copyto(copies, values)
        else:
            for slot in new:
                part = slice(slot.offset, slot.offset + slot.length)
                copies[part] = values[part]
        self._kept.update(slot.key for slot in new)

    def restore(self, keys: Collection[str]) -> None:
        """Gives the book the kept values of these parameters, and keeps them no longer."""
        for key in self._kept.intersection(keys):
            np.copyto(self.book.of(key), self._copies.of(key))
        self.forget(keys)

    def forget(self, keys: Collection[str]) -> None:
        self._kept.difference_update(keys)

    def rescale(self, factor: float) -> None:
        self._copies.rescale(factor)

    def clear(self) -> None:
        self._copies, self._kept = FlatBook(), set()
