"""One rank of a race, a program on a host: argument DESCRIPTOR, of a socket to the parent.

The first line is the configuration; each later one a command, which is answered by one line.
"""

from __future__ import annotations

import importlib
import json
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gradwire.lab.contestants import Contestant


def load(entry: dict[str, Any]) -> Contestant:
    """Make the contestant that an entry names as ``module:class`` with options."""
    module, _, name = entry["factory"].partition(":")
    contestant: Contestant = getattr(importlib.import_module(module), name)(**entry["options"])
    return contestant


class Worker:
    """One rank's contestants and buffer."""

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
        self._fill()

    def _fill(self) -> None:
        self._buffer.fill_(float(self._rank + 1))

    def round(self, contestant: str, start: float, verify: bool) -> dict[str, Any]:
        """Run one round at a moment of ``time.monotonic()``; answers the seconds since then."""
        runner = self._contestants[contestant]
        while (left := start - time.monotonic()) > 0:
            time.sleep(left)
        runner.run_round(self._buffer)
        seconds = time.monotonic() - start
        if verify:
            runner.verify(self._buffer, {rank: float(rank + 1) for rank in range(self._world)})
        self._fill()
        return {"seconds": seconds}

    def report(self) -> dict[str, Any]:
        """What each contestant has to say."""
        return {name: contestant.report() for name, contestant in self._contestants.items()}

    def close(self) -> dict[str, Any]:
        """Close all contestants."""
        for contestant in self._contestants.values():
            contestant.close()
        return {}


def serve(channel: TextIO) -> None:
    """Obey the parent until it hangs up."""
    worker = Worker(json.loads(channel.readline()))
    _answer(channel, {"ready": True})
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "round": worker.round,
        "report": worker.report,
        "close": worker.close,
    }
    for line in channel:
        command = json.loads(line)
        _answer(channel, commands[command.pop("command")](**command))


def _answer(channel: TextIO, answer: dict[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


def main(arguments: list[str]) -> None:
    """Connect to the parent and serve; an error is its last answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    torch.set_num_threads(1)
    with socket.socket(fileno=int(arguments[0])) as endpoint, endpoint.makefile("rw") as channel:
        try:
            serve(channel)
        except Exception:
            _answer(channel, {"error": traceback.format_exc()})


if __name__ == "__main__":
    main(sys.argv[1:])
