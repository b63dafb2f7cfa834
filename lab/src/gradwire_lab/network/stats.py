"""The queues of a network count what they have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PortStats", "QueueStats", "port_stats"]


@dataclass(frozen=True)
class QueueStats:
    """These are the counters of one queue since the network was made.

    Attributes:
        bytes: the bytes sent, Ethernet headers counted.
        packets: sent; a train counts as its packets, but one that came over another host's wire
            as none unless this host has a wire, too.
        drops: overflows; a train that is dropped whole counts once.
        backlog: bytes that wait.
        marked: the packets that it marked CE; only queues of a network with `ecn` do.
    """

    bytes: int
    packets: int
    drops: int
    backlog: int
    marked: int = 0


@dataclass(frozen=True)
class PortStats:
    """These are the counters of both directions of a host's port, or of a leaf's uplink.

    Attributes:
        uplink: the host's own queue, towards the switch; or the leaf's, towards the spine.
        downlink: the switch's queue, towards the host; or the spine's, towards the leaf.
    """

    uplink: QueueStats
    downlink: QueueStats


def port_stats(answer: dict[str, Any]) -> PortStats:
    """Make it from the keeper's answer."""
    return PortStats(QueueStats(**answer["uplink"]), QueueStats(**answer["downlink"]))
