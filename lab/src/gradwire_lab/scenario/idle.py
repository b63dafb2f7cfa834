"""Keys that do nothing in any cell of a file are refused before somebody counts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gradwire_lab.scenario.reader import ScenarioError, default_of
from gradwire_lab.scenario.schema import Cell, Scenario

__all__ = ["check_idle"]

_NEEDS: tuple[tuple[str, tuple[str, ...], Callable[[Scenario], Any], str], ...] = (
    (
        "loss",
        ("at", "when", "steps", "run"),
        lambda each: each.loss.any,
        "a share in loss.rate or loss.per_worker",
    ),
    (
        "loss",
        ("lasts_s",),
        lambda each: each.loss.any and each.loss.when != "always",
        "a share in loss.rate or loss.per_worker and loss.when='rounds' or 'steps'",
    ),
    (
        "rivals",
        ("target", "congestion_control"),
        lambda each: each.rivals.streams,
        "rivals.streams",
    ),
    ("bandwidth", ("every_s",), lambda each: each.bandwidth.rates, "bandwidth.rates"),
    ("tail", ("contestant", "rounds", "tries"), lambda each: each.tail.ratio, "tail.ratio"),
    ("work", ("layers",), lambda each: each.work.kind == "all_reduce", "work.kind='all_reduce'"),
    ("model", ("bucket_mb",), lambda each: each.model.overlap, "model.overlap=true"),
    ("model", ("target_within",), lambda each: each.model.target_of, "model.target_of"),
)
"""Table, keys, whether they do something in a cell, and what they need for that."""


def check_idle(cells: Iterable[Cell]) -> None:
    """Check that every key does something in one of the cells that it is set in.

    Args:
        cells: the cells of the file and of its short form.

    Raises:
        ScenarioError: names the key, its value and what it needs.
    """
    scenarios = [cell.scenario for cell in cells]
    for table, names, works, needed in _NEEDS:
        tables = [getattr(each, table) for each in scenarios]
        for name in names:
            usual = default_of(type(tables[0]), name)
            found = [getattr(each, name) for each in tables]
            setting = [each for each, value in zip(scenarios, found, strict=True) if value != usual]
            if setting and not any(map(works, setting)):
                value = next(value for value in found if value != usual)
                shown = list(value) if isinstance(value, tuple) else value
                raise ScenarioError(
                    f"{table}.{name}={shown!r}: does nothing in any cell without {needed}; give "
                    "that, or leave it out"
                )
