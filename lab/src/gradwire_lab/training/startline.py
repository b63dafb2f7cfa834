"""A line that all ranks leave together before they communicate.

It lies in memory that the ranks of a demo share, so no packet crosses the network for it. It
parts the time that ranks wait for the slowest one's computation from the time that the network
takes.
"""

from __future__ import annotations

import mmap
import os
import time

_SLOT = 64
_POLL_SECONDS = 0.0002


def memory(ranks: int) -> int:
    """Make the memory of a line; returns the descriptor that the ranks inherit."""
    descriptor = os.memfd_create("gradwire-demo-line")
    os.ftruncate(descriptor, ranks * _SLOT)
    return descriptor


class StartLine:
    """One rank's access to the line."""

    def __init__(self, descriptor: int, rank: int, ranks: int) -> None:
        """Map the memory.

        Args:
            descriptor: what `memory` returned, in this process.
            rank: of this process.
            ranks: how many there are.
        """
        self._counts = memoryview(mmap.mmap(descriptor, ranks * _SLOT)).cast("q")
        self._mine = rank * _SLOT // 8
        self._all = range(0, ranks * _SLOT // 8, _SLOT // 8)

    def wait(self, timeout: float) -> float:
        """Step up to the line and wait for the others.

        Args:
            timeout: seconds after which somebody is given up.

        Returns:
            The moment of leaving, in seconds of ``time.monotonic()``.

        Raises:
            TimeoutError: names the ranks that did not come.
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
