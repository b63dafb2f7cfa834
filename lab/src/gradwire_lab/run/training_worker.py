"""This program is one rank of a training scenario.

Its argument is the descriptor of a socket to the parent, whose commands it obeys, see
`gradwire_lab.contest.rank_program`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gradwire.server import open_store
from gradwire.training.configure import configure
from gradwire_lab.contest.rank_program import Commands, obey
from gradwire_lab.contest.ranks import Message
from gradwire_lab.contest.serving import ServerThread
from gradwire_lab.run.trainee import LabTrainee
from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.reader import build
from gradwire_lab.scenario.work import Model
from gradwire_lab.training.rank import TrainingRank
from gradwire_lab.training.recipe import Recipe
from gradwire_lab.training.text import load

_GROUP_SECONDS = 300.0


def _contestants(config: Message) -> list[Contestant]:
    return [build(Contestant, fields, "contestants") for fields in config["contestants"]]


class Worker(TrainingRank[LabTrainee]):
    """A worker is a rank that trains all contestants."""

    def __init__(self, config: Message, tell: Callable[[Message], None]) -> None:
        """Meet the other ranks and set all contestants up.

        Args:
            config: contestants, model, recipe, steps, trials, rank, store (host and
                port), line (descriptor of the start line's memory).
            tell: a function that is called with each step of rank 0.
        """
        recipe = Recipe(**config["recipe"])
        super().__init__(config, recipe.ranks, _GROUP_SECONDS, tell)
        text = load()
        model = Model(**config["model"])
        for each in _contestants(config):
            try:
                self.trainees[each.name] = LabTrainee(
                    each,
                    model,
                    recipe,
                    text,
                    self.rank,
                    self.start_line,
                    config["steps"],
                    config["trials"],
                )
            except Exception as error:
                raise RuntimeError(f"{each.name}: {error}") from error
        first = next(iter(self.trainees.values()))
        self.facts = {"parameters": first.model.parameter_count, "characters": len(text.train)}

    def block(
        self, contestant: str, *arguments: Any, compute_s: float = 0.0, **options: Any
    ) -> dict[str, Any]:
        """Train one contestant at a pace."""
        self.trainees[contestant].pace.compute_s = compute_s
        return super().block(contestant, *arguments, **options)


class Server:
    """A server is a rank after the workers' that sums for them and trains nothing.

    It serves all contestants of gradwire's together, since they share a group and so an engine.
    """

    def __init__(self, config: Message) -> None:
        """Serve the job from now on.

        Args:
            config: the configuration, as for `Worker`.
        """
        workers = config["recipe"]["ranks"]
        ours = [each for each in _contestants(config) if each.transport == "gradwire"]
        self._thread: ServerThread | None = None
        if ours:
            settings = configure(ours[0].policy, ours[0].options)[1]
            self._thread = ServerThread(
                open_store(f"{config['store_host']}:{config['store_port']}", _GROUP_SECONDS),
                workers=workers,
                index=config["rank"] - workers,
                settings=settings,
            )

    def look(self, **_: Any) -> dict[str, Any]:
        """Check that the server still serves, whatever the command to the workers is."""
        if self._thread is not None:
            self._thread.check()
        return {}

    def close(self) -> dict[str, Any]:
        if self._thread is not None:
            self._thread.close()
        return {}


def set_up(config: Message, tell: Callable[[Message], None]) -> tuple[Message, Commands]:
    if config["rank"] >= config["recipe"]["ranks"]:
        server = Server(config)
        return {}, {"block": server.look, "fingerprints": server.look, "close": server.close}
    worker = Worker(config, tell)
    return worker.facts, worker.commands


if __name__ == "__main__":
    obey(int(sys.argv[1]), set_up)
