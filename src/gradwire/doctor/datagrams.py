"""The datagrams of a probe: their one format, and what each kind asks and answers.

Two hosts take part. The *prober* asks, and the *responder* answers. Every datagram begins with the
same header, in network byte order:

| bytes | field | meaning |
|---|---|---|
| 0–3 | magic | `gwdr` |
| 4 | version | 1 |
| 5 | kind | see `Kind` |
| 6–7 | zero | |
| 8–15 | token | random number of this measurement, from the prober |
| 16–23 | cookie | the responder's proof that the prober has its address; 0 until it is known |
| 24–27 | number | number of the question; an answer repeats it |
| 28–31 | zero | |
| 32–79 | arguments | six numbers of 64 bits; their meaning depends on the kind |

SIZE, FILL and DATA are padded with zeros to the length that they test, all others are 80 bytes
long. What is shorter, has another magic or version or an unknown kind is dropped.

The responder answers HELLO, KNOCK is not answered, and everything else is dropped without the right
cookie. WELCOME carries the cookie and is as long as HELLO. So whoever forges the address of another
host makes a responder send no more bytes there than it received.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["HEADER_BYTES", "Datagram", "Kind", "data_prefix", "parse"]

MAGIC = b"gwdr"
VERSION = 1
PREFIX = struct.Struct("!4sBBxxQQIxxxx")
ARGUMENTS = struct.Struct("!6Q")
HEADER_BYTES = PREFIX.size + ARGUMENTS.size
LARGEST_ARGUMENT = (1 << 64) - 1


class Kind(IntEnum):
    """What a datagram asks or answers; arguments in brackets."""

    HELLO = 1
    """Prober: are you there?"""
    WELCOME = 2
    """Responder: yes (largest datagram that its route to the prober takes)."""
    KNOCK = 3
    """Responder that knows the prober's address: this is the way back. It opens firewalls that
    let answers through."""
    PING = 4
    """Prober: what is the round-trip time?"""
    PONG = 5
    """Responder (nanoseconds between the arrival and this; ECN field of the PING)."""
    SIZE = 6
    """Prober: does a datagram of this length arrive?"""
    GOT = 7
    """Responder: it did (its length)."""
    WANT = 8
    """Prober: send a FILL (its length)."""
    FILL = 9
    """Responder: a datagram of that length."""
    DATA = 10
    """Either: one of a burst, whose number is that of the question."""
    COUNT = 11
    """Prober: what arrived of the burst of this number?"""
    COUNTED = 12
    """Responder (datagrams, bits per second, datagrams that its own kernel dropped for want of
    buffer, most datagrams merged by GRO)."""
    BURST = 13
    """Prober: send a burst (datagrams, length, bits per second, datagrams a train; 0: as many as
    the rate asks)."""
    SENT = 14
    """Responder: the burst is over (datagrams, bits per second, whether trains were refused)."""
    BYE = 15
    """Prober: the measurement is over (1 where it was complete)."""
    GOODBYE = 16
    """Responder: the BYE arrived."""


KINDS = frozenset(Kind)
LONG = frozenset((Kind.SIZE, Kind.FILL, Kind.DATA))


@dataclass(frozen=True)
class Datagram:
    """One datagram of a probe.

    Attributes:
        kind: What it asks or answers.
        token: The measurement's random number.
        cookie: The proof of the prober's address; 0 where it is not known.
        number: The question's number.
        arguments: Up to six numbers, of which missing ones are 0.
        length: The length of the whole in bytes.
    """

    kind: Kind
    token: int
    cookie: int = 0
    number: int = 0
    arguments: tuple[int, ...] = ()
    length: int = HEADER_BYTES

    def pack(self) -> bytes:
        """Returns the datagram as bytes."""
        values = [min(max(0, each), LARGEST_ARGUMENT) for each in self.arguments]
        prefix = PREFIX.pack(MAGIC, VERSION, self.kind, self.token, self.cookie, self.number)
        header = prefix + ARGUMENTS.pack(*values, *[0] * (6 - len(values)))
        return header + bytes(max(0, self.length - HEADER_BYTES))


def parse(data: bytes) -> Datagram | None:
    """Reads a datagram; returns None for anything that is none."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, kind, token, cookie, number = PREFIX.unpack_from(data)
    if magic != MAGIC or version != VERSION or kind not in KINDS:
        return None
    if len(data) > HEADER_BYTES and kind not in LONG:
        return None
    arguments = ARGUMENTS.unpack_from(data, PREFIX.size)
    return Datagram(Kind(kind), token, cookie, number, arguments, len(data))


def data_prefix(token: int, cookie: int, number: int) -> bytes:
    """Returns the first bytes of all DATA of a burst, by which they are counted unread."""
    return PREFIX.pack(MAGIC, VERSION, Kind.DATA, token, cookie, number)
