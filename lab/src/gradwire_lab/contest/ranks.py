"""The parent of ranks starts one on each host, gives commands, and notices when one fails.

Parent and rank write lines of JSON to each other: the parent writes the configuration, then
commands, and the rank answers each (its end is `gradwire_lab.contest.rank_program`).
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

# The log level keeps torch's store from warning that the hosts have no names. The cache folder is
# one that exists, because torch would leave an empty one behind.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
}
_READ_BYTES = 1 << 16

Message = dict[str, Any]


class RankError(RuntimeError):
    """A rank failed or did not answer; the message names it and the cause.

    Attributes:
        details: the rank's traceback, if there is one.
        late: whether a rank was given no more time.
    """

    def __init__(self, message: str, details: str = "", *, late: bool = False) -> None:
        super().__init__(message)
        self.details = details
        self.late = late


class _RemoteTraceback(Exception):
    """A rank's traceback is the cause of an error raised here, so that both are printed."""

    def __str__(self) -> str:
        return f"in the rank:\n{self.args[0]}"


class Spawn(Protocol):
    """A spawn starts a program on a host, as `gradwire_lab.network.network.Network.spawn` does."""

    def __call__(
        self,
        host: int,
        command: Sequence[str],
        /,
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stdin: int,
    ) -> subprocess.Popen[Any]:
        """Start it; ``env`` is added to this process's environment."""


class Ranks:
    """Ranks are processes, rank k on host k; a ``with`` block kills them at its end."""

    def __init__(
        self,
        spawn: Spawn,
        module: str,
        configs: Sequence[Message],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the ranks and send their configurations; the first `gather` waits for them.

        Args:
            module: the ranks' program, which runs `gradwire_lab.contest.rank_program.obey`.
            configs: the first message to each rank, in rank order.
        """
        self._ranks: list[_Rank] = []
        try:
            for number in range(len(configs)):
                self._ranks.append(_Rank(spawn, number, module, env or {}, pass_fds))
            for rank, config in zip(self._ranks, configs, strict=True):
                rank.send(config)
        except BaseException:
            self.kill()
            raise

    def ask(
        self,
        command: Message,
        deadline: float,
        progress: Callable[[Message], None] | None = None,
    ) -> list[Message]:
        """Give all ranks a command; see `gather`.

        Args:
            command: its name as ``command``, and its arguments.
            deadline: the latest moment, in seconds of ``time.monotonic()``.
            progress: a function that is called with each tick that a rank sends before it answers.
        """
        for rank in self._ranks:
            rank.send(command)
        return self.gather(deadline, progress)

    def gather(
        self, deadline: float, progress: Callable[[Message], None] | None = None
    ) -> list[Message]:
        """Wait for an answer of every rank.

        Args:
            deadline: the latest moment, in seconds of ``time.monotonic()``.
            progress: a function that is called with each tick that a rank sends before it answers.

        Returns:
            The answers, in rank order.
        """
        answers: dict[int, Message] = {}
        given = deadline - time.monotonic()
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
            while len(answers) < len(self._ranks):
                for rank in self._wait(selector, deadline, given, answers):
                    for message in rank.receive():
                        if "tick" in message:
                            if progress is not None:
                                progress(message["tick"])
                        else:
                            # The rank stays watched, as it may still die.
                            answers[rank.number] = message
        return [answers[rank.number] for rank in self._ranks]

    def _wait(
        self,
        selector: selectors.BaseSelector,
        deadline: float,
        given: float,
        answers: dict[int, Message],
    ) -> list[_Rank]:
        while (left := deadline - time.monotonic()) > 0:
            if ready := selector.select(left):
                return [key.data for key, _ in ready]
        late = [str(rank.number) for rank in self._ranks if rank.number not in answers]
        text = f"rank {', '.join(late)} did not answer within {max(0.0, given):.0f} s"
        raise RankError(text, late=True)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank's process.

        Raises:
            IndexError: there is no such rank.
        """
        self._ranks[rank].signal(number)

    def kill(self) -> None:
        """End all ranks at once. May be called again."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class _Rank:
    """This is the parent's end of one rank."""

    def __init__(
        self,
        spawn: Spawn,
        number: int,
        module: str,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
    ) -> None:
        self.number = number
        self.channel, theirs = socket.socketpair()
        with theirs:
            self._process = spawn(
                number,
                [sys.executable, "-m", module, str(theirs.fileno())],
                env={**_ENVIRONMENT, **env},
                pass_fds=[theirs.fileno(), *pass_fds],
                stdin=subprocess.DEVNULL,
            )
        self._buffer = b""

    def send(self, message: Message) -> None:
        try:
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise RankError(f"rank {self.number}: {self._fate()}") from error

    def receive(self) -> list[Message]:
        """Return the messages that are complete; reading does not block when there is something."""
        try:
            data = self.channel.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise RankError(f"rank {self.number}: {self._fate()}")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        messages: list[Message] = [json.loads(line) for line in lines]
        for message in messages:
            if "error" in message:
                details = message["traceback"]
                cause = _RemoteTraceback(details)
                raise RankError(f"rank {self.number}: {message['error']}", details) from cause
        return messages

    def _fate(self) -> str:
        try:
            return f"ended with status {self._process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return "closed its channel"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.channel.close()
        self._process.kill()  # kill() ignores a process that has ended
        self._process.wait()
