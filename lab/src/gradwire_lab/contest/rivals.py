"""Competing TCP streams go into one port of a network, and count what they get of it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
from typing import Any

from gradwire_lab.network.helper import helper_command
from gradwire_lab.network.network import LabUnavailable, Network

__all__ = ["RivalStreams"]


class RivalStreams:
    """Rival streams go from an extra host to a host, while a ``with`` block lasts."""

    def __init__(
        self, network: Network, streams: int, congestion_control: str, *, target: int, source: int
    ) -> None:
        """Start both ends.

        Args:
            network: a network with the source among its extra hosts.
            streams: how many.
            congestion_control: theirs.
            target: host that reads; its port is what is fought for.
            source: host that writes.

        Raises:
            IndexError: there is no such host.
        """
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        address = network.address(target)
        ends = [
            (target, helper_command("contest.rival", "receive", address, bare=True), self._log),
            (
                source,
                helper_command(
                    "contest.rival", "send", address, streams, congestion_control, bare=True
                ),
                subprocess.DEVNULL,
            ),
        ]
        self._processes: list[subprocess.Popen[Any]] = []
        for host, command, output in ends:
            process = network.spawn(host, command, stdin=subprocess.DEVNULL, stdout=output)
            self._processes.append(process)

    def read(self) -> list[tuple[float, int]]:
        """Return what the streams delivered so far.

        It is a list of moments of ``time.monotonic()``, each with the bytes since the one before.

        Raises:
            LabUnavailable: one end has died.
        """
        for process in self._processes:
            if process.poll() is not None:
                raise LabUnavailable(f"the rivals ended with status {process.returncode}")
        size = os.fstat(self._log.fileno()).st_size
        lines = os.pread(self._log.fileno(), size, 0).splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [(float(each["at"]), int(each["bytes"])) for each in found]

    def sending(self) -> bool:
        """Return whether the streams, which first connect one by one, have delivered anything.

        Raises:
            LabUnavailable: one end has died.
        """
        return any(count for _, count in self.read())

    def close(self) -> None:
        """End both. May be called again."""
        for process in reversed(self._processes):  # the sender ends first
            process.kill()
            process.wait()
        self._log.close()

    def __enter__(self) -> RivalStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def goodput(read: list[tuple[float, int]], spans: list[tuple[float, float]]) -> float | None:
    """Return the mean bytes per second within spans of time; None where nothing was seen in them.

    Args:
        read: what `RivalStreams.read` returned.
        spans: starts and ends, in seconds of ``time.monotonic()``.
    """
    seconds = total = 0.0
    for (before, _), (moment, count) in itertools.pairwise(read):
        inside = sum(max(0.0, min(moment, end) - max(before, start)) for start, end in spans)
        if moment > before:
            seconds += inside
            total += count * inside / (moment - before)
    return total / seconds if seconds else None
