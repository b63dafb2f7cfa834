"""Scenario files, their short form, and the cells of their grids."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError
from gradwire.lab.scenario.reader import ScenarioError, build
from gradwire.lab.scenario.schema import Scenario

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Cell", "Experiment", "load"]

LABEL = "label"


@dataclass(frozen=True)
class Cell:
    """One point of a scenario's grid.

    Attributes:
        labels: the label of each axis, by the axis' name.
        scenario: with this cell's values; the contestants that this gradwire lacks left out.
    """

    labels: Mapping[str, str]
    scenario: Scenario

    @property
    def name(self) -> str:
        """The labels in one line."""
        return ", ".join(self.labels.values()) or "the only cell"


@dataclass(frozen=True)
class Experiment:
    """A scenario file.

    Attributes:
        path: where it was read.
        quick: whether its short form was taken.
        cells: in the order in which they run.
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
        """The scenario of the first cell: name, title and marks are the same in all."""
        return self.cells[0].scenario


def load(path: Path, *, quick: bool = False) -> Experiment:
    """Read and check a scenario file.

    Args:
        path: of the TOML file.
        quick: take its short form: its table ``quick`` is merged over the others, and of the
            contestants only those in ``quick.only`` take part, if there is such a list.

    Raises:
        ScenarioError: a sentence that names file, key, value and what is allowed.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: not TOML: {error}") from None
    short = raw.pop("quick", {})
    if not isinstance(short, dict):
        raise ScenarioError(f"{path}: quick={short!r}: a table of keys is expected")
    if quick:
        raw = _short(raw, dict(short), path)
    else:  # a short form that cannot run is an error all the same
        _expand(_short(raw, dict(short), path), path)
    cells = _expand(raw, path)
    left_out = _left_out(cells[0].scenario)
    cells = tuple(replace(cell, scenario=_without(cell.scenario, left_out)) for cell in cells)
    for axis in (cells[0].scenario.map.rows, cells[0].scenario.map.columns):
        if axis and axis not in cells[0].labels:
            raise ScenarioError(f"{path}: map: {axis!r} is no axis; axes are {[*cells[0].labels]}")
    if cells[0].scenario.name != path.stem:
        raise ScenarioError(f"{path}: name={cells[0].scenario.name!r}: must be {path.stem!r}")
    return Experiment(path, quick, cells, left_out, raw)


def _short(raw: Mapping[str, Any], short: dict[str, Any], path: Path) -> dict[str, Any]:
    only = short.pop("only", None)
    merged = _merge(raw, short)
    if "grid" in short:
        merged["grid"] = short["grid"]
    if only is not None:
        known = [each.get("name") for each in raw.get("contestants", ())]
        for name in only if isinstance(only, list) else [only]:
            if name not in known:
                raise ScenarioError(f"{path}: quick.only={name!r}: contestants are {known}")
        merged["contestants"] = [each for each in raw["contestants"] if each["name"] in only]
        merged["marks"] = [
            mark
            for mark in merged.get("marks", ())
            if {mark.get("contestant"), *mark.get("over", ())} <= {*only, "limit"}
        ]
    return merged


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        known = merged.get(name)
        both = isinstance(value, dict) and isinstance(known, dict)
        merged[name] = _merge(known, value) if both else value  # type: ignore[arg-type]
    return merged


def _expand(raw: Mapping[str, Any], path: Path) -> tuple[Cell, ...]:
    tables = dict(raw)
    grid = tables.pop("grid", {})
    if not isinstance(grid, dict):
        raise ScenarioError(f"{path}: grid={grid!r}: a table of axes is expected")
    axes = [_axis(name, values, path) for name, values in grid.items()]
    cells = []
    for point in itertools.product(*axes):
        labels, changed = {}, tables
        for axis, (label, changes) in zip(grid, point, strict=True):
            labels[axis] = label
            for place, value in changes.items():
                changed = _set(changed, place, value, f"{path}: grid.{axis}")
        scenario = build(Scenario, changed, f"{path}: scenario")
        try:
            scenario.check_marks()
        except ScenarioError as error:
            raise ScenarioError(f"{path}: {error}") from None
        cells.append(Cell(labels, scenario))
    return tuple(cells)


def _axis(name: str, values: Any, path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The points of an axis: a label, and what is set by dotted key."""
    if not isinstance(values, list) or not values:
        raise ScenarioError(f"{path}: grid.{name}={values!r}: a list of values is expected")
    points = []
    for value in values:
        if isinstance(value, dict):
            changes = dict(value)
            label = str(changes.pop(LABEL, ", ".join(f"{k}={v}" for k, v in changes.items())))
        else:
            changes = {name: value}
            label = f"{name.rpartition('.')[2]} {value:g}" if _number(value) else str(value)
        points.append((label, changes))
    if len({label for label, _ in points}) != len(points):
        raise ScenarioError(f"{path}: grid.{name}: the labels of its points must differ")
    return points


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _set(tables: Mapping[str, Any], place: str, value: Any, where: str) -> dict[str, Any]:
    """The tables with one dotted key set; a number in it counts through a list of tables."""
    head, _, rest = place.partition(".")
    changed = dict(tables)
    if not rest:
        changed[head] = value
        return changed
    inner = changed.get(head, {})
    number, _, deeper = rest.partition(".")
    if isinstance(inner, list):
        if not number.isdigit() or int(number) >= len(inner) or not deeper:
            raise ScenarioError(f"{where}: {place!r}: {head} is a list of {len(inner)} tables")
        inner = list(inner)
        inner[int(number)] = _set(inner[int(number)], deeper, value, where)
        changed[head] = inner
    else:
        changed[head] = _set(inner, rest, value, where)
    return changed


def _left_out(scenario: Scenario) -> dict[str, str]:
    return dict(_refused(scenario))


def _refused(scenario: Scenario) -> Iterator[tuple[str, str]]:
    for each in scenario.contestants:
        try:
            each.check_options(scenario.work.kind)
        except ConfigError as error:
            yield each.name, str(error)


def _without(scenario: Scenario, left_out: Mapping[str, str]) -> Scenario:
    stay = tuple(each for each in scenario.contestants if each.name not in left_out)
    if not stay:
        raise ScenarioError(f"{scenario.name}: no contestant is left: {dict(left_out)}")
    return replace(scenario, contestants=stay)  # marks that miss one are told as not measured
