"""Bursts of cross traffic go into one port of a network."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import Burst
from gradwire_lab.network.reporter import Reporter

_LEAD_SECONDS = 0.5
_GOLDEN = 0.618
"""Share of a period by which phases move from turn to turn, so that none comes again soon."""


@dataclass(frozen=True)
class BurstRecord:
    """A record holds a burst as it was sent.

    Attributes:
        start: when its first packet went out, in seconds of ``time.monotonic()``.
        stop: when its last one did.
        bytes: the bytes sent, Ethernet headers counted.
        planned: the bytes that it should have sent; 0 if they are not known.
    """

    start: float
    stop: float
    bytes: int
    planned: int = 0


def phase_of(turn: int, burst: Burst) -> float:
    """Return where in a burst's period a turn begins, in seconds.

    Turns that follow each other begin at different phases.
    """
    return turn * _GOLDEN % 1.0 * burst.period


class BurstTraffic(Reporter):
    """Burst traffic goes from an extra host into a host's port while a ``with`` block lasts.

    The schedule follows the clock and nothing else: burst k starts at
    ``origin + phase + k * period`` whatever the network does, so several contestants can be
    measured at the same phase of it. The packets are dropped by the host that they reach.
    """

    def __init__(
        self,
        network: Network,
        burst: Burst,
        *,
        target: int = 0,
        source: int | None = None,
        origin: float | None = None,
    ) -> None:
        """Start the sender.

        Args:
            source: host that sends; the first extra one if not given.
            origin: time of phase zero, in seconds of ``time.monotonic()``; soon if not given.

        Raises:
            ValueError: the network has no extra host and no source is given.
        """
        if source is None:
            if network.extra_hosts == 0:
                raise ValueError("bursts need a network with an extra host to send them")
            source = network.hosts
        self.burst = burst
        self.target = target
        self.origin = time.monotonic() + _LEAD_SECONDS if origin is None else origin
        schedule = json.dumps({**asdict(burst), "origin": self.origin})
        address = network.discard_address(target)
        super().__init__(
            "the burst sender", network, source, "network.burst_sender", address, schedule
        )

    def next_phase(self, offset: float = 0.0, *, after: float | None = None) -> float:
        """Return the next time at which the bursts are at a given phase.

        Args:
            offset: seconds after a burst's start.
            after: not before this time; now if not given.

        Returns:
            Seconds of ``time.monotonic()``.
        """
        after = time.monotonic() if after is None else after
        first = self.origin + self.burst.phase + offset
        number = max(0, -int((first - after) // self.burst.period))
        return first + number * self.burst.period

    def records(self) -> list[BurstRecord]:
        """Return the bursts sent so far."""
        return [BurstRecord(**line) for line in self.lines()]

    def sending(self) -> bool:
        """Return whether it has sent a burst."""
        return bool(self.lines())
