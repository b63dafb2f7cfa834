"""A TAP link is two TAP devices, on a host and at the switch, with a thread between them.

This code runs in the keeper. The threads (`engine/lab`) are those of one helper process, which
dies with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from dataclasses import dataclass
from typing import Any

from gradwire_lab.network.helper import helper_command
from gradwire_lab.network.kernel import CLONE_NEWNET, setns
from gradwire_lab.network.tap import open_tap
from gradwire_lab.network.wire import Wire

DIRECTIONS = {"uplink": 0, "downlink": 1}
"""A link's first device is the host's."""

_MAX_ANSWER = 1 << 16
_ANSWER_SECONDS = 10.0
_STOP_SECONDS = 2.0


@dataclass(frozen=True)
class TapPair:
    """A TAP link has two devices.

    Attributes:
        host: descriptor of the one on the host.
        port: the same of the device at the switch.
        carrier: what carries frames between them, as results shall name it.
    """

    host: int
    port: int
    carrier: str


def make_pair(namespace: int, interface: str, switch: int, port: str, *, offloads: bool) -> TapPair:
    """Make a link's devices; leaves the process in the switch's namespace.

    Args:
        namespace: descriptor of the host's.
        interface: name of the device there.
        switch: descriptor of the switch's.
        port: name of the device there.
        offloads: whether trains pass whole.

    Raises:
        TapUnavailable: the machine does not let this process do so.
    """
    setns(namespace, CLONE_NEWNET)
    try:
        host, udp_trains = open_tap(interface, offloads=offloads)
    finally:
        setns(switch, CLONE_NEWNET)
    try:
        end, _ = open_tap(port, offloads=offloads)
    except OSError:
        os.close(host)
        raise
    carrier = "TAP pairs" if udp_trains or not offloads else "TAP pairs that cut UDP trains"
    return TapPair(host, end, carrier)


class TapLinks:
    """These are all TAP links of a network."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, host: int, pair: TapPair, seed: int) -> None:
        """Start a thread between two devices; their descriptors belong to it from now on.

        Raises:
            OSError: it cannot be started.
        """
        try:
            if self._process is None:
                self._start()
            self._ask("start", host, [pair.host, pair.port], seed=seed)
        finally:
            os.close(pair.host)  # the devices then go with the thread
            os.close(pair.port)

    def set(self, host: int, wire: Wire, direction: str) -> None:
        """Have a direction of a host's link do so from now on.

        Raises:
            OSError: it has failed.
        """
        options = {
            "delay_ns": round(wire.delay_s * 1e9),
            "jitter_ns": round(wire.jitter_s * 1e9),
            "keep_order": wire.keep_order,
            "rate": wire.rate / 8,
            "queue_bytes": wire.queue,
            "ecn_bytes": wire.ecn,
            "loss": wire.loss,
            "loss_burst": wire.loss_burst,
        }
        self._ask("set", host, direction=DIRECTIONS[direction], options=options)

    def counters(self, host: int) -> dict[str, dict[str, int]]:
        """Return both directions' counters, those of `_link.TapLink.counters`, and `cpu_ns`.

        Raises:
            OSError: it has failed.
        """
        counters = self._ask("count", host)["counters"]
        return {name: counters[direction] for name, direction in DIRECTIONS.items()}

    def close(self) -> None:
        """End all threads. May be called again."""
        if self._channel is None or self._process is None:
            return
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                helper_command("network.link_process", os.getpid(), theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def _ask(
        self, ask: str, host: int, descriptors: list[int] | None = None, **request: Any
    ) -> dict[str, Any]:
        assert self._channel is not None
        message = json.dumps({"ask": ask, "host": host, **request}).encode()
        try:
            socket.send_fds(self._channel, [message], descriptors or [])
            received = self._channel.recv(_MAX_ANSWER)
        except OSError as error:
            raise OSError(f"the process of the lab's links: {error}") from error
        if not received:
            raise OSError("the process of the lab's links has ended")
        answer: dict[str, Any] = json.loads(received)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer
