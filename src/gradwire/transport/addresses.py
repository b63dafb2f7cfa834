"""The local addresses by which gradwire's datagrams leave, and their longest datagrams.

Addresses are IPv4 or IPv6, as text. A host is whatever shares one loopback: one network namespace
of one running kernel.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire.core.errors import ConfigError
from gradwire.core.plan import LARGEST_DATAGRAM
from gradwire.transport.native import load_engine

if TYPE_CHECKING:
    from gradwire import _engine

UDP_OVERHEAD = {4: 28, 6: 48}
"""Bytes of the IP and UDP headers, by IP version (RFC 791, RFC 8200, RFC 768)."""
ETHERNET_MTU = 1500
"""The MTU in bytes where no interface and no route names one."""
ETHERNET_DATAGRAM = ETHERNET_MTU - UDP_OVERHEAD[4]

NEITHER = "neither an interface nor an address of this host"

MOST_LISTED = 24
"""How many interfaces an error lists at most."""

# Constants of <linux/in.h> and <linux/in6.h> that Python does not name.
IP_MTU = 14
IPV6_MTU = 24
IPV6_ADDR_PREFERENCES = 72
IPV6_PREFER_SRC_PUBLIC = 2

Bound = TypeVar("Bound")

ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, RFC 3849), to which the default route leads."""


@dataclass(frozen=True)
class LocalAddress:
    """An address of this host that can be bound.

    Attributes:
        address: The address, without the scope of a link-local one, which is `interface`.
        interface: Name of the interface that has the address, "" where none lists it.
        mtu: MTU of that interface in bytes; 0 where none lists the address.
    """

    address: str
    interface: str = ""
    mtu: int = 0

    @property
    def version(self) -> int:
        return _parsed(self.address).version

    @property
    def bound(self) -> str:
        """The address to which a socket is bound, with its scope."""
        return scoped(self.address, self.interface)

    def datagram(self, route_mtu: int = 0) -> int:
        """Returns the largest UDP payload in bytes that leaves this address unfragmented.

        Args:
            route_mtu: MTU of the routes to the peers in bytes, 0 where it is not known. It counts
                in place of the interface's, since the route to another address of this host passes
                loopback, whichever interface has the two.
        """
        mtu = route_mtu or self.mtu or ETHERNET_MTU
        return min(LARGEST_DATAGRAM, mtu - UDP_OVERHEAD[self.version])


def local_addresses(interface: object, towards: str | None) -> tuple[LocalAddress, ...]:
    """Returns the addresses that this process can announce, at most one of each IP version.

    The preferred one comes first: the address from which the kernel would send to the host of the
    job's store, or by the default route without one. The other version's is on the same interface.

    Args:
        interface: The setting `interface`: the name of an interface, or an address of this host,
            which is then the only one; None for the preferred ones.
        towards: The host of the job's store, None where it has none.
    """
    known = _interfaces()
    if interface is None:
        first = _preferred(towards)
        owner = _owner(known, first)
        return tuple(_one_of_each(known, [first, *([] if owner is None else owner.addresses)]))
    if not isinstance(interface, str) or set(interface) & set(",^="):
        raise _no_interface(interface, known, "lists and patterns are not supported")
    named = _named(known, interface)
    if named is not None:
        return tuple(_of_interface(known, interface, named, towards))
    return (_of_address(known, interface),)


def on_first_free(ports: Sequence[int], bind: Callable[[int], Bound]) -> Bound:
    """Returns what `bind` returns for the first port that no other socket holds."""
    for port in ports[:-1]:
        try:
            return bind(port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return bind(ports[-1])


def route_mtu(source: str, destination: str) -> int:
    """Returns the MTU in bytes of the route from a local address to another one."""
    with udp_socket(source) as probe:
        probe.connect(_place(destination))  # sends nothing
        if probe.family == socket.AF_INET6:
            return probe.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)
        return probe.getsockopt(socket.IPPROTO_IP, IP_MTU)


