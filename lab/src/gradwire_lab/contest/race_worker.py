"""This program is one rank of a race.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gradwire_lab.contest.contestant import Contestant
from gradwire_lab.contest.rank_program import Commands, obey
from gradwire_lab.contest.ranks import Message
from gradwire_lab.contest.usage import Usage
from gradwire_lab.network.clock import sleep_until

_CHECKED = 1 << 18
"""Elements that are checked at a time."""


def load(entry: dict[str, Any]) -> Contestant:
    module, _, name = entry["factory"].partition(":")
    contestant: Contestant = getattr(importlib.import_module(module), name)(**entry["options"])
    return contestant


class Worker:
    """A worker has one rank's contestants and buffer."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Set all contestants up.

        Args:
            config: rank, world, bytes of the buffer, store (host and port), entries.
        """
        self._rank: int = config["rank"]
        self._world: int = config["world"]
        self._buffer = torch.empty(config["bytes"] // 4)
        store = TCPStore(
            config["store_host"], config["store_port"], self._world, is_master=self._rank == 0
        )
        self._contestants: dict[str, Contestant] = {}
        for entry in config["entries"]:
            contestant = load(entry)
            contestant.setup(self._rank, self._world, PrefixStore(entry["name"], store))
            self._contestants[entry["name"]] = contestant
        self._store = store
        self._buffer.fill_(float(self._rank + 1))
        self._usage = Usage()

    def round(self, contestant: str, start: float, size: int, verify: bool) -> dict[str, Any]:
        """Run one round at a moment of ``time.monotonic()``.

        Returns:
            The seconds since then, and the contestant's counters of the round.
        """
        runner = self._contestants[contestant]
        buffer = self._buffer[: size // 4]
        sleep_until(start)
        with self._usage.round():
            details = runner.run_round(buffer)
            seconds = time.monotonic() - start
        with self._usage.aside():
            if verify:
                inputs = {rank: float(rank + 1) for rank in range(self._world)}
                # A check's own memory is no contestant's.
                for piece in torch.split(buffer, _CHECKED):
                    runner.verify(piece, inputs)
            buffer.fill_(float(self._rank + 1))
        return {"seconds": seconds, "details": details or {}}

    def usage(self) -> dict[str, float]:
        return self._usage.so_far()

    def report(self) -> dict[str, Any]:
        return {name: contestant.report() for name, contestant in self._contestants.items()}

    def close(self) -> dict[str, Any]:
        for contestant in self._contestants.values():
            contestant.close()
        return {}


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; its rounds are too short for news of them."""
    worker = Worker(config)
    commands = ("round", "usage", "report", "close")
    return {}, {name: getattr(worker, name) for name in commands}


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
