"""A scenario file is loaded with the cells of its grid."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.grid import points
from gradwire_lab.scenario.idle import check_idle
from gradwire_lab.scenario.measurable import check_measurable
from gradwire_lab.scenario.reader import ScenarioError, build
from gradwire_lab.scenario.schema import Cell, Scenario
from gradwire_lab.scenario.short import merge_short

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Cell", "Experiment", "load"]

_DEEPEST = 16


@dataclass(frozen=True)
class Experiment:
    """An experiment is a scenario file.

    Attributes:
        path: where it was read.
        quick: whether its short form was taken.
        cells: the cells in the order in which they run.
        left_out: why, by the name of an optional contestant that takes no part.
        raw: the tables as they were read, the short form merged in.
    """

    path: Path
    quick: bool
    cells: tuple[Cell, ...]
    left_out: Mapping[str, str]
    raw: Mapping[str, Any]

    @property
    def first(self) -> Scenario:
        return self.cells[0].scenario

    @property
    def title(self) -> str:
        """Return what it measures; the file's title tells of its whole form alone."""
        if not self.quick:
            return self.first.title
        workers = sorted({cell.scenario.topology.workers for cell in self.cells})
        hosts = f"{' or '.join(map(str, workers))} worker{'s' if workers != [1] else ''}"
        cells = "; ".join(cell.name for cell in self.cells)
        return f"Short form of {self.first.name}: {hosts}; {cells}"


def load(path: Path, *, quick: bool = False) -> Experiment:
    """Read and check a scenario file, its short form too.

    Args:
        quick: take its short form: its table ``quick`` is merged over the others, and of the
            contestants only those in ``quick.only`` take part, if there is such a list.

    Raises:
        ScenarioError: a sentence that names file, key, value and what is allowed.
    """
    raw = _read(path)
    _check_values(raw, path)
    short = raw.pop("quick", {})
    if not isinstance(short, dict):
        raise ScenarioError(f"{path}: quick={short!r}: a table of keys is expected")
    cells = _expand(raw, str(path), path.stem)
    merged = merge_short(raw, short, str(path))
    # The short form is checked in any case, also where the whole one is asked for.
    short_cells = _expand(merged, f"{path}: short form", path.stem) if short else cells
    try:
        check_measurable(cells)
        check_idle((*cells, *short_cells))
    except ScenarioError as error:
        raise ScenarioError(f"{path}: {error}") from None
    if quick:
        cells = short_cells
    left_out = {
        each.name: reason
        for cell in cells
        for each in cell.scenario.contestants
        if (reason := _lacking(each, cell.scenario)) is not None
    }
    cells = tuple(replace(cell, scenario=_without(cell, left_out, path)) for cell in cells)
    return Experiment(path, quick, cells, left_out, merged if quick else raw)


def _lacking(contestant: Contestant, scenario: Scenario) -> str | None:
    return contestant.lacking(scenario.work, scenario.model, scenario.topology.servers)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    # Bad TOML, bad UTF-8, or a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ScenarioError(f"{path}: not TOML: {words}") from None


def _check_values(raw: Mapping[str, Any], path: Path) -> None:
    """Check the values as TOML promises them: numbers of 64 bits, and tables not too deep."""
    waiting: list[tuple[str, Any, int]] = [(name, value, 1) for name, value in raw.items()]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise ScenarioError(f"{path}: {name}: tables in tables, {_DEEPEST} deep, are allowed")
        if isinstance(value, dict):
            waiting += [(f"{name}.{key}", each, depth + 1) for key, each in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{name}[{n}]", each, depth + 1) for n, each in enumerate(value)]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ScenarioError(f"{path}: {name}: a whole number of 64 bits is allowed")


def _expand(raw: Mapping[str, Any], where: str, stem: str) -> tuple[Cell, ...]:
    cells: dict[str, Cell] = {}
    for labels, tables in points(raw, where):
        cell = Cell(labels, build(Scenario, tables, f"{where}:"))
        if cell.name in cells:
            raise ScenarioError(
                f"{where}: grid: two cells are called {cell.name!r}; other labels are needed"
            )
        cells[cell.name] = cell
        try:
            cell.scenario.check_name(stem)
            cell.scenario.check_marks()
            cell.scenario.map.check(cell.labels)
        except ScenarioError as error:
            raise ScenarioError(f"{where}: {error}") from None
    made = tuple(cells.values())
    quiet = made[0].scenario.map
    if quiet.rows and quiet.quiet not in {cell.labels[quiet.rows] for cell in made}:
        raise ScenarioError(
            f"{where}: map.quiet={quiet.quiet!r}: labels of {quiet.rows!r} are "
            f"{list(dict.fromkeys(cell.labels[quiet.rows] for cell in made))}"
        )
    return made


def _without(cell: Cell, left_out: Mapping[str, str], path: Path) -> Scenario:
    scenario = cell.scenario
    stay = tuple(each for each in scenario.contestants if each.name not in left_out)
    if not stay:
        raise ScenarioError(f"{path}: contestants: none is left: {dict(left_out)}")
    try:
        return replace(scenario, contestants=stay)  # marks that lack one count as not measured
    except ScenarioError as error:
        raise ScenarioError(f"{path}: without {[*left_out]}: {error}") from None
