"""Bursts of cross traffic go into one port of a network."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gradwire_lab.network.helper import helper_command
from gradwire_lab.network.network import LabUnavailable, Network
from gradwire_lab.network.presets import Burst

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


def windows(burst: Burst, origin: float, since: float, until: float) -> Iterator[BurstRecord]:
    """Return the bursts as planned that overlap a span of time.

    Args:
        burst: their rate and rhythm.
        origin: time of phase zero, in seconds of ``time.monotonic()``.
        since: start of the span.
        until: end of the span.
    """
    first = origin + burst.phase
    number = max(0, int((since - first - burst.on) // burst.period) + 1)
    while (start := first + number * burst.period) < until:
        size = int(burst.rate * burst.on / 8)
        yield BurstRecord(start, start + burst.on, size, size)
        number += 1


def phase_of(turn: int, burst: Burst) -> float:
    """Return where in a burst's period a turn begins, in seconds.

    Turns that follow each other begin at different phases.
    """
    return turn * _GOLDEN % 1.0 * burst.period


class BurstTraffic:
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
            network: a network with at least one extra host.
            burst: rate and rhythm.
            target: host whose port is hit.
            source: host that sends; the first extra one if not given.
            origin: time of phase zero, in seconds of ``time.monotonic()``; soon if not given.

        Raises:
            ValueError: the network has no extra host and no source is given.
            IndexError: there is no such host.
        """
        if source is None:
            if network.extra_hosts == 0:
                raise ValueError("bursts need a network with an extra host to send them")
            source = network.hosts
        self.burst = burst
        self.target = target
        self.origin = time.monotonic() + _LEAD_SECONDS if origin is None else origin
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        schedule = json.dumps({**asdict(burst), "origin": self.origin})
        self._process = network.spawn(
            source,
            helper_command(
                "network.burst_sender", network.discard_address(target), schedule, bare=True
            ),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
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
        """Return the bursts sent so far.

        Raises:
            LabUnavailable: the sender has died.
        """
        self._check()
        size = os.fstat(self._log.fileno()).st_size
        lines = os.pread(self._log.fileno(), size, 0).splitlines(keepends=True)
        return [_record(json.loads(line)) for line in lines if line.endswith(b"\n")]

    @property
    def pid(self) -> int:
        """Return the id of the process that sends."""
        return self._process.pid

    def sending(self) -> bool:
        """Return whether it has sent a burst.

        Raises:
            LabUnavailable: the sender has died.
        """
        return bool(self.records())

    def close(self) -> None:
        """Stop sending. May be called again."""
        self._process.kill()  # kill() ignores a process that has ended
        self._process.wait()
        self._log.close()

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise LabUnavailable(f"the burst sender ended with status {self._process.returncode}")

    def __enter__(self) -> BurstTraffic:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _record(fields: dict[str, Any]) -> BurstRecord:
    return BurstRecord(
        float(fields["start"]), float(fields["stop"]), int(fields["bytes"]), int(fields["planned"])
    )
