"""FlatCopies: copies that last for one step, in memory that is kept for the next.

Memory that is allocated anew in each step is also paged in and cleared anew, which may take longer
than the copy.
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
        """Returns a copy of the values (float32, 1-D), valid until the key's next copy."""
        copy = self._by_key.get(key)
        if copy is None or copy.size != values.size:
            copy = self._by_key[key] = np.empty_like(values)
        np.copyto(copy, values)
        return copy

    def clear(self) -> None:
        """Drops all copies; whoever holds one may go on using it."""
        self._by_key.clear()
