"""Addresses: which of this host's the datagrams leave by, and how long they may be there."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from gradwire.errors import ConfigError
from gradwire.settings import LARGEST_DATAGRAM

__all__ = ["ETHERNET_DATAGRAM", "datagram_for", "local_address", "mtu_of"]

UDP_OVERHEAD = 28
"""Bytes of the IPv4 and UDP headers."""
ETHERNET_MTU = 1500
ETHERNET_DATAGRAM = ETHERNET_MTU - UDP_OVERHEAD


def local_address(interface: str | None, towards: str | None) -> str:
    """The IPv4 address this process's datagrams leave by.

    interface: an interface's name or one of this host's addresses; without it the source
    address of the route towards `towards`, else the host name's address, else loopback.
    Raises ConfigError for an interface that does not exist or has no IPv4 address.
    """
    if interface:
        return _interface_address(interface)
    if towards:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((towards, 9))  # sends nothing: only asks for the route
            return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def mtu_of(address: str) -> int:
    """The MTU of the interface that owns a local IPv4 address; loopback counts as 1500."""
    if ipaddress.ip_address(address).is_loopback:
        return ETHERNET_MTU
    for _, name in socket.if_nameindex():
        if _ioctl_address(name) == address:
            with contextlib.suppress(OSError, ValueError), open(f"/sys/class/net/{name}/mtu") as f:
                return int(f.read())
    return ETHERNET_MTU


def datagram_for(address: str) -> int:
    """The largest UDP payload that the interface of a local address takes unfragmented."""
    return min(LARGEST_DATAGRAM, mtu_of(address) - UDP_OVERHEAD)


def _interface_address(interface: str) -> str:
    names = [name for _, name in socket.if_nameindex()]
    if interface in names:
        address = _ioctl_address(interface)
        if address is None:
            raise ConfigError.of("interface", interface, "it has no IPv4 address")
        return address
    with contextlib.suppress(ValueError):
        wanted = str(ipaddress.IPv4Address(interface))
        if ipaddress.ip_address(wanted).is_loopback or wanted in map(_ioctl_address, names):
            return wanted
    raise ConfigError.of(
        "interface",
        interface,
        "neither an interface nor an IPv4 address of this host; its interfaces are "
        f"{', '.join(names)}",
    )


def _ioctl_address(name: str) -> str | None:
    siocgifaddr = 0x8915
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), siocgifaddr, request)
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])
