"""A link between a host and the switch that delays, jitters, loses and limits packets.

It is the lab's own and needs no netem: two TAP devices take the place of the host's veth pair, and
a thread of the engine carries frames from one to the other. So it is the same on every kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from gradwire.lab.network import Network
from gradwire.lab.wire import Wire, WireStats, wire_stats

BOTH = ("uplink", "downlink")
"""From the host, and to it."""


class DelayLink:
    """Has a host of a network reach its switch over such a link while a ``with`` block lasts.

    The port keeps its rate and queue in both directions: what leaves them travels on the wire. Make
    the link before anything runs on the host: with its devices go its connections, the port's
    statistics, and what `Network.set_loss` and `Network.set_rate` changed there. A round trip
    between two hosts crosses four wires, so for an RTT each wire of two hosts takes a quarter.
    """

    def __init__(self, network: Network, host: int, *, seed: int = 0, **wire: Any) -> None:
        """Make the link.

        Args:
            network: of the host.
            host: which one.
            seed: of losses and jitter; the hosts of a network differ all the same.
            wire: what both directions do at first, as in `Wire`: delay_s, jitter_s, keep_order,
                rate, queue, loss, loss_burst.

        Raises:
            IndexError: there is no such host.
            ValueError: an impossible wire.
            LabUnavailable: the machine lets the caller make no TAP device, or the host has such a
                link.
        """
        self.network = network
        self.host = host
        made = Wire(**wire)
        self._wires = dict.fromkeys(BOTH, made)
        self.carrier: str = network.ask_wire("add wire", host, seed=seed << 8 | host)["carrier"]
        self._open = True
        self._apply(BOTH)

    def set(self, *, directions: Iterable[str] = BOTH, **changes: Any) -> None:
        """Change what the wire does; in force when this returns.

        What travels already arrives when it was due. ``set(loss=1)`` cuts the link.

        Args:
            directions: "uplink" (from the host), "downlink" (to it).
            changes: attributes of `Wire`; all others stay.

        Raises:
            ValueError: a direction that is none, or an impossible wire.
            LabUnavailable: the link has failed, or it is closed.
        """
        wanted = list(directions)
        for direction in wanted:
            if direction not in BOTH:
                raise ValueError(f"direction {direction!r}: allowed are {', '.join(BOTH)}")
        changed = {name: replace(self._wires[name], **changes) for name in wanted}
        self._wires.update(changed)
        self._apply(wanted)

    def wire(self, direction: str) -> Wire:
        """What a direction does."""
        return self._wires[direction]

    def stats(self) -> dict[str, WireStats]:
        """What both directions have seen since the link was made: "uplink", "downlink".

        Raises:
            LabUnavailable: the link has failed, or it is closed.
        """
        counters = self.network.ask_wire("wire statistics", self.host)["stats"]
        return {name: wire_stats(counters[name]) for name in BOTH}

    def close(self) -> None:
        """Give the host its veth pair back. May be called again."""
        if self._open:
            self._open = False
            self.network.ask_wire("remove wire", self.host)

    def _apply(self, directions: Iterable[str]) -> None:
        for name in directions:
            wire = asdict(self._wires[name])
            self.network.ask_wire("set wire", self.host, wire=wire, direction=name)

    def __enter__(self) -> DelayLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
