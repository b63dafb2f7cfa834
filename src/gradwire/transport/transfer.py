"""One transfer: TransferRequest asks for it, Engine carries it out, and Handle is waited on.

`gradwire.transport.engines.SharedEngine` is the engine over real sockets, and
`gradwire.sim.job.VirtualEngine` the one in virtual time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import ConfigError, TransferError
from gradwire.core.plan import PRIORITY_CLASSES, TransferPlan
from gradwire.core.transfer_report import TransferReport
from gradwire.transport.threads import StartQueue, apart

log = logging.getLogger("gradwire")


class OfThisProcess:
    """Base of objects that belong to this process's engine, so are neither copied nor pickled."""

    _instead: ClassVar[str] = ""  # what to copy or save

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} objects are connected to the engine of their process and can "
            f"be neither copied nor pickled{self._instead}"
        )


@dataclass(frozen=True, eq=False)
class TransferRequest:
    """One worker's part of a transfer, checked and complete but for its number.

    A communicator makes it, and an engine carries it out.

    Attributes:
        plan: The plan.
        effective_bounds: Each region's bound after rounding down to whole chunks, for the report.
        data: The array, float32, or the bits of elements of two bytes as uint16; it belongs to the
            engine until the transfer is done.
        lane: The lane, the same on all ranks.
        step: The training step.
        critical: uint32, the ids of chunks that must count; None for none.
        priorities: uint8, the class of each chunk; None for one class.
        stats: Up to eight statistics.
        timeout_s: Longest duration in seconds.
        timeout_from: Origin of the time-out, for errors.
    """

    plan: TransferPlan
    effective_bounds: tuple[float, ...]
    data: NDArray[Any]
    lane: int
    step: int
    critical: NDArray[np.uint32] | None
    priorities: NDArray[np.uint8] | None
    stats: tuple[float, ...]
    timeout_s: float
    timeout_from: str


class Handle(OfThisProcess):
    """One transfer in progress. The array belongs to the engine until it is done.

    Args:
        plan: The plan; None for an empty array.

    Attributes:
        plan: The plan; None for an empty array.
    """

    def __init__(self, plan: TransferPlan | None, keep: object) -> None:
        self.plan = plan
        self._keep: object | None = keep
        self._mutex = threading.Lock()
        self._done = threading.Event()
        self._callbacks: list[Callable[[Handle], None]] = []
        self._report: TransferReport | None = None
        self._error: TransferError | None = None

    def done(self) -> bool:
        """Returns whether the transfer has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> TransferReport:
        """Waits for the result, which is then in the array.

        Args:
            timeout: Seconds to wait; None for as long as it takes.

        Returns:
            The report.

        Raises:
            TransferError: The transfer failed.
            TimeoutError: The transfer is not done within the time-out.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the transfer is not done after {timeout:g} s")
        return self.report

    @property
    def report(self) -> TransferReport:
        """The report of a transfer that is done; raises its TransferError if it failed."""
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise TransferError("the transfer is not done yet: wait() first")
        return self._report

    @property
    def error(self) -> TransferError | None:
        """The reason why the transfer failed; None while it runs and when it went well."""
        return self._error

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Calls `callback(handle)` once done, on a completion thread; at once if already done.

        The callback may wait for other handles. An exception that it raises is logged and dropped.
        """
        with self._mutex:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def when_done(self, callback: Callable[[Handle], None]) -> None:
        """Calls `callback(handle)` once done, but never on the thread that calls this.

        It is for threads that start transfers in order, such as that of StartQueue: a callback that
        waits for a later transfer would wait there for ever.
        """
        here = threading.current_thread()

        def call(handle: Handle) -> None:
            if threading.current_thread() is here:
                apart(lambda: self._call(callback))
            else:
                callback(handle)

        self.add_done_callback(call)

    def finish(self, outcome: TransferReport | TransferError) -> None:
        """Ends the handle and runs its callbacks on this thread; for the communicator only."""
        self.end(outcome)()

    def end(self, outcome: TransferReport | TransferError) -> Callable[[], None]:
        """Ends the handle, and returns a function that runs its callbacks.

        Of handles that end together all have to be ended first, since a callback may wait for
        another handle.
        """
        with self._mutex:
            callbacks, self._callbacks = self._callbacks, []
            if not self._done.is_set():
                if isinstance(outcome, TransferError):
                    self._error = outcome
                else:
                    self._report = outcome
                self._keep = None
                self._done.set()

        def run() -> None:
            for callback in callbacks:
                self._call(callback)

        return run

    def _call(self, callback: Callable[[Handle], None]) -> None:
        try:
            callback(self)
        except Exception:  # other callbacks wait for the same end
            log.exception("a callback of a transfer raised")


class Engine(Protocol):
    """What a communicator needs of its engine.

    Attributes:
        session: The tag of the engine's packets, of which no other engine of the job has the same.
        datagram: The agreed size of datagrams in bytes.
        start_queue: The queue of transfers that start later than they are asked for.
        numbers: What warnings call those that have taken a number (`Communicator.take_number`).
    """

    session: int
    datagram: int
    start_queue: StartQueue
    numbers: dict[int, str]

    def start(self, request: TransferRequest) -> Handle:
        """Starts one op, numbered in the order of these calls in its lane.

        The ranks start the ops of a lane in the same order, and those of different lanes in any.

        Args:
            request: What is asked for.

        Returns:
            The handle, which is ended with the op.

        Raises:
            TransferError: The engine has failed or is closed, or belongs to another process.
        """

    def counters(self) -> dict[str, float]:
        """Returns the engine's counters."""

    def record(self, entries: int) -> list[list[tuple[int, str, int | None, int]]]:
        """Keeps a timeline of what the engine does, and why it stops, for the lab.

        Args:
            entries: The most that each engine thread keeps from now on; 0 for none.

        Returns:
            The entries of each thread since the last call: the time in nanoseconds, what happened,
            with which endpoint or None, and a value.
        """

    def set_drop(self, rate: float, burst: float, seed: int) -> None:
        """Injects loss of DATA packets in the receive path."""

    def fail(self, why: str) -> None:
        """Stops the engine for a reason of the caller's, which the other ranks are told."""

    def forget(self) -> None:
        """Notes that a communicator is garbage; the engine stays open for the next one."""

    def leave(self) -> None:
        """Notes that a communicator was closed, and closes the engine with the last one."""


