"""SharedEngine: an open engine of this process, shared by all users of one group.

An engine is opened by the first communicator of its group and closed with the last. Ranks close at
different times, so they agree whether the next communicator reuses an engine: where one rank has
none, or another one than the others, all open a new one. A communicator that is garbage-collected
closes nothing, because the time of the collection differs from rank to rank, and a peer may still
be in a transfer. Until then it counts as a user, and the engine stays open for the next one.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradwire.core.errors import TransferError
from gradwire.core.settings import Settings
from gradwire.core.transfer_report import TransferReport
from gradwire.live.publisher import publish
from gradwire.transport import registry
from gradwire.transport.engine_state import engine_state
from gradwire.transport.meeting import Meeting
from gradwire.transport.native import native_plan, transfer_report
from gradwire.transport.notices import Notices
from gradwire.transport.threads import CompletionPool, StartQueue, apart
from gradwire.transport.transfer import Engine, Handle, TransferRequest

if TYPE_CHECKING:
    from gradwire import _engine

log = logging.getLogger("gradwire")

FIRST_WARNING_S, NEXT_WARNING_S = 30.0, 60.0
"""Seconds after which a transfer that waits is logged, and until it is logged again."""

WORTH_TELLING_S = 1.0
"""How long the oldest transfer has waited where readers of the state are told for whom."""

POLL_NS = 500_000_000
"""How long a thread waits in the engine before it checks whether the engine has failed."""


@dataclass
class Pending:
    """A transfer that the engine has not completed.

    Attributes:
        begun: When it began, in seconds of the monotonic clock.
        warn_at: When its wait is logged, in seconds of the monotonic clock.
    """

    handle: Handle
    request: TransferRequest
    begun: float = field(default_factory=time.monotonic)
    warn_at: float = field(default_factory=lambda: time.monotonic() + FIRST_WARNING_S)


class SharedEngine(Engine):
    """An open engine with its completion threads, shared by communicators of one group.

    Args:
        store: Identity of the store (`identity_of`).
        datagram: The agreed size of datagrams in bytes, without their tags.
        tag: The bytes of a tag.

    Attributes:
        native: The compiled engine; None once it is closed.
        users: Number of communicators that use it.
        start_queue: The queue of transfers that start later.
    """

    def __init__(
        self,
        native: _engine.Engine,
        *,
        store: str,
        group: str,
        rank: int,
        world_size: int,
        settings: Settings,
        session: int,
        datagram: int,
        meeting: Meeting,
        notices: Notices,
        tag: int = 0,
    ) -> None:
        self.native: _engine.Engine | None = native
        self._totals: dict[str, float] = {}  # the counters of a closed engine
        self.store = store
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.settings = settings
        self.session = session
        self.datagram = datagram
        self._carried = datagram
        self._tag = tag
        self.users = 1
        self.numbers: dict[int, str] = {}
        self.pid = os.getpid()
        # Without servers an open engine does not keep a store that is no longer needed.
        self._meeting = meeting if settings.server_count else None
        self._notices = notices
        self._names = meeting.names
        self._name = meeting.describe([rank])
        self._mutex = threading.Lock()
        self._next_ops: collections.Counter[int] = collections.Counter()  # by lane
        self._pending: dict[tuple[int, int], Pending] = {}
        self._failed_at: float | None = None
        self._broken: Exception | None = None  # the reason why no completion can be read
        self.start_queue = StartQueue(f"gradwire-stage-{rank}")
        self._pool: CompletionPool[_engine.Completion] = CompletionPool(
            self._poll, self._complete, f"gradwire-{rank}", self._break
        )
        self._hide = publish(store, self.state)

    def start(self, request: TransferRequest) -> Handle:
        step, lane = request.step, request.lane
        if os.getpid() != self.pid:
            raise TransferError(
                f"{self._name}: the engine belongs to process {self.pid}, not to its fork "
                f"{os.getpid()}: gradwire cannot be used in a forked child",
                rank=self._names.rank_of(self.rank),
                step=step,
            )
        handle, plan = Handle(request.plan, request.data), native_plan(request.plan)
        with self._mutex:
            if self._broken is not None:
                raise self._unread(self._broken, step)
            native = self.native
            if native is None:
                raise self._closed(step)
            op = self._next_ops[lane]
            self._pending[lane, op] = Pending(handle, request)
            try:
                native.all_reduce(
                    op=op,
                    lane=lane,
                    step=step,
                    plan=plan,
                    data=request.data,
                    critical=request.critical,
                    priorities=request.priorities,
                    stats=request.stats,
                    timeout_ns=int(request.timeout_s * 1e9),
                    timeout_from=request.timeout_from,
                )
            except RuntimeError as error:
                del self._pending[lane, op]
                failure = native.failure()
                if failure is None:
                    text = f"{self._name}, step {step}: {error}"
                    raise TransferError(text, step=step) from error
                raise self._error(failure, step) from error
            except BaseException:  # the engine has not taken the array, so nobody waits for it
                del self._pending[lane, op]
                raise
            self._next_ops[lane] += 1
        return handle

    def counters(self) -> dict[str, float]:
        native = self.native
        return dict(self._totals if native is None else native.counters())

    def record(self, entries: int) -> list[list[tuple[int, str, int | None, int]]]:
        native = self.native
        return [] if native is None else native.record(entries)

    def state(self) -> dict[str, Any]:
        """Returns the engine's state, as `gradwire.live` offers it; raises once it is closed."""
        native = self.native
        if native is None:
            raise self._closed(0)
        state = engine_state(native, self._names, self.rank, self.group)
        if oldest := self._oldest():
            key, waits = oldest
            seconds = time.monotonic() - waits.begun
            if seconds > WORTH_TELLING_S:
                absent = self._absent(native, *key)
                state["waits"] = {
                    "step": waits.request.step,
                    "seconds": seconds,
                    "for": [self._names.name(peer.endpoint) for peer in absent],
                }
        return state

    def failure(self) -> _engine.Failure | None:
        """Returns why the engine has failed; None while it has not, and once it is closed."""
        native = self.native
        return None if native is None else native.failure()

    def set_drop(self, rate: float, burst: float, seed: int) -> None:
        if self.native is not None:
            self.native.set_drop(rate, burst, seed)

    def fail(self, why: str) -> None:
        """Stops the engine for a reason of the caller's, which the other ranks are told."""
        native = self.native
        if native is not None and os.getpid() == self.pid:
            native.fail(why)

    def forget(self) -> None:
        """Notes that a communicator is garbage; the engine stays open for the next one."""
        if os.getpid() == self.pid:
            with registry.lock:
                self.users -= 1

    def leave(self) -> None:
        """Notes that a communicator was closed, and closes the engine with the last one."""
        if os.getpid() == self.pid:
            self.forget()
            registry.drop(self, used=False)

    def close(self) -> None:
        """Closes the engine and ends the threads; open transfers fail.

        It then holds no object of the compiled engine, even where it lives on itself until the
        interpreter's end, as it does in a graph of autograd.
        """
        native = self.native
        if native is None or os.getpid() != self.pid:
            return
        self._hide()
        native.close()
        if self._meeting is not None:  # after that: peers need the goodbye, whatever the store does
            self._meeting.close()
        self._totals = dict(native.counters())
        self._pool.stop()
        self.start_queue.stop()
        self._fail_pending(self._closed)
        with self._mutex:
            self.native = None

    def leave_to_parent(self) -> None:
        """Makes a forked child neither use nor destroy what belongs to the parent."""
        native, self.native = self.native, None
        if native is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))
            native.leave_to_parent()

    def _poll(self) -> _engine.Completion | None:
        native = self.native
        if native is None:
            return None
        completion = native.next_completion(POLL_NS)
        if completion is None and self._pending:
            self._notices.watch(native.refusal())
            self._watch_failure(native)
            self._watch_patience(native)
        return completion

    def _oldest(self) -> tuple[tuple[int, int], Pending] | None:
        with self._mutex:
            return next(iter(self._pending.items()), None)

    def _watch_patience(self, native: _engine.Engine) -> None:
        """Logs, where the oldest transfer has waited for long, the ranks that have not begun it."""
        oldest, now = self._oldest(), time.monotonic()
        if oldest is None or now < oldest[1].warn_at:
            return
        (lane, op), waits = oldest
        waits.warn_at = now + NEXT_WARNING_S
        absent = [
            f"{self._names.name(peer.endpoint)} has not begun it and was last heard "
            f"{peer.silence_ns / 1e9:.1f} s ago"
            for peer in self._absent(native, lane, op)
        ]
        log.warning(
            "%s, step %d: a transfer has waited for %.0f s (timeout=%g); %s",
            self._name,
            waits.request.step,
            now - waits.begun,
            waits.request.timeout_s,
            (", ".join(absent) or "all ranks with which it exchanges data have begun it")
            + self._disorder(lane, op),
        )

    def _absent(self, native: _engine.Engine, lane: int, op: int) -> list[_engine.Peer]:
        """Returns the workers that have not begun an op, of those that tell this engine."""
        known = [peer for peer in native.peers() if peer.endpoint < self.world_size]
        return [peer for peer in known if not peer.has_begun(op, lane)]

    def _disorder(self, lane: int, op: int) -> str:
        """Returns which ranks wait elsewhere than this one, which waits for an op; "" for none.

        They have not begun the op, but another one that this rank has not begun, over this engine
        or over that of another group.
        """
        native = self.native
        peers = [] if native is None else native.peers()
        late = {self._names.rank_of(p.endpoint) for p in peers if not p.has_begun(op, lane)}
        with registry.lock:
            engines = list(registry.open_engines)
        found = [text for engine in engines for text in engine.begun_elsewhere(late)]
        return disorder(self._user(lane), found)

    def begun_elsewhere(self, ranks: Collection[int]) -> list[str]:
        """Returns what those of some ranks wait for here that this process has not begun."""
        native = self.native
        if native is None:
            return []
        with self._mutex:
            begun = dict(self._next_ops)
        lanes = [0, *(1 + number for number in list(self.numbers))]
        return [
            f"{self._names.name(peer.endpoint)} in {self._user(lane)}"
            for peer in native.peers()
            if self._names.rank_of(peer.endpoint) in ranks
            for lane in lanes
            if peer.has_begun(begun.get(lane, 0), lane)
        ]

    def _user(self, lane: int) -> str:
        """Names the user of a lane; lane 0 is that of all without a number."""
        return self.numbers.get(lane - 1, f"group {self.group!r}")

    def _watch_failure(self, native: _engine.Engine) -> None:
        """Fails open transfers when the engine has failed without completing them."""
        failure = native.failure()
        if failure is None:
            return
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        elif time.monotonic() - self._failed_at > 1.0:
            error = functools.partial(self._error, failure)
            apart(lambda: self._fail_pending(error))

    def _break(self, error: Exception) -> None:
        with self._mutex:
            self._broken = error
        self._fail_pending(functools.partial(self._unread, error))

    def _unread(self, error: Exception, step: int) -> TransferError:
        return TransferError(
            f"{self._name}, step {step}: the results of transfers cannot be read: {error!r}",
            step=step,
        )

    def _error(self, failure: _engine.Failure, step: int) -> TransferError:
        at_fault, why = self._notices.explain(self.native, failure.rank, failure.cause)
        return TransferError(
            f"{self._name}, step {step}: {failure.text}{why}",
            rank=self._names.rank_of(at_fault),
            step=step,
            cause=failure.cause,
        )

    def _closed(self, step: int) -> TransferError:
        return TransferError(
            f"{self._name}, step {step}: the engine was closed", step=step, cause="closed"
        )

    def _watch_datagram(self, carried: int) -> None:
        """Logs when the paths of the job carry other datagrams than before."""
        before = self._carried
        if carried in (0, before):
            return
        self._carried = carried
        if carried > before:
            log.info(
                "%s: the paths of the job carry datagrams of %d bytes again",
                self._name,
                carried + self._tag,
            )
            return
        log.warning(
            "%s: a path of the job carries datagrams of %d bytes, not of the %d that were agreed: "
            "later steps use that size (set datagram=%d, or raise the MTU)",
            self._name,
            carried + self._tag,
            self.datagram + self._tag,
            carried + self._tag,
        )

    def _fail_pending(self, error: Callable[[int], TransferError]) -> None:
        with self._mutex:
            pending, self._pending = self._pending, {}
        ended = [each.handle.end(error(each.request.step)) for each in pending.values()]
        for run_callbacks in ended:
            run_callbacks()

    def _complete(self, completion: _engine.Completion) -> None:
        with self._mutex:
            known = self._pending.pop((completion.lane, completion.op), None)
        if known is None:
            return
        handle, step = known.handle, known.request.step
        outcome: TransferReport | TransferError
        if completion.ok:
            if self._notices.told:
                self._notices.watch("")
            self._watch_datagram(completion.datagram_bytes)
            try:
                outcome = transfer_report(completion, known.request.effective_bounds)
            except Exception as error:  # such as a lack of memory: whoever waits has to learn it
                outcome = self._unread(error, step)
        else:
            cause = completion.error_cause
            at_fault, why = self._notices.explain(self.native, completion.error_rank, cause)
            late = cause == "timeout"
            order = self._disorder(completion.lane, completion.op) if late else ""
            text = completion.error
            if f"step {step}" not in text:  # as in what another rank reports of itself
                text = f"{self._name}, step {step}: {text}"
            outcome = TransferError(
                text + order + why,
                rank=self._names.rank_of(at_fault),
                step=step,
                cause=cause,
            )
        handle.finish(outcome)


def disorder(own: str, others: Sequence[str]) -> str:
    """Says, at the end of a text, that ranks wait in another order.

    Args:
        own: What this rank waits in.
        others: Which ranks wait elsewhere, each as "rank 1 in module Net"; none for no text.
    """
    if not others:
        return ""
    return (
        f"; the order differs: this rank waits in {own}, {', '.join(others)}: modules and groups "
        "have to be stepped in the same order on all ranks"
    )
