"""A fork server is a process on a host that forks programs with torch imported already.

Its argument is the descriptor of a socket, over which it is asked one thing at a time: to fork a
program, to send a signal to one, to wait for its end, or to end all of them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
from typing import Any

import torch
import torch._dynamo
import torch.distributed
import torch.nn.parallel

from gradwire_lab.faults.programs import PROGRAMS, Tell
from gradwire_lab.network.kernel import die_with_parent

LONGEST_MESSAGE = 1 << 16
POLL_S = 0.005


class ForkServer:
    """A fork server knows its children until somebody has waited for them."""

    def __init__(self, channel: socket.socket) -> None:
        """Serve this channel; its other end is the parent's."""
        self._channel = channel
        self._children: dict[int, int | None] = {}

    def serve(self) -> tuple[str, dict[str, Any], socket.socket] | None:
        """Do what is asked until the parent hangs up.

        Returns:
            None here; in a forked child its program, its configuration and its channel.
        """
        while True:
            text, descriptors, _, _ = socket.recv_fds(self._channel, LONGEST_MESSAGE, 1)
            if not text:
                self.end()
                return None
            asked = json.loads(text)
            if asked["ask"] == "fork":
                ours = os.getpid()
                child = os.fork()
                if child == 0:
                    die_with_parent(ours)
                    self._channel.close()
                    return asked["program"], asked["config"], socket.socket(fileno=descriptors[0])
                os.close(descriptors[0])
                self._children[child] = None
                self._answer(child)
            elif asked["ask"] == "signal":
                if self._status(asked["pid"], 0.0) is None:
                    os.kill(asked["pid"], asked["number"])
                self._answer(None)
            elif asked["ask"] == "wait":
                self._answer(self._status(asked["pid"], asked["seconds"]))
            elif asked["ask"] == "end":
                self.end()
                self._answer(None)

    def _answer(self, value: int | None) -> None:
        self._channel.send(json.dumps(value).encode())

    def _status(self, pid: int, seconds: float) -> int | None:
        """Return a child's exit status, negative for a signal; None while it lives."""
        until = time.monotonic() + seconds
        while self._children[pid] is None:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._children[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= until:
                return None
            else:
                time.sleep(POLL_S)
        return self._children[pid]

    def end(self) -> None:
        """Kill all children that live."""
        for pid in list(self._children):
            if self._status(pid, 0.0) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._status(pid, 60.0)
        self._children.clear()


def main() -> int:
    """Serve, or be a child's program; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    torch.set_num_threads(1)
    gc.freeze()  # else each child looks through all modules at its end, which takes it seconds
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        child = ForkServer(channel).serve()
    if child is None:
        return 0
    program, config, end = child
    return PROGRAMS[program](config, Tell(end))


if __name__ == "__main__":
    sys.exit(main())
