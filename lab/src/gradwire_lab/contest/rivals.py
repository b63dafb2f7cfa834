"""Competing TCP streams go into one port of a network, and count what they get of it."""

from __future__ import annotations

import itertools

from gradwire_lab.network.network import Network
from gradwire_lab.network.reporter import Reporter

__all__ = ["RivalStreams"]


class RivalStreams:
    """Rival streams go from an extra host to a host, while a ``with`` block lasts."""

    def __init__(
        self, network: Network, streams: int, congestion_control: str, *, target: int, source: int
    ) -> None:
        """Start both ends.

        Args:
            network: a network with the source among its extra hosts.
            target: host that reads; its port is what is fought for.
        """
        name, address = "the rivals", network.address(target)
        self._receiver = Reporter(name, network, target, "contest.rival", "receive", address)
        arguments = ("send", address, streams, congestion_control)
        self._sender = Reporter(name, network, source, "contest.rival", *arguments)

    def read(self) -> list[tuple[float, int]]:
        """Return what the streams delivered so far.

        It is a list of moments of ``time.monotonic()``, each with the bytes since the one before.
        """
        self._sender.lines()
        return [(float(each["at"]), int(each["bytes"])) for each in self._receiver.lines()]

    def sending(self) -> bool:
        """Return whether the streams, which first connect one by one, have delivered anything."""
        return any(count for _, count in self.read())

    def close(self) -> None:
        """End both. May be called again."""
        self._sender.close()  # it ends first
        self._receiver.close()

    def __enter__(self) -> RivalStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def goodput(read: list[tuple[float, int]], spans: list[tuple[float, float]]) -> float | None:
    """Return the mean bytes per second within spans of time; None where nothing was seen in them.

    Args:
        spans: starts and ends, in seconds of ``time.monotonic()``.
    """
    seconds = total = 0.0
    for (before, _), (moment, count) in itertools.pairwise(read):
        inside = sum(max(0.0, min(moment, end) - max(before, start)) for start, end in spans)
        if moment > before:
            seconds += inside
            total += count * inside / (moment - before)
    return total / seconds if seconds else None
