"""What a scenario must show, and the map that its page may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.lab.scenario.reader import MISSING, ScenarioError, key

__all__ = ["LIMIT", "QUANTITIES", "Map", "Mark"]

LIMIT = "limit"
"""In a mark: the physical limit of the cell in place of a contestant."""

QUANTITIES = (
    "time_median",
    "time_mean",
    "time_p99",
    "time_max",
    "throughput",
    "steps_per_s",
    "job_time",
    "rival_goodput",
    "final_loss",
)


@dataclass(frozen=True)
class Mark:
    """Something that the scenario must show: a quantity, beside another one."""

    text: str = key(MISSING, "what is wanted, in words")
    contestant: str = key(MISSING, "whose quantity")
    quantity: str = key("time_median", "which", choices=QUANTITIES)
    over: tuple[str, ...] = key(
        (), 'contestants that it is divided by, or ["limit"]; none: the quantity itself'
    )
    pick: str = key(
        "best", "which of several in `over`: the best, or the worst", choices=["best", "worst"]
    )
    inverse: bool = key(False, "the other one divided by it: the speed-up, where it is a time")
    over_cell: dict[str, Any] = key(
        {}, "divide by the same contestant's in this cell: axis = label"
    )
    where: dict[str, Any] = key({}, "only in cells with these labels: axis = [labels]")
    at_most: float | None = key(None, "the quotient wanted")
    at_least: float | None = key(None, "the quotient wanted")
    share_of_cap: float | None = key(
        None, "at least this share of what the round-trip and byte formulas allow over fixed bounds"
    )
    plus_rtts: float = key(0.0, "round-trip times allowed beside at_most × the limit", low=0.0)
    scope: str = key(
        "every",
        "of which cells: every one, their mean, or the one largest",
        choices=["every", "mean", "max"],
    )

    def __post_init__(self) -> None:
        wanted = [self.at_most, self.at_least, self.share_of_cap]
        if sum(value is not None for value in wanted) != 1:
            raise ScenarioError("one of at_most, at_least and share_of_cap is wanted")
        if self.plus_rtts and self.over != (LIMIT,):
            raise ScenarioError(f'plus_rtts={self.plus_rtts!r}: only with over=["limit"]')


@dataclass(frozen=True)
class Map:
    """A map of a grid: each cell's tail over the quiet median."""

    rows: str = key("", "axis of the rows; none: no map")
    columns: str = key("", "axis of the columns")
    quiet: str = key("", "label on the axis of the rows of the cells without bursts")
