"""This program is one rank of the demo.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`. During a block it also reports each step as it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gradwire_lab.contest.rank_program import Commands, obey
from gradwire_lab.contest.ranks import Message
from gradwire_lab.demo.scenario import Scenario
from gradwire_lab.network.kernel import die_with_parent
from gradwire_lab.scenario.reader import build
from gradwire_lab.training.rank import TrainingRank
from gradwire_lab.training.text import load
from gradwire_lab.training.trainee import Trainee

_GROUP_SECONDS = 60.0


class Worker(TrainingRank[Trainee]):
    """A worker is a rank that trains all contestants."""

    def __init__(self, config: Message, tell: Callable[[Message], None]) -> None:
        """Meet the other ranks and set all contestants up.

        Args:
            config: scenario, rank, store (host and port), lossy (whether gradwire drops some of
                its packets), line (descriptor of the start line's memory).
        """
        scenario = build(Scenario, config["scenario"], "scenario")
        super().__init__(config, scenario.ranks, _GROUP_SECONDS, tell)
        text = load()
        for entry in scenario.entries:
            try:
                trainee = Trainee(entry, scenario, text, self.rank, self.start_line)
                if config["lossy"]:
                    trainee.lose(scenario.drop_rate, scenario.drop_burst)
                self.trainees[entry.name] = trainee
            except Exception as error:
                raise RuntimeError(f"{entry.label}: {error}") from error
        self.facts = {
            "parameters": next(iter(self.trainees.values())).model.parameter_count,
            "characters": len(text.train),
            "files": text.files,
        }

    def block(self, contestant: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Train one contestant; its answer has the phase detector's verdict, too."""
        answer = super().block(contestant, *arguments, **options)
        return {**answer, "verdict": self.trainees[contestant].verdict}


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    """Set the rank up; it dies with the process that the configuration names, if it is not 0."""
    if config["parent"]:
        die_with_parent(config["parent"])
    worker = Worker(config, tell)
    return worker.facts, worker.commands


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
