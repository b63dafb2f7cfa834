"""Cross traffic is tuned for a tail: bursts get longer until a contestant's times show it."""

from __future__ import annotations

import math
from typing import Any

from gradwire_lab.contest.measure import percentile
from gradwire_lab.contest.race import Race
from gradwire_lab.run.ground import Ground
from gradwire_lab.scenario.schema import Scenario

__all__ = ["next_length", "tune"]

_CLOSE = 0.1
"""A ratio within this share of the one wanted is near enough."""


def tune(scenario: Scenario, ground: Ground, race: Race) -> dict[str, Any]:
    """Find the bursts' length for the wanted ratio, by doubling and halving, and keep it.

    Returns:
        The ratio wanted, the rounds of an attempt, the attempts (length in seconds, ratio), and
        the length that was kept: that of the attempt nearest to the wanted ratio.
    """
    wanted, period = scenario.tail.ratio, scenario.bursts[0].period_s
    longest = 0.9 * period
    low, high = 0.0, math.inf
    length = min(scenario.bursts[0].on_s, longest)
    attempts: list[tuple[float, float]] = []
    for _ in range(scenario.tail.tries):
        ground.burst(length)
        ratio = _ratio(scenario, ground, race)
        attempts.append((length, ratio))
        if abs(ratio - wanted) <= _CLOSE * wanted or (ratio < wanted and length >= longest):
            break
        low, high, length = next_length(low, high, length, ratio < wanted)
        length = min(length, longest)
    taken, reached = min(attempts, key=lambda each: abs(each[1] - wanted))
    ground.burst(taken)
    return {
        "wanted": wanted,
        "rounds": scenario.tail.rounds,
        "reached": reached,
        "on_s": taken,
        "attempts": attempts,
    }


def next_length(
    low: float, high: float, length: float, too_short: bool
) -> tuple[float, float, float]:
    """Return the new limits of the length, and the next to try: doubled until one is too long."""
    if too_short:
        low = length
    else:
        high = length
    return low, high, 2 * low if math.isinf(high) else (low + high) / 2


def _ratio(scenario: Scenario, ground: Ground, race: Race) -> float:
    rounds = race.run(
        scenario.tail.rounds,
        block=scenario.tail.rounds,
        warm_up=scenario.work.warm_up,
        bursts=ground.traffic[0],
        only=[scenario.tail.contestant],
        rotate=True,
    )[scenario.tail.contestant]
    times = [each.seconds for each in rounds]
    return percentile(times, 99) / percentile(times, 50)
