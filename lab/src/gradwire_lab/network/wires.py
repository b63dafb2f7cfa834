"""Wires of hosts and ports that mark are links that are more than a veth pair.

This code runs in the keeper, as the topology does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gradwire_lab.network.presets import Preset
from gradwire_lab.network.tap_links import TapLinks
from gradwire_lab.network.wire import Wire

_RING = 4096
"""Frames that a TAP device holds until the link's thread comes for them."""


@dataclass(frozen=True)
class _End:
    """An end is one device of a wire: a socket inside its namespace, and its index there."""

    netlink: Any
    index: int

    def unsent(self) -> int:
        """Return the frames that the device dropped after its queue had let them go."""
        (link,) = self.netlink.get_links(self.index)
        return int(link.get_attr("IFLA_STATS64")["tx_dropped"])


@dataclass(frozen=True)
class Near:
    """A near end says where the first device of a link is.

    Attributes:
        namespace: descriptor of its network namespace.
        netlink: a socket inside that.
        name: the name of the device.
    """

    namespace: int
    netlink: Any
    name: str


class Wires:
    """Wires are pairs of TAP devices with a thread between them, in place of veth pairs."""

    def __init__(self, switch: Any, switch_namespace: int, *, offloads: bool) -> None:
        """Make none yet.

        Args:
            switch: a socket inside the switch's namespace.
        """
        self._switch = switch
        self._links = TapLinks(switch_namespace, offloads=offloads)
        self._ends: dict[int, dict[str, _End]] = {}
        self._wires: dict[tuple[int, str], Wire] = {}
        self._queues: dict[tuple[int, str], tuple[int, int, int]] = {}

    @property
    def carrier(self) -> str | None:
        """Name what carries packets over the wires, for results; None without wires."""
        return ", ".join(sorted(self._links.carriers)) or None

    def add(self, number: int, near: Near, port: str, seed: int) -> None:
        """Make a link's devices and start what is between them, which does nothing yet.

        Args:
            number: the number of the host, or one that no host has.
            near: the first device: where it is and what it is called.
            port: name of the second, at the switch.
            seed: the seed of losses and jitter; links differ all the same.

        Raises:
            TapUnavailable: the machine lets the caller make none.
            OSError: the thread does not start.
        """
        self._links.add(number, near.namespace, near.name, port, seed << 8 | number)
        (uplink,) = near.netlink.link_lookup(ifname=near.name)
        (downlink,) = self._switch.link_lookup(ifname=port)
        near.netlink.link("set", index=uplink, txqlen=_RING)
        self._switch.link("set", index=downlink, txqlen=_RING)
        self._ends[number] = {
            "uplink": _End(near.netlink, uplink),
            "downlink": _End(self._switch, downlink),
        }

    def set(self, number: int, wire: Wire, directions: Iterable[str]) -> None:
        """Change what directions of a link do; a queue that `mark` gave them stays."""
        for direction in directions:
            self._wires[number, direction] = wire
            if queue := self._queues.get((number, direction)):
                rate, size, ecn = queue
                self._links.set(number, replace(wire, rate=rate, queue=size, ecn=ecn), direction)
            else:
                self._links.set(number, wire, direction)

    def mark(self, number: int, direction: str, preset: Preset, ecn: int) -> None:
        """Have a direction of a link be a port's queue, which marks: the kernel's cannot.

        Args:
            ecn: occupancy above which packets are marked, in bytes.
        """
        self._queues[number, direction] = preset.rate, preset.queue, ecn
        self.set(number, self._wires.get((number, direction), Wire()), [direction])

    def queue_stats(self, number: int, direction: str) -> dict[str, int] | None:
        """Return the counters of the queue that `mark` gave a direction; None where it gave none.

        They have the names of `network.QueueStats`.
        """
        if (number, direction) not in self._queues:
            return None
        seen = self.stats(number)[direction]
        waiting = seen["queue_bytes"]
        return {
            "bytes": seen["bytes"] - seen["dropped_queue_bytes"] - waiting,
            "packets": seen["packets"] - seen["dropped_queue"],
            "drops": seen["dropped_queue"],
            "backlog": waiting,
            "marked": seen["marked"],
        }

    def stats(self, number: int) -> dict[str, dict[str, int]]:
        """Return what both directions of a link have seen: as the engine counts, and `overrun`."""
        stats = self._links.counters(number)
        for direction, end in self._ends[number].items():
            stats[direction]["overrun"] = end.unsent()
        return stats

    def arrived(self, number: int) -> int | None:
        """Count the packets that left the switch's queue for a host; None where it has no wire.

        The kernel counts a train from a TAP device as no packet at all, so its own count is of no
        use where trains came over somebody's wire.
        """
        if number not in self._ends:
            return None
        downlink = self.stats(number)["downlink"]
        return downlink["packets"] + downlink["overrun"]

    def close(self) -> None:
        """End all threads. May be called again."""
        self._links.close()
