"""The protocol in virtual time: many endpoints on one switch, one seed, one run.

The endpoints are the engine's own; only the network and the clock are computed. Times are seconds
(of virtual time), rates bytes per second as they count on the wire, sizes bytes.

    fabric = Fabric(workers=4, link=NETWORK_A, seed=1)
    fabric.cross_traffic(2, rate=500e6, start=0.01, length=0.01, period=0.2)
    fabric.all_reduce(0, plan, [gradients of rank 0, …])
    fabric.run()
    print(fabric.completion(0, 0).total_ns, fabric.result(0, 0))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.transport.native import load_engine

if TYPE_CHECKING:
    from gradwire import _engine

__all__ = ["NETWORK_A", "NETWORK_B", "BrokenInvariantError", "Fabric", "Link", "Sent"]

Direction = Literal["up", "down"]


class BrokenInvariantError(AssertionError):
    """An endpoint did what none may do; the message says where and when."""


@dataclass(frozen=True)
class Link:
    """One direction of a port.

    rate: bytes/s. delay: seconds one way. queue: bytes of the drop-tail queue.
    loss: share of packets that the wire loses; loss_burst: mean packets of a run of losses
    (Gilbert–Elliott, at least loss / (1 - loss); 1: independent). reorder: share that comes late
    by up to reorder_delay seconds. duplicate: share that comes twice. garbage: share followed by a
    datagram that no endpoint may heed. flip: share with flipped bits, as if the UDP checksum had
    not noticed. ecn: bytes in the queue above which ECT packets are marked CE as they come (0: none
    are). bleach: clears the ECN field of all packets. drop_ect: loses all that are ECT.
    longest: bytes; loses longer datagrams (UDP payload) and says nothing; 0: none is too long.
    """

    rate: float = 125e6
    delay: float = 20e-6
    queue: int = 256 << 10
    loss: float = 0.0
    loss_burst: float = 1.0
    reorder: float = 0.0
    reorder_delay: float = 100e-6
    duplicate: float = 0.0
    garbage: float = 0.0
    flip: float = 0.0
    ecn: int = 0
    bleach: bool = False
    drop_ect: bool = False
    longest: int = 0


NETWORK_A = Link(rate=125e6, queue=256 << 10)
NETWORK_B = Link(rate=25e6, queue=64 << 10)


class Sent(NamedTuple):
    """One datagram in the trace; packet number, op and chunk are those of reliable packets."""

    time_ns: int
    source: int
    destination: int
    kind: str
    packet_number: int
    op: int
    chunk: int
    bytes: int
    fate: str  # "delivered", "queue", "loss" or "unreachable"
    dscp: int
    lane: int


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Fabric:
    """Hosts on one switch; hosts 0 … workers - 1 are the workers (ranks), then the servers.

    link: of every direction of every port (see `set_link` for one). overhead: bytes on the wire
    beside each UDP payload. whole_trains: a train passes queues and losses as one, as under
    segmentation offload (network A). host_delay, host_jitter: seconds from a datagram's arrival
    until the process looks at it, and how much that varies. trace: how many datagrams `trace()`
    keeps. The rest is the engine's configuration.
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
        datagram_bytes: int = 1472,
        peer_timeout: float = 30.0,
        ping_interval: float = 1.0,
        delay_target: float = 1.3e-3,
        receive_buffer: int = 1 << 20,
        memory_limit: int = 1 << 31,
        pacing: bool = True,
        ecn: bool = True,
        session: int = 1,
        trace: int = 0,
    ) -> None:
        self.workers = workers
        self.servers = servers
        self.datagram_bytes = datagram_bytes
        self._core: _engine.Fabric = load_engine().Fabric(
            workers=workers,
            servers=servers,
            seed=seed,
            rate=link.rate,
            delay_ns=_ns(link.delay),
            queue_bytes=link.queue,
            loss=link.loss,
            loss_burst=link.loss_burst,
            reorder=link.reorder,
            reorder_delay_ns=_ns(link.reorder_delay),
            duplicate=link.duplicate,
            garbage=link.garbage,
            flip=link.flip,
            ecn_bytes=link.ecn,
            bleach=link.bleach,
            drop_ect=link.drop_ect,
            longest=link.longest,
            ecn=ecn,
            overhead=overhead,
            whole_trains=whole_trains,
            host_delay_ns=_ns(host_delay),
            host_jitter_ns=_ns(host_jitter),
            datagram_bytes=datagram_bytes,
            peer_timeout_ns=_ns(peer_timeout),
            ping_interval_ns=_ns(ping_interval),
            delay_target_ns=_ns(delay_target),
            receive_buffer=receive_buffer,
            memory_limit=memory_limit,
            pacing=pacing,
            session=session,
            trace_limit=trace,
        )

    # ------------------------------------------------------------------ time

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._core.now_ns * 1e-9

    @property
    def events(self) -> int:
        """Events of the simulation so far."""
        return self._core.events

    @property
    def trace_hash(self) -> int:
        """Of everything that was sent, when, and of all results: equal runs, equal hashes."""
        return self._core.trace_hash

    def run(self, until: float = 120.0, *, until_done: bool = True) -> bool:
        """Runs to `until` (seconds since the start), or until all ops of living workers are done.

        Returns whether they all are. Raises BrokenInvariantError at once when a check fails.
        """
        done = self._core.run(_ns(until), until_done)
        broken = self._core.violations()
        if broken:
            raise BrokenInvariantError("\n".join(broken))
        return done

    # ------------------------------------------------------------------ the network

    def set_link(self, host: int, direction: Direction, link: Link) -> None:
        """Gives one direction of a host's port other properties from now on."""
        fields = asdict(link)
        self._core.set_link(
            host,
            direction,
            delay_ns=_ns(fields.pop("delay")),
            reorder_delay_ns=_ns(fields.pop("reorder_delay")),
            queue_bytes=fields.pop("queue"),
            ecn_bytes=fields.pop("ecn"),
            **fields,
        )

    def link_counters(self, host: int, direction: Direction) -> dict[str, int]:
        """Packets, bytes, drops by queue and by loss, largest queue, cross traffic."""
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
        packet_bytes: int = 1514,
        train: int = 1,
    ) -> None:
        """Foreign packets into a port: bursts of `length` seconds at `rate` bytes/s, every `period`
        seconds (0: once). `train`: packets back to back."""
        self._core.cross_traffic(
            host,
            direction,
            rate=rate,
            start_ns=_ns(start),
            length_ns=_ns(length),
            period_ns=_ns(period),
            packet_bytes=packet_bytes,
            train=train,
        )

    def pause(self, host: int) -> None:
        """The process stands still; its socket buffer fills."""
        self._core.pause(host)

    def resume(self, host: int) -> None:
        """The process runs again."""
        self._core.resume(host)

    def kill(self, host: int) -> None:
        """The host is gone without a word."""
        self._core.kill(host)

    def partition(self, a: int, b: int) -> None:
        """Nothing passes between two hosts any more."""
        self._core.partition(a, b, True)

    def heal(self, a: int, b: int) -> None:
        """Undoes `partition`."""
        self._core.partition(a, b, False)

    def inject(self, source: int, destination: int, data: bytes) -> None:
        """Delivers a datagram that somebody sent in the name of `source`."""
        self._core.inject(source, destination, data)

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
        """One worker's part of one all-reduce, from `at` (seconds since the start) on.

        lane: ops of a lane are numbered 0, 1, 2, … in the order they start, alike on all workers.
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
            timeout_ns=_ns(timeout),
            at_ns=_ns(at),
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
        """One all-reduce by all workers; `at` may differ between them (skew)."""
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
        """The endpoint says goodbye; `closed` tells when it has."""
        self._core.close(host, _ns(linger))

    def forget(self) -> None:
        """Lets go of the ops that all workers have finished, so that a long run takes no more
        memory than a short one; their completions and results are gone."""
        self._core.forget()

    # ------------------------------------------------------------------ what came of it

    def completion(self, worker: int, op: int, *, lane: int = 0) -> _engine.Completion | None:
        """None while the op runs."""
        return self._core.completion(worker, op, lane)

    def result(self, worker: int, op: int, *, lane: int = 0) -> NDArray[np.float32]:
        """The worker's buffer after the op; ValueError while it runs."""
        return self._core.result(worker, op, lane)

    def round_trip(self, plan: _engine.Plan, data: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the others get of a worker's values under the plan's encoding."""
        values: NDArray[np.float32] = load_engine().round_trip(
            plan, np.ascontiguousarray(data), self.datagram_bytes, self.servers or self.workers
        )
        return values

    def finished_at(self, worker: int, op: int, *, lane: int = 0) -> float:
        """When the worker's op was done, in seconds since the start."""
        return self._core.finished_at_ns(worker, op, lane) * 1e-9

    def failure(self, host: int) -> str:
        """ "" or why the endpoint can serve no more."""
        return self._core.failure(host)

    def closed(self, host: int) -> bool:
        """Whether the endpoint has said goodbye and been heard."""
        return self._core.closed(host)

    def counters(self, host: int) -> dict[str, float]:
        """The endpoint's counters, and what its socket buffer dropped."""
        return self._core.counters(host)

    def trace(self) -> list[Sent]:
        """The first datagrams that were sent, as many as asked for."""
        return [Sent(*entry) for entry in self._core.trace()]
