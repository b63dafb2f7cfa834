"""Network: the hosts and ports of a fabric, and what goes wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire.sim.link import Direction, Link, ns

if TYPE_CHECKING:
    from gradwire import _engine


class Network:
    """Ports with links, other traffic on them, clocks, cuts, and processes that stop or end."""

    _core: _engine.Fabric

    def set_link(self, host: int, direction: Direction, link: Link) -> None:
        """Gives one direction of a host's port other properties from now on."""
        self._core.set_link(host, direction, link.core())

    def link_counters(self, host: int, direction: Direction) -> dict[str, int]:
        """Returns packets, bytes, drops by queue and by loss, the queue, cross traffic."""
        return self._core.link(host, direction)

    def cross_traffic(
        self,
        host: int,
        *,
        rate: float,
        length: float,
        start: float = 0.0,
        period: float = 0.0,
        direction: Direction = "down",
        train: int = 1,
    ) -> None:
        """Sends foreign packets into a port, in bursts.

        Args:
            host: The host of the port.
            rate: Rate within a burst in bytes per second.
            length: Duration of a burst in seconds.
            start: Start of the first burst, in seconds since the start.
            period: Seconds from one burst to the next; 0 for a single one.
            direction: "up" or "down".
            train: Number of packets back to back.
        """
        self._core.cross_traffic(
            host,
            direction,
            rate=rate,
            start_ns=ns(start),
            length_ns=ns(length),
            period_ns=ns(period),
            train=train,
        )

    def tcp_flow(
        self,
        host: int,
        *,
        start: float = 0.0,
        end: float | None = None,
        round_trip: float = 200e-6,
        direction: Direction = "down",
    ) -> int:
        """Adds a flow of TCP Reno into a port, which grows until packets are lost and yields then.

        Args:
            host: The host of the port.
            start: Seconds since the fabric's start.
            end: When it ends, in seconds since the start; None for never.
            round_trip: Round-trip time in seconds, without the port's queue.
            direction: "up" or "down".

        Returns:
            The flow's index, for `flow`.
        """
        return self._core.add_flow(
            host,
            direction,
            start_ns=ns(start),
            end_ns=-1 if end is None else ns(end),
            round_ns=ns(round_trip),
        )

    def flow(self, index: int) -> dict[str, int]:
        """Returns the packets, drops and delivered bytes of a flow so far."""
        return self._core.flow(index)

    def set_clock(self, host: int, ppm: float) -> None:
        """Makes a host's clock run faster, by millionths (-1000 to 1000); before the run only."""
        self._core.set_clock(host, ppm)

    def pause(self, host: int) -> None:
        """Stops the process of a host; its socket buffer fills."""
        self._core.pause(host)

    def resume(self, host: int, *, clock_stood: bool = False) -> None:
        """Continues the process of a host.

        Args:
            host: The host.
            clock_stood: Whether its clock stood still, as that of a suspended virtual machine.
        """
        self._core.resume(host, clock_stood)

    def jump_clock(self, host: int, seconds: float) -> None:
        """Sets a host's clock forward, as the move of a virtual machine to another host does."""
        self._core.jump_clock(host, ns(seconds))

    def restart(self, host: int, session: int) -> None:
        """Starts the process of a host anew, in another session than the one it was in.

        The first call with a session's tag begins the job anew: ops are numbered from 0 again, and
        those of the session before, with their results, are forgotten. Packets under way stay.

        Args:
            host: The host.
            session: Session tag, the same for all hosts of the new job.
        """
        self._core.restart(host, session)

    def cut(self, source: int, destination: int, cut: bool = True) -> None:
        """Drops all packets from one host to another from now on, or ends that."""
        self._core.cut(source, destination, cut)

    def kill(self, host: int) -> None:
        """Ends a host without a message to its peers."""
        self._core.kill(host)

    def partition(self, a: int, b: int) -> None:
        """Drops all packets between two hosts from now on."""
        self._core.partition(a, b, True)

    def heal(self, a: int, b: int) -> None:
        """Ends a `partition`."""
        self._core.partition(a, b, False)

    def inject(self, source: int, destination: int, data: bytes) -> None:
        """Delivers a datagram with a forged source."""
        self._core.inject(source, destination, data)
