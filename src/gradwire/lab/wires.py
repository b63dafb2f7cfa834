"""Puts a pair of TAP devices in the place of a host's veth pair, and back.

Runs in the keeper, as the topology does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.lab.addresses import INTERFACE, host_mac
from gradwire.lab.tap_links import SPARE, TapLinks, make_pair
from gradwire.lab.wire import Wire

if TYPE_CHECKING:
    from gradwire.lab.topology import Topology

_RING = 4096
"""Frames that a TAP device holds until the link's thread comes for them."""


class Wires:
    """The wires of a topology's hosts."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._links = TapLinks()

    def add(self, number: int, seed: int) -> str:
        """Make a host's link anew, of two TAP devices with a thread between them.

        Returns:
            What carries it, as results shall name it.

        Raises:
            TapUnavailable: the machine lets the caller make none.
            OSError: the host has one, or the thread does not start.
        """
        if number in self._links.hosts:
            raise OSError(f"host {number} has a wire already")
        topology, host = self._topology, self._topology.hosts[number]
        # First of all, because where it fails the host is to keep what it has.
        pair = make_pair(
            host.namespace, topology.switch_namespace, offloads=topology.plan.preset.offloads
        )
        topology.switch.link("del", index=host.downlink)
        host.netlink.link("set", index=_spare(host.netlink), address=host_mac(number))
        for netlink, name in ((host.netlink, INTERFACE), (topology.switch, f"port{number}")):
            netlink.link("set", index=_spare(netlink), ifname=name, txqlen=_RING)
        self._links.add(number, pair, seed)
        self._plug_in(number)
        return pair.carrier

    def remove(self, number: int) -> None:
        """Make a host's link a veth pair again.

        Raises:
            OSError: it is one.
        """
        self._links.remove(number)
        self._topology.add_pair(number, self._topology.hosts[number].namespace)
        self._plug_in(number)

    def set(self, number: int, wire: Wire, direction: str) -> None:
        """Change what one direction of a host's wire does.

        Raises:
            OSError: it has none, or the wire has failed.
        """
        self._links.set(number, wire, direction)

    def stats(self, number: int) -> dict[str, dict[str, int]]:
        """What both directions of a host's wire have seen: as the engine counts, and `overrun`.

        Raises:
            OSError: it has none, or the wire has failed.
        """
        stats = self._links.counters(number)
        host = self._topology.hosts[number]
        stats["uplink"]["overrun"] = _unsent(host.netlink, host.uplink)
        stats["downlink"]["overrun"] = _unsent(self._topology.switch, host.downlink)
        return stats

    def arrived(self, number: int) -> int | None:
        """Packets that have left the switch's queue for a host; None where it has no wire.

        The kernel counts a train from a TAP device as no packet at all, so where trains came over
        somebody's wire its own count is of no use.

        Raises:
            OSError: the wire has failed.
        """
        if number not in self._links.hosts:
            return None
        downlink = self.stats(number)["downlink"]
        return downlink["packets"] + downlink["overrun"]

    def close(self) -> None:
        """End all threads. May be called again."""
        self._links.close()

    def _plug_in(self, number: int) -> None:
        self._topology.plug_in(number, self._topology.hosts[number])
        self._topology.fill_tables(number)


def _spare(netlink: Any) -> int:
    return int(netlink.link_lookup(ifname=SPARE)[0])


def _unsent(netlink: Any, index: int) -> int:
    """Frames that a device dropped after its queue had let them go."""
    (link,) = netlink.get_links(index)
    return int(link.get_attr("IFLA_STATS64")["tx_dropped"])
