"""Paced bursts of DATA: how they are sent, and how the other end counts them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gradwire.doctor.datagrams import HEADER_BYTES
from gradwire.doctor.udp import LARGEST_UDP, Message, SocketAddress, UdpSocket

__all__ = ["MOST_BYTES", "Burst", "Tally", "is_allowed", "send_burst"]

MOST_BYTES = 64 << 20
"""The most bytes that a measurement sends in one direction."""
LONGEST_BURST_S = 0.5
FASTEST = 100_000_000_000
"""The highest rate of a burst in bits per second."""
MOST_SEGMENTS = 64
QUANTUM_S = 250e-6
"""A train lasts about so long at the burst's rate, so that it fits into small queues."""
MOST_LATE_S = 2e-3
"""How much lateness a burst makes up for; more would overflow queues that the rate does not."""
SHORTEST_SLEEP_S = 100e-6


@dataclass(frozen=True)
class Burst:
    """A burst to send.

    Attributes:
        count: Number of datagrams.
        size: Length of each in bytes.
        rate: Bits per second.
        train: Datagrams handed to the kernel at once; 0 for as many as the rate asks.
    """

    count: int
    size: int
    rate: int
    train: int = 0

    @property
    def seconds(self) -> float:
        return self.count * self.size * 8 / self.rate


def is_allowed(burst: Burst) -> bool:
    """Returns whether a burst that somebody asks for is short and small enough to be sent."""
    return (
        burst.count > 0
        and HEADER_BYTES <= burst.size <= LARGEST_UDP
        and 0 < burst.rate <= FASTEST
        and burst.train <= MOST_SEGMENTS
        and burst.count * burst.size <= MOST_BYTES
        and burst.seconds <= LONGEST_BURST_S
    )


def send_burst(
    socket: UdpSocket, prefix: bytes, burst: Burst, to: SocketAddress, local: bytes = b""
) -> int:
    """Sends a burst, and returns its rate in bits per second as it was sent.

    Args:
        prefix: The first bytes of every datagram (`data_prefix`).
        local: The address to send from; see `UdpSocket.send`.
    """
    most = min(MOST_SEGMENTS, LARGEST_UDP // burst.size)
    train = min(burst.train or max(1, int(burst.rate * QUANTUM_S / 8 / burst.size)), most)
    datagram = prefix + bytes(burst.size - len(prefix))
    full = datagram * train
    interval = train * burst.size * 8 / burst.rate
    begun = due = time.monotonic()
    last = begun
    left = burst.count
    while left > 0:
        now = time.monotonic()
        if due - now > SHORTEST_SLEEP_S:
            time.sleep(due - now)
        while (now := time.monotonic()) < due:
            pass
        number = min(train, left)
        data = full if number == train else datagram * number
        socket.send(data, to, segment=burst.size if number > 1 else 0, local=local)
        left -= number
        last = now
        due = max(due + interval, now - MOST_LATE_S)
    after_first = (burst.count - min(train, burst.count)) * burst.size
    return int(after_first * 8 / (last - begun)) if last > begun else burst.rate


class Tally:
    """What arrived of a burst.

    Args:
        prefix: The first bytes of its datagrams (`data_prefix`).

    Attributes:
        count: Datagrams.
        merged: The most datagrams that one message held.
    """

    def __init__(self, prefix: bytes) -> None:
        self.prefix = prefix
        self.count = 0
        self.merged = 0
        self._first_ns = self._last_ns = 0
        self._after_first = 0

    def take(self, message: Message) -> list[bytes]:
        """Counts the burst's datagrams in a message, and returns all others."""
        data, segment = message.data, message.segment
        others = []
        count = size = 0
        for at in range(0, len(data), segment):
            if data.startswith(self.prefix, at):
                count += 1
                size += min(segment, len(data) - at)
            else:
                others.append(data[at : at + segment])
        if count:
            self.count += count
            self.merged = max(self.merged, count)
            if self._first_ns == 0:
                self._first_ns = message.arrived_ns
            elif message.arrived_ns > self._first_ns:
                self._after_first += size
                self._last_ns = max(self._last_ns, message.arrived_ns)
        return others

    @property
    def rate(self) -> int:
        """The rate of arrival in bits per second; 0 where too little arrived to know it."""
        passed = self._last_ns - self._first_ns
        return self._after_first * 8_000_000_000 // passed if passed > 0 else 0
