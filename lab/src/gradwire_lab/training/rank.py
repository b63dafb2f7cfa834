"""A training rank trains several contestants in turn, for demo and lab alike."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from gradwire_lab.contest.rank_program import Commands
from gradwire_lab.contest.ranks import Message
from gradwire_lab.training.startline import StartLine
from gradwire_lab.training.trainee import RankStep, Trainee

__all__ = ["TrainingRank"]

T = TypeVar("T", bound=Trainee)


class TrainingRank(Generic[T]):
    """A training rank has a trainee of each contestant.

    Attributes:
        rank: its number.
        trainees: the trainees by contestant; subclasses fill them in.
        start_line: where the ranks wait for each other.
    """

    def __init__(
        self, config: Message, ranks: int, seconds: float, tell: Callable[[Message], None]
    ) -> None:
        """Meet the other ranks.

        Args:
            config: rank, store (host and port), line (descriptor of the start line's memory).
            tell: a function that is called with each step, on rank 0.
        """
        self._tell = tell
        self.rank: int = config["rank"]
        self.trainees: dict[str, T] = {}
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{config['store_host']}:{config['store_port']}",
            rank=self.rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=seconds),
        )
        self.start_line = StartLine(config["line"], self.rank, ranks)

    @property
    def commands(self) -> Commands:
        return {"block": self.block, "fingerprints": self.fingerprints, "close": self.close}

    def block(
        self, contestant: str, steps: int, start: float, validate: bool = True
    ) -> dict[str, Any]:
        """Train one contestant for some steps; then look at the held-out text, if asked to."""
        trainee = self.trainees[contestant]
        done = trainee.block(steps, start, self._stepped)
        return {"steps": done, "validation": trainee.validate() if validate else None}

    def _stepped(self, step: RankStep) -> None:
        """Report a step to the parent, if this is rank 0."""
        if self.rank == 0:
            self._tell(asdict(step))

    def fingerprints(self) -> dict[str, Any]:
        return {name: trainee.fingerprint() for name, trainee in self.trainees.items()}

    def close(self) -> dict[str, Any]:
        for trainee in self.trainees.values():
            trainee.close()
        self.trainees.clear()
        dist.destroy_process_group()
        return {}
