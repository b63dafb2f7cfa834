"""A grid has points on each axis, which set keys in a scenario's tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from gradwire_lab.scenario.reader import ScenarioError, is_line
from gradwire_lab.scenario.schema import Scenario

__all__ = ["MOST_CELLS", "points"]

LABEL = "label"
MOST_CELLS = 10_000
_SAME = ("name", "title", "published", "map", "marks", "work.seeds")
"""Keys that belong to the file, not to a cell; they are taken from the first cell."""

Point = tuple[dict[str, str], dict[str, Any]]


def points(raw: Mapping[str, Any], where: str) -> Iterator[Point]:
    """Yield the points of a grid: each axis' label, and the tables with the point's keys set.

    Args:
        where: the file, for errors.

    Raises:
        ScenarioError: the grid is none, or a key of it leads nowhere.
    """
    tables = dict(raw)
    grid = tables.pop("grid", {})
    if not isinstance(grid, dict):
        raise ScenarioError(f"{where}: grid={grid!r}: a table of axes is expected")
    axes = [_axis(name, values, f"{where}: grid.{name}") for name, values in grid.items()]
    count = math.prod(len(axis) for axis in axes)
    if count > MOST_CELLS:
        raise ScenarioError(f"{where}: grid: {count} cells; {MOST_CELLS} at most are allowed")
    for point in itertools.product(*axes):
        labels, changed = {}, tables
        for axis, (label, changes) in zip(grid, point, strict=True):
            labels[axis] = label
            for place, value in changes.items():
                changed = _set(changed, place, value, f"{where}: grid.{axis}: {place!r}")
        yield labels, changed


def _axis(name: str, values: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the points of an axis: a label, and what is set by dotted key."""
    if isinstance(values, dict):
        raise ScenarioError(
            f"{where}={values!r}: a list of values is expected; a dotted key stands in quotes, as "
            f'in "{name}.{next(iter(values), "rate")}"'
        )
    if not isinstance(values, list) or not values:
        raise ScenarioError(f"{where}={values!r}: a list of values is expected")
    found = [_point(name, value, where) for value in values]
    for label, changes in found:
        if not is_line(label):
            raise ScenarioError(f"{where}: label={label!r}: a text of one line is expected")
        for place, value in changes.items():
            _check_place(place, value, where)
    if len({label for label, _ in found}) != len(found):
        raise ScenarioError(f"{where}: the labels of its points must differ")
    return found


def _point(name: str, value: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Return a point's label, and what it sets by dotted key.

    A table with a label sets the keys in it. Anything else is a value of the key that the axis is
    named after. A table on an axis that is no key sets the keys in it, and they are the label.
    """
    if not isinstance(value, dict):
        return _label(name, value), {name: value}
    changes = dict(value)
    if LABEL in changes:
        label = changes.pop(LABEL)
        if not isinstance(label, str) or not label.strip():
            raise ScenarioError(f"{where}: label={label!r}: a text of one line is expected")
        return label, changes
    label = ", ".join(f"{key}={each}" for key, each in changes.items()) or "none"
    if name.partition(".")[0] in {field.name for field in dataclasses.fields(Scenario)}:
        return f"{name.rpartition('.')[2]} {label}", {name: changes}
    return label, changes


def _label(name: str, value: Any) -> str:
    """Return what a value of a dotted key is called."""
    if not _is_number(value):
        return str(value)
    if name == "loss.rate":
        return f"loss {100 * value:g} %"
    return f"{name.rpartition('.')[2]} {value:g}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_place(place: str, value: Any, where: str) -> None:
    """Check that what a point sets may differ between cells; a table sets the keys in it."""
    inner = value if isinstance(value, dict) else {}
    found = {place: value, **{f"{place}.{name}": each for name, each in inner.items()}}
    for name, each in found.items():
        if any(name == one or name.startswith(f"{one}.") for one in _SAME):
            raise ScenarioError(
                f"{where}: {name}={each!r}: the same in all cells; give it outside of the grid"
            )


def _set(tables: Any, place: str, value: Any, where: str) -> dict[str, Any]:
    """Return the tables with one dotted key set; a number in it counts through a list of tables."""
    head, dot, rest = place.partition(".")
    if not head or (dot and not rest):
        raise ScenarioError(f"{where}: a key has a name before and after each dot")
    changed = dict(tables)
    if not dot:
        changed[head] = value
        return changed
    inner = changed.get(head, {})
    if isinstance(inner, list):
        number, _, deeper = rest.partition(".")
        index = int(number) if number.isascii() and number.isdecimal() and len(number) < 9 else -1
        if not 0 <= index < len(inner) or not deeper or not isinstance(inner[index], dict):
            raise ScenarioError(
                f"{where}: {head} is a list of {len(inner)}: a key of one of its tables is "
                f'expected, as in "{head}.0.name"'
            )
        inner = list(inner)
        inner[index] = _set(inner[index], deeper, value, where)
        changed[head] = inner
    elif isinstance(inner, dict):
        changed[head] = _set(inner, rest, value, where)
    else:
        raise ScenarioError(f"{where}: {head}={inner!r} is no table: there are no keys in it")
    return changed
