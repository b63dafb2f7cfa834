"""Calls of the program `gradwire` in tests of the lab."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path


class Lab:
    """One call of `gradwire`, in a session of its own."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        self.mark = uuid.uuid4().hex
        self.errors = folder / "stderr"
        self.output = folder / "stdout"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradwire.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={
                    **os.environ,
                    "GRADWIRE_TEST_MARK": self.mark,
                    "COLUMNS": "400",
                    "TERM": "dumb",
                    **env,
                },
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
        """What it has written to stderr."""
        return self.errors.read_text()

    def wait_until_it_says(self, text: str) -> None:
        """Wait for words on stderr."""
        deadline = time.monotonic() + 60
        while text not in self.said() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        assert text in self.said(), self.said()

    def check_that_nothing_is_left(self) -> None:
        """No process is left, and so no namespace: these have no names."""
        deadline = time.monotonic() + 10
        while left := self._processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found
