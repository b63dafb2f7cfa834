"""Ranks on hosts of their own, for end-to-end tests: network namespaces as a test builds them.

A test file has a module-level function that builds the links and addresses through a `Builder`;
`HostRanks` then runs the file's other functions on the ranks, as `ranks.Ranks` does. The
namespaces have no names and go with the processes.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gradwire_lab.network.keeper import make_namespace
from gradwire_lab.network.kernel import (
    CLONE_NEWNET,
    die_with_parent,
    open_network_namespace,
    setns,
    unshare,
)
from ranks import Ranks, _load, _serve, context

CLONE_NEWUTS = 0x04000000
PERMANENT = 0x80  # NUD_PERMANENT
NO_DETECTION = 0x02  # IFA_F_NODAD: an IPv6 address can be bound at once


class Builder:
    """Links, addresses and routes between hosts 0, 1, …, each with its loopback up."""

    def __init__(self, namespaces: Sequence[int]) -> None:
        from pyroute2 import IPRoute

        self._namespaces = namespaces
        self._netlink = []
        for host, namespace in enumerate(namespaces):
            for kind in ("all", "default"):
                if socket.has_ipv6:  # link-local addresses can be bound at once
                    self.sysctl(host, f"ipv6/conf/{kind}/accept_dad", 0)
                self.sysctl(host, f"ipv4/conf/{kind}/rp_filter", 0)  # answers may come another way
            setns(namespace, CLONE_NEWNET)
            self._netlink.append(IPRoute())
            self.up(host, "lo")

    def cable(self, first: int, second: int, name: str = "eth0", mtu: int = 1500) -> None:
        """A link between two hosts, an interface of that name on both."""
        netlink = self._netlink[first]
        netlink.link("add", ifname=name, kind="veth", peer={"ifname": "far"})
        far = netlink.link_lookup(ifname="far")[0]
        netlink.link("set", index=far, net_ns_fd=self._namespaces[second])
        theirs = self._netlink[second]
        theirs.link("set", index=theirs.link_lookup(ifname="far")[0], ifname=name)
        for host in (first, second):
            self.set(host, name, mtu=mtu)
            self.up(host, name)

    def lonely(self, host: int, name: str, mtu: int = 1500) -> None:
        """An interface that leads nowhere."""
        self._netlink[host].link("add", ifname=name, kind="veth", peer={"ifname": f"{name}-end"})
        self.up(host, f"{name}-end")
        self.set(host, name, mtu=mtu)
        self.up(host, name)

    def set(self, host: int, name: str, **values: Any) -> None:
        """As `ip link set`."""
        self._netlink[host].link("set", index=self._index(host, name), **values)

    def up(self, host: int, name: str) -> None:
        self.set(host, name, state="up")

    def address(self, host: int, name: str, address: str, length: int, **more: Any) -> None:
        """As `ip address add`."""
        if ":" in address:
            more = {"flags": NO_DETECTION, **more}
        self._netlink[host].addr(
            "add", index=self._index(host, name), address=address, prefixlen=length, **more
        )

    def route(self, host: int, name: str, to: str, **more: Any) -> None:
        """As `ip route add`."""
        family = socket.AF_INET6 if ":" in to else socket.AF_INET
        self._netlink[host].route("add", dst=to, oif=self._index(host, name), family=family, **more)

    def neighbour(self, host: int, name: str, address: str, other: int) -> None:
        """Makes the other end of a cable known, so that nothing needs to be heard from there."""
        there = self._netlink[other]
        (link,) = there.get_links(self._index(other, name))
        self._netlink[host].neigh(
            "replace",
            dst=address,
            lladdr=link.get_attr("IFLA_ADDRESS"),
            ifindex=self._index(host, name),
            state=PERMANENT,
        )

    def sysctl(self, host: int, name: str, value: int) -> None:
        """As `sysctl`, of what lies under net."""
        setns(self._namespaces[host], CLONE_NEWNET)
        Path("/proc/sys/net", name).write_text(str(value))

    def _index(self, host: int, name: str) -> int:
        found: int = self._netlink[host].link_lookup(ifname=name)[0]
        return found


class HostRanks(Ranks):
    """One process a rank, without a process group.

    build: a function of a test file, which gets a Builder. hosts: how many there are. places: the
    host of each rank. names: each rank's host name.
    """

    def __init__(
        self,
        build: Callable[[Builder], None],
        *,
        hosts: int = 2,
        places: Sequence[int] = (0, 1),
        names: Sequence[str] = ("alpha", "beta"),
        **environment: str,
    ) -> None:
        self.world = len(places)
        self._ends: list[Connection] = []
        ends: list[Connection] = []
        for _ in places:
            ours, theirs = context.Pipe()
            self._ends.append(ours)
            ends.append(theirs)
        path = sys.modules[build.__module__].__file__
        variables = {**os.environ, "WORLD_SIZE": str(self.world), **environment}
        village = context.Process(
            target=_village,
            args=(path, build.__name__, hosts, list(places), list(names), ends, variables),
            daemon=True,
        )
        village.start()
        for end in ends:
            end.close()
        self.processes = [village]


def _village(
    path: str,
    build: str,
    hosts: int,
    places: list[int],
    names: list[str],
    ends: list[Connection],
    variables: dict[str, str],
) -> None:
    """The process that makes the hosts and starts a process for each rank."""
    namespaces = []
    make_namespace()  # and a user namespace where that is needed
    for _ in range(hosts):
        unshare(CLONE_NEWNET)
        namespaces.append(open_network_namespace())
    # In a process of its own, so that no rank has what building leaves.
    if _in_child(lambda: getattr(_load({}, path), build)(Builder(namespaces))).wait() != 0:
        raise RuntimeError(f"{build} failed")
    ranks = []
    for rank, place in enumerate(places):

        def live(rank: int = rank, place: int = place) -> None:
            setns(namespaces[place], CLONE_NEWNET)
            unshare(CLONE_NEWUTS)
            socket.sethostname(names[rank])
            for other, end in enumerate(ends):
                if other != rank:
                    end.close()
            _serve(rank, len(places), ends[rank], {**variables, "RANK": str(rank)}, False)

        ranks.append(_in_child(live))
    for end in ends:
        end.close()
    for child in ranks:
        child.wait()


class _in_child:
    """A fork that makes a call and ends, with 0 unless it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        parent = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            status = 1
            try:
                die_with_parent(parent)
                call()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
