"""A topology is made of namespaces, links, queues and tables of hosts and their switches.

This code runs in the keeper's process, which has one thread and no other task, because the
functions move it from one network namespace to another.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute

from gradwire_lab.network.addresses import (
    DISCARD_NETWORK,
    INTERFACE,
    PREFIX_LENGTH,
    discard_address,
    host_address,
    host_mac,
)
from gradwire_lab.network.kernel import CLONE_NEWNET, open_network_namespace, setns, unshare
from gradwire_lab.network.leaves import Leaves
from gradwire_lab.network.loss_rules import LossRules
from gradwire_lab.network.offloads import switch_offloads_off
from gradwire_lab.network.presets import ETHERNET_MTU, Preset
from gradwire_lab.network.shaping import NO_BOTTLENECK, queue_stats, shape
from gradwire_lab.network.switches import Switches, index_of, up
from gradwire_lab.network.tap_links import DIRECTIONS
from gradwire_lab.network.wire import Wire
from gradwire_lab.network.wires import Near, Wires


@dataclass(frozen=True)
class Plan:
    """A plan says what is to be built.

    Attributes:
        hosts: hosts whose ports are shaped in both directions.
        extra_hosts: hosts for cross traffic, on the spine where there is one; their way into the
            switch is not the bottleneck.
        preset: the preset of every port that `ports` does not name.
        leaves: the switches that the hosts share; None for a single one.
        congestion_control: the congestion control of TCP on every host.
        ecn: occupancy of a switch's queue above which ECT packets are marked, in bytes; 0: none
            are. Then every one of `hosts` has a wire.
        wires: what the link of a host does in both directions at first; other links are veth pairs.
        seed: the seed of the wires' losses and jitter.
        ports: the ports of single hosts, by number.
    """

    hosts: int
    extra_hosts: int
    preset: Preset
    congestion_control: str
    leaves: Leaves | None = None
    ecn: int = 0
    wires: dict[int, Wire] = field(default_factory=dict)
    seed: int = 0
    ports: dict[int, Preset] = field(default_factory=dict)

    def port(self, number: int) -> Preset:
        """Return how a host's port is shaped."""
        return self.ports.get(number, self.preset)


@dataclass
class Host:
    """A host has been built.

    Attributes:
        namespace: descriptor of its network namespace.
        netlink: a socket inside it.
        uplink: index of its own interface.
        downlink: index of the switch's port towards it.
    """

    namespace: int
    netlink: Any
    uplink: int
    downlink: int


