"""A start line makes all ranks begin a communication at the same moment.

It separates the time that ranks wait for the slowest one's computation from the time that the
network takes. It is in memory that the ranks share, so no packet crosses the network for it.
"""

from __future__ import annotations

import mmap
import os
import time

_SLOT = 64
_POLL_SECONDS = 0.0002


def memory(ranks: int) -> int:
    """Make the memory of a line; return the descriptor that the ranks inherit."""
    descriptor = os.memfd_create("gradwire-start-line")
    os.ftruncate(descriptor, ranks * _SLOT)
    return descriptor


class StartLine:
    """A start line is one rank's access to the line's memory."""

    def __init__(self, descriptor: int, rank: int, ranks: int) -> None:
        """Map the memory.

        Args:
            descriptor: what `memory` returned, in this process.
        """
        self._counts = memoryview(mmap.mmap(descriptor, ranks * _SLOT)).cast("q")
        self._mine = rank * _SLOT // 8
        self._all = range(0, ranks * _SLOT // 8, _SLOT // 8)

    def wait(self, timeout: float) -> float:
        """Arrive at the line and wait for the other ranks.

        Args:
            timeout: seconds to wait.

        Returns:
            When all had arrived, in seconds of ``time.monotonic()``.

        Raises:
            TimeoutError: names the ranks that did not arrive.
        """
        mine = self._counts[self._mine] + 1
        self._counts[self._mine] = mine
        deadline = time.monotonic() + timeout
        while True:
            late = [rank for rank, slot in enumerate(self._all) if self._counts[slot] < mine]
            now = time.monotonic()
            if not late:
                return now
            if now > deadline:
                raise TimeoutError(f"ranks {late} did not reach the start line in {timeout:g} s")
            time.sleep(_POLL_SECONDS)
