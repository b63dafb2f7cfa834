"""The lab's own links between hosts and switch, for kernels without netem.

Each is a pair of TAP devices, one on the host and one at the switch, with a thread between them
(`engine/lab`) that delays, jitters, loses and limits what passes. Runs in the keeper; the threads
are those of one helper process, which dies with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradwire.lab.addresses import INTERFACE
from gradwire.lab.helper import helper_command
from gradwire.lab.kernel import CLONE_NEWNET, setns
from gradwire.lab.tap import open_tap
from gradwire.lab.wire import Wire

DIRECTIONS = {"uplink": 0, "downlink": 1}
"""A link's first device is the host's."""

_MAX_MESSAGE = 1 << 16
_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 2.0


@dataclass(frozen=True)
class TapPair:
    """A link's two devices.

    Attributes:
        host: descriptor of the one on the host.
        port: of the one at the switch.
        udp_trains: whether trains of UDP packets pass whole.
    """

    host: int
    port: int
    udp_trains: bool


def make_pair(namespace: int, switch: int, port: str, *, offloads: bool) -> TapPair:
    """Make a link's devices; leaves the process in the switch's namespace.

    Args:
        namespace: descriptor of the host's.
        switch: descriptor of the switch's.
        port: name of the device at the switch.
        offloads: whether trains pass whole.

    Raises:
        TapUnavailable: the machine does not let this process do so.
    """
    setns(namespace, CLONE_NEWNET)
    try:
        host, udp_trains = open_tap(INTERFACE, offloads=offloads)
    finally:
        setns(switch, CLONE_NEWNET)
    try:
        return TapPair(host, open_tap(port, offloads=offloads)[0], udp_trains)
    except OSError:
        os.close(host)
        raise


class DelayLinks:
    """All such links of a network."""

    def __init__(self, pairs: dict[int, TapPair], seed: int) -> None:
        """Start the threads; the descriptors now belong to this object.

        Args:
            pairs: by host.
            seed: of losses and jitter.

        Raises:
            OSError: the helper process cannot be started.
        """
        self._numbers = {host: number for number, host in enumerate(pairs)}
        descriptors = [end for pair in pairs.values() for end in (pair.host, pair.port)]
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                helper_command(
                    "link_process",
                    os.getpid(),
                    theirs.fileno(),
                    seed,
                    *(f"{pair.host}:{pair.port}" for pair in pairs.values()),
                ),
                pass_fds=[theirs.fileno(), *descriptors],
                stdin=subprocess.DEVNULL,
            )
        for descriptor in descriptors:
            os.close(descriptor)  # so that the devices go with the process that serves them

    def set(self, host: int, wire: Wire, directions: Iterable[str]) -> None:
        """Have a host's link do so from now on; what travels already arrives when it was due.

        Args:
            host: whose link.
            wire: what it shall do.
            directions: "uplink" (from the host), "downlink" (to it).

        Raises:
            OSError: the link has failed.
        """
        options = {
            "delay_ns": round(wire.delay_s * 1e9),
            "jitter_ns": round(wire.jitter_s * 1e9),
            "keep_order": wire.keep_order,
            "rate": wire.rate / 8,
            "queue_bytes": wire.queue,
            "loss": wire.loss,
            "loss_burst": wire.loss_burst,
        }
        self._ask(host, options=options, directions=[DIRECTIONS[name] for name in directions])

    def counters(self, host: int) -> dict[str, dict[str, int]]:
        """What both directions of a host's link have seen, as `_engine.TapLink.counters` says it.

        Raises:
            OSError: the link has failed.
        """
        counters = self._ask(host)["counters"]
        return {name: counters[direction] for name, direction in DIRECTIONS.items()}

    def _ask(self, host: int, **request: Any) -> dict[str, Any]:
        self._channel.send(json.dumps({"link": self._numbers[host], **request}).encode())
        message = self._channel.recv(_MAX_MESSAGE)
        if not message:
            raise OSError("the process that carries delayed frames has ended")
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise OSError(f"the link of host {host}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Stop the threads. May be called again."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()
        self._process.wait()