def host_identity() -> str:
    """Returns what identifies this host: the same in all processes that share its loopback.

    It is the kernel's boot id with the number of the network namespace, because host names may be
    equal on several hosts and differ within one.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        # The thread's own namespace is the one that its sockets are in.
        namespace = os.stat("/proc/thread-self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{boot}/{namespace}"


def reachable_interfaces() -> dict[str, list[str]]:
    """Returns the interfaces that are up, with those addresses that other hosts may reach."""
    listed = {
        each.name: [
            address
            for address in each.addresses
            if not is_loopback(address) and not is_link_local(address)
        ]
        for each in _interfaces()
        if each.up
    }
    found = {name: addresses for name, addresses in listed.items() if addresses}
    return dict(list(found.items())[:MOST_LISTED])


def describe_interfaces(interfaces: Mapping[str, Sequence[str]]) -> str:
    """Lists interfaces as text: "eth0 (10.0.0.1, fd00::1), eth1 (10.1.0.1)"."""
    return _listing(f"{name} ({', '.join(each)})" for name, each in interfaces.items()) or "none"


def is_loopback(address: str) -> bool:
    return _parsed(address).is_loopback


def is_link_local(address: str) -> bool:
    """Returns whether the address is a link-local one of IPv6, which needs an interface with it."""
    parsed = _parsed(address)
    return parsed.version == 6 and parsed.is_link_local


def with_port(address: str, *ports: int) -> str:
    """Returns an address and its ports as text, an IPv6 address in brackets."""
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{','.join(map(str, ports))}"


def scoped(address: str, interface: str) -> str:
    """Returns the address with the scope that a link-local one needs (RFC 4007)."""
    return f"{address}%{interface}" if is_link_local(address) else address


# ------------------------------------------------------------------- without interface=


def _preferred(towards: str | None) -> str:
    """Returns the address from which the kernel would send to a host.

    Without a host, or without a route to it, it is the address that this host's name has, unless
    that is of loopback; else that of the default route; else that of loopback.
    """
    sources = _sources(towards) if towards else []
    if not sources:
        sources = [each for each in _sources(socket.gethostname()) if not is_loopback(each)]
    if not sources:
        sources = [source for host in ANYWHERE for source in _sources(host)]
    if not sources:
        sources = [each for each in ("127.0.0.1", "::1") if can_be_bound(each)]
    return sources[0] if sources else "127.0.0.1"


def _sources(host: str) -> list[str]:
    """Returns the addresses from which the kernel would send to a host's addresses.

    Those that reach furthest come first, and of these IPv4, so that all ranks choose alike.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: the text cannot be a host's name
        return []
    sources = []
    for family, _, _, _, place in found:
        if family not in (socket.AF_INET, socket.AF_INET6) or _parsed(str(place[0])).is_unspecified:
            continue
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            if family == socket.AF_INET6:
                with contextlib.suppress(OSError):  # prefers an address that stays (RFC 5014)
                    probe.setsockopt(
                        socket.IPPROTO_IPV6, IPV6_ADDR_PREFERENCES, IPV6_PREFER_SRC_PUBLIC
                    )
            probe.connect(place)  # sends nothing, and only asks for the route
            sources.append(_text(probe.getsockname()))
    return sorted(dict.fromkeys(sources), key=_reach)


# ---------------------------------------------------------------------- with interface=


def _named(known: Sequence[_engine.Interface], name: str) -> _engine.Interface | None:
    """Returns the interface of this name or alternative name; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        name = socket.if_indextoname(socket.if_nametoindex(name))
    return next((each for each in known if each.name == name), None)


def _of_interface(
    known: Sequence[_engine.Interface],
    interface: str,
    named: _engine.Interface,
    towards: str | None,
) -> list[LocalAddress]:
    if not named.up:
        raise _no_interface(interface, known, "it is down")
    preferred = [each for each in _sources(towards) if each in named.addresses] if towards else []
    found = _one_of_each(known, [*preferred, *sorted(named.addresses, key=_reach)])
    if not found:
        raise _no_interface(interface, known, "it has no address")
    return found


def _of_address(known: Sequence[_engine.Interface], interface: str) -> LocalAddress:
    try:
        wanted = _unmapped(interface)
        parsed = _parsed(wanted)
    except ValueError:
        raise _no_interface(interface, known, NEITHER) from None
    if is_link_local(wanted) and "%" not in wanted:
        having = [each for each in known if f"{wanted}%{each.name}" in each.addresses]
        if len(having) != 1:
            allowed = f"an IPv6 link-local address needs its interface, as in {interface}%eth0"
            raise _no_interface(interface, known, allowed)
        wanted = f"{wanted}%{having[0].name}"
    owner = _owner(known, wanted)
    if owner is not None and not owner.up:
        raise _no_interface(interface, known, f"its interface {owner.name} is down")
    if owner is not None and not can_be_bound(wanted):
        raise _no_interface(interface, known, f"{owner.name} has it, but it cannot be bound now")
    alone = not (parsed.is_unspecified or parsed.is_multicast)
    listed = owner is not None and wanted in owner.addresses
    if alone and (listed or _reaches_itself(wanted)):
        return _local(known, wanted)
    raise _no_interface(interface, known, NEITHER)


def _no_interface(interface: object, known: Sequence[_engine.Interface], why: str) -> ConfigError:
    listed = []
    # Interfaces with an address to choose come first.
    for each in sorted(known, key=lambda each: not (each.up and any(each.addresses))):
        wide = [address for address in each.addresses if not is_link_local(address)]
        words = wide or list(each.addresses) or ["no address"]
        if not each.carrier:
            words.append("no carrier" if each.up else "down")
        listed.append(f"{each.name} ({', '.join(words)})")
    return ConfigError.of(
        "interface",
        interface,
        f"{why}; give the name or an address of one of this host's interfaces, which are "
        f"{_listing(listed) or 'not known'}",
    )


# ------------------------------------------------------------------------- small parts


def _interfaces() -> list[_engine.Interface]:
    """Returns this host's interfaces; none where the kernel does not list them."""
    found: list[_engine.Interface] = []
    with contextlib.suppress(OSError):
        found = load_engine().interfaces()
    return found


