"""This program is one rank of the benchmark of encodings, which trains one model a contestant.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from gradwire.core.plan import TransferPlan
from gradwire.policies.base import PlanContext, Policy
from gradwire.policies.registry import register
from gradwire_lab.contest.rank_program import Commands, obey
from gradwire_lab.contest.ranks import Message
from gradwire_lab.training.rank import TrainingRank
from gradwire_lab.training.recipe import Entry, Recipe
from gradwire_lab.training.text import load
from gradwire_lab.training.trainee import Trainee

_GROUP_SECONDS = 120.0


@register
@dataclass
class Fixed(Policy):
    """Policy "fixed": every chunk counts, in one encoding.

    Attributes:
        encoding: f32, f16 or int8.
    """

    name: ClassVar[str] = "fixed"
    feedback: ClassVar[bool | None] = False

    encoding: str = "f32"

    def plan(self, context: PlanContext) -> TransferPlan:
        """Make one region over the whole bucket with bound 0, averaged."""
        scale = 1.0 / context.world_size
        whole = TransferPlan.whole(context.elements, scale=scale, seed=context.seed)
        return replace(whole, encoding=self.encoding)


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Meet the other ranks and set all contestants up.

    Args:
        config: rank, store (host and port), line (descriptor of the start line's memory), recipe,
            entries.
    """
    recipe = Recipe(**config["recipe"])
    rank: TrainingRank[Trainee] = TrainingRank(config, recipe.ranks, _GROUP_SECONDS, tell)
    text = load()
    for each in config["entries"]:
        entry = Entry(**each)
        rank.trainees[entry.name] = Trainee(entry, recipe, text, rank.rank, rank.start_line)
    model = rank.trainees["exact"].model
    return {"parameters": model.parameter_count}, rank.commands


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
