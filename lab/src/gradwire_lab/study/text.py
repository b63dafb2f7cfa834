"""In task "text" a small transformer learns the standard library's sources by character.

Text and model are the demo's, in smaller sizes.
"""

from __future__ import annotations

import functools
import math

import torch

from gradwire_lab.study.lesson import WORKERS, MissingDataError, Task
from gradwire_lab.training.model import CharacterModel, Shape
from gradwire_lab.training.text import SYMBOLS, NoText, Text
from gradwire_lab.training.text import load as load_text

__all__ = ["TEXT"]

SHAPE = Shape(symbols=SYMBOLS, context=48, width=32, layers=2, heads=2)
BATCH = 6
VALIDATION = 96
"""Samples of each of four draws; the same for all seeds and arms."""

RATE = 3e-3
"""Without loss 0.008 trains best in 300 rounds, but there any perturbation, half a per cent
of the gradients left out for instance, scatters scores by three margins; here by less than one."""

WARM, LEAST = 0.1, 0.02


class TextLesson:
    """A text lesson is one training.

    Attributes:
        texts: each worker's part of the text.
    """

    def __init__(self, seed: int, part: int, data: str) -> None:
        text = load()
        self._seed = seed
        self.texts = [text] * WORKERS
        if data == "own":
            quarter = len(text.train) // WORKERS
            self.texts = [
                Text(text.train[w * quarter : (w + 1) * quarter], text.held_out, text.files)
                for w in range(WORKERS)
            ]
        self.rounds_per_epoch = 50
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model: torch.nn.Module = CharacterModel(SHAPE)

    def loss(self, round_number: int, worker: int) -> torch.Tensor:
        inputs, targets = self.texts[worker].batch(
            step=round_number, rank=worker, seed=self._seed, size=BATCH, context=SHAPE.context
        )
        loss: torch.Tensor = self.model(inputs, targets)
        return loss

    def score(self) -> float:
        """Return the mean cross-entropy of the validation samples, in nats per character."""
        total = 0.0
        for rank in range(WORKERS):
            inputs, targets = self.texts[0].validation(
                rank=rank, seed=0, size=VALIDATION, context=SHAPE.context
            )
            with torch.no_grad():
                total += float(self.model(inputs, targets))
        return total / WORKERS


@functools.cache
def load() -> Text:
    """Return the text.

    Raises:
        MissingDataError: this Python has no readable sources.
    """
    try:
        return load_text()
    except NoText as error:
        raise MissingDataError(str(error)) from error


def rate(done: float) -> float:
    if done < WARM:
        return (done + 1e-2) / (WARM + 1e-2)
    return LEAST + (1 - LEAST) * (0.5 + 0.5 * math.cos(math.pi * (done - WARM) / (1 - WARM)))


def adamw(model: torch.nn.Module, peak: float = RATE) -> torch.optim.Optimizer:
    """Return a transformer's usual optimizer; peak: the learning rate at its largest."""
    return torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)


TEXT = Task(
    name="text",
    optimizers={"adamw": adamw},
    rounds=300,
    parts=1,
    unit="nats",
    margin=0.01,
    more_is_better=False,
    rate=rate,
    clip=1.0,
    open=TextLesson,
)
