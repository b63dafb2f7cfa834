"""UdpSocket sends and receives a probe's datagrams with the socket options that the engine sets.

These are segmentation (UDP_SEGMENT), merging (UDP_GRO), the ECN field, buffers of the same size,
and datagrams that IP never fragments (engine/io/socket.cc).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gradwire.transport.addresses import is_link_local, scoped, with_port

__all__ = ["ECT0", "LARGEST_UDP", "Message", "SocketAddress", "UdpSocket", "place_text"]

SocketAddress = tuple[Any, ...]
"""An address and port, as a socket takes them."""

RECEIVE_BUFFER = 16 << 20
SEND_BUFFER = 4 << 20
"""What the engine asks for, in bytes (engine/io/socket.h)."""

ECT0 = 2
"""The ECN field of a packet whose sender heeds marks (RFC 3168)."""
LARGEST_UDP = 65_507
"""The longest UDP payload over IPv4 in bytes; a train may be as long."""

# Options of the kernel that Python does not name.
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
SO_TIMESTAMPNS = 35
SO_RXQ_OVFL = 40
UDP_SEGMENT, UDP_GRO = 103, 104
IP_PKTINFO, IP_RECVTOS, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 8, 13, 10, 3
IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE, IPV6_RECVPKTINFO, IPV6_PKTINFO = 23, 3, 49, 50

PKTINFO = struct.Struct("@i4s4s")
"""in_pktinfo of ip(7): interface, local address, the header's destination."""
PKTINFO6 = struct.Struct("@16si")
"""in6_pktinfo of ipv6(7): address, interface."""

ANCILLARY_BYTES = 256
REFUSED_TRAIN = (errno.EIO, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOPROTOOPT)


@dataclass(frozen=True)
class Message:
    """What one system call received: a datagram, or several of one flow that GRO has merged.

    Attributes:
        data: The bytes.
        segment: The length of each datagram; the last one may be shorter.
        source: The sender's address and port.
        ecn: Their ECN field.
        arrived_ns: When the kernel received the first of them (CLOCK_REALTIME).
        local: The address at which they arrived, as `UdpSocket.send` takes it.
    """

    data: bytes
    segment: int
    source: SocketAddress
    ecn: int
    arrived_ns: int
    local: bytes

    @property
    def local_address(self) -> str:
        """The local address as text; "" where the kernel did not report it."""
        if len(self.local) == PKTINFO.size:
            return socket.inet_ntop(socket.AF_INET, self.local[4:8])
        if len(self.local) == PKTINFO6.size:
            address, index = PKTINFO6.unpack(self.local)
            return _scoped(socket.inet_ntop(socket.AF_INET6, address), index)
        return ""

    @property
    def source_address(self) -> str:
        """The sender's address as text, with its scope."""
        return _scoped(str(self.source[0]), self.source[3] if len(self.source) == 4 else 0)

    def datagrams(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), self.segment):
            yield self.data[at : at + self.segment]


