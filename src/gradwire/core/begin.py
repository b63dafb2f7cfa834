"""begin() starts a thread, or says that it cannot.

`threading.Thread.start` waits until the thread runs. Where the system's memory lasts for a thread,
but not for its first call, the thread ends before, and the wait never does.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

BEGIN_S = 5.0
"""Seconds within which a thread has to run."""


def begin(work: Callable[[], None], name: str) -> threading.Thread:
    """Starts a daemon thread that runs `work`, and returns it once it runs.

    Raises:
        RuntimeError: The system has no thread left, or no memory for one.
    """
    decided = threading.Event()
    taken = threading.Lock()  # by the thread, or by this function, which waits for it no more
    refused: list[BaseException] = []

    def run() -> None:
        if taken.acquire(blocking=False):
            decided.set()
            work()

    thread = threading.Thread(target=run, name=name, daemon=True)

    def start() -> None:
        try:
            thread.start()
        except BaseException as error:
            refused.append(error)
            decided.set()

    try:
        _thread.start_new_thread(start, ())  # which waits for the thread in the caller's place
        if not decided.wait(BEGIN_S) and taken.acquire(blocking=False):
            raise MemoryError(f"it did not run within {BEGIN_S:g} s")
        if refused:
            raise refused[0]
    except (MemoryError, RuntimeError) as error:
        raise RuntimeError(f"no further thread can be started ({name}): {error!r}") from error
    return thread
