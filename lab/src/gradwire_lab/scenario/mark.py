"""A mark says what a scenario must show; its page may have a map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire_lab.scenario.reader import MISSING, ScenarioError, key

__all__ = ["LIMIT", "P99_SAMPLES", "QUANTITIES", "SCOPES", "TIMES", "Map", "Mark"]

LIMIT = "limit"
"""Name that stands in a mark for the physical limit of the cell in place of a contestant."""

TIMES = ("time_median", "time_mean", "time_p99", "time_max")
LIMITED = (*TIMES, "goodput")
"""Quantities that have a physical limit.

It is a cell's least time, or the rate of whole gradients in that time, headers counted.
"""

P99_SAMPLES = 300
"""A 99th percentile of fewer samples is not given."""

OF_SEEDS = ("final_loss",)
"""Quantities of which each seed has one."""

QUANTITIES = {
    "time_median": "median_s",
    "time_mean": "mean_s",
    "time_p99": "p99_s",
    "time_max": "max_s",
    "throughput": "throughput_bps",
    "goodput": "goodput_bps",
    "steps_per_s": "steps_per_s",
    "job_time": "job_s",
    "rival_goodput": "rival_goodput_bps",
    "final_loss": "final_loss",
    "time_to_loss": "time_to_loss_s",
}
"""What marks compare, and its name among `gradwire_lab.run.model.Quantities`."""

SCOPES = {"every": "every cell; the worst", "mean": "mean of cells", "max": "largest cell"}
"""Of which cells a mark's value is, and how tables put it."""


@dataclass(frozen=True)
class Mark:
    """A mark is a quantity that the scenario must show, beside another one."""

    text: str = key(MISSING, "what has to hold, in words", line=True)
    contestant: str = key(MISSING, "whose quantity")
    quantity: str = key("time_median", "which", choices=[*QUANTITIES])
    over: tuple[str, ...] = key(
        (), 'contestants that it is divided by, or ["limit"]; none: the quantity itself'
    )
    pick: str = key(
        "best", "which of several in `over`: the best, or the worst", choices=["best", "worst"]
    )
    difference: bool = key(
        False, "the one in `over` taken from it, seed by seed, instead of a quotient"
    )
    inverse: bool = key(False, "the other one divided by it: the speed-up, where it is a time")
    over_cell: dict[str, Any] = key(
        {}, "divide by the same contestant's in this cell: axis = label"
    )
    where: dict[str, Any] = key({}, "only in cells with these labels: axis = [labels]")
    at_most: float | None = key(None, "the largest quotient that meets it", above=0.0)
    at_least: float | None = key(None, "the smallest quotient that meets it", above=0.0)
    share_of_cap: float | None = key(
        None,
        "at least this share of what the round-trip and byte formulas allow over fixed bounds",
        above=0.0,
    )
    within: float | None = key(
        None,
        "of a difference: its 90 % interval over seeds must lie from minus this to this",
        above=0.0,
    )
    plus_rtts: float = key(0.0, "round-trip times allowed beside at_most × the limit", low=0.0)
    scope: str = key(
        "every",
        "of which cells: every one, their mean, or the one largest",
        choices=[*SCOPES],
    )

    def __post_init__(self) -> None:
        wanted = [self.at_most, self.at_least, self.share_of_cap, self.within]
        if sum(value is not None for value in wanted) != 1:
            raise ScenarioError("one of at_most, at_least, share_of_cap and within is needed")
        if self.difference or self.within is not None:
            self._check_difference()
        if self.contestant == LIMIT or self.contestant in self.over:
            raise ScenarioError(
                f"contestant={self.contestant!r} over {list(self.over)!r}: a contestant is "
                "needed, and others in over"
            )
        if self.over and self.over_cell:
            raise ScenarioError("over and over_cell: one of them is allowed")
        if LIMIT in self.over and (len(self.over) > 1 or self.quantity not in LIMITED):
            raise ScenarioError(
                f"over={list(self.over)!r} with quantity={self.quantity!r}: {LIMIT!r} stands "
                f"alone, for one of {', '.join(LIMITED)}"
            )
        if self.plus_rtts and (self.over != (LIMIT,) or self.quantity not in TIMES):
            raise ScenarioError(f'plus_rtts={self.plus_rtts!r}: only of a time with over=["limit"]')
        if self.share_of_cap is not None and not (
            len(self.over) == 1
            and self.over != (LIMIT,)
            and self.inverse
            and self.quantity in TIMES
        ):
            raise ScenarioError(
                f"share_of_cap={self.share_of_cap!r}: takes one contestant in over, inverse=true "
                f"and a time: one of {', '.join(TIMES)}"
            )

    def _check_difference(self) -> None:
        if not self.difference or self.within is None:
            raise ScenarioError(
                f"difference={str(self.difference).lower()} with within={self.within!r}: each "
                "takes the other"
            )
        alone = len(self.over) == 1 and self.over != (LIMIT,) and not self.inverse
        if not alone or self.quantity not in OF_SEEDS or self.scope != "every":
            raise ScenarioError(
                f"difference=true with quantity={self.quantity!r}, over={list(self.over)!r}: takes "
                f"{' or '.join(OF_SEEDS)}, one contestant in over, scope='every' and no inverse"
            )


@dataclass(frozen=True)
class Map:
    """A map of a grid shows each cell's tail over the quiet median."""

    rows: str = key("", "axis of the rows; none: no map")
    columns: str = key("", "axis of the columns")
    quiet: str = key("", "label on the axis of the rows of the cells without bursts")

    def check(self, labels: Mapping[str, str]) -> None:
        """Check that a grid has its axes.

        Args:
            labels: the labels of one cell, by axis.
        """
        for name in ("rows", "columns"):
            axis = getattr(self, name)
            if (axis or self.rows or self.columns or self.quiet) and axis not in labels:
                raise ScenarioError(f"map.{name}={axis!r}: is no axis; axes are {[*labels]}")
        if self.rows and self.rows == self.columns:
            raise ScenarioError(f"map.columns={self.columns!r}: another axis than rows is needed")
