"""The open engines of this process: who uses them, and when they are closed."""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing.util
import os
import threading
from typing import TYPE_CHECKING

import gradwire.core.leaving  # noqa: F401  # whose end comes after that of the engines

if TYPE_CHECKING:
    from gradwire.transport.engines import SharedEngine

open_engines: list[SharedEngine] = []
lock = threading.RLock()
"""Guards `open_engines`. Nothing may wait while it is held, least of all for a store.

Finalizers take it on whatever thread collects garbage, even on one that holds it already."""


_collecting = threading.Lock()


def collect_forgotten() -> None:
    """Collects communicators that nobody refers to, which do not count as users of an engine.

    The time that it takes grows with the process's objects, so it is called only where a forgotten
    communicator may be in the way. Two collections are needed: a DDP module is garbage in a cycle,
    and its reducer, in C++, drops what it holds only once the module is gone. A collection returns
    at once where another thread's has begun, so that callers take turns.
    """
    with _collecting:
        gc.collect()
        gc.collect()


def drop(engine: SharedEngine, *, used: bool = True) -> bool:
    """Closes an engine, one that somebody uses only where `used`; returns whether it is closed."""
    with lock:
        goes = used or engine.users <= 0
        known = goes and engine in open_engines
        if known:
            open_engines.remove(engine)
    if known:
        engine.close()
    return goes


def close_all() -> None:
    with lock:
        engines = list(open_engines)
        open_engines.clear()
    for engine in engines:
        with contextlib.suppress(Exception):
            engine.close()


def _after_fork_in_child() -> None:
    """Makes a forked child drop the engines, whose threads exist only in the parent.

    Their ports are then free once the parent has closed them.
    """
    global lock, _collecting
    lock, _collecting = threading.RLock(), threading.Lock()
    for engine in open_engines:
        engine.leave_to_parent()
    open_engines.clear()


def close_at_exit() -> None:
    """Registers the closing of the engines once in each process.

    A process that multiprocessing has forked ends without `atexit`, hence the finalizer. While the
    engines close they still resend what the others need for their last step.
    """
    global _closes_at_exit
    if _closes_at_exit != os.getpid():
        _closes_at_exit = os.getpid()
        multiprocessing.util.Finalize(None, close_all, exitpriority=10)


_closes_at_exit = 0
atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
