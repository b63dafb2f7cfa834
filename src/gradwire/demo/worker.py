"""One rank of the demo, a program: arguments CHANNEL LINE PARENT.

CHANNEL is the descriptor of a socket to the parent, LINE that of the start line's memory; PARENT
is the process to die with, 0 where somebody else sees to that. The first line on the channel is
the configuration; each later one is a command, answered by one line. A block also tells of each
of its steps as it ends.
"""

from __future__ import annotations

import datetime
import json
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import torch
import torch.distributed as dist

from gradwire.demo.scenario import Scenario
from gradwire.demo.startline import StartLine
from gradwire.demo.text import load
from gradwire.demo.trainee import RankStep, Trainee
from gradwire.lab.kernel import die_with_parent

_GROUP_SECONDS = 60.0


class Worker:
    """One rank with all contestants."""

    def __init__(self, config: dict[str, Any], line: int, channel: TextIO) -> None:
        """Meet the other ranks and set all contestants up.

        Args:
            config: scenario, rank, store (host and port), lossy.
            line: descriptor of the start line's memory.
            channel: to the parent.
        """
        scenario = Scenario.from_json(config["scenario"])
        self._channel = channel
        self._rank: int = config["rank"]
        text = load()
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{config['store_host']}:{config['store_port']}",
            rank=self._rank,
            world_size=scenario.ranks,
            timeout=datetime.timedelta(seconds=_GROUP_SECONDS),
        )
        start_line = StartLine(line, self._rank, scenario.ranks)
        self._trainees: dict[str, Trainee] = {}
        for entry in scenario.entries:
            try:
                self._trainees[entry.name] = Trainee(
                    entry, scenario, text, self._rank, start_line, config["lossy"]
                )
            except Exception as error:
                raise RuntimeError(f"{entry.label}: {error}") from error
        self.facts = {
            "parameters": next(iter(self._trainees.values())).model.parameter_count,
            "characters": len(text.train),
            "files": text.files,
        }

    def block(self, contestant: str, steps: int, start: float) -> dict[str, Any]:
        """Train one contestant for some steps, then look at the held-out text."""
        trainee = self._trainees[contestant]
        done = trainee.block(steps, start, self._tell)
        return {"steps": done, "validation": trainee.validate(), "verdict": trainee.verdict}

    def _tell(self, step: RankStep) -> None:
        if self._rank == 0:
            answer(self._channel, {"tick": asdict(step)})

    def fingerprints(self) -> dict[str, Any]:
        """A hash of each contestant's weights."""
        return {name: trainee.fingerprint() for name, trainee in self._trainees.items()}

    def close(self) -> dict[str, Any]:
        """Let go of everything, together with the other ranks."""
        for trainee in self._trainees.values():
            trainee.close()
        self._trainees.clear()
        dist.destroy_process_group()
        return {}


def serve(channel: TextIO, line: int) -> None:
    """Obey the parent until it hangs up."""
    worker = Worker(json.loads(channel.readline()), line, channel)
    answer(channel, worker.facts)
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "block": worker.block,
        "fingerprints": worker.fingerprints,
        "close": worker.close,
    }
    for text in channel:
        command = json.loads(text)
        answer(channel, commands[command.pop("command")](**command))


def answer(channel: TextIO, message: dict[str, Any]) -> None:
    """Write one line to the parent."""
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def main(arguments: list[str]) -> None:
    """Connect to the parent and serve; an error is the last answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    descriptor, line, parent = map(int, arguments)
    if parent:
        die_with_parent(parent)
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as endpoint, endpoint.makefile("rw") as channel:
        try:
            serve(channel, line)
        except Exception as error:
            summary = "".join(traceback.format_exception_only(error)).strip()
            answer(channel, {"error": summary, "traceback": traceback.format_exc()})


if __name__ == "__main__":
    main(sys.argv[1:])
