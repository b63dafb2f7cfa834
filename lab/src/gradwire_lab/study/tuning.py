"""In task "tuning" the text's model, trained already, goes on with other files.

As in the paper that sets eager closing's price in perplexity, where a trained language model is
tuned (our reading: its perplexity of 1.6 is no first training's). What was learnt before is the
same for all arms of a seed: plain sums, no loss.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from gradwire_lab.study.lesson import WORKERS
from gradwire_lab.study.replica import Replica, exact_mean
from gradwire_lab.study.text import TEXT, TextLesson, adamw, load
from gradwire_lab.training.text import Text

__all__ = ["TUNING"]

BEFORE = 600
"""Rounds that the model has been trained for."""

RATE = 1e-3


class TuningLesson(TextLesson):
    """A tuning lesson trains on half of the files a model that knows the other half."""

    def __init__(self, seed: int, part: int, data: str) -> None:
        super().__init__(seed, part, "mixed")
        self.model.load_state_dict(trained(seed))
        text = load()
        half = len(text.train) // 2
        share = (len(text.train) - half) // WORKERS if data == "own" else 0
        self.texts = [
            Text(
                text.train[half + w * share : half + (w + 1) * share]
                if share
                else text.train[half:],
                text.held_out,
                text.files,
            )
            for w in range(WORKERS)
        ]


@functools.lru_cache(maxsize=2)
def trained(seed: int) -> dict[str, torch.Tensor]:
    """Return the parameters that all arms of a seed begin with."""
    lesson = TextLesson(seed, 0, "mixed")
    text = load()
    first = Text(text.train[: len(text.train) // 2], text.held_out, text.files)
    lesson.texts = [first] * WORKERS
    replica = Replica(lesson.model, TEXT.optimizers["adamw"](lesson.model), TEXT.clip)
    for number in range(BEFORE):
        replica.set_rate(TEXT.rate(number / BEFORE))
        replica.apply(
            exact_mean([replica.gradient(lesson.loss(number, w)) for w in range(WORKERS)])
        )
    return lesson.model.state_dict()


TUNING = replace(
    TEXT,
    name="tuning",
    optimizers={"adamw": lambda model: adamw(model, RATE)},
    open=TuningLesson,
)
