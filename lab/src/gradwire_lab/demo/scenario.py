"""A demo's scenario says who takes part, on which network, and for how long."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire_lab.training.recipe import Entry, Recipe

GLOO = Entry("gloo", "Gloo f32", None)
GLOO_FP16 = Entry("gloo-fp16", "Gloo fp16", None, hook="fp16")
RELIABLE = Entry("reliable", "gradwire reliable", "reliable")
DBLP = Entry("dblp", "gradwire dblp", "dblp")
ADAPTIVE = Entry("adaptive", "gradwire adaptive", "adaptive")
ENTRIES = (GLOO, GLOO_FP16, RELIABLE, DBLP, ADAPTIVE)
"""The contestants, in the order in which they take turns."""

TAIL_STEPS = 300
"""A 99th percentile of fewer steps is not given."""


@dataclass(frozen=True)
class Scenario(Recipe):
    """A scenario is a training, and how its contestants take turns.

    Attributes:
        network: name of the standard network.
        entries: the contestants, in the order of their turns.
        seconds: after the start no turn begins that is expected to end later than this; the last
            turns are shorter to fit.
        steps: the most steps of each contestant.
        block: steps of one turn.
        warm_up: steps at the start of each turn that train but are not timed: what an idle
            connection has forgotten is no cost of training.
        drop_rate: on loopback, the share of gradwire's packets that is dropped on arrival.
        drop_burst: on loopback, the mean length of a run of dropped packets.
    """

    network: str = "A"
    entries: tuple[Entry, ...] = ENTRIES
    seconds: float = 150.0
    steps: int = 400
    block: int = 20
    warm_up: int = 2
    drop_rate: float = 0.02
    drop_burst: float = 8.0

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: names the field and what is allowed.
        """
        super().__post_init__()
        if not self.entries or len({entry.name for entry in self.entries}) != len(self.entries):
            raise ValueError("entries: contestants with different names")
        self.check_positive("seconds", "steps", "block")
        if not 0 <= self.warm_up < self.block:
            raise ValueError(f"warm_up={self.warm_up}: fewer steps than a block of {self.block}")

    def as_json(self) -> dict[str, Any]:
        """Return the scenario as plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Scenario:
        """Return the scenario that `as_json` was made from."""
        entries = tuple(Entry(**entry) for entry in values["entries"])
        return Scenario(**{**values, "entries": entries})


def standard(network: str, entries: tuple[Entry, ...] = ENTRIES) -> Scenario:
    """Return the default demo of a network; a slower network gets shorter turns."""
    return Scenario(network=network, entries=entries, block=20 if network == "A" else 10)


def quick(network: str, entries: tuple[Entry, ...] = ENTRIES) -> Scenario:
    """Return a demo of a few steps, to see that everything works."""
    return Scenario(network=network, entries=entries, seconds=22.0, steps=8, block=4, warm_up=1)
