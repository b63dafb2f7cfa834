"""One rank of the demo, a program: argument DESCRIPTOR, of a socket to the parent.

Obeys as `gradwire.lab.rank_program` says; a block also tells of each of its steps as it ends.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from gradwire.demo.scenario import Scenario
from gradwire.demo.startline import StartLine
from gradwire.demo.text import load
from gradwire.demo.trainee import RankStep, Trainee
from gradwire.lab.kernel import die_with_parent
from gradwire.lab.rank_program import Commands, obey
from gradwire.lab.ranks import Message

_GROUP_SECONDS = 60.0


class Worker:
    """One rank with all contestants."""

    def __init__(self, config: Message, tell: Callable[[Message], None]) -> None:
        """Meet the other ranks and set all contestants up.

        Args:
            config: scenario, rank, store (host and port), lossy, line (descriptor of the start
                line's memory).
            tell: called with each step.
        """
        scenario = Scenario.from_json(config["scenario"])
        self._tell = tell
        self._rank: int = config["rank"]
        text = load()
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{config['store_host']}:{config['store_port']}",
            rank=self._rank,
            world_size=scenario.ranks,
            timeout=datetime.timedelta(seconds=_GROUP_SECONDS),
        )
        start_line = StartLine(config["line"], self._rank, scenario.ranks)
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
        done = trainee.block(steps, start, self._stepped)
        return {"steps": done, "validation": trainee.validate(), "verdict": trainee.verdict}

    def _stepped(self, step: RankStep) -> None:
        if self._rank == 0:
            self._tell(asdict(step))

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


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; the configuration names the process to die with, 0 if that is seen to."""
    if config["parent"]:
        die_with_parent(config["parent"])
    worker = Worker(config, tell)
    return worker.facts, {
        "block": worker.block,
        "fingerprints": worker.fingerprints,
        "close": worker.close,
    }


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
