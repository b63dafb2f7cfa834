"""TransferReport, the outcome of a transfer, and Waits, what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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


@dataclass(frozen=True)
class TransferReport:
    """The outcome of one transfer as this worker saw it.

    Attributes:
        op: Number of the op in its lane, -1 where no network was needed.
        step: Training step.
        counted: uint8 for each chunk of the grid; 1 where this worker's contribution counted.
        applied: uint8 for each chunk of the grid; 1 where a result was applied, in a lossy pull at
            this worker.
        withheld_chunks: uint32, the chunks whose results a committed pull left out and this rank
            keeps as its residual.
        withheld_values: float32, scaled; the results of those chunks, concatenated.
        delivered: For each region, the fraction of this worker's elements that counted.
        effective_bounds: For each region, its bound rounded down to whole chunks.
        exceeded: Indices of the regions whose loss exceeded their bound (plans by time only).
        stats_sum: The summed statistics of all workers, the same on all ranks.
        stats_max: The maximised statistics of all workers, the same on all ranks.
        push_s: Duration of the push in seconds.
        pull_s: Duration of the pull in seconds.
        total_s: Duration of the transfer in seconds.
        bytes_sent: UDP payload that this worker sent, in bytes.
        packets_sent: Datagrams that this worker sent.
        retransmissions: Those of them that were sent again.
        rtprop_s: Smallest round-trip time seen, in seconds.
        btlbw: Bandwidth of the bottleneck in bytes per second, 0 while it is not known.
        result_error: float32, scaled; the error of the encoding in the results that this rank
            aggregated, which it keeps as its residual.
        error_offset: The first element that `result_error` covers.
        passes: Passes of the push, the most of any aggregator; 0 under control "stream".
        datagram: Size in bytes of the longest datagram that all paths of the job carried when the
            transfer began, the same on all workers; 0 where it was not needed.
        waits: What it waited for.
    """

    op: int
    step: int
    counted: NDArray[np.uint8]
    applied: NDArray[np.uint8]
    withheld_chunks: NDArray[np.uint32]
    withheld_values: NDArray[np.float32]
    delivered: tuple[float, ...]
    effective_bounds: tuple[float, ...]
    exceeded: tuple[int, ...]
    stats_sum: tuple[float, ...]
    stats_max: tuple[float, ...]
    push_s: float = 0.0
    pull_s: float = 0.0
    total_s: float = 0.0
    bytes_sent: int = 0
    packets_sent: int = 0
    retransmissions: int = 0
    rtprop_s: float = 0.0
    btlbw: float = 0.0
    result_error: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    error_offset: int = 0
    passes: int = 0
    datagram: int = 0
    waits: Waits = NOTHING
