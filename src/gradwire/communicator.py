"""Communicator: buckets in, handles out; owns this process's engine.

One engine (one UDP socket, one engine thread) serves all communicators of the same group of
processes: it is opened by the first and closed with the last. A group with other members gets an
engine of its own. Completions run on a pool of threads distinct from the engine's, see
`gradwire.executor`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwire import rendezvous
from gradwire.errors import ConfigError, EngineMissingError, RendezvousError, TransferError
from gradwire.executor import CompletionPool, Stager
from gradwire.plans import TransferPlan, TransferReport
from gradwire.settings import LONGEST_S, Settings

if TYPE_CHECKING:
    import torch

    from gradwire import _engine

__all__ = ["ChunkGrid", "Communicator", "Handle"]

log = logging.getLogger(__name__)

POLL_NS = 500_000_000
"""How long a thread waits in the engine before it looks whether the engine has failed."""

DEFAULT_TIMEOUT_S = 1800.0
"""How long one all-reduce may take where neither a setting nor a process group says."""


def load_engine() -> Any:
    """Imports `gradwire._engine`; raises EngineMissingError saying how to build it."""
    try:
        from gradwire import _engine
    except ImportError as error:
        raise EngineMissingError(
            f"the compiled engine gradwire._engine cannot be imported ({error}); in a source "
            "checkout build it with `make engine`"
        ) from error
    return _engine


class ChunkGrid:
    """The chunks of a plan: what one datagram carries each. Arrays of one entry per chunk.

    offsets: uint64, lengths: uint32, in elements; regions, aggregators: uint32.
    """

    def __init__(
        self,
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        regions: NDArray[np.uint32],
        aggregators: NDArray[np.uint32],
    ) -> None:
        self.offsets = offsets
        self.lengths = lengths
        self.regions = regions
        self.aggregators = aggregators

    def __len__(self) -> int:
        return len(self.offsets)

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, int, int, int], ...]:
        """Runs of neighbouring chunks of one length: (first chunk, chunks, offset, length).

        Chunks first … first + chunks - 1 cover the elements from `offset` on, `length` each, so
        that a run can be treated as the rows of a matrix.
        """
        if not len(self):
            return ()
        offsets, lengths = self.offsets.astype(np.int64), self.lengths.astype(np.int64)
        breaks = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (lengths[1:] != lengths[:-1])
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(self)]
        return tuple(
            (first, end - first, int(offsets[first]), int(lengths[first]))
            for first, end in itertools.pairwise(starts)
        )


class Handle:
    """One all-reduce on its way. The array belongs to the engine until it is done."""

    def __init__(self, plan: TransferPlan | None, keep: object) -> None:
        self.plan = plan
        self._keep: object | None = keep
        self._mutex = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Handle], None]] = []
        self._report: TransferReport | None = None
        self._error: TransferError | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> TransferReport:
        """Waits (seconds; None: as long as it takes) for the result, which is then in the array.

        Raises TransferError when the transfer failed, TimeoutError when the wait did.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the all-reduce is not done after {timeout:g} s")
        return self.report

    @property
    def report(self) -> TransferReport:
        """The report of a transfer that is done; raises its TransferError if it failed."""
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise TransferError("the all-reduce is not done yet: wait() first")
        return self._report

    @property
    def error(self) -> TransferError | None:
        """Why the transfer failed; None while it runs and when it went well."""
        return self._error

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Calls `callback(handle)` once done, on a completion thread; at once if already done.

        The callback may wait for other handles. What it raises is logged and dropped.
        """
        with self._mutex:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def finish(self, outcome: TransferReport | TransferError) -> None:
        """Ends the handle and runs its callbacks on this thread. For the communicator."""
        with self._mutex:
            if self._done.is_set():
                return
            if isinstance(outcome, TransferError):
                self._error = outcome
            else:
                self._report = outcome
            self._keep = None
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Handle], None]) -> None:
        try:
            callback(self)
        except Exception:  # its own fault: others wait for the same end
            log.exception("a callback of an all-reduce raised")


class Communicator:
    """All-reduces float32 arrays among `world_size` processes over UDP.

    store: a torch.distributed Store that all processes share. config: Settings, or a mapping of
    them. group: which group of processes this is; communicators of one process that share store
    and group share an engine. timeout_s: of one transfer where the settings name none.

    Every rank calls `all_reduce` in the same order with the same plans. Needs no sockets when
    there is one worker and no server.

    Raises ConfigError for impossible settings (a port in use among them) and RendezvousError
    naming the ranks that are absent, of another version or configured otherwise.
    """

    def __init__(
        self,
        store: rendezvous.Store,
        rank: int,
        world_size: int,
        config: Settings | Mapping[str, object] | None = None,
        *,
        group: str = "world",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        settings = config if isinstance(config, Settings) else Settings.build(config)
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(
                f"rank={rank!r} with world_size={world_size!r}: a rank from 0 to world_size - 1"
            )
        self.rank = rank
        self.world_size = world_size
        self.settings = settings
        self.timeout_s = min(settings.timeout or timeout_s, LONGEST_S)
        self._store = store
        self._group = group
        self._plans: dict[object, tuple[ChunkGrid, tuple[float, ...]]] = {}
        self._closed = False
        self._host: _Host | None = None
        if world_size > 1 or settings.server_count > 0:
            self._host = _Host.join(store, group, rank, world_size, settings)
        self._stager = Stager("gradwire-stage") if self._host is None else self._host.stager
        self._forget = weakref.finalize(self, _forget, self._host, self._stager)
        self._forget.atexit = False  # the engines are closed by this module's own atexit

    @property
    def aggregators(self) -> int:
        """How many aggregators share a bucket: the ranks, or the servers."""
        return self.settings.server_count or self.world_size

    @property
    def stager(self) -> Stager:
        """The queue of the all-reduces that start later than they are asked for; one for all
        communicators of the engine. Whoever uses the engine starts through it once it is started.
        """
        return self._stager

    @property
    def datagram(self) -> int:
        """The agreed datagram size in bytes."""
        return rendezvous.ETHERNET_DATAGRAM if self._host is None else self._host.datagram

    @property
    def chunk_elements(self) -> int:
        """How many float32 elements one datagram carries."""
        header = 40 if self._host is None else int(load_engine().HEADER_BYTES)
        return max(1, (self.datagram - header) // 4)

    def take_number(self) -> int:
        """The smallest number from 0 on that no other user of this engine has taken.

        Alike on all ranks if all take and return theirs in the same order.
        """
        if self._host is None:
            return 0
        with _hosts_lock:
            number = next(n for n in itertools.count() if n not in self._host.numbers)
            self._host.numbers.add(number)
        return number

    def return_number(self, number: int) -> None:
        """Gives back what `take_number` returned; once."""
        if self._host is not None:
            with _hosts_lock:
                self._host.numbers.discard(number)

    def agree(self, topic: str, configuration: Mapping[str, object]) -> None:
        """Checks that all workers pass the same configuration; a collective call.

        Raises RendezvousError naming the first rank and field that differ from rank 0, or the
        ranks that did not call within the rendezvous time-out.
        """
        if self.world_size == 1:
            return
        meeting = rendezvous.Meeting(
            self._store,
            f"{self._group}/{topic}",
            endpoint=self.rank,
            workers=self.world_size,
            servers=0,
            timeout_s=self.settings.rendezvous_timeout,
        )
        rendezvous.agree(meeting, configuration)

    def all_reduce(
        self,
        array: NDArray[np.float32] | torch.Tensor,
        plan: TransferPlan | None = None,
        *,
        step: int = 0,
        critical: NDArray[np.uint32] | None = None,
        stats: Sequence[float] = (),
    ) -> Handle:
        """Starts the all-reduce of a float32 array (numpy, or a torch CPU tensor) in place.

        The array stays untouched by the caller until the handle is done. plan: an exact sum when
        None. step: for reports and errors. critical: ids of chunks that must count. stats: up to
        eight finite numbers; the first four are summed over the workers, the others maximised.

        Raises TypeError and ValueError for an array that cannot be reduced, TransferError when
        the engine has failed or is closed.
        """
        flat = _as_float32(array)
        if self._closed:
            raise TransferError("the communicator is closed", step=step)
        if plan is not None and plan.elements != flat.size:
            raise ConfigError(
                f"plan.elements={plan.elements} for an array of {flat.size} elements: must match"
            )
        if flat.size == 0:
            handle = Handle(None, flat)
            handle.finish(_trivial_report(TransferPlan.whole(1), 0, step, stats))
            return handle
        plan = plan or TransferPlan.whole(flat.size)
        handle = Handle(plan, flat)
        if self._host is None:
            if plan.scale != 1.0:
                np.multiply(flat, np.float32(plan.scale), out=flat)
            handle.finish(_trivial_report(plan, flat.size, step, stats))
            return handle
        _, effective = self._described(plan)
        self._host.start(
            handle,
            engine_plan=_engine_plan(plan),
            effective_bounds=effective,
            data=flat,
            step=step,
            critical=critical,
            stats=tuple(stats),
            timeout_ns=int(self.timeout_s * 1e9),
        )
        return handle

    def chunk_grid(self, plan: TransferPlan) -> ChunkGrid:
        """The chunk grid of a plan on this communicator's datagram size and aggregators."""
        if self._host is None:
            one = np.zeros(1, np.uint32)
            return ChunkGrid(np.zeros(1, np.uint64), np.array([plan.elements], np.uint32), one, one)
        return self._described(plan)[0]

    def effective_bounds(self, plan: TransferPlan) -> tuple[float, ...]:
        """Each region's bound after rounding down to whole chunks."""
        if self._host is None:
            return (0.0,) * len(plan.regions)
        return self._described(plan)[1]

    def counters(self) -> dict[str, float]:
        """The engine's counters; empty without an engine."""
        return {} if self._host is None else dict(self._host.engine.counters())

    def set_drop(self, rate: float, burst: float = 1.0, seed: int = 0) -> None:
        """Injects loss of DATA packets in the receive path (tests and demonstrations)."""
        if self._host is not None:
            self._host.engine.set_drop(rate, burst, seed)

    def close(self) -> None:
        """Closes the communicator, and the engine with its last communicator. Idempotent."""
        self._closed = True
        if self._forget.detach() is not None:
            gc.collect()  # forgotten communicators count on no rank
            _release(self._host)
        if self._host is None:
            self._stager.stop()

    def _described(self, plan: TransferPlan) -> tuple[ChunkGrid, tuple[float, ...]]:
        key = (plan.elements, plan.regions)
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= 256:
                self._plans.clear()
            native = _engine_plan(plan)
            grid = ChunkGrid(*load_engine().chunk_grid(native, self.datagram, self.aggregators))
            bounds = tuple(native.effective_bounds(self.datagram, self.aggregators))
            known = self._plans[key] = (grid, bounds)
        return known


