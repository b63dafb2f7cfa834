"""Waits, which says what a transfer waited for at one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Most(NamedTuple):
    """The largest value of some kind, and the endpoint that it belongs to.

    Attributes:
        endpoint: Number of the endpoint, workers first, then servers; -1 for none.
    """

    endpoint: int = -1
    value: float = 0.0


NOBODY = Most()


@dataclass(frozen=True)
class Waits:
    """What one transfer waited for at one worker. Times are seconds since its start there.

    Attributes:
        began: The last worker to begin it, as this worker knows.
        pushed: The worker whose contribution completed this worker's share of the sum; none where
            time closed it. Its time stands there all the same.
        pulled: The endpoint that sent the last results.
        queued: The longest that an arriving packet queued, in seconds, and who had sent it.
        resent: The most packets that this worker sent again to one endpoint.
        missed: The most packets of one endpoint that were not there when a later one arrived.
        burst: The most packets, sent or awaited, that were lost one after another.
    """

    began: Most = NOBODY
    pushed: Most = NOBODY
    pulled: Most = NOBODY
    queued: Most = NOBODY
    resent: Most = NOBODY
    missed: Most = NOBODY
    burst: Most = NOBODY

    @staticmethod
    def of(noted: Sequence[tuple[int, int]]) -> Waits:
        """Returns what the engine has noted: four times in nanoseconds, then three counts."""
        times = [Most(endpoint, nanoseconds / 1e9) for endpoint, nanoseconds in noted[:4]]
        return Waits(*times, *(Most(*each) for each in noted[4:]))


NOTHING = Waits()
"""Of a transfer that needed no network."""
