"""One rank of a training scenario, a program: argument DESCRIPTOR, of a socket to the parent.

Obeys as `gradwire.lab.rank_program` says.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from gradwire.demo.scenario import Scenario as DemoScenario
from gradwire.demo.startline import StartLine
from gradwire.demo.text import load
from gradwire.demo.trainee import RankStep
from gradwire.lab.rank_program import Commands, obey
from gradwire.lab.ranks import Message
from gradwire.lab.run.trainee import LabTrainee
from gradwire.lab.scenario.contestant import Contestant
from gradwire.lab.scenario.work import Model

_GROUP_SECONDS = 300.0


class Worker:
    """One rank with all contestants."""

    def __init__(self, config: Message, tell: Callable[[Message], None]) -> None:
        """Meet the other ranks and set all contestants up.

        Args:
            config: contestants, model, demo (its scenario), steps, rank, store (host and port),
                line (descriptor of the start line's memory).
            tell: called with each step of rank 0.
        """
        demo = DemoScenario(**config["demo"])
        self._tell = tell
        self._rank: int = config["rank"]
        text = load()
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{config['store_host']}:{config['store_port']}",
            rank=self._rank,
            world_size=demo.ranks,
            timeout=datetime.timedelta(seconds=_GROUP_SECONDS),
        )
        line = StartLine(config["line"], self._rank, demo.ranks)
        model = Model(**config["model"])
        self._trainees: dict[str, LabTrainee] = {}
        for fields in config["contestants"]:
            each = Contestant(**fields)
            try:
                self._trainees[each.name] = LabTrainee(
                    each, model, demo, text, self._rank, line, config["steps"]
                )
            except Exception as error:
                raise RuntimeError(f"{each.name}: {error}") from error
        first = next(iter(self._trainees.values()))
        self.facts = {"parameters": first.model.parameter_count, "characters": len(text.train)}

    def block(
        self, contestant: str, steps: int, start: float, compute_s: float, validate: bool
    ) -> dict[str, Any]:
        """Train one contestant for some steps; then look at the held-out text, if asked to."""
        trainee = self._trainees[contestant]
        trainee.pace.compute_s = compute_s
        done = trainee.block(steps, start, self._stepped)
        loss = trainee.validate() if validate else None
        return {"steps": done, "validation": loss, "layers": trainee.take_layers()}

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
    """Set the rank up."""
    worker = Worker(config, tell)
    return worker.facts, {
        "block": worker.block,
        "fingerprints": worker.fingerprints,
        "close": worker.close,
    }


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
