"""The demo runs blocks of steps in turn, until its time or its steps are used up."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire_lab.contest.measure import softnet_drops
from gradwire_lab.contest.ranks import RankError, Ranks
from gradwire_lab.demo.ground import Ground, open_ground
from gradwire_lab.demo.scenario import Scenario
from gradwire_lab.network.bursts import BurstRecord
from gradwire_lab.training import crew
from gradwire_lab.training.block import Block
from gradwire_lab.training.recipe import Entry

READY_SECONDS = 60.0
BLOCK_SECONDS = 90.0
CLOSE_SECONDS = 10.0
_LEAD_SECONDS = 0.02
_CAUTION = 0.9
_WORTH_WHILE = 3
"""The least timed steps of a last, shorter turn."""
_PHASE = 0.6
"""Blocks begin after this share of the bursts' period, behind a burst."""


@dataclass
class Outcome:
    """An outcome holds what the demo measured.

    Attributes:
        scenario: what was to be done.
        ground: where it ran; None if there was no ground yet.
        origin: when it began, in seconds of ``time.monotonic()``.
        facts: about model and text.
        blocks: the blocks in the order in which they were run.
        bursts: the bursts as they were sent.
        fingerprints: hashes of each contestant's weights, in rank order.
        network_drops: packets lost in the network, cross traffic included.
        softnet_drops: packets that this machine's processors dropped outside of any queue.
        error: why the demo ended early; None if it did not.
        details: what else is known about the error.
        late: whether it was that a rank was given no more time.
    """

    scenario: Scenario
    origin: float
    ground: Ground | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    bursts: list[BurstRecord] = field(default_factory=list)
    fingerprints: dict[str, list[str]] = field(default_factory=dict)
    network_drops: int = 0
    softnet_drops: int = 0
    error: str | None = None
    details: str = ""
    late: bool = False


class Audience:
    """An audience follows the demo's progress; this one ignores it."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def grounded(self, ground: Ground) -> None:
        """It is known where the demo runs."""

    def plan(self, steps: int) -> None:
        """Each contestant will do about so many steps."""

    def tick(self, entry: Entry, step: dict[str, Any]) -> None:
        """A contestant's rank 0 has done a step."""


def run(scenario: Scenario, audience: Audience) -> Outcome:
    """Run the demo; an error ends it, and is in the outcome."""
    outcome = Outcome(scenario, time.monotonic())
    try:
        with open_ground(scenario) as ground:
            outcome.ground = ground
            audience.grounded(ground)
            audience.stage("starting the ranks")
            with _start(ground, scenario) as ranks:
                outcome.facts = ranks.gather(time.monotonic() + READY_SECONDS)[0]
                ground.start_bursts()
                audience.stage("training in turn")
                before = softnet_drops()
                try:
                    train_in_turn(scenario, ranks, ground, outcome, audience)
                finally:
                    outcome.softnet_drops = softnet_drops() - before
                    if ground.traffic is not None:
                        outcome.bursts = ground.traffic.records()
                audience.stage("comparing the replicas")
                _close(ranks, ground, outcome)
    except (RankError, OSError) as error:
        outcome.error = str(error)
        outcome.details = getattr(error, "details", "")
        outcome.late = getattr(error, "late", False)
    return outcome


def _start(ground: Ground, scenario: Scenario) -> Ranks:
    """Start the ranks; their first answers are facts about model and text."""
    configs = [
        {
            "scenario": asdict(scenario),
            "rank": rank,
            "store_host": ground.store[0],
            "store_port": ground.store[1],
            "lossy": ground.reason is not None,
            "parent": ground.parent,
        }
        for rank in range(scenario.ranks)
    ]
    return crew.start(ground.spawn, "gradwire_lab.demo.worker", configs, scenario.ranks)


def train_in_turn(
    scenario: Scenario, ranks: Ranks, ground: Ground, outcome: Outcome, audience: Audience
) -> None:
    """Train all contestants, a turn each, until the steps or the time are used up."""
    done, slowest = 0, 0.0
    while done < scenario.steps:
        began = time.monotonic()
        left = outcome.origin + scenario.seconds - began
        room = int(left / slowest * _CAUTION) if slowest else scenario.block
        if done:
            audience.plan(min(scenario.steps, done + max(0, room)))
            if room < scenario.warm_up + _WORTH_WHILE:
                return
        steps = min(scenario.block, scenario.steps - done, room)
        for entry in scenario.entries:
            outcome.blocks.append(_block(scenario, ranks, ground, entry, steps, audience))
        done += steps
        slowest = max(slowest, (time.monotonic() - began) / steps)


def _block(
    scenario: Scenario,
    ranks: Ranks,
    ground: Ground,
    entry: Entry,
    steps: int,
    audience: Audience,
) -> Block:
    start = time.monotonic() + _LEAD_SECONDS
    if ground.traffic is not None:
        start = ground.traffic.next_phase(_PHASE * ground.traffic.burst.period, after=start)
    try:
        return crew.train(
            ranks,
            entry.name,
            steps,
            start,
            start + BLOCK_SECONDS,
            warm_up=min(scenario.warm_up, steps - 1),
            progress=lambda step: audience.tick(entry, step),
        )
    except RankError as error:
        raise RankError(f"{entry.label}: {error}", error.details, late=error.late) from error


def _close(ranks: Ranks, ground: Ground, outcome: Outcome) -> None:
    answers = ranks.ask({"command": "fingerprints"}, time.monotonic() + CLOSE_SECONDS)
    for entry in outcome.scenario.entries:
        outcome.fingerprints[entry.name] = [answer[entry.name] for answer in answers]
    outcome.network_drops = ground.dropped()
    ranks.ask({"command": "close"}, time.monotonic() + CLOSE_SECONDS)
