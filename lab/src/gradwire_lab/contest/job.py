"""A job has ranks on the hosts of a network, which obey one command after another."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from gradwire_lab.contest.interrupts import uninterrupted
from gradwire_lab.contest.ranks import Message, Ranks
from gradwire_lab.network.addresses import STORE_PORT
from gradwire_lab.network.network import Network

__all__ = ["Job", "turns"]

_SETUP_SECONDS = 120.0

J = TypeVar("J", bound="Job")


class Job:
    """A job lasts as long as a ``with`` block, at whose end its ranks are told to close.

    Attributes:
        facts: what rank 0 answered when it was set up.
    """

    def __init__(
        self,
        network: Network,
        module: str,
        seconds: float,
        ranks_a_host: int = 1,
        env: Mapping[str, str] | None = None,
        **config: Any,
    ) -> None:
        """Start a rank on each host, or several; none on the extra hosts.

        Args:
            module: the ranks' program, which joins the others by `rank_program.meet`.
            seconds: how long setting up may take, and each command.
        """
        world = network.hosts * ranks_a_host
        shared = {"world": world, "store_host": network.address(0), "store_port": STORE_PORT}

        def spawn(rank: int, *arguments: Any, **options: Any) -> Any:
            return network.spawn(rank // ranks_a_host, *arguments, **options)

        configs = [{"rank": rank, **shared, **config} for rank in range(world)]
        self._seconds = seconds
        with uninterrupted():
            self._ranks = Ranks(spawn, module, configs, env=env)
        try:
            self.facts = self._ranks.gather(time.monotonic() + max(seconds, _SETUP_SECONDS))[0]
        except BaseException:
            self._ranks.kill()
            raise

    def ask(self, command: str, **arguments: Any) -> list[Message]:
        """Give all ranks a command; return their answers in rank order."""
        deadline = time.monotonic() + self._seconds
        return self._ranks.ask({"command": command, **arguments}, deadline)

    def time(self, command: str, **arguments: Any) -> list[float]:
        """Give a command that answers with ``seconds``; return those of the slowest rank."""
        answers = [answer["seconds"] for answer in self.ask(command, **arguments)]
        return [max(each) for each in zip(*answers, strict=True)]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank's process."""
        self._ranks.signal(rank, number)

    def __enter__(self: J) -> J:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.ask("close")
        finally:
            self._ranks.kill()


def turns(names: Collection[str], rounds: int, block: int) -> Iterator[tuple[str, int]]:
    """Yield contestants in turn, with the rounds of each turn, until each has had so many."""
    for done in range(0, rounds, block):
        for name in names:
            yield name, min(block, rounds - done)
