"""Calls of the program `gradwire`, as a user makes them, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Call", "Lab", "until"]


class Call:
    """One call of `gradwire`, in a session of its own."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        self.mark = uuid.uuid4().hex
        self.output = folder / "stdout"
        self.errors = folder / "stderr"
        with self.output.open("wb") as output, self.errors.open("wb") as errors, _heeded():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradwire.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, "GRADWIRE_TEST_MARK": self.mark, **env},
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int:
        """Wait for its end; returns its status."""
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def said(self) -> str:
        """What it has written to stderr so far."""
        return self.errors.read_text()

    def wait_until_it_says(self, text: str) -> None:
        """Wait for words on stderr."""
        until(lambda: text in self.said() or self.process.poll() is not None, 60.0)
        assert text in self.said(), self.said()

    def processes(self, program: str = "") -> list[int]:
        """Its processes that are still there, itself left out."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                if self.mark.encode() not in (entry / "environ").read_bytes():
                    continue
                if program.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def check_that_nothing_is_left(self) -> None:
        """No process is left, and so no namespace: these have no names."""
        assert until(lambda: not self.processes(), 10.0), self.processes()


@contextlib.contextmanager
def _heeded() -> Iterator[None]:
    """What starts meanwhile heeds signals that this process ignores, under nohup for instance."""
    ignored = [n for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


class Lab(Call):
    """One call that writes wide tables."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        super().__init__(folder, *arguments, **{"COLUMNS": "400", "TERM": "dumb", **env})


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; returns whether it came."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
