"""Ctrl-C is for the parent: a terminal sends it to everybody."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["uninterrupted"]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait, and let the processes that are started meanwhile never hear of it.

    A terminal sends it to all of them; but it is for the parent, which then ends the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
