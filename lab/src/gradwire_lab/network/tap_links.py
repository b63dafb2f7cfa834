"""A TAP link is two TAP devices, on a host and at the switch, with a thread between them.

This code runs in the keeper. The threads (`engine/lab`) are those of one helper process, which
dies with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from gradwire_lab.network.channel import Channel
from gradwire_lab.network.kernel import CLONE_NEWNET, setns
from gradwire_lab.network.tap import open_tap
from gradwire_lab.network.wire import Wire

DIRECTIONS = {"uplink": 0, "downlink": 1}
"""A link's first device is the host's."""


class TapLinks:
    """These are all TAP links of a network.

    Attributes:
        carriers: what carries frames between the devices, as results name it.
    """

    def __init__(self, switch: int, *, offloads: bool) -> None:
        """Make none yet; the switch's namespace is that of the process, given by a descriptor."""
        self._switch = switch
        self._offloads = offloads
        self._process: Channel | None = None
        self.carriers: set[str] = set()

    def add(self, host: int, namespace: int, interface: str, port: str, seed: int) -> None:
        """Make a link's devices and start the thread between them.

        Args:
            namespace: descriptor of the host's.

        Raises:
            TapUnavailable: the machine does not let this process do so.
        """
        taps = []
        try:
            setns(namespace, CLONE_NEWNET)
            try:
                tap, udp_trains = open_tap(interface, offloads=self._offloads)
                taps.append(tap)
            finally:
                setns(self._switch, CLONE_NEWNET)
            taps.append(open_tap(port, offloads=self._offloads)[0])
            if self._process is None:
                self._process = Channel(
                    "network.link_process", "the process of the lab's links has ended"
                )
            self._ask("start", host, taps, seed=seed)
        finally:
            for tap in taps:
                os.close(tap)  # the devices then go with the thread
        whole = udp_trains or not self._offloads
        self.carriers.add("TAP pairs" if whole else "TAP pairs that cut UDP trains")

    def set(self, host: int, wire: Wire, direction: str) -> None:
        """Have a direction of a host's link do so from now on."""
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
        """Return both directions' counters, those of `_link.TapLink.counters`, and `cpu_ns`."""
        counters = self._ask("count", host)["counters"]
        return {name: counters[direction] for name, direction in DIRECTIONS.items()}

    def close(self) -> None:
        """End all threads. May be called again."""
        if self._process is not None:
            self._process.close()

    def _ask(
        self, ask: str, host: int, descriptors: Sequence[int] = (), **request: Any
    ) -> dict[str, Any]:
        assert self._process is not None
        answer, _ = self._process.ask({"ask": ask, "host": host, **request}, send=descriptors)
        return answer
