"""A task offers lessons to the trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["DATA", "WORKERS", "Lesson", "MissingDataError", "Task"]

WORKERS = 4

DATA = ("mixed", "own")
"""How workers share the data.

With "mixed" all workers draw from the same data; with "own" each has another part of it (digits:
other classes; text: other files).
"""


class MissingDataError(Exception):
    """A task's data are not on this machine; the message says how to get them."""


class Lesson(Protocol):
    """A lesson is one training of a task: a model, and each worker's loss in each round."""

    model: torch.nn.Module
    rounds_per_epoch: int

    def loss(self, round_number: int, worker: int) -> torch.Tensor:
        """Return the training loss of this worker's batch; the same batch at every call."""

    def score(self) -> float:
        """Return how good the model is on data that it was not trained with."""


@dataclass(frozen=True)
class Task:
    """A task is what the study trains.

    Attributes:
        name: its name on the command line.
        optimizers: those it is trained with, and how each is made.
        rounds: the number of rounds of one training.
        parts: trainings that make one seed's score, the mean of theirs (folds).
        unit: the unit of the score.
        margin: a policy is as good as lossless when the interval of the difference lies within it.
        more_is_better: the sign of the score.
        rate: the factor of the learning rate at a share of the training.
        open: makes the lesson of a seed, part and kind of data (`DATA`).
        clip: the largest L2 norm of an applied gradient (larger ones are scaled down); None: any.
        sections: the only sections of the study that it is trained in; empty for all.
    """

    name: str
    optimizers: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]]
    rounds: int
    parts: int
    unit: str
    margin: float
    more_is_better: bool
    rate: Callable[[float], float]
    open: Callable[[int, int, str], Lesson]
    clip: float | None = None
    sections: tuple[str, ...] = ()
