"""A network's switches are one bridge, or leaves under a spine with shaped uplinks.

This code runs in the keeper, as the topology does. All bridges are in one namespace, the
switches'. An uplink is a veth pair between two of them with a token bucket on each end, or, where
queues mark, a TAP pair whose link has rate and queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyroute2.netlink.rtnl.ndmsg import NTF_MASTER, NUD_NOARP

from gradwire_lab.network.addresses import MAX_HOSTS, host_mac
from gradwire_lab.network.leaves import Leaves
from gradwire_lab.network.offloads import switch_offloads_off
from gradwire_lab.network.shaping import NO_BOTTLENECK, queue_stats, shape
from gradwire_lab.network.tap_links import DIRECTIONS
from gradwire_lab.network.wires import Near, Wires

__all__ = ["Switches", "index_of", "up"]

_SPINE = "spine"
_NUMBERS = MAX_HOSTS
"""Number of the first uplink's link; those of hosts come before."""


class Switches:
    """Switches are bridges with their uplinks and tables of addresses."""

    def __init__(
        self,
        near: Callable[[str], Near],
        hosts: int,
        leaves: Leaves | None,
        wires: Wires,
        ecn: int,
    ) -> None:
        """Make them.

        Args:
            near: a device of this name in the switches' namespace, in which the process is.
            hosts: how many there are on the leaves; all others are on the spine.
            leaves: None for a single switch.
            ecn: occupancy of an uplink's queue above which it marks, in bytes; 0: none does.

        Raises:
            OSError: the kernel cannot or may not do one of the steps.
        """
        self._near = near
        self._netlink = near("").netlink
        self._wires = wires
        self._ecn = ecn
        self._hosts = hosts
        self._leaves = leaves
        self._bridges: dict[str, int] = {}
        self._uplinks: list[tuple[int, int]] = []
        if leaves is None:
            self._add_bridge("switch")
            return
        self._add_bridge(_SPINE)
        for leaf in range(leaves.count):
            self._add_bridge(f"leaf{leaf}")
            self._uplinks.append(self._add_uplink(leaf, leaves))

    def _add_bridge(self, name: str) -> None:
        self._netlink.link("add", ifname=name, kind="bridge", br_mcast_snooping=0, br_stp_state=0)
        self._bridges[name] = index_of(self._netlink, name)
        up(self._netlink, self._bridges[name])

    def _add_uplink(self, leaf: int, leaves: Leaves) -> tuple[int, int]:
        """Return an uplink's two ends: that of the leaf, and that of the spine."""
        names = f"uplink{leaf}", f"downlink{leaf}"
        if self._ecn:
            self._wires.add(_NUMBERS + leaf, self._near(names[0]), names[1], seed=0)
        else:
            self._netlink.link("add", ifname=names[0], kind="veth", peer={"ifname": names[1]})
        first, second = (index_of(self._netlink, name) for name in names)
        if not leaves.uplink.offloads:
            for name in names:
                switch_offloads_off(name)
        for index, bridge in ((first, f"leaf{leaf}"), (second, _SPINE)):
            shape(self._netlink, index, NO_BOTTLENECK if self._ecn else leaves.uplink)
            self._join(index, bridge)
        if self._ecn:
            for direction in DIRECTIONS:
                self._wires.mark(_NUMBERS + leaf, direction, leaves.uplink, self._ecn)
        return first, second

    def connect(self, number: int, port: int) -> None:
        """Put a host's port where it belongs, and enter the way to the host in every switch."""
        self._join(port, self._bridge_of(number))
        self._know(number, port)
        if self._leaves is None:
            return
        home = self._leaf_of(number)
        for leaf, (uplink, downlink) in enumerate(self._uplinks):
            # The host's own leaf knows its port, and the spine the way down; other leaves send up.
            self._know(number, downlink if leaf == home else uplink)

    def _leaf_of(self, number: int) -> int | None:
        if self._leaves is None or number >= self._hosts:
            return None
        return self._leaves.of(number, self._hosts)

    def _bridge_of(self, number: int) -> str:
        if self._leaves is None:
            return "switch"
        leaf = self._leaf_of(number)
        return _SPINE if leaf is None else f"leaf{leaf}"

    def _join(self, index: int, bridge: str) -> None:
        self._netlink.link("set", index=index, master=self._bridges[bridge])
        self._netlink.brport("set", index=index, learning=0, unicast_flood=0)
        up(self._netlink, index)

    def _know(self, number: int, port: int) -> None:
        """Have the bridge that a port belongs to send a host's frames out of it."""
        self._netlink.fdb(
            "add",
            ifindex=port,
            lladdr=host_mac(number),
            flags=NTF_MASTER,
            # A "static" entry; a "permanent" one would be an address of the switch.
            state=NUD_NOARP,
        )

    def uplink_stats(self, leaf: int) -> dict[str, dict[str, int]]:
        """Return what both queues of a leaf's uplink have seen since they were made."""
        return {
            direction: self._wires.queue_stats(_NUMBERS + leaf, direction)
            or queue_stats(self._netlink, index)
            for direction, index in zip(DIRECTIONS, self._uplinks[leaf], strict=True)
        }

    def wire_stats(self, leaf: int) -> dict[str, dict[str, int]]:
        """Return the counters of a leaf's uplink, where uplinks mark; see `Wires.stats`."""
        return self._wires.stats(_NUMBERS + leaf)


def index_of(netlink: Any, name: str) -> int:
    """Return the index of a device in a socket's namespace."""
    return int(netlink.link_lookup(ifname=name)[0])


def up(netlink: Any, index: int) -> None:
    """Switch a device on."""
    netlink.link("set", index=index, state="up")
