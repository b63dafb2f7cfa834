"""C++ is left before the interpreter ends: `inside` guards what daemon threads do there.

The interpreter ends a daemon thread where it asks for the GIL. In C++ that unwinds frames which
may not be left so, and the process aborts (until Python 3.14, gh-87135).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 2.0
"""Seconds that the interpreter's end waits at most for threads that are inside."""


class _Threads:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside = 0
        self.ended = False
        self.own = threading.local()


_threads = _Threads()


@contextmanager
def inside() -> Iterator[None]:
    """Guards a call into the C++ of torch or of the engine, where a daemon thread makes it.

    Once the interpreter ends such a thread stays here for good: nobody waits for what it would do.
    A thread that is inside already goes on, so that it leaves.
    """
    threads = _threads
    if not threading.current_thread().daemon or hasattr(threads.own, "inside"):
        yield
        return
    with threads.changed:
        threads.changed.wait_for(lambda: not threads.ended)
        threads.inside += 1
    threads.own.inside = True
    try:
        yield
    finally:
        del threads.own.inside
        with threads.changed:
            threads.inside -= 1
            threads.changed.notify_all()


def _leave() -> None:
    threads = _threads
    with threads.changed:
        threads.ended = True  # first, since a thread that leaves may enter again at once
        threads.changed.wait_for(lambda: not threads.inside, WAIT_S)


def _after_fork_in_child() -> None:
    """Forgets the threads, which exist only in the parent."""
    global _threads
    _threads = _Threads()


atexit.register(_leave)
os.register_at_fork(after_in_child=_after_fork_in_child)
