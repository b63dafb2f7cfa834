"""Network devices get a rate and a drop-tail queue by the kernel's token bucket (tbf)."""

from __future__ import annotations

from typing import Any

from gradwire_lab.network.presets import Preset

__all__ = ["NO_BOTTLENECK", "queue_stats", "shape"]

NO_BOTTLENECK = Preset("no bottleneck", 10_000_000_000, 8 << 20, 1 << 17, offloads=True)
"""A shaping that is never the bottleneck.

It has a queue all the same, because a queue counts a train's packets and a bare link does not.
"""


def shape(netlink: Any, index: int, preset: Preset, verb: str = "add") -> None:
    """Give a device a rate and a queue, or with the verb "change" others.

    Args:
        netlink: a socket inside the device's namespace.
        preset: rate, queue and bucket.
    """
    netlink.tc(
        verb,
        "tbf",
        index=index,
        rate=preset.rate // 8,  # tc takes bytes per second
        burst=preset.bucket,
        limit=preset.queue,
    )


def queue_stats(netlink: Any, index: int) -> dict[str, int]:
    """Return what a device's queue has seen since it was made: fields of `network.QueueStats`."""
    for queue in netlink.get_qdiscs(index=index):
        if queue.get_attr("TCA_KIND") == "tbf":
            stats = queue.get_attr("TCA_STATS2")
            basic = stats.get_attr("TCA_STATS_BASIC")
            state = stats.get_attr("TCA_STATS_QUEUE")
            return {
                "bytes": basic["bytes"],
                "packets": basic["packets"],
                "drops": state["drops"],
                "backlog": state["backlog"],
            }
    raise OSError(f"the queue of device {index} is gone")
