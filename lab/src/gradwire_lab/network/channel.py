"""A network's owner asks its keeper over a channel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from typing import Any

from gradwire_lab.network.helper import helper_command

__all__ = ["KeeperChannel", "LabUnavailable"]

_START_SECONDS = 30.0
_STOP_SECONDS = 2.0
_MAX_ANSWER = 1 << 16


class LabUnavailable(OSError):
    """This machine lets the caller make no test network; the message says why."""


class KeeperChannel:
    """A channel starts a keeper's process and asks it, one question at a time, from any thread."""

    def __init__(self) -> None:
        """Start the process, which waits for a plan."""
        self._lock = threading.Lock()
        self._unanswered = False  # the last question may still be answered
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_START_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                helper_command("network.keeper", theirs.fileno(), os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def ask(
        self,
        request: dict[str, Any],
        trouble: str = "the network is closed",
        descriptors: int = 0,
    ) -> tuple[dict[str, Any], list[int]]:
        """Return what the keeper answers, with so many descriptors at most.

        Where no answer is received, for whatever reason, none is to any later question: it could
        be the one to this.

        Args:
            request: the question, which goes as JSON.
            trouble: what it means when there is no answer.
            descriptors: how many the answer may bring.

        Raises:
            LabUnavailable: there is no answer, or it is why the keeper cannot do it.
        """
        with self._lock:
            if self._unanswered:
                raise LabUnavailable(f"{trouble}: an earlier question has had no answer")
            self._unanswered = True
            try:
                self._channel.send(json.dumps(request).encode())
                message, received, _, _ = socket.recv_fds(self._channel, _MAX_ANSWER, descriptors)
                self._unanswered = False
            except OSError as error:
                raise LabUnavailable(f"{trouble}: {error}") from error
        if not message:
            raise LabUnavailable(trouble)
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise LabUnavailable(answer["error"])
        return answer, received

    def close(self) -> None:
        """End the process, and with it the network. May be called again."""
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
