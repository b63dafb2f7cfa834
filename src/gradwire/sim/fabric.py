"""Fabric: many endpoints on one switch in virtual time, where a seed determines the run.

The endpoints are the engine's own; only the network and the clock are simulated. Times are virtual
seconds, rates are bytes per second on the wire, and sizes are bytes.

    fabric = Fabric(workers=4, link=NETWORK_A, seed=1)
    fabric.cross_traffic(2, rate=500e6, start=0.01, length=0.01, period=0.2)
    fabric.all_reduce(0, plan, [gradients of rank 0, …])
    fabric.run()
    print(fabric.completion(0, 0).total_ns, fabric.result(0, 0))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.sim.link import NETWORK_A, NETWORK_B, Direction, Link, ns
from gradwire.sim.network import Network
from gradwire.transport.native import load_engine

if TYPE_CHECKING:
    from gradwire import _engine


__all__ = [
    "NETWORK_A",
    "NETWORK_B",
    "BrokenInvariantError",
    "Direction",
    "Fabric",
    "Link",
    "Sent",
]


class BrokenInvariantError(AssertionError):
    """An endpoint broke an invariant of the protocol; the message says where and when."""


class Sent(NamedTuple):
    """One datagram in the trace; packet number, op and chunk are those of reliable packets.

    Attributes:
        time_ns: Time of sending in nanoseconds.
        source: Host that sent it.
        destination: Host that it is for.
        kind: Type of the packet.
        packet_number: Number of the packet.
        op: The op.
        chunk: The chunk.
        bytes: Size of the UDP payload in bytes.
        fate: "delivered", "queue", "loss" or "unreachable".
        dscp: The DSCP.
        lane: The lane of the op.
    """

    time_ns: int
    source: int
    destination: int
    kind: str
    packet_number: int
    op: int
    chunk: int
    bytes: int
    fate: str
    dscp: int
    lane: int


class Fabric(Network):
    """Hosts on one switch; hosts 0 … workers - 1 are the workers (ranks), then the servers.

    Args:
        workers: Number of workers.
        servers: Number of servers.
        seed: Seed of all random events.
        link: Every direction of every port (`set_link` changes one).
        overhead: Bytes on the wire beside each UDP payload.
        whole_trains: Whether queues and losses treat a train as one packet, as under segmentation
            offload (network A).
        host_delay: Seconds from a datagram's arrival until the process reads it, and from the time
            of a timer until the process wakes.
        host_jitter: Variation of that delay in seconds.
        send_time: Seconds for which a call that sends a train keeps the process busy.
        datagram_bytes: Size of datagrams in bytes.
        peer_timeout: Seconds of silence after which a peer counts as dead.
        ping_interval: Seconds between pings.
        receive_buffer: Size of a socket's receive buffer in bytes.
        memory_limit: Bytes that an endpoint may hold for its peers.
        pacing: Whether packets are paced.
        ecn: Whether acknowledged packets are sent as ECT(0).
        session: Session tag of the packets.
        trace: Number of datagrams that `trace()` keeps.
        most_events: Number of simulated events; more are a storm, which breaks an invariant.
        beside: The fabric of another job on the same hosts: both share its ports, and this one's
            time goes on from its time. From then on, `run_beside` runs both.
        engines: Number of engines of each host, which divide every op among them; each has a fabric
            of its own (`gradwire.sim.cores`).
        engine: Which of them this fabric has.

    Raises:
        ValueError: An argument is not allowed.

    Attributes:
        workers: Number of workers.
        servers: Number of servers.
        datagram_bytes: Size of datagrams in bytes.
    """

    def __init__(
        self,
        workers: int,
        *,
        servers: int = 0,
        seed: int = 0,
        link: Link = NETWORK_A,
        overhead: int = 42,
        whole_trains: bool = False,
        host_delay: float = 0.0,
        host_jitter: float = 0.0,
        send_time: float = 0.0,
        datagram_bytes: int = 1472,
        peer_timeout: float = 30.0,
        ping_interval: float = 1.0,
        receive_buffer: int = 1 << 20,
        memory_limit: int = 1 << 31,
        pacing: bool = True,
        ecn: bool = True,
        session: int = 1,
        trace: int = 0,
        most_events: int = (1 << 64) - 1,
        beside: Fabric | None = None,
        engines: int = 1,
        engine: int = 0,
    ) -> None:
        self.workers = workers
        self.servers = servers
        self.datagram_bytes = datagram_bytes
        self._core: _engine.Fabric = load_engine().Fabric(
            workers=workers,
            servers=servers,
            seed=seed,
            link=link.core(),
            ecn=ecn,
            overhead=overhead,
            whole_trains=whole_trains,
            host_delay_ns=ns(host_delay),
            host_jitter_ns=ns(host_jitter),
            send_time_ns=ns(send_time),
            datagram_bytes=datagram_bytes,
            peer_timeout_ns=ns(peer_timeout),
            ping_interval_ns=ns(ping_interval),
            receive_buffer=receive_buffer,
            memory_limit=memory_limit,
            pacing=pacing,
            session=session,
            trace_limit=trace,
            most_events=most_events,
            beside=None if beside is None else beside._core,
            engines=engines,
            engine=engine,
        )

    # ------------------------------------------------------------------ time

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._core.now_ns * 1e-9

    @property
    def events(self) -> int:
        """The number of simulated events so far."""
        return self._core.events

    @property
    def trace_hash(self) -> int:
        """A hash of all that was sent, when, and of all results; equal runs have equal hashes."""
        return self._core.trace_hash

    def run(self, until: float = 120.0, *, until_done: bool = True, check: bool = True) -> bool:
        """Runs until a time, or until all ops of living workers are done.

        Args:
            until: Seconds since the start.
            until_done: Whether to stop when all ops are done.
            check: Whether to check all results at the end; many short runs leave that to the last.

        Returns:
            Whether all ops are done.

        Raises:
            BrokenInvariantError: A check failed.
        """
        done = self._core.run(ns(until), until_done)
        if check:
            self.check()
        return done

    def run_beside(self, other: Fabric, until: float, *, check: bool = True) -> None:
        """Runs two jobs on the same ports, until a time or until one of them has no open op.

        Args:
            other: The other job; one of the two was made `beside` the other.
            until: Seconds since the start of the first.
            check: As in `run`.

        Raises:
            BrokenInvariantError: A check failed.
        """
        self._core.run_beside(other._core, ns(until))
        if check:
            self.check()
            other.check()

    @staticmethod
    def run_together(fabrics: Sequence[Fabric], until: float = 120.0) -> bool:
        """Runs several jobs on the same ports, until a time or until all their ops are done.

        Args:
            fabrics: The jobs; all but the first were made `beside` the first.
            until: Seconds since the start of the first.

        Returns:
            Whether all ops are done.

        Raises:
            BrokenInvariantError: A check failed.
        """
        done = load_engine().Fabric.run_together([each._core for each in fabrics], ns(until))
        for fabric in fabrics:
            fabric.check()
        return bool(done)

    def check(self) -> None:
        """Raises BrokenInvariantError where a check has failed; compares finished results again."""
        if broken := self._core.violations():
            raise BrokenInvariantError("\n".join(broken))

    # ------------------------------------------------------------------ ops

    def start(
        self,
        worker: int,
        op: int,
        plan: _engine.Plan,
        data: NDArray[np.float32],
        *,
        lane: int = 0,
        step: int | None = None,
        critical: Sequence[int] | NDArray[np.uint32] | None = None,
        priorities: NDArray[np.uint8] | None = None,
        stats: Sequence[float] = (),
        timeout: float = 1800.0,
        at: float = 0.0,
    ) -> None:
        """Starts one worker's part of an op.

        Args:
            worker: The worker.
            op: Number of the op. Ops of a lane are numbered 0, 1, 2, … in the order they start,
                the same on all workers.
            plan: The engine's plan.
            data: float32, the worker's values.
            lane: The lane.
            step: The training step; None for the op's number.
            critical: Ids of chunks that must count.
            priorities: uint8, the class of each chunk.
            stats: Up to eight statistics.
            timeout: Longest duration in seconds.
            at: Start in seconds since the fabric's start.
        """
        self._core.start(
            worker=worker,
            op=op,
            lane=lane,
            step=op if step is None else step,
            plan=plan,
            data=np.ascontiguousarray(data, dtype=np.float32),
            critical=None if critical is None else np.asarray(critical, dtype=np.uint32),
            priorities=priorities,
            stats=stats,
            timeout_ns=ns(timeout),
            at_ns=ns(at),
        )

    def all_reduce(
        self,
        op: int,
        plan: _engine.Plan,
        data: Sequence[NDArray[np.float32]],
        *,
        lane: int = 0,
        step: int | None = None,
        critical: Sequence[Sequence[int] | NDArray[np.uint32] | None] | None = None,
        priorities: Sequence[NDArray[np.uint8] | None] | None = None,
        stats: Sequence[Sequence[float]] | None = None,
        timeout: float = 1800.0,
        at: float | Sequence[float] = 0.0,
    ) -> None:
        """Starts one op on all workers.

        Args:
            op: Number of the op in its lane.
            plan: The engine's plan.
            data: float32, the values of each worker.
            lane: The lane.
            step: The training step; None for the op's number.
            critical: Ids of chunks that must count, for each worker.
            priorities: uint8, the class of each chunk, for each worker.
            stats: Up to eight statistics, for each worker.
            timeout: Longest duration in seconds.
            at: Start in seconds since the fabric's start, for all workers or for each.
        """
        for worker, values in enumerate(data):
            self.start(
                worker,
                op,
                plan,
                values,
                lane=lane,
                step=step,
                critical=None if critical is None else critical[worker],
                priorities=None if priorities is None else priorities[worker],
                stats=() if stats is None else stats[worker],
                timeout=timeout,
                at=at if isinstance(at, (int, float)) else at[worker],
            )

    def close(self, host: int, linger: float = 2.0) -> None:
        """Makes an endpoint leave; `closed` is true once it has left."""
        self._core.close(host, ns(linger))

    def forget(self) -> None:
        """Frees the memory of ops that all workers have finished; their results are gone."""
        self._core.forget()

    # ------------------------------------------------------------------ what came of it

    def completion(self, worker: int, op: int, *, lane: int = 0) -> _engine.Completion | None:
        """Returns the completion of a worker's op; None while it runs."""
        return self._core.completion(worker, op, lane)

    def result(self, worker: int, op: int, *, lane: int = 0) -> NDArray[np.float32]:
        """Returns a worker's buffer after an op; raises ValueError while it runs."""
        return self._core.result(worker, op, lane)

    def round_trip(self, plan: _engine.Plan, data: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns what the others get of a worker's values under the plan's encoding."""
        values: NDArray[np.float32] = load_engine().round_trip(
            plan, np.ascontiguousarray(data), self.datagram_bytes, self.servers or self.workers
        )
        return values

    def finished_at(self, worker: int, op: int, *, lane: int = 0) -> float:
        """Returns when a worker's op was done, in seconds since the start."""
        return self._core.finished_at_ns(worker, op, lane) * 1e-9

    def failure(self, host: int) -> str:
        """Returns why an endpoint can no longer serve; "" while it can."""
        return self._core.failure(host)

    @property
    def met(self) -> bool:
        """Whether each endpoint has had an answer of each that it talks to."""
        return self._core.met

    def unheard(self, source: int, destination: int) -> float:
        """Returns how long one host at most heard nothing of another, as the wire lost it all.

        Args:
            source: The host that was not heard.
            destination: The host that heard nothing.

        Returns:
            Seconds; 0 where too few datagrams were lost to explain a silence.
        """
        return self._core.unheard_ns(source, destination) * 1e-9

    def closed(self, host: int) -> bool:
        """Returns whether an endpoint has left, and its peers know it."""
        return self._core.closed(host)

    def counters(self, host: int) -> dict[str, float]:
        """Returns an endpoint's counters, and those of its packets that sockets and ports dropped.

        Of those that came to it, its socket's buffer dropped ``dropped_by_socket``. Of those that
        it sent, queues and policers dropped ``dropped_by_ports``.
        """
        return self._core.counters(host)

    def record(self, host: int, entries: int) -> list[tuple[int, str, int | None, int]]:
        """Keeps so many entries of an endpoint's timeline from now on; 0 for none.

        Returns:
            The entries since the last call, as `gradwire.transport.transfer.Engine.record` has
            them.
        """
        return self._core.record(host, entries)

    def trace(self) -> list[Sent]:
        """Returns the first datagrams that were sent, as many as the argument `trace` asked for."""
        return [Sent(*entry) for entry in self._core.trace()]