class _Host:
    """An open engine with its completion threads, shared by communicators of one group."""

    def __init__(
        self,
        engine: _engine.Engine,
        *,
        group: str,
        rank: int,
        world_size: int,
        settings: Settings,
        session: int,
        datagram: int,
        meeting: rendezvous.Meeting,
    ) -> None:
        self.engine = engine
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.settings = settings
        self.session = session
        self.datagram = datagram
        self.users = 1
        self.numbers: set[int] = set()
        self.pid = os.getpid()
        self._meeting = meeting if settings.server_count else None
        self._mutex = threading.Lock()
        self._next_op = 0
        self._pending: dict[int, tuple[Handle, int, tuple[float, ...]]] = {}
        self._failed_at: float | None = None
        self.stager = Stager(f"gradwire-stage-{rank}")
        self._pool: CompletionPool[_engine.Completion] = CompletionPool(
            self._poll, self._complete, f"gradwire-{rank}"
        )

    @staticmethod
    def join(
        store: rendezvous.Store, group: str, rank: int, world_size: int, settings: Settings
    ) -> _Host:
        """The open engine of this group in this store, or a new one."""
        with _hosts_lock:
            host = _Host._find(store, group, rank, world_size)
        if host is not None and host.settings.transport() != settings.transport():
            gc.collect()
            if _drop_unused(host):
                host = None
        if host is not None and host.engine.failure():
            _drop(host)
            host = None
        if host is not None:
            _check_same_transport(host.settings, settings)
            with _hosts_lock:
                host.users += 1  # first, so that nobody closes it after the look
                if host in _hosts:
                    return host
        host = _Host._open(store, group, rank, world_size, settings)
        with _hosts_lock:
            _hosts.append(host)
        return host

    @staticmethod
    def _find(store: rendezvous.Store, group: str, rank: int, world_size: int) -> _Host | None:
        for host in list(_hosts):  # garbage collected meanwhile may close one
            same = (host.group, host.rank, host.world_size) == (group, rank, world_size)
            if same and rendezvous.base_store(store).check([_session_key(host.session)]):
                return host
        return None

    @staticmethod
    def _open(
        store: rendezvous.Store, group: str, rank: int, world_size: int, settings: Settings
    ) -> _Host:
        opened = open_engine(store, group, rank, world_size, settings)
        if rank == 0:
            rendezvous.base_store(store).set(_session_key(opened.session), "1")
        try:
            opened.meeting.exchange("marked", "1")
        except RendezvousError:
            opened.engine.close()
            raise
        return _Host(
            opened.engine,
            group=group,
            rank=rank,
            world_size=world_size,
            settings=settings,
            session=opened.session,
            datagram=opened.datagram,
            meeting=opened.meeting,
        )

    def start(
        self,
        handle: Handle,
        *,
        engine_plan: _engine.Plan,
        effective_bounds: tuple[float, ...],
        data: NDArray[np.float32],
        step: int,
        critical: NDArray[np.uint32] | None,
        stats: tuple[float, ...],
        timeout_ns: int,
    ) -> None:
        """Gives one all-reduce to the engine, numbered in the order of these calls."""
        if os.getpid() != self.pid:
            raise TransferError(
                f"rank {self.rank}: the engine belongs to process {self.pid}, not to its fork "
                f"{os.getpid()}: gradwire cannot be used in a forked child",
                rank=self.rank,
                step=step,
            )
        with self._mutex:
            op = self._next_op
            self._pending[op] = (handle, step, effective_bounds)
            try:
                self.engine.all_reduce(
                    op=op,
                    step=step,
                    plan=engine_plan,
                    data=data,
                    critical=critical,
                    stats=stats,
                    timeout_ns=timeout_ns,
                )
            except RuntimeError as error:
                del self._pending[op]
                why = self.engine.failure() or str(error)
                raise TransferError(f"rank {self.rank}, step {step}: {why}", step=step) from error
            except BaseException:  # the engine has not taken the array: nobody waits for it
                del self._pending[op]
                raise
            self._next_op += 1

    def close(self) -> None:
        """Closes the engine and ends the threads; open transfers fail."""
        if os.getpid() != self.pid:
            return
        if self._meeting is not None:
            self._meeting.leave()
        self.engine.close()
        self._pool.stop()
        self.stager.stop()
        self._fail_pending("the engine was closed")

    def _poll(self) -> _engine.Completion | None:
        completion = self.engine.next_completion(POLL_NS)
        if completion is None and self._pending:
            self._watch_failure()
        return completion

    def _watch_failure(self) -> None:
        """Fails what is open when the engine has failed without saying so per transfer."""
        why = self.engine.failure()
        if not why:
            return
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        elif time.monotonic() - self._failed_at > 1.0:
            threading.Thread(target=self._fail_pending, args=(why,), daemon=True).start()

    def _fail_pending(self, why: str) -> None:
        with self._mutex:
            pending, self._pending = self._pending, {}
        for handle, step, _ in pending.values():
            message = f"rank {self.rank}, step {step}: {why}"
            handle.finish(TransferError(message, rank=self.rank, step=step))

    def _complete(self, completion: _engine.Completion) -> None:
        with self._mutex:
            known = self._pending.pop(completion.op, None)
        if known is None:
            return
        handle, step, effective = known
        if completion.ok:
            handle.finish(_report(completion, effective))
        else:
            handle.finish(TransferError(completion.error, rank=completion.error_rank, step=step))


