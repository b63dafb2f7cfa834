"""What the demo does: who takes part, with which model, for how long."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        name: what the JSON calls it.
        label: what people read.
        policy: of gradwire; None for DDP's own all-reduce on Gloo.
        options: further keyword arguments of `gradwire.attach`.
    """

    name: str
    label: str
    policy: str | None
    options: Mapping[str, Any] = field(default_factory=dict)


GLOO = Entry("gloo", "Gloo over TCP", None)
RELIABLE = Entry("reliable", "gradwire reliable", "reliable")
DBLP = Entry("dblp", "gradwire dblp", "dblp")
ADAPTIVE = Entry("adaptive", "gradwire adaptive", "adaptive")
ENTRIES = (GLOO, RELIABLE, DBLP, ADAPTIVE)
"""In the order in which they take turns."""

TAIL_STEPS = 300
"""A 99th percentile of fewer steps is not given."""


@dataclass(frozen=True)
class Scenario:
    """One demo.

    Attributes:
        network: name of the standard network.
        entries: the contestants, in the order of their turns.
        seconds: after the start no turn begins that is expected to end later than this; the last
            turns are shorter to fit.
        steps: of each contestant, at most.
        block: steps of one turn.
        warm_up: steps at the start of each turn that train but are not timed: what an idle
            connection has forgotten is no cost of training.
        ranks: processes, one on each host.
        batch: samples of each rank and step.
        validation: samples of each rank after each turn.
        learning_rate: of AdamW, reached after ``rise`` steps and then constant.
        rise: steps over which the learning rate rises from nothing.
        clip: largest norm of an averaged gradient.
        seed: of the initial weights and of the order of the data.
        context, width, layers, heads: the model's, see `gradwire_lab.training.model.Shape`.
        drop_rate: on loopback, the share of gradwire's packets that is dropped on arrival.
        drop_burst: on loopback, the mean length of a run of dropped packets.
    """

    network: str = "A"
    entries: tuple[Entry, ...] = ENTRIES
    seconds: float = 150.0
    steps: int = 400
    block: int = 20
    warm_up: int = 2
    ranks: int = 4
    batch: int = 4
    validation: int = 16
    learning_rate: float = 1e-3
    rise: int = 20
    clip: float = 1.0
    seed: int = 1
    context: int = 64
    width: int = 208
    layers: int = 4
    heads: int = 4
    drop_rate: float = 0.02
    drop_burst: float = 8.0

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: names the field and what is allowed.
        """
        if not self.entries or len({entry.name for entry in self.entries}) != len(self.entries):
            raise ValueError("entries: contestants with different names")
        for name in ("seconds", "steps", "block", "ranks", "batch", "validation"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
        if not 0 <= self.warm_up < self.block:
            raise ValueError(f"warm_up={self.warm_up}: fewer steps than a block of {self.block}")
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: {self.heads} heads must divide it")

    def as_json(self) -> dict[str, Any]:
        """The scenario as plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Scenario:
        """What `as_json` was made from."""
        entries = tuple(Entry(**entry) for entry in values["entries"])
        return Scenario(**{**values, "entries": entries})


def standard(network: str, entries: tuple[Entry, ...] = ENTRIES) -> Scenario:
    """The demo as it is run if nothing else is asked for; slower networks get shorter turns."""
    return Scenario(network=network, entries=entries, block=20 if network == "A" else 10)


def quick(network: str, entries: tuple[Entry, ...] = ENTRIES) -> Scenario:
    """A demo of a few steps, to see that everything works."""
    return Scenario(network=network, entries=entries, seconds=22.0, steps=8, block=4, warm_up=1)
