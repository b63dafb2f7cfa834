"""A command ends by Ctrl-C, by `kill`, or because its terminal closes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["end_as_ctrl_c_does", "uninterrupted"]


def end_as_ctrl_c_does() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, unless they were to be ignored, as nohup
    wants it of SIGHUP."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


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
