"""A block is one turn of a contestant in training; its steps join all ranks' views."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

__all__ = ["Block", "Step", "join"]


@dataclass(frozen=True)
class Block:
    """A block is one turn of a contestant.

    Attributes:
        contestant: its name.
        start: when the ranks began, in seconds of ``time.monotonic()``.
        warm_up: how many of the steps are not timed.
        ranks: each rank's steps as JSON, see `gradwire_lab.training.trainee.RankStep`.
        validation: mean loss of the held-out text after the block; None if nobody looked.
        verdict: the verdict of the phase detector on the run so far; None where there is none.
    """

    contestant: str
    start: float
    warm_up: int
    ranks: list[list[dict[str, Any]]]
    validation: float | None
    verdict: str | None


@dataclass(frozen=True)
class Step:
    """A step is one of a contestant's, all ranks together.

    Attributes:
        step: its number, from 0.
        turn: number of the turn that it belongs to, counted over all contestants.
        timed: False for the warm-up of a turn.
        start: when all ranks had their gradients, in seconds since `join`'s origin.
        comm: seconds from then until the last rank had the averaged gradients.
        took: seconds from the end of the step before until the last rank had moved its weights.
        loss: mean over the ranks, in nats per character.
        delivered: mean over the ranks of the share of gradients that counted.
        critical: whether the phase was critical; None where there are no phases.
        encoded: bytes of the encoded gradients over those of float32; None if it is not known.
    """

    step: int
    turn: int
    timed: bool
    start: float
    comm: float
    took: float
    loss: float
    delivered: float
    critical: bool | None
    encoded: float | None = None


def join(block: Block, number: int, origin: float) -> list[Step]:
    """Join the ranks' views of one turn.

    Args:
        number: the number of the turn, counted over all contestants.
        origin: time from which starts count, in seconds of ``time.monotonic()``.
    """
    steps = []
    before = block.start
    for index, views in enumerate(zip(*block.ranks, strict=True)):
        start = min(view["start"] for view in views)
        ended = max(view["ended"] for view in views)
        steps.append(
            Step(
                step=views[0]["step"],
                turn=number,
                timed=index >= block.warm_up,
                start=start - origin,
                comm=max(view["end"] for view in views) - start,
                took=ended - before,
                loss=statistics.fmean(view["loss"] for view in views),
                delivered=statistics.fmean(view["delivered"] for view in views),
                critical=views[0]["critical"],
                encoded=views[0]["encoded"],
            )
        )
        before = ended
    return steps
