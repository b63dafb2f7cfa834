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
    """The kind of a datagram says what it asks or answers; its arguments follow in brackets."""

    HELLO = 1
    """The prober asks whether the responder receives its datagrams."""
    WELCOME = 2
    """The responder answers a HELLO (length of the longest datagram that its route to the prober
    takes)."""
    KNOCK = 3
    """The responder opens firewalls on its side that let only answers through. It sends this to a
    prober whose address it knows beforehand."""
    PING = 4
    """The prober asks for an answer at once, whose delay is the round-trip time."""
    PONG = 5
    """The responder answers a PING (nanoseconds between its arrival and this; its ECN field)."""
    SIZE = 6
    """The prober sends a datagram as long as the length that it tests."""
    GOT = 7
    """The responder confirms the arrival of a SIZE (its length)."""
    WANT = 8
    """The prober asks for a FILL (its length)."""
    FILL = 9
    """The responder answers a WANT with a datagram of the length asked for."""
    DATA = 10
    """Either end sends a burst of these, whose number is that of the question."""
    COUNT = 11
    """The prober asks how much of its burst of this number arrived."""
    COUNTED = 12
    """The responder answers a COUNT (datagrams, bits per second, datagrams that its own kernel
    dropped for want of buffer, most datagrams merged by GRO)."""
    BURST = 13
    """The prober asks for a burst of DATA (datagrams, length, bits per second, datagrams a train;
    0: as many as the rate asks)."""
    SENT = 14
    """The responder reports the end of a burst (datagrams, bits per second, whether its kernel
    refused trains)."""
    BYE = 15
    """The prober ends the measurement (1 where it was complete)."""
    GOODBYE = 16
    """The responder confirms the arrival of a BYE."""


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