class OpenEngine:
    """An engine that has met all its peers. For communicators and `gradwire server`."""

    def __init__(
        self, engine: _engine.Engine, session: int, datagram: int, meeting: rendezvous.Meeting
    ) -> None:
        self.engine = engine
        self.session = session
        self.datagram = datagram
        self.meeting = meeting


def open_engine(
    store: rendezvous.Store, group: str, endpoint: int, workers: int, settings: Settings
) -> OpenEngine:
    """Meets the other endpoints in the store, opens the engine and connects it.

    With servers the store under all prefixes is used, because servers know no process group.
    """
    native = load_engine()
    servers = settings.server_count
    meeting = rendezvous.Meeting(
        rendezvous.base_store(store) if servers else store,
        group,
        endpoint=endpoint,
        workers=workers,
        servers=servers,
        timeout_s=settings.rendezvous_timeout,
    )
    address = rendezvous.local_address(settings.interface, rendezvous.store_host(store))
    everybody = meeting.introduce(
        rendezvous.Introduction(
            endpoint=endpoint,
            protocol=int(native.PROTOCOL_VERSION),
            address=address,
            datagram=settings.datagram or rendezvous.datagram_for(address),
            host=socket.gethostname(),
            configuration={"route": settings.route, "servers": servers, "workers": workers},
            session=rendezvous.new_session() if endpoint == 0 else 0,
        )
    )
    rendezvous.check_introductions(meeting, everybody)
    datagram = min(each.datagram for each in everybody)
    session = everybody[0].session
    try:
        engine = native.Engine(
            endpoint=endpoint,
            workers=workers,
            servers=servers,
            session=session,
            address=address,
            port=settings.port,
            datagram_bytes=datagram,
            peer_timeout_ns=int(settings.peer_timeout * 1e9),
            memory_limit=settings.memory_limit,
            drop_rate=settings.drop_rate,
            drop_burst=settings.drop_burst,
            drop_seed=settings.drop_seed,
        )
    except (OSError, ValueError) as error:
        who = meeting.describe([endpoint])
        what = f"cannot open UDP {address} port={settings.port}: {error}"
        meeting.tell_failure("port", what)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{who} {what}; choose another port= or 0 for any free one"
            ) from error
        raise ConfigError(f"{who} {what}") from error
    try:
        ports = meeting.exchange("port", str(engine.address[1]))
        addresses = [(each.address, int(port)) for each, port in zip(everybody, ports, strict=True)]
        engine.connect(addresses)
        _wait_connected(engine, meeting, everybody, addresses, settings.rendezvous_timeout)
    except BaseException:
        engine.close()
        raise
    return OpenEngine(engine, session, datagram, meeting)