class Topology:
    """A topology is a network that has been built.

    Attributes:
        hosts: the hosts by number.
        switches: one, or leaves and a spine.
        wires: the links of those hosts that have more than a veth pair.
    """

    def __init__(self, plan: Plan) -> None:
        """Build it.

        Raises:
            OSError: the kernel cannot or may not do one of the steps.
            TapUnavailable: it lets the caller make no wires.
        """
        self._plan = plan
        self._rules: dict[int, LossRules] = {}
        _quiet_ipv6()
        _switch_frames_unfiltered()
        self._switch_namespace = open_network_namespace()
        self._switch = IPRoute()
        self.wires = Wires(self._switch, self._switch_namespace, offloads=plan.preset.offloads)
        near = partial(Near, self._switch_namespace, self._switch)
        self.switches = Switches(near, plan.hosts, plan.leaves, self.wires, plan.ecn)
        count = plan.hosts + plan.extra_hosts
        self.hosts = [self._add_host(number) for number in range(count)]
        for number in range(count):
            self._fill_tables(number)

    def _add_host(self, number: int) -> Host:
        namespace = _new_namespace()
        _quiet_ipv6()
        if self._plan.ecn:
            _ask_for_ecn()
        netlink = IPRoute()
        setns(self._switch_namespace, CLONE_NEWNET)
        port = f"port{number}"
        if wire := self._plan.wires.get(number):
            self.wires.add(number, Near(namespace, netlink, INTERFACE), port, self._plan.seed)
            self.wires.set(number, wire, DIRECTIONS)
            netlink.link("set", index=index_of(netlink, INTERFACE), address=host_mac(number))
        else:
            self._switch.link(
                "add",
                ifname=port,
                kind="veth",
                peer={"ifname": INTERFACE, "net_ns_fd": namespace, "address": host_mac(number)},
            )
        host = Host(namespace, netlink, index_of(netlink, INTERFACE), index_of(self._switch, port))
        preset = self._plan.port(number)
        if preset.mtu != ETHERNET_MTU:
            netlink.link("set", index=host.uplink, mtu=preset.mtu)
            self._switch.link("set", index=host.downlink, mtu=preset.mtu)
        if not (preset.offloads and preset.udp_trains):
            switch_offloads_off(port, udp_only=preset.offloads)
            setns(namespace, CLONE_NEWNET)
            switch_offloads_off(INTERFACE, udp_only=preset.offloads)
            setns(self._switch_namespace, CLONE_NEWNET)
        extra = number >= self._plan.hosts
        if preset.rate:
            shape(netlink, host.uplink, NO_BOTTLENECK if extra or preset.fast_hosts else preset)
            shape(self._switch, host.downlink, NO_BOTTLENECK if self._marks(number) else preset)
        if self._marks(number):
            self.wires.mark(number, "downlink", preset, self._plan.ecn)
        self.switches.connect(number, host.downlink)
        up(netlink, index_of(netlink, "lo"))
        netlink.addr(
            "add", index=host.uplink, address=host_address(number), prefixlen=PREFIX_LENGTH
        )
        up(netlink, host.uplink)
        return host

    def _marks(self, number: int) -> bool:
        """Return whether the switch's queue towards a host is its wire's, which marks."""
        return self._plan.ecn > 0 and number < self._plan.hosts

    def _fill_tables(self, number: int) -> None:
        """Write what the first packets would have to ask for, and TCP's congestion control."""
        host = self.hosts[number]
        # The congestion control is set by route. A namespace may neither choose nor inherit an
        # algorithm that is restricted on its machine, as cubic is on some.
        via: dict[str, Any] = {
            "oif": host.uplink,
            "scope": "link",
            "metrics": {"cc_algo": self._plan.congestion_control},
        }
        network = f"{host_address(0).rsplit('.', 1)[0]}.0/{PREFIX_LENGTH}"
        host.netlink.route("replace", dst=network, prefsrc=host_address(number), proto=2, **via)
        host.netlink.route("add", dst=DISCARD_NETWORK, **via)
        for other in range(len(self.hosts)):
            if other == number:
                continue
            for address in (host_address(other), discard_address(other)):
                host.netlink.neigh(
                    "add",
                    dst=address,
                    lladdr=host_mac(other),
                    ifindex=host.uplink,
                    state="permanent",
                )

    def port_stats(self, number: int) -> dict[str, dict[str, int]]:
        """Return what both queues of a host's port have seen since they were made."""
        host = self.hosts[number]
        stats = {
            "uplink": queue_stats(host.netlink, host.uplink),
            "downlink": queue_stats(self._switch, host.downlink),
        }
        if (marking := self.wires.queue_stats(number, "downlink")) is not None:
            stats["downlink"] = marking
        elif (arrived := self.wires.arrived(number)) is not None:
            stats["downlink"]["packets"] = arrived
        return stats

    def set_loss(self, changes: Iterable[tuple[int, str, float]]) -> None:
        """Drop packets by chance where they have crossed a host's uplink or downlink."""
        for number, direction, rate in changes:
            up = direction == "uplink"
            namespace = self._switch_namespace if up else self.hosts[number].namespace
            self._rules_of(namespace).set(f"port{number}" if up else INTERFACE, rate)

    def set_refusal(self, number: int, on: bool) -> None:
        """Let a host's kernel refuse the datagrams of its programs, or no more."""
        self._rules_of(self.hosts[number].namespace).refuse_datagrams(on)

    def _rules_of(self, namespace: int) -> LossRules:
        if namespace not in self._rules:
            setns(namespace, CLONE_NEWNET)
            self._rules[namespace] = LossRules()
        return self._rules[namespace]

    def set_wire(self, number: int, wire: dict[str, Any], directions: list[str]) -> None:
        self.wires.set(number, Wire(**wire), directions)

    def set_rate(self, number: int, rate: int) -> None:
        """Change the rate of a host's port in both directions, in bits per second."""
        host, preset = self.hosts[number], self._plan.port(number)
        changed = replace(preset, rate=rate)
        if not preset.fast_hosts:
            shape(host.netlink, host.uplink, changed, "change")
        if self._marks(number):
            self.wires.mark(number, "downlink", changed, self._plan.ecn)
        else:
            shape(self._switch, host.downlink, changed, "change")

    def close(self) -> None:
        self.kill_everything()
        self.wires.close()

    def kill_everything(self) -> None:
        """Kill every process on any of the hosts, whoever started it."""
        spaces = {os.fstat(host.namespace).st_ino for host in self.hosts}
        for _ in range(100):  # the next round finds what was forked meanwhile
            victims = [pid for pid in _processes() if _namespace_of(pid) in spaces]
            if not victims:
                return
            for pid in victims:
                _kill(pid)


def _processes() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _namespace_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _new_namespace() -> int:
    unshare(CLONE_NEWNET)
    return open_network_namespace()


def _quiet_ipv6() -> None:
    """Keep devices that are yet to come from announcing themselves over IPv6."""
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    if switch.exists():
        switch.write_text("1")


def _ask_for_ecn() -> None:
    """Have TCP of the process' namespace offer and accept ECN on every connection (RFC 3168)."""
    Path("/proc/sys/net/ipv4/tcp_ecn").write_text("1")


def _switch_frames_unfiltered() -> None:
    """Keep the firewall's hooks of this namespace away from what the bridge forwards.

    A switch has none, and here they cost a tenth of the processor time of every contestant.
    """
    for family in ("iptables", "ip6tables", "arptables"):
        hook = Path(f"/proc/sys/net/bridge/bridge-nf-call-{family}")
        with contextlib.suppress(OSError):
            if hook.exists():
                hook.write_text("0")