def _one_of_each(
    known: Sequence[_engine.Interface], addresses: Iterable[str]
) -> list[LocalAddress]:
    """Returns the first address of each IP version that can be bound.

    Link-local addresses of IPv6 count only where one is asked for or there is nothing else, because
    every interface has one, and it reaches no further than the next router.
    """
    addresses = [each for each in addresses if can_be_bound(each)]
    wide = [each for each in addresses if not is_link_local(each)]
    if addresses and (not wide or is_link_local(addresses[0])):
        wide = addresses
    found: dict[int, LocalAddress] = {}
    for each in wide:
        found.setdefault(_parsed(each).version, _local(known, each))
    return list(found.values())


def _local(known: Sequence[_engine.Interface], address: str) -> LocalAddress:
    owner = _owner(known, address)
    plain, _, _ = address.partition("%")
    if owner is None:
        return LocalAddress(plain)
    return LocalAddress(plain, owner.name, owner.mtu)


def _owner(known: Sequence[_engine.Interface], address: str) -> _engine.Interface | None:
    for each in known:
        if address in each.addresses:
            return each
    if is_loopback(address):  # the loopback interface lists one address of 127.0.0.0/8
        return next((each for each in known if each.loopback), None)
    return None


def can_be_bound(address: str) -> bool:
    with contextlib.suppress(OSError), udp_socket(address):
        return True
    return False


def _reaches_itself(address: str) -> bool:
    """Returns whether a datagram to this address comes to this host.

    The kernel may let other addresses be bound as well, such as those of a broadcast.
    """
    with contextlib.suppress(OSError), udp_socket(address) as probe:
        probe.settimeout(1.0)
        probe.sendto(b"", probe.getsockname())
        probe.recv(1)
        return True
    return False


def udp_socket(address: str, port: int = 0) -> socket.socket:
    """Returns a UDP socket that is bound to an address of this host, with its scope."""
    place = _place(address, port)
    opened = socket.socket(
        socket.AF_INET if _parsed(address).version == 4 else socket.AF_INET6, socket.SOCK_DGRAM
    )
    try:
        opened.bind(place)
    except BaseException:
        opened.close()
        raise
    return opened


def _place(address: str, port: int = 0) -> Any:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
    return found[0][4]


def _text(place: tuple[Any, ...]) -> str:
    address = str(place[0]).partition("%")[0]
    if len(place) == 4 and place[3] and is_link_local(address):
        address += "%" + socket.if_indextoname(place[3])
    return _unmapped(address)


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address)


def _unmapped(address: str) -> str:
    """Returns an address in its usual form.

    IPv4 is not mapped into IPv6, and a scope is a name and stands only where it counts.
    """
    parsed = _parsed(address)
    if parsed.version == 4:
        return str(parsed)
    assert isinstance(parsed, ipaddress.IPv6Address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    plain = str(parsed).partition("%")[0]
    scope = parsed.scope_id
    if scope is None or not is_link_local(plain):
        return plain
    with contextlib.suppress(OSError, ValueError):
        scope = socket.if_indextoname(int(scope))
    return f"{plain}%{scope}"


def _reach(address: str) -> tuple[bool, bool, int]:
    """Returns a sort key: addresses that reach further come first, then IPv4 before IPv6."""
    return is_loopback(address), is_link_local(address), _parsed(address).version


def _listing(items: Iterable[str]) -> str:
    items = list(items)
    more = len(items) - MOST_LISTED
    return ", ".join(items[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
