"""Helper processes on hosts write lines of JSON, which their parent reads while they run."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from typing import Any, TypeVar

from gradwire_lab.network.helper import helper_command
from gradwire_lab.network.network import LabUnavailable, Network

__all__ = ["Reporter"]

T = TypeVar("T", bound="Reporter")


class Reporter:
    """A reporter is a process on a host that lasts until it is closed, as by a ``with`` block."""

    def __init__(
        self, name: str, network: Network, host: int, module: str, *arguments: object
    ) -> None:
        """Start it.

        Args:
            module: a module of the lab that needs the standard library only.
        """
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        command = helper_command(module, *arguments, bare=True)
        self._process = network.spawn(host, command, stdin=subprocess.DEVNULL, stdout=self._log)

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines that it has written so far."""
        if self._process.poll() is not None:
            raise LabUnavailable(f"{self._name} ended with status {self._process.returncode}")
        size = os.fstat(self._log.fileno()).st_size
        lines = os.pread(self._log.fileno(), size, 0).splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def close(self) -> None:
        """End it. May be called again."""
        self._process.kill()  # kill() ignores a process that has ended
        self._process.wait()
        self._log.close()

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
