"""The agenda of a run lists the cells and seeds to run, those left, and how long they take."""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gradwire_lab.scenario.load import Cell, Experiment
from gradwire_lab.scenario.reader import ScenarioError
from gradwire_lab.scenario.work import LARGEST_SEED

__all__ = ["Agenda", "Key", "choose_cells", "choose_seeds", "duration", "time_left"]

Key = tuple[str, int]
"""A key names a run by its cell's name and its seed."""


@dataclass(frozen=True)
class Agenda:
    """An agenda holds the runs that were asked for.

    Attributes:
        cells: the cells in the order in which they run.
        seeds: the seeds in their order; each runs for all cells before the next.
    """

    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]

    @property
    def all(self) -> list[tuple[Cell, int]]:
        """Return every run, in order."""
        return [(cell, seed) for seed in self.seeds for cell in self.cells]

    def due(self, done: Collection[Key]) -> list[tuple[Cell, int]]:
        """Return the runs that are not done, in order."""
        return [(cell, seed) for cell, seed in self.all if (cell.name, seed) not in done]

    def text(self, done: Collection[Key]) -> str:
        """Say how many are done."""
        count = len(self.all) - len(self.due(done))
        if len(self.seeds) == 1:
            return f"{count} of {len(self.cells)} cells were there"
        return (
            f"{count} of {len(self.all)} runs ({len(self.cells)} cells, {len(self.seeds)} seeds) "
            "were there"
        )


def choose_cells(experiment: Experiment, patterns: Sequence[str]) -> tuple[Cell, ...]:
    """Return the cells whose names hold one of the patterns, or match it as a shell pattern.

    Without a pattern all cells are returned.

    Raises:
        ScenarioError: a pattern that matches none.
    """
    if not patterns:
        return experiment.cells
    chosen: set[str] = set()
    for pattern in patterns:
        found = {
            cell.name
            for cell in experiment.cells
            if pattern and (pattern in cell.name or fnmatch.fnmatchcase(cell.name, pattern))
        }
        if not found:
            names = "; ".join(cell.name for cell in experiment.cells)
            raise ScenarioError(
                f"{experiment.path}: --cells {pattern!r}: matches no cell; cells are {names}"
            )
        chosen |= found
    return tuple(cell for cell in experiment.cells if cell.name in chosen)


def choose_seeds(text: str) -> tuple[int, ...]:
    """Read seeds from a command line: "3" is 0, 1 and 2; "0,4" these two; "4," the one.

    Raises:
        ScenarioError: the text is none of these.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) > 1 and not words[-1]:
        words.pop()
    if all(word.isascii() and word.isdecimal() and len(word) < 12 for word in words):
        numbers = tuple(map(int, words))
        if "," not in text and 1 <= numbers[0] <= 1000:
            return tuple(range(numbers[0]))
        if "," in text and len(set(numbers)) == len(numbers) and max(numbers) <= LARGEST_SEED:
            return numbers
    raise ScenarioError(
        f"--seeds {text!r}: a number of seeds from 1 to 1000, or different seeds with commas "
        "(0,1 or 4,) are allowed"
    )


def time_left(due: Sequence[Key], took: Mapping[Key, float]) -> float | None:
    """Estimate the seconds that the due runs will take; None while no run is done.

    A run is taken to last as long as its cell did under other seeds, or else as long as the mean
    of all runs that are done.
    """
    if not took:
        return None
    mean = statistics.fmean(took.values())
    by_cell: dict[str, list[float]] = {}
    for (name, _), seconds in took.items():
        by_cell.setdefault(name, []).append(seconds)
    return sum(statistics.fmean(by_cell.get(name, [mean])) for name, _ in due)


def duration(seconds: float) -> str:
    """Say in words how long a time is."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
