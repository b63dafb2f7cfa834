"""What the tests of the engine's parts share: units of time, and a plan with its chunks."""

from typing import Any

import _parts

from gradwire._engine import Plan

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

CHUNK = 100  # elements
DATAGRAM = 28 + 4 * CHUNK  # bytes


def plan_of(*regions: tuple[int, float], **options: Any) -> tuple[Plan, _parts.Grid]:
    """A plan with regions of (chunks, bound), and its grid with one aggregator."""
    ranges = []
    start = 0
    for chunks, bound in regions:
        ranges.append((start, chunks * CHUNK, bound))
        start += chunks * CHUNK
    plan = Plan(elements=start, regions=ranges, **options)
    return plan, _parts.Grid(plan, DATAGRAM, 1)