def _wait_connected(
    engine: _engine.Engine,
    meeting: rendezvous.Meeting,
    everybody: list[rendezvous.Introduction],
    addresses: list[tuple[str, int]],
    timeout_s: float,
) -> None:
    """Raises RendezvousError naming who has not answered, and why the engine failed if it did."""
    deadline = time.monotonic() + timeout_s
    while missing := list(engine.wait_connected(200_000_000)):
        failure = engine.failure()
        if time.monotonic() < deadline and not failure:
            continue
        where = ", ".join(
            f"{meeting.describe([m])} at {addresses[m][0]}:{addresses[m][1]} on "
            f"{everybody[m].host!r}"
            for m in missing
        )
        if failure:
            raise RendezvousError(
                f"the engine failed before {where} answered over UDP: {failure}", missing
            )
        raise RendezvousError(
            f"no answer over UDP from {where} within {timeout_s:g} s: a firewall, or the wrong "
            "network; set interface= or GRADWIRE_INTERFACE, and port= for a fixed port",
            missing,
        )


def _as_float32(array: NDArray[np.float32] | torch.Tensor) -> NDArray[np.float32]:
    """A flat view of the array's memory."""
    if not isinstance(array, np.ndarray):
        array = _tensor_memory(array)
    if array.dtype != np.float32:
        raise TypeError(f"array of dtype {array.dtype}: all_reduce takes float32")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise ValueError("all_reduce works in place: the array must be contiguous and writable")
    return array.reshape(-1)


