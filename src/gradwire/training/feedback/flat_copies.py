"""FlatCopies: copies that last for one step, in memory that is kept for the next.

Memory that a step takes anew and gives back is paged in anew, and cleared, each time: for 8 MB that
may take longer than the copy.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from gradwire.training.feedback.flat import FlatArray

__all__ = ["FlatCopies"]


class FlatCopies:
    """One copy for each key."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, FlatArray] = {}

    def of(self, key: Hashable, values: FlatArray) -> FlatArray:
        """A copy of the values (float32, 1-D); it lasts until the key's next one."""
        copy = self._by_key.get(key)
        if copy is None or copy.size != values.size:
            copy = self._by_key[key] = np.empty_like(values)
        np.copyto(copy, values)
        return copy

    def clear(self) -> None:
        """Keeps none any longer; who has one may go on using it."""
        self._by_key.clear()
