"""The parent's end of the demo's ranks: starts them, gives commands, notices when one fails."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gradwire.demo.ground import Ground
from gradwire.demo.scenario import Scenario
from gradwire.demo.startline import memory

# The second keeps torch's store from complaining that the hosts have no names; the third, a folder
# that exists, keeps torch from leaving an empty one there.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
}
_READ_BYTES = 1 << 16

Message = dict[str, Any]


class DemoError(RuntimeError):
    """A rank failed or did not answer; the message names it and the cause.

    Attributes:
        details: the rank's traceback, if there is one.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Crew:
    """One process for each rank."""

    def __init__(self, ground: Ground, scenario: Scenario) -> None:
        """Start the ranks and tell them what to do; `ready` waits for them.

        Args:
            ground: where they run.
            scenario: of the demo.
        """
        self._ranks: list[_Rank] = []
        line = memory(scenario.ranks)
        try:
            for number in range(scenario.ranks):
                self._ranks.append(_Rank(ground, number, line))
            for rank in self._ranks:
                rank.send(
                    {
                        "scenario": scenario.as_json(),
                        "rank": rank.number,
                        "store_host": ground.store[0],
                        "store_port": ground.store[1],
                        "lossy": ground.reason is not None,
                    }
                )
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(line)

    def ready(self, deadline: float) -> Message:
        """Wait until all contestants are set up everywhere.

        Args:
            deadline: in seconds of ``time.monotonic()``.

        Returns:
            Facts about model and text, as JSON.

        Raises:
            DemoError: a rank failed or is late.
        """
        return self._gather(deadline)[0]

    def ask(
        self,
        command: Message,
        deadline: float,
        progress: Callable[[Message], None] | None = None,
    ) -> list[Message]:
        """Give all ranks a command.

        Args:
            command: as JSON.
            deadline: in seconds of ``time.monotonic()``.
            progress: called with each tick that a rank sends before it answers.

        Returns:
            The answers, in rank order.

        Raises:
            DemoError: a rank failed or is late.
        """
        for rank in self._ranks:
            rank.send(command)
        return self._gather(deadline, progress)

    def _gather(
        self, deadline: float, progress: Callable[[Message], None] | None = None
    ) -> list[Message]:
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while len(answers) < len(self._ranks):
                for rank in self._wait(selector, deadline, answers):
                    for message in rank.receive():
                        if "tick" in message:
                            if progress is not None:
                                progress(message["tick"])
                        else:
                            answers[rank.number] = message
                            selector.unregister(rank.channel)
        return [answers[rank.number] for rank in self._ranks]

    def _wait(
        self, selector: selectors.BaseSelector, deadline: float, answers: dict[int, Message]
    ) -> list[_Rank]:
        while (left := deadline - time.monotonic()) > 0:
            if ready := selector.select(left):
                return [key.data for key, _ in ready]
        late = [str(rank.number) for rank in self._ranks if rank.number not in answers]
        raise DemoError(f"rank {', '.join(late)} did not answer in time")

    def kill(self) -> None:
        """End all ranks at once. May be called again."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, ground: Ground, number: int, line: int) -> None:
        self.number = number
        self.channel, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), line]
            self._process = ground.spawn(
                number,
                [
                    sys.executable,
                    "-m",
                    "gradwire.demo.worker",
                    *map(str, descriptors),
                    str(ground.parent),
                ],
                _ENVIRONMENT,
                descriptors,
            )
        self._buffer = b""

    def send(self, message: Message) -> None:
        try:
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise DemoError(f"rank {self.number}: {self._fate()}") from error

    def receive(self) -> list[Message]:
        """The messages that are complete; reading does not block when there is something."""
        try:
            data = self.channel.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise DemoError(f"rank {self.number}: {self._fate()}")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages: list[Message] = [json.loads(line) for line in lines]
        for message in messages:
            if "error" in message:
                raise DemoError(
                    f"rank {self.number}: {message['error']}", str(message.get("traceback", ""))
                )
        return messages

    def _fate(self) -> str:
        try:
            return f"ended with status {self._process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return "closed its channel"

    def kill(self) -> None:
        self.channel.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