def _tensor_memory(tensor: Any) -> NDArray[np.float32]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"all_reduce of a {type(tensor).__name__}: takes numpy arrays and torch CPU tensors"
        )
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        raise TypeError(
            f"all_reduce of a {tensor.dtype} tensor on {tensor.device}: takes float32 on the CPU"
        )
    if not tensor.is_contiguous():
        raise ValueError("all_reduce works in place: the tensor must be contiguous")
    memory: NDArray[np.float32] = tensor.detach().numpy()
    return memory


def _engine_plan(plan: TransferPlan) -> _engine.Plan:
    native: _engine.Plan = load_engine().Plan(
        elements=plan.elements,
        regions=[(region.offset, region.length, region.bound) for region in plan.regions],
        spend=plan.spend,
        schedule=[
            (step.clock, step.scope, int(step.delay_s * 1e9), step.fraction)
            for step in plan.schedule
        ],
        fill=plan.fill,
        order=plan.order,
        pull=plan.pull,
        pull_bound=plan.pull_bound,
        scale=plan.scale,
        seed=plan.seed,
    )
    return native


def _report(completion: _engine.Completion, effective: tuple[float, ...]) -> TransferReport:
    return TransferReport(
        op=completion.op,
        step=completion.step,
        counted=completion.counted,
        applied=completion.applied,
        withheld_chunks=completion.withheld_chunks,
        withheld_values=completion.withheld_values,
        delivered=tuple(completion.delivered),
        effective_bounds=effective,
        exceeded=tuple(completion.exceeded),
        stats_sum=tuple(completion.stats_sum),
        stats_max=tuple(completion.stats_max),
        push_s=completion.push_ns / 1e9,
        pull_s=completion.pull_ns / 1e9,
        total_s=completion.total_ns / 1e9,
        bytes_sent=completion.bytes_sent,
        packets_sent=completion.packets_sent,
        retransmissions=completion.retransmissions,
        rtprop_s=completion.rtprop_ns / 1e9,
        btlbw=completion.btlbw,
    )


