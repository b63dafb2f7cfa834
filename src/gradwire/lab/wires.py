"""The wires of hosts that have more than a veth pair: what a topology keeps of them.

Runs in the keeper, as the topology does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradwire.lab.addresses import INTERFACE, host_mac
from gradwire.lab.tap_links import DIRECTIONS, TapLinks, make_pair
from gradwire.lab.wire import Wire

_RING = 4096
"""Frames that a TAP device holds until the link's thread comes for them."""


@dataclass(frozen=True)
class _End:
    """One device of a wire: a socket inside its namespace, and its index there."""

    netlink: Any
    index: int

    def unsent(self) -> int:
        """Frames that the device dropped after its queue had let them go."""
        (link,) = self.netlink.get_links(self.index)
        return int(link.get_attr("IFLA_STATS64")["tx_dropped"])


class Wires:
    """Pairs of TAP devices with a thread between them, in the place of veth pairs."""

    def __init__(self, switch: Any, switch_namespace: int, *, offloads: bool) -> None:
        """Make none yet.

        Args:
            switch: a socket inside the switch's namespace.
            switch_namespace: descriptor of that.
            offloads: whether trains pass whole.
        """
        self._switch = switch
        self._switch_namespace = switch_namespace
        self._offloads = offloads
        self._links = TapLinks()
        self._ends: dict[int, dict[str, _End]] = {}
        self._carriers: set[str] = set()

    @property
    def carrier(self) -> str | None:
        """What carries packets over the wires, as results shall name it; None without wires."""
        return ", ".join(sorted(self._carriers)) or None

    def add(self, number: int, namespace: int, netlink: Any, wire: Wire, seed: int) -> None:
        """Make a host's devices, on the host and at the switch, and start what is between them.

        Args:
            number: of the host.
            namespace: descriptor of its network namespace.
            netlink: a socket inside that.
            wire: what both directions do.
            seed: of losses and jitter; hosts differ all the same.

        Raises:
            TapUnavailable: the machine lets the caller make none.
            OSError: the thread does not start.
        """
        port = f"port{number}"
        pair = make_pair(
            namespace, INTERFACE, self._switch_namespace, port, offloads=self._offloads
        )
        self._links.add(number, pair, seed << 8 | number)
        self._carriers.add(pair.carrier)
        (uplink,) = netlink.link_lookup(ifname=INTERFACE)
        (downlink,) = self._switch.link_lookup(ifname=port)
        netlink.link("set", index=uplink, address=host_mac(number), txqlen=_RING)
        self._switch.link("set", index=downlink, txqlen=_RING)
        self._ends[number] = {
            "uplink": _End(netlink, uplink),
            "downlink": _End(self._switch, downlink),
        }
        self.set(number, wire, DIRECTIONS)

    def set(self, number: int, wire: Wire, directions: Iterable[str]) -> None:
        """Change what directions of a host's wire do.

        Raises:
            OSError: the wire has failed.
        """
        for direction in directions:
            self._links.set(number, wire, direction)

    def stats(self, number: int) -> dict[str, dict[str, int]]:
        """What both directions of a host's wire have seen: as the engine counts, and `overrun`.

        Raises:
            OSError: the wire has failed.
        """
        stats = self._links.counters(number)
        for direction, end in self._ends[number].items():
            stats[direction]["overrun"] = end.unsent()
        return stats

    def arrived(self, number: int) -> int | None:
        """Packets that have left the switch's queue for a host; None where it has no wire.

        The kernel counts a train from a TAP device as no packet at all, so where trains came over
        somebody's wire its own count is of no use.

        Raises:
            OSError: the wire has failed.
        """
        if number not in self._ends:
            return None
        downlink = self.stats(number)["downlink"]
        return downlink["packets"] + downlink["overrun"]

    def close(self) -> None:
        """End all threads. May be called again."""
        self._links.close()
