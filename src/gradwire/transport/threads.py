"""The threads of an engine's users: CompletionPool for what ends, Stager for what begins.

CompletionPool: a callback may block on another completion (PowerSGD's does), so completions may
never queue behind a running callback. Hence leader and followers: one thread at a time, the
leader, waits for the next completion; before it runs that one's callbacks it hands the lead to
another thread and starts one if none is free. The pool so grows to the number of callbacks that
run at once, and a completion reaches its callbacks without a hop between threads.

Stager: ops are numbered as they start, alike on all ranks, while the copies that starts wait for
are done sooner or later on each: so one queue holds all starts in the order they were asked for.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["CompletionPool", "Stager"]

log = logging.getLogger(__name__)

T = TypeVar("T")

SPARE_THREADS = 2
"""Followers that stay when the pool has grown and is idle again."""


class CompletionPool(Generic[T]):
    """Calls `handle(item)` for each item that `poll()` returns, on threads of its own.

    poll: waits for a bounded time without the GIL; returns None when nothing came. It is called
    by one thread at a time. handle: may block; what it raises is printed and dropped. broken:
    called once with what `poll` raised, after which the pool ends.
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
        self._ended = False  # `poll` has failed
        self._lead = threading.Lock()
        self._mutex = threading.Lock()
        self._free = 0  # threads that lead or wait to lead
        self._threads: set[threading.Thread] = set()
        self._stopping = False
        self._started = 0
        with self._mutex:
            self._spawn()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the threads; waits for those whose callbacks return within the time-out.

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
        """The number of threads."""
        with self._mutex:
            return len(self._threads)

    def _spawn(self) -> None:
        self._started += 1
        thread = threading.Thread(
            target=self._run, name=f"{self._name}-{self._started}", daemon=True
        )
        thread.start()
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
                if item is not None and self._free == 0:
                    self._grow()
        if failure is not None:
            self._broken(failure)
        if item is None:
            return False
        try:
            self._handle(item)
        except Exception:  # a callback's own fault must not end the pool
            traceback.print_exc()
        with self._mutex:
            if self._free > SPARE_THREADS:
                return False
            self._free += 1
        return True

    def _next(self) -> tuple[T | None, Exception | None]:
        """The next item, None when the pool ends; and why `poll` failed, to whom it does."""
        try:
            while not self._ended:
                item = self._poll()
                if item is not None or self._stopping:
                    return item, None
        except Exception as error:
            self._ended = True
            return None, error
        return None, None

    def _grow(self) -> None:
        try:
            self._spawn()
        except RuntimeError:  # the system gives no thread: this one leads again after its callback
            log.warning("%s: no further thread for completions", self._name, exc_info=True)


class Stager:
    """Runs what it is given one after another, in the order given, on one thread.

    Ordered are the calls of `submit`: calls from several threads at once come in either order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._mutex = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def started(self) -> bool:
        """Whether anything was submitted since the start (or since `stop`): then whatever must
        not overtake it is to be submitted too. False in a forked child, which has no thread."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: Callable[[], None]) -> None:
        """Queues `work` and returns at once. What it raises is logged and dropped."""
        with self._mutex:
            if not self.started:
                self._queue = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=_run_in_order, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
            self._queue.put(work)

    def stop(self) -> None:
        """Ends the thread once it has run what is queued; waits for nothing. Idempotent."""
        with self._mutex:
            self._queue.put(None)
            self._thread = None


def _run_in_order(waiting: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := waiting.get()) is not None:
        try:
            work()
        except Exception:  # its own fault must not keep the others from their turn
            log.exception("a start raised")
        del work  # the queue may stay empty for long
