"""A network of switches and hosts is on this machine while a ``with`` block lasts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gradwire_lab.network.addresses import (
    ADDRESS_VARIABLE,
    INTERFACE,
    MAX_HOSTS,
    discard_address,
    host_address,
)
from gradwire_lab.network.channel import Channel, LabUnavailable
from gradwire_lab.network.helper import helper_command
from gradwire_lab.network.leaves import Leaves
from gradwire_lab.network.presets import ETHERNET_MTU, NETWORK_A, Preset
from gradwire_lab.network.stats import PortStats, port_stats
from gradwire_lab.network.wire import Wire, WireStats, wire_stats

__all__ = ["LabUnavailable", "Network", "probe"]

_STOP_SECONDS = 2.0


class Network:
    """A network has hosts on one switch; every port has a rate and a drop-tail queue each way.

    Or on several, the leaves, each with an uplink to one spine that is shaped as the ports are;
    two hosts on one leaf meet there, all others across the spine.

    Hosts are network namespaces without names, held by a helper process. They are made as root or,
    through a user namespace, as an ordinary user, and nothing is left of them when this object is
    closed or its process dies, however it dies: programs on the hosts are killed then. Whatever is
    asked of it then raises LabUnavailable, as does what the kernel cannot do; a host that it has
    not raises IndexError.

    Hosts 0 … ``hosts`` - 1 have the preset's ports. The ``extra_hosts`` after them are for cross
    traffic: their way into the switch, or the spine, is never the bottleneck.
    """

    interface = INTERFACE

    def __init__(
        self,
        hosts: int,
        preset: Preset = NETWORK_A,
        *,
        ports: Mapping[int, Preset] | None = None,
        extra_hosts: int = 0,
        leaves: Leaves | None = None,
        ecn: int = 0,
        congestion_control: str = "cubic",
        wires: Mapping[int, Wire] | None = None,
        wire_seed: int = 0,
    ) -> None:
        """Make the network.

        Args:
            ports: the ports of single hosts, by number, where they differ; offloads are as
                everybody's.
            leaves: how the hosts are spread over leaf switches; None for a single switch.
            ecn: occupancy of a switch's queue, towards a host or on an uplink, above which ECT
                packets are marked CE, in bytes; 0 for none. TCP on every host asks for it then.
                No queue of the kernel is sure to mark, so these are the lab's own: every host has
                a wire, which has the port's rate and queue on the way to the host.
            wires: what the link of a host does to packets, by host, in both directions at first.
                All others are veth pairs, which do nothing to them. The port keeps its rate and
                queue: what leaves them travels on the wire.

        Raises:
            LabUnavailable: the machine does not let this process do so.
            ValueError: a number is out of range.
        """
        if hosts < 1 or extra_hosts < 0 or hosts + extra_hosts > MAX_HOSTS:
            raise ValueError(f"a network has 1 to {MAX_HOSTS} hosts")
        if any(not 0 <= host < hosts + extra_hosts for host in wires or {}):
            raise ValueError(f"wires: hosts are 0 to {hosts + extra_hosts - 1}")
        if leaves is not None and leaves.count > hosts:
            raise ValueError(f"leaves={leaves.count}: {hosts} hosts take 2 to {hosts} leaves")
        ports = dict(ports or {})
        if any(not 0 <= host < hosts for host in ports):
            raise ValueError(f"ports: hosts are 0 to {hosts - 1}")
        if any(port.offloads != preset.offloads for port in ports.values()):
            raise ValueError("ports: offloads are on or off for all hosts")
        if preset.mtu != ETHERNET_MTU and (ecn or leaves or wires):
            raise ValueError(f"mtu={preset.mtu}: with ecn, leaves or wires it is {ETHERNET_MTU}")
        if not preset.rate and (ecn or extra_hosts or leaves):
            raise ValueError("ports without a rate allow no ecn, extra hosts or leaves")
        queues = [preset.queue, *(port.queue for port in ports.values())]
        smallest = min(queues if leaves is None else [*queues, leaves.uplink.queue])
        if ecn and not 0 < ecn < smallest:
            raise ValueError(f"ecn={ecn}: 1 to {smallest - 1} bytes are allowed, and 0 for none")
        if ecn and any(wire.rate for wire in (wires or {}).values()):
            raise ValueError("wires: with ecn they have the ports' rates; a rate is not allowed")
        self.ecn = ecn
        # Queues that mark belong to wires, so with ECN every host has a wire.
        self.wires = dict.fromkeys(range(hosts), Wire()) if ecn else {}
        self.wires.update(wires or {})
        self.wire_seed = wire_seed
        self.hosts = hosts
        self.extra_hosts = extra_hosts
        self.preset = preset
        self.ports = ports
        self.leaves = leaves
        self.congestion_control = congestion_control
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[Any]] = []
        self._keeper = Channel("network.keeper", "the network is closed")
        try:
            self._namespaces, self._user_namespace = self._build()
        except BaseException:
            self._keeper.close()
            raise

    def _build(self) -> tuple[list[int], int | None]:
        count = self.hosts + self.extra_hosts
        plan = {
            "hosts": self.hosts,
            "extra_hosts": self.extra_hosts,
            "preset": asdict(self.preset),
            "leaves": None if self.leaves is None else asdict(self.leaves),
            "congestion_control": self.congestion_control,
            "ecn": self.ecn,
            "wires": {host: asdict(wire) for host, wire in self.wires.items()},
            "seed": self.wire_seed,
            "ports": {host: asdict(port) for host, port in self.ports.items()},
        }
        # The answer brings a namespace for each host, and the user namespace if one was made.
        answer, namespaces = self._keeper.ask(plan, receive=count + 1)
        user = namespaces.pop() if answer["user_namespace"] else None
        self.wires_by: str | None = answer["wires_by"]
        return namespaces, user

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        self._check(host)
        return host_address(host)

    def discard_address(self, host: int) -> str:
        """Return the IPv4 address behind a host's port whose packets the host silently drops."""
        self._check(host)
        return discard_address(host)

    def spawn(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a program on a host.

        It is killed when the network is closed and when this process dies. Besides what the
        caller gives it, it finds ``GLOO_SOCKET_IFNAME`` in its environment, and the host's own
        address in ``GRADWIRE_LAB_ADDRESS``.

        Args:
            env: additions to this process's environment.

        Raises:
            OSError: the process cannot be started.
        """
        self._check(host)
        user = -1 if self._user_namespace is None else self._user_namespace
        namespaces = [self._namespaces[host]] + ([user] if user >= 0 else [])
        # The kernel kills such a child when the thread that started it ends, and only the main
        # thread lasts. A program that another thread starts is killed by the keeper.
        lasting = threading.current_thread() is threading.main_thread()
        process = subprocess.Popen(
            helper_command(
                "network.enter",
                user,
                namespaces[0],
                os.getpid() if lasting else 0,
                *command,
                bare=True,
            ),
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": INTERFACE,
                ADDRESS_VARIABLE: host_address(host),
                **(env or {}),
            },
            pass_fds=[*pass_fds, *namespaces],
            **options,
        )
        with self._lock:
            self._processes.append(process)
        return process

    def _ask(self, ask: str, **arguments: Any) -> dict[str, Any]:
        answer, _ = self._keeper.ask({"ask": ask, **arguments})
        return answer

    def port_stats(self, host: int) -> PortStats:
        """Return what both queues of a host's port have seen since the network was made."""
        self._check(host)
        return port_stats(self._ask("port statistics", number=host))

    def uplink_stats(self, leaf: int) -> PortStats:
        """Return what both queues of a leaf's uplink have seen since the network was made."""
        self._check_leaf(leaf)
        return port_stats(self._ask("uplink statistics", leaf=leaf))

    def uplink_wire_stats(self, leaf: int) -> dict[str, WireStats]:
        """Return the counters of a leaf's uplink, as `wire_stats` has them; only with `ecn`.

        Raises:
            ValueError: uplinks do not mark, so they have no such link.
        """
        if not self.ecn:
            raise ValueError("uplinks are veth pairs; see ecn= of Network")
        self._check_leaf(leaf)
        stats = self._ask("uplink wire statistics", leaf=leaf)
        return {name: wire_stats(counters) for name, counters in stats.items()}

    def _check_leaf(self, leaf: int) -> None:
        count = 0 if self.leaves is None else self.leaves.count
        if not 0 <= leaf < count:
            raise IndexError(f"no leaf {leaf} among {count}")

    def lost_packets(self) -> int:
        """Count the packets that went into a switch and neither came out to a host nor wait in one.

        Exact when nothing is being sent, and with trains too, of which `QueueStats.drops` counts
        each only once. Cross traffic is included, and so is what a host's wire loses on the way in.
        """
        stats = [self.port_stats(host) for host in range(self.hosts + self.extra_hosts)]
        return sum(port.uplink.packets - port.downlink.packets for port in stats)

    def set_loss(self, changes: Iterable[tuple[int, str, float]]) -> None:
        """Let links lose packets by chance, behind their rate and queue.

        Args:
            changes: host, "uplink" (from the host) or "downlink" (to it), and the chance of each
                packet, 0 for none and 1 for a link that is cut. A train that passes whole is lost
                whole: see `Preset.offloads`.

        Raises:
            ValueError: a direction or a chance that is none.
        """
        wanted = list(changes)
        for host, direction, rate in wanted:
            self._check(host)
            if direction not in ("uplink", "downlink") or not 0 <= rate <= 1:
                raise ValueError(f"loss of {rate!r} on the {direction!r} of host {host}")
        self._ask("loss", changes=wanted)

    def set_refusal(self, host: int, on: bool) -> None:
        """Have the kernel of a host refuse the datagrams that its programs send, or no more.

        Sending one fails with EPERM, as behind a firewall on the host itself; what others send to
        it arrives.
        """
        self._check(host)
        self._ask("refusal", number=host, on=on)

    def set_rate(self, host: int, rate: int) -> None:
        """Change the rate of a host's port, in both directions and in bits per second.

        Raises:
            ValueError: a rate that is not positive.
        """
        self._check(host)
        if rate <= 0:
            raise ValueError(f"rate={rate!r}: must be positive")
        self._ask("rate", number=host, rate=rate)

    def set_wire(
        self, host: int, wire: Wire, *, directions: Iterable[str] = ("uplink", "downlink")
    ) -> None:
        """Change what the wire of a host does, from the return of this call on.

        What travels already arrives when it was due.

        Args:
            directions: "uplink" (from the host), "downlink" (to it).

        Raises:
            ValueError: a direction that is none, a host without a wire, or with `ecn` a rate.
        """
        wanted = list(directions)
        self._check_wire(host)
        if not set(wanted) <= {"uplink", "downlink"}:
            raise ValueError(f"directions {wanted!r}: allowed are uplink, downlink")
        if self.ecn and wire.rate:
            raise ValueError("wire: with ecn it has the port's rate; a rate is not allowed")
        self._ask("wire", number=host, wire=asdict(wire), directions=wanted)

    def wire_stats(self, host: int) -> dict[str, WireStats]:
        """Return what the wire of a host has seen since the network was made: "uplink", "downlink".

        Raises:
            ValueError: a host without a wire.
        """
        self._check_wire(host)
        stats = self._ask("wire statistics", number=host)
        return {name: wire_stats(counters) for name, counters in stats.items()}

    @property
    def pid(self) -> int:
        """Return the id of the process that holds the namespaces."""
        return self._keeper.pid

    def _check_wire(self, host: int) -> None:
        self._check(host)
        if host not in self.wires:
            raise ValueError(f"host {host} was made without a wire; see wires= of Network")

    def close(self) -> None:
        """Kill all programs on the hosts and remove the network. May be called again."""
        with self._lock:
            processes, self._processes = self._processes, []
        for process in processes:
            process.terminate()  # terminate() ignores a process that has ended, and so does kill()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            process.wait()
        self._keeper.close()
        namespaces, self._namespaces = self._namespaces, []
        if self._user_namespace is not None:
            namespaces.append(self._user_namespace)
            self._user_namespace = None
        for descriptor in namespaces:
            os.close(descriptor)

    def _check(self, host: int) -> None:
        if not 0 <= host < self.hosts + self.extra_hosts:
            raise IndexError(f"no host {host} among {self.hosts + self.extra_hosts}")

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def probe(wired: bool = False, lossy: bool = False) -> str | None:
    """Try to make a small network.

    Args:
        wired: whether it needs a wire of the lab's own.
        lossy: whether it needs a port that loses by the kernel's packet filter.

    Returns:
        None if it works, or one line that says why it does not.
    """
    try:
        with Network(hosts=1, wires={0: Wire(delay_s=1e-3)} if wired else None):
            pass
        if lossy:
            with Network(hosts=1) as network:
                network.set_loss([(0, "uplink", 0.5)])
    except LabUnavailable as error:
        return str(error)
    return None