def check_elements(plan: TransferPlan, elements: int) -> None:
    """Checks that a plan is for so many elements; raises ConfigError if not."""
    if plan.elements != elements:
        raise ConfigError.about(
            f"plan.elements={plan.elements} for an array of {elements} elements",
            "must match",
            setting="plan.elements",
            value=plan.elements,
        )


def check_encoding(plan: TransferPlan, encoding: str) -> None:
    """Checks that elements of this encoding can travel by a plan; raises ConfigError if not."""
    if encoding != "f32" and (plan.encoding != encoding or plan.pull == "none"):
        raise ConfigError.about(
            f"plan.encoding={plan.encoding!r}, plan.pull={plan.pull!r} for an array of "
            "elements of two bytes",
            f"its encoding is {encoding!r}, and its results come back",
            setting="plan.encoding",
            value=plan.encoding,
        )


def shards_of(
    plan: TransferPlan, elements: int, workers: int, shards: Sequence[int] | None
) -> Sequence[int]:
    """Returns the elements of each worker's shard: as given, as in the plan, or equal ones.

    Raises:
        ConfigError: They do not fit the elements or the workers.
    """
    if shards is None:
        each, left = divmod(elements, workers)
        shards = plan.shards or (each,) * workers
        if left and not plan.shards:
            raise ConfigError.of(
                "shards",
                None,
                "give one number for each worker",
                beside=f"for {elements} elements and {workers} workers",
            )
    if len(shards) != workers or sum(shards) != elements or min(shards) < 0:
        raise ConfigError.of(
            "shards",
            tuple(shards),
            f"one number for each of {workers} workers, together {elements}",
        )
    return shards


def check_priorities(plan: TransferPlan, chunks: int, priorities: NDArray[np.uint8]) -> None:
    """Checks the classes of the chunks of a plan; raises ConfigError."""
    if plan.order != "priority":
        raise ConfigError.about(
            f"priorities for a plan with order={plan.order!r}",
            "only order='priority' has classes",
            setting="priorities",
            value=priorities,
        )
    if priorities.dtype != np.uint8 or priorities.shape != (chunks,):
        raise ConfigError.about(
            f"priorities of shape {priorities.shape} and type {priorities.dtype}",
            f"one uint8 for each of {chunks} chunks",
            setting="priorities",
            value=priorities,
        )
    if chunks and int(priorities.max()) >= PRIORITY_CLASSES:
        raise ConfigError.about(
            f"priorities: class {priorities.max()}",
            f"allowed are 0 to {PRIORITY_CLASSES - 1}",
            setting="priorities",
            value=int(priorities.max()),
        )