def _trivial_report(
    plan: TransferPlan, elements: int, step: int, stats: Sequence[float]
) -> TransferReport:
    """The report of a transfer that needed no network: everything counted."""
    padded = [*stats, *[0.0] * (8 - len(stats))]
    chunks = 1 if elements else 0
    return TransferReport(
        op=-1,
        step=step,
        counted=np.ones(chunks, np.uint8),
        applied=np.ones(chunks, np.uint8),
        withheld_chunks=np.zeros(0, np.uint32),
        withheld_values=np.zeros(0, np.float32),
        delivered=(1.0,) * len(plan.regions),
        effective_bounds=(0.0,) * len(plan.regions),
        exceeded=(),
        stats_sum=tuple(padded[:4]),
        stats_max=tuple(padded[4:]),
        push_s=0.0,
        pull_s=0.0,
        total_s=0.0,
        bytes_sent=0,
        packets_sent=0,
        retransmissions=0,
        rtprop_s=0.0,
        btlbw=0.0,
    )


def _check_same_transport(open_: Settings, wanted: Settings) -> None:
    for name, value in wanted.transport().items():
        have = open_.transport()[name]
        if value != have:
            raise ConfigError(
                f"{name}={value!r}: this process's engine already runs with {name}={have!r}, and "
                "one engine serves all attachments of a group; use the same value"
            )


def _session_key(session: int) -> str:
    return f"gradwire/session/{session}"


_hosts: list[_Host] = []
_hosts_lock = threading.RLock()  # collected garbage may take it once more
_left_to_the_parent: list[_Host] = []


def _forget(host: _Host | None, stager: Stager) -> None:
    """A communicator was garbage-collected. Its engine stays open for the next one: when garbage
    is collected differs from rank to rank, and all ranks must open or reuse an engine alike."""
    if host is None:
        stager.stop()
    elif os.getpid() == host.pid:
        with _hosts_lock:
            host.users -= 1


def _release(host: _Host | None) -> None:
    if host is None or os.getpid() != host.pid:
        return
    with _hosts_lock:
        host.users -= 1
    _drop_unused(host)


def _drop_unused(host: _Host) -> bool:
    """Closes the host unless somebody uses it; whether nobody did."""
    with _hosts_lock:
        unused = host.users <= 0
        known = unused and host in _hosts
        if known:
            _hosts.remove(host)
    if known:
        host.close()
    return unused


def _drop(host: _Host) -> None:
    with _hosts_lock:
        known = host in _hosts
        if known:
            _hosts.remove(host)
    if known:
        host.close()


def _close_all() -> None:
    with _hosts_lock:
        hosts = list(_hosts)
        _hosts.clear()
    for host in hosts:
        with contextlib.suppress(Exception):
            host.close()


def _after_fork_in_child() -> None:
    """The engines' threads exist only in the parent: the child keeps its hands off them."""
    global _hosts_lock
    _hosts_lock = threading.RLock()
    for host in _hosts:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(host.engine))  # never destroyed here
        _left_to_the_parent.append(host)
    _hosts.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
