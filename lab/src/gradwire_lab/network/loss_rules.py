"""Random loss at a network device is made by the kernel's packet filter (nftables).

What arrives at the device is dropped with a chance, each packet by itself; a train that passes
whole counts as one. The rules are sent to the kernel directly, because the program `nft` is not
on every machine. Numbers and layouts are those of the kernel's `linux/netfilter/nf_tables.h`.
"""

from __future__ import annotations

import os
import socket
import struct

_NETLINK_NETFILTER = 12
_SUBSYSTEM = 10
_FAMILY_INET, _FAMILY_NETDEV = 1, 5
_HOOK_INGRESS, _HOOK_OUTPUT = 0, 3
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6
_NESTED = 0x8000
_REGISTER = 8
_ERROR = 2
_EQUAL, _LESS, _GREATER = 0, 2, 4
_META_PROTOCOL = 16
_UDP = 17

SCALE = 1_000_000
"""A chance is a whole number of this."""


class LossRules:
    """Loss rules belong to the network namespace in which this object is made.

    Raises:
        OSError: the kernel has no packet filter, or the process may not use it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        self._socket.settimeout(2.0)
        self._socket.bind((0, 0))
        self._sequence = 0

    def set(self, device: str, rate: float) -> None:
        """Drop this share of what arrives at a device; 0 takes the rule away."""
        self._replace(device, _by_chance(rate) if rate > 0 else None)

    def refuse_datagrams(self, on: bool) -> None:
        """Let sending a UDP datagram fail with EPERM, as a host's own firewall does, or no more."""
        hook = _number(1, _HOOK_OUTPUT) + _number(2, 0)
        self._write("gradwire-out", _FAMILY_INET, hook, _datagrams() if on else None)

    def set_longest(self, device: str, longest: int) -> None:
        """Drop what is longer than this many bytes, IP header included, and report nothing.

        A train counts as one packet. 0 takes the rule away, which is also that of `set`.
        """
        self._replace(device, _longer_than(longest) if longest else None)

    def _replace(self, device: str, expressions: bytes | None) -> None:
        """Drop what arrives at a device and matches these expressions; None: nothing."""
        hook = _number(1, _HOOK_INGRESS) + _number(2, 0) + _text(3, device)
        self._write(f"gradwire-{device}", _FAMILY_NETDEV, hook, expressions)

    def _write(self, name: str, family: int, hook: bytes, expressions: bytes | None) -> None:
        """Write a table anew, with one chain of one rule; without expressions it goes."""
        table = _text(1, name)
        messages = [(_NEW_TABLE, _CREATE, table), (_DELETE_TABLE, 0, table)]
        if expressions is not None:
            chain = _text(1, name) + _text(3, "loss") + _nest(4, hook)
            rule = _text(1, name) + _text(2, "loss") + _nest(4, expressions)
            messages += [
                (_NEW_TABLE, _CREATE, table),
                (_NEW_CHAIN, _CREATE, chain + _text(7, "filter")),
                (_NEW_RULE, _CREATE, rule),
            ]
        self._send(messages, family)

    def _send(self, messages: list[tuple[int, int, bytes]], family: int) -> None:
        batch = self._message(_BATCH_BEGIN, 0, b"", 0, _SUBSYSTEM)
        for kind, flags, body in messages:
            batch += self._message(_SUBSYSTEM << 8 | kind, flags | _ACK, body, family)
        batch += self._message(_BATCH_END, 0, b"", 0, _SUBSYSTEM)
        self._socket.send(batch)
        for _ in messages:
            answer = self._socket.recv(1 << 16)
            while answer:
                length, kind = struct.unpack_from("=IH", answer)
                code = struct.unpack_from("=i", answer, 16)[0] if kind == _ERROR else 0
                if code:
                    raise OSError(-code, f"packet filter: {os.strerror(-code)}")
                answer = answer[length + 3 & ~3 :]

    def _message(self, kind: int, flags: int, body: bytes, family: int, resource: int = 0) -> bytes:
        self._sequence += 1
        body = struct.pack("!BBH", family, 0, resource) + body
        header = struct.pack("=IHHII", 16 + len(body), kind, flags | _REQUEST, self._sequence, 0)
        return header + body

    def close(self) -> None:
        """Let go of the socket; the rules stay."""
        self._socket.close()


def _by_chance(rate: float) -> bytes:
    """Make expressions that match where a random number is below the rate."""
    number = _number(1, _REGISTER) + _number(2, SCALE) + _number(3, 1)
    swap = b"".join(
        _number(kind, value)
        for kind, value in ((1, _REGISTER), (2, _REGISTER), (3, 1), (4, 4), (5, 4))
    )
    below = _compared(_LESS, struct.pack("!I", round(min(rate, 1.0) * SCALE)))
    return _dropping(("numgen", number), ("byteorder", swap), ("cmp", below))


def _longer_than(longest: int) -> bytes:
    """Make expressions that match where the total length in the IPv4 header is larger."""
    return _dropping(
        ("payload", _header(0, 1)),
        ("cmp", _compared(_EQUAL, b"\x45")),  # the frame is IPv4, not ARP
        ("payload", _header(2, 2)),
        ("cmp", _compared(_GREATER, struct.pack("!H", longest))),
    )


def _datagrams() -> bytes:
    """Make expressions that match UDP of either version of IP."""
    protocol = _number(2, _META_PROTOCOL) + _number(1, _REGISTER)
    return _dropping(("meta", protocol), ("cmp", _compared(_EQUAL, bytes([_UDP]))))


def _header(offset: int, length: int) -> bytes:
    """Make the expression that loads bytes of the network header into the register."""
    return _number(1, _REGISTER) + _number(2, 1) + _number(3, offset) + _number(4, length)


def _compared(relation: int, value: bytes) -> bytes:
    return _number(1, _REGISTER) + _number(2, relation) + _nest(3, _attribute(1, value))


def _dropping(*matches: tuple[str, bytes]) -> bytes:
    drop = _number(1, 0) + _nest(2, _nest(2, _number(1, 0)))
    return b"".join(
        _nest(1, _text(1, name) + _nest(2, body)) for name, body in (*matches, ("immediate", drop))
    )


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _nest(kind: int, value: bytes) -> bytes:
    return _attribute(kind | _NESTED, value)


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack("!I", value))


def _text(kind: int, value: str) -> bytes:
    return _attribute(kind, value.encode() + b"\0")
