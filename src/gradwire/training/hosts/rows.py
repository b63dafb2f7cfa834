"""The shared memory of one bucket: a row for each rank's gradient, and one for their sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwire.transport.host_link import map_rows, memory_of_rows

BLOCK = 1 << 16
"""Elements that are summed at a time, so that the sum stays in the cache."""

LEAST_SHARD = 1 << 14
"""Elements below which a share of the work is not worth a message."""


class Rows:
    """The rows of one bucket, mapped into this process."""

    def __init__(self, memory: int, ranks: int, elements: int) -> None:
        self._ranks = ranks
        self._rows = map_rows(memory, ranks + 1, elements)

    @staticmethod
    def make(ranks: int, elements: int) -> int:
        return memory_of_rows(ranks + 1, elements)

    def of(self, place: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._rows[place]
        return row

    @property
    def total(self) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._rows[self._ranks]
        return row

    def add(self, place: int, share: float) -> None:
        """Sums this rank's shard of all rows, in rank order, and multiplies it."""
        factor = np.float32(share)
        start, end = shard(self.total.size, self._ranks, place)
        for at in range(start, end, BLOCK):
            block = slice(at, min(at + BLOCK, end))
            total = self.total[block]
            np.copyto(total, self._rows[0, block])
            for row in range(1, self._ranks):
                np.add(total, self._rows[row, block], out=total)
            np.multiply(total, factor, out=total)


def has_shard(elements: int, ranks: int, place: int) -> bool:
    """Returns whether the rank at a place sums a part of a bucket, and reports it."""
    start, end = shard(elements, ranks, place)
    return start < end


def shard(elements: int, ranks: int, place: int) -> tuple[int, int]:
    workers = max(1, min(ranks, elements // LEAST_SHARD))
    return elements * min(place, workers) // workers, elements * min(place + 1, workers) // workers
