"""A demo's scenario says who takes part, on which network, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire_lab.training.recipe import Entry, Recipe

GLOO = Entry("gloo", "Gloo f32", None)
GLOO_FP16 = Entry("gloo-fp16", "Gloo fp16", None, hook="fp16")
RELIABLE = Entry("reliable", "gradwire reliable", "reliable")
DBLP = Entry("dblp", "gradwire dblp", "dblp")
ADAPTIVE = Entry("adaptive", "gradwire adaptive", "adaptive")
ENTRIES = (GLOO, GLOO_FP16, RELIABLE, DBLP, ADAPTIVE)
"""The contestants, in the order in which they take turns."""

CASES = ("bursts", "far")
"""The cases of a demo, in their order."""

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
        round_trip_s: seconds of a round trip between any two hosts, beside what queues add. Where
            it is not 0, nothing bursts.
        loss: the share of the packets that such a path loses, each by itself.
        drop_rate: on loopback, the share of gradwire's packets that is dropped on arrival.
        drop_burst: on loopback, the mean length of a run of dropped packets.
    """

    network: str = "A"
    entries: tuple[Entry, ...] = ENTRIES
    seconds: float = 150.0
    steps: int = 400
    block: int = 20
    warm_up: int = 2
    round_trip_s: float = 0.0
    loss: float = 0.0
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

    @property
    def far(self) -> bool:
        """Whether the hosts are far from each other."""
        return self.round_trip_s > 0


def scenarios_of(
    cases: Sequence[str], network: str, only: Sequence[str], *, short: bool
) -> list[Scenario]:
    """Return the scenario of each case.

    Args:
        cases: those of `CASES` to take; none for both, of which the short form has the first only.
        network: name of the standard network of the first one.
        only: the contestants to take; none for all.
        short: whether a few steps are enough, to see that everything works.
    """
    entries = tuple(entry for entry in ENTRIES if not only or entry.name in only)
    scenarios = []
    if not cases or "bursts" in cases:
        scenarios.append((quick if short else standard)(network, entries))
    if "far" in cases or (not cases and not short and _far_entries(entries)):
        scenarios.append(far(entries))
    return scenarios


def standard(network: str, entries: tuple[Entry, ...] = ENTRIES) -> Scenario:
    """Return the default demo of a network; a slower network gets shorter turns."""
    return Scenario(network=network, entries=entries, block=20 if network == "A" else 10)


def quick(network: str, entries: tuple[Entry, ...] = ENTRIES) -> Scenario:
    """Return a demo of a few steps, to see that everything works."""
    return Scenario(network=network, entries=entries, seconds=22.0, steps=8, block=4, warm_up=1)


def far(entries: tuple[Entry, ...] = ENTRIES) -> Scenario:
    """Return the case of hosts far from each other, in which a step over TCP takes seconds."""
    return Scenario(
        entries=_far_entries(entries),
        seconds=65.0,
        steps=12,
        block=6,
        warm_up=1,
        round_trip_s=0.010,
        loss=0.01,
    )


def _far_entries(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return who takes part in few steps: Gloo in half precision only, its faster form."""
    return tuple(entry for entry in entries if entry in (GLOO_FP16, RELIABLE, ADAPTIVE))
