"""The threads of an engine's users: CompletionPool handles what ends, StartQueue starts transfers.

A callback may wait for another completion, as PowerSGD's hook does, so a completion must never
queue behind a running callback. In CompletionPool one thread at a time waits for the next
completion. Before it runs the callbacks of that one, another thread takes its place; it is created
if none is free. So the pool grows to the number of callbacks that run at once, and a completion
reaches its callbacks without a change of threads. Where the system has no thread left, the last one
waits until another is free, since all might wait for what nobody takes then.

Ops are numbered in the order in which they start, which has to be the same on all ranks, whereas
the copies that they wait for end at different times on each rank. So StartQueue starts all of them
in the order in which they were asked for.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gradwire.core.begin import begin
from gradwire.core.leaving import inside

log = logging.getLogger("gradwire")

T = TypeVar("T")

SPARE_THREADS = 2
"""Threads that stay when the pool has grown and is idle again."""

FIRST_THREADS = 3
"""Threads that a pool begins with: one leads, one waits for what another one takes."""

HELD_S = 5.0
"""Seconds that the last thread waits for another one, before it is sure that all wait."""


class CompletionPool(Generic[T]):
    """Calls `handle(item)` for each item that `poll()` returns, on threads of its own.

    Args:
        poll: Waits for a bounded time without the GIL, and returns None when there is no item. One
            thread at a time calls it.
        handle: Handles an item, and may block. An exception that it raises is logged and dropped.
        broken: Called once with the exception that `poll` raised, or because callbacks wait for
            each other and no thread is left, after which the pool ends.
    """

    def __init__(
        self,
        poll: Callable[[], T | None],
        handle: Callable[[T], None],
        name: str,
        broken: Callable[[Exception], None],
    ) -> None:
        self._poll = poll
        self._handle = handle
        self._name = name
        self._broken = broken
        self._ended = False  # whether `poll` has failed
        self._lead = threading.Lock()
        self._mutex = threading.Lock()
        self._freed = threading.Condition(self._mutex)
        self._free = 0  # threads that lead or wait to lead
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._started = 0
        with self._mutex:
            for _ in range(FIRST_THREADS):  # memory may have run out when they are needed
                self._spawn()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the threads.

        Items that `poll` still returns are handled first.
        """
        self._stopping = True
        with self._mutex:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    @property
    def size(self) -> int:
        with self._mutex:
            return len(self._threads)

    def _spawn(self) -> None:
        self._started += 1
        thread = begin(self._run, f"{self._name}-{self._started}")
        self._free += 1
        self._threads.add(thread)

    def _run(self) -> None:
        try:
            while self._work():
                pass
        finally:
            with self._mutex:
                self._threads.discard(threading.current_thread())

    def _work(self) -> bool:
        """Leads until one item is taken, handles it; returns whether this thread goes on."""
        with self._lead:
            item, failure = self._next()
            with self._mutex:
                self._free -= 1
                last = item is not None and self._free == 0 and not self._grows()
        if last:
            failure = self._stuck()
        if failure is not None:
            self._broken(failure)
        if item is None:
            return False
        try:
            with inside():
                self._handle(item)
        except Exception:  # an error of a callback must not end the pool
            log.exception("handling a transfer that has ended raised")
        with self._mutex:
            if self._free > SPARE_THREADS:
                return False
            self._free += 1
            self._freed.notify_all()
        return True

    def _next(self) -> tuple[T | None, Exception | None]:
        """Returns the next item, None when the pool ends; and why `poll` failed, once."""
        try:
            while not self._ended:
                with inside():
                    item = self._poll()
                if item is not None or self._stopping:
                    return item, None
        except Exception as error:
            self._ended = True
            return None, error
        return None, None

    def _grows(self) -> bool:
        try:
            self._spawn()
        except RuntimeError:
            log.warning("%s: no further thread can be started", self._name, exc_info=True)
            return False
        return True

    def _stuck(self) -> Exception | None:
        """Waits for a free thread; returns why the pool ends if there is none."""
        with self._freed:
            if self._freed.wait_for(lambda: self._free > 0, HELD_S):
                return None
        self._ended = True
        return RuntimeError(
            "all threads run callbacks, which may wait for each other, and the system gives none "
            "more; raise the limits of threads and memory (ulimit -u, ulimit -v)"
        )


class StartQueue:
    """Runs what is submitted one after another, in order, on one thread.

    The order is that of the calls of `submit`. Calls from several threads at once come in either
    order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether anything was submitted since the start or since `stop`.

        If so, whatever must not overtake it has to be submitted, too. It is False in a forked
        child, which has no thread.
        """
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: Callable[[], None]) -> None:
        """Queues `work` and returns at once. An exception that it raises is logged and dropped."""
        with self._mutex:
            if not self.started:
                self._queue = queue.SimpleQueue()
                self._thread = begin(functools.partial(_run_in_order, self._queue), self._name)
            self._queue.put(work)

    def stop(self) -> None:
        """Ends the thread once it has run what is queued; waits for nothing. Idempotent."""
        with self._mutex:
            self._queue.put(None)
            self._thread = None


def apart(work: Callable[[], None]) -> None:
    """Runs `work` on a thread of its own, since it may wait for what the calling thread does later.

    If the system has no thread left, it runs on the calling one.
    """
    try:
        begin(inside()(work), "gradwire-apart")
    except RuntimeError:
        log.warning("%s: no further thread can be started", "gradwire-apart", exc_info=True)
        work()


def _run_in_order(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := waiting.get()) is not None:
        try:
            with inside():
                work()
        except Exception:  # an error must not keep the others from their turn
            log.exception("starting a transfer raised")
        del work  # the queue may stay empty for long, and this would keep the work's memory
