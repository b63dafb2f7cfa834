"""A process asks a helper of its own over a channel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from gradwire_lab.network.helper import helper_command

__all__ = ["MAX_MESSAGE", "Channel", "LabUnavailable"]

MAX_MESSAGE = 1 << 16
_START_SECONDS = 30.0
_STOP_SECONDS = 2.0


class LabUnavailable(OSError):
    """This machine lets the caller make no test network; the message says why."""


class Channel:
    """A channel starts a helper and asks it, one question at a time, from any thread.

    Where no answer is received, for whatever reason, none is to any later question: it could be the
    one to an earlier.
    """

    def __init__(self, module: str, trouble: str) -> None:
        """Start the helper.

        Args:
            module: its program, whose arguments are a socket's descriptor and this process' id.
        """
        self._trouble = trouble
        self._lock = threading.Lock()
        self._unanswered = False  # the last question may still be answered
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_START_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                helper_command(module, theirs.fileno(), os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def ask(
        self, request: dict[str, Any], *, send: Sequence[int] = (), receive: int = 0
    ) -> tuple[dict[str, Any], list[int]]:
        """Return what the helper answers.

        Args:
            request: the question, which goes as JSON.

        Raises:
            LabUnavailable: there is no answer, or it is why the helper cannot do it.
        """
        with self._lock:
            if self._unanswered:
                raise LabUnavailable(f"{self._trouble}: an earlier question has had no answer")
            self._unanswered = True
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], send)
                message, received, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE, receive)
                self._unanswered = False
            except OSError as error:
                raise LabUnavailable(f"{self._trouble}: {error}") from error
        if not message:
            raise LabUnavailable(self._trouble)
        answer: dict[str, Any] = json.loads(message)
        if "error" in answer:
            raise LabUnavailable(answer["error"])
        return answer, received

    def close(self) -> None:
        """End the process, and with it what it holds. May be called again."""
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