class UdpSocket:
    """A UDP socket of a probe.

    Args:
        address: The local address with its scope; "0.0.0.0" and "::" for any of that version.
        port: The UDP port, 0 for any free one.

    Attributes:
        overflows: Datagrams that this host's kernel dropped because the receive buffer was full.
        segments: Whether the kernel takes trains; an attempt that it refuses makes it False.
        refusal: Why the kernel refused a datagram last; "" where it never did.

    Raises:
        OSError: The address or port cannot be bound.
    """

    def __init__(self, address: str, port: int = 0, dscp: int = 0) -> None:
        found = socket.getaddrinfo(
            address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
        self.family, place = found[0][0], found[0][4]
        self.v6 = self.family == socket.AF_INET6
        self.overflows = 0
        self.refusal = ""
        self._overflow_mark = 0
        self._class = dscp << 2
        self._socket = socket.socket(self.family, socket.SOCK_DGRAM)
        try:
            if self.v6:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self._socket.bind(place)
        except BaseException:
            self._socket.close()
            raise
        self._grow(SO_RCVBUFFORCE, socket.SO_RCVBUF, RECEIVE_BUFFER)
        self._grow(SO_SNDBUFFORCE, socket.SO_SNDBUF, SEND_BUFFER)
        self._try(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._try(socket.SOL_SOCKET, SO_RXQ_OVFL, 1)
        self._try(socket.IPPROTO_UDP, UDP_GRO, 1)
        if self.v6:
            self._try(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE)
            self._try(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
            self._try(socket.IPPROTO_IPV6, IPV6_RECVPKTINFO, 1)
        else:
            self._try(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            self._try(socket.IPPROTO_IP, IP_RECVTOS, 1)
            self._try(socket.IPPROTO_IP, IP_PKTINFO, 1)
        self.segments = self._try(socket.IPPROTO_UDP, UDP_SEGMENT, 0)

    @property
    def place(self) -> SocketAddress:
        """The address and port that it is bound to."""
        name: SocketAddress = self._socket.getsockname()
        return name

    def connect(self, place: SocketAddress) -> None:
        """Receives from this address alone from now on, and learns when it refuses datagrams."""
        self._socket.connect(place)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(
        self,
        data: bytes,
        to: SocketAddress,
        *,
        ecn: int = ECT0,
        segment: int = 0,
        local: bytes = b"",
    ) -> bool:
        """Sends a datagram, or a train of several.

        What the kernel refuses is lost, and `refusal` has the reason.

        Args:
            data: The bytes.
            segment: The length of each datagram of a train; 0 for a single one.
            local: The address to send from, `Message.local` of what is answered.

        Returns:
            Whether the kernel took it.
        """
        level, kind = (
            (socket.IPPROTO_IPV6, socket.IPV6_TCLASS)
            if self.v6
            else (socket.IPPROTO_IP, socket.IP_TOS)
        )
        extra = [(level, kind, struct.pack("@i", self._class | ecn))]
        if local:
            extra.append((level, IPV6_PKTINFO if self.v6 else IP_PKTINFO, local))
        if segment and self.segments:
            train = [*extra, (socket.IPPROTO_UDP, UDP_SEGMENT, struct.pack("@H", segment))]
            try:
                self._socket.sendmsg([data], train, 0, to)
                return True
            except OSError as error:
                if error.errno not in REFUSED_TRAIN:
                    self.refusal = error.strerror or str(error)
                    return False
                self.segments = False
        taken = True
        step = segment or len(data)
        for at in range(0, len(data), step):
            try:
                self._socket.sendmsg([data[at : at + step]], extra, 0, to)
            except OSError as error:
                if error.errno != errno.EMSGSIZE:
                    self.refusal = error.strerror or str(error)
                taken = False
        return taken

    def receive(self, deadline: float) -> Message | None:
        """Returns the next message; None when the time is up (`time.monotonic`).

        One that is there is returned though the time is up, unless it is empty or cut off.
        """
        while True:
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                data, extra, flags, source = self._socket.recvmsg(1 << 16, ANCILLARY_BYTES)
            except (TimeoutError, BlockingIOError):
                return None
            except OSError as error:  # that of an earlier datagram: nobody listens, for instance
                self.refusal = error.strerror or str(error)
            else:
                if data and not flags & socket.MSG_TRUNC:
                    return self._message(data, extra, source)
            if time.monotonic() >= deadline:
                return None

    def _message(
        self, data: bytes, extra: list[tuple[int, int, bytes]], source: SocketAddress
    ) -> Message:
        segment, ecn, arrived, local = len(data), 0, time.time_ns(), b""
        for level, kind, value in extra:
            if (level, kind) == (socket.IPPROTO_UDP, UDP_GRO):
                segment = struct.unpack_from("@i", value)[0] or segment
            elif (level, kind) == (socket.IPPROTO_IP, socket.IP_TOS):
                ecn = value[0] & 3
            elif (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_TCLASS):
                ecn = struct.unpack_from("@i", value)[0] & 3
            elif (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, nanoseconds = struct.unpack_from("@qq", value)
                arrived = seconds * 1_000_000_000 + nanoseconds
            elif (level, kind) == (socket.SOL_SOCKET, SO_RXQ_OVFL):
                mark = struct.unpack_from("@I", value)[0]
                self.overflows += (mark - self._overflow_mark) & 0xFFFFFFFF
                self._overflow_mark = mark
            elif (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
                _, _, address = PKTINFO.unpack_from(value)
                local = PKTINFO.pack(0, address, bytes(4))
            elif (level, kind) == (socket.IPPROTO_IPV6, IPV6_PKTINFO):
                local = value
        return Message(data, segment, source, ecn, arrived, local)

    def _grow(self, force: int, plain: int, wanted: int) -> None:
        if not self._try(socket.SOL_SOCKET, force, wanted):
            self._try(socket.SOL_SOCKET, plain, wanted)

    def _try(self, level: int, option: int, value: int) -> bool:
        with contextlib.suppress(OSError):
            self._socket.setsockopt(level, option, value)
            return True
        return False


def place_text(place: SocketAddress) -> str:
    """Returns an address and port as text, an IPv6 address in brackets."""
    host = _scoped(str(place[0]), place[3] if len(place) == 4 else 0)
    return with_port(host, place[1])


def _scoped(address: str, index: int) -> str:
    """Returns an address with the interface of this number where it is a link-local one."""
    address = address.partition("%")[0]
    if not is_link_local(address):
        return address
    with contextlib.suppress(OSError):
        return scoped(address, socket.if_indextoname(index))
    return address
