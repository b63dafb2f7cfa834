"""The parent of ranks that train starts them and gives them turns."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire_lab.contest.interrupts import uninterrupted
from gradwire_lab.contest.ranks import Message, Ranks, Spawn
from gradwire_lab.training.block import Block
from gradwire_lab.training.startline import memory

__all__ = ["start", "train"]


def start(
    spawn: Spawn,
    module: str,
    configs: Sequence[Message],
    trainees: int,
    env: Mapping[str, str] | None = None,
) -> Ranks:
    """Start ranks whose trainees share a start line; their first answers are facts.

    Args:
        spawn: starts a program on the host of a rank.
        configs: the first message to each rank, in rank order; ``line`` is added.
        trainees: how many of the ranks train; they come first.
    """
    line = memory(trainees)
    try:
        with uninterrupted():
            full = [{**config, "line": line} for config in configs]
            return Ranks(spawn, module, full, pass_fds=[line], env=env)
    finally:
        os.close(line)


def train(
    ranks: Ranks,
    contestant: str,
    steps: int,
    start: float,
    deadline: float,
    *,
    warm_up: int = 0,
    trainees: int | None = None,
    progress: Callable[[Message], None] | None = None,
    **options: Any,
) -> Block:
    """Let the ranks train one contestant for a turn.

    Args:
        start: when to begin, in seconds of ``time.monotonic()``.
        deadline: when all ranks have to have answered, likewise.
        trainees: how many of the ranks train; all if not given.
        progress: a function that is called with each step of rank 0.
    """
    command = {"command": "block", "contestant": contestant, "steps": steps, "start": start}
    answers = ranks.ask({**command, **options}, deadline, progress)[:trainees]
    losses = [answer["validation"] for answer in answers]
    return Block(
        contestant=contestant,
        start=start,
        warm_up=warm_up,
        ranks=[answer["steps"] for answer in answers],
        validation=None if None in losses else statistics.fmean(losses),
        verdict=answers[0].get("verdict"),
    )
