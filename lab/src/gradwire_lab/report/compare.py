"""Runs are compared with one row for each contestant of each cell and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire_lab.report.words import NONE, row
from gradwire_lab.run.model import Results, Summary

__all__ = ["COLUMNS", "compare"]

_PLACE = ("scenario", "cell", "contestant", "run", "samples")
_NUMBERS = ("median", "p99", "max", "× limit", "throughput", "delivered")
COLUMNS = (*_PLACE, "median", "× the first run", *_NUMBERS[1:])


def compare(documents: Mapping[str, Results]) -> list[dict[str, Any]]:
    """Return rows with the keys of `COLUMNS`, a contestant's rows of one cell together.

    The first run is the first one of the scenario.
    """
    found: dict[tuple[str, str, str], list[tuple[str, Summary]]] = {}
    first: dict[str, str] = {}
    for folder, document in documents.items():
        first.setdefault(document.scenario, folder)
        for cell in document.cells:
            for entry in cell.contestants:
                key = (document.scenario, cell.name, entry.name)
                found.setdefault(key, []).append((folder, entry))
    return [
        _row(key, folder, entry, dict(entries).get(first[key[0]]))
        for key, entries in found.items()
        for folder, entry in entries
    ]


def _row(
    key: tuple[str, str, str], folder: str, entry: Summary, first: Summary | None
) -> dict[str, Any]:
    ratio = NONE
    if first is not None and first.median_s and entry.median_s is not None:
        ratio = f"{entry.median_s / first.median_s:.2f}"
    numbers = dict(zip(_NUMBERS, row(entry, _NUMBERS), strict=True))
    return {
        **dict(zip(_PLACE, (*key, folder, entry.samples), strict=True)),
        "median": numbers.pop("median"),
        "× the first run": ratio,
        **numbers,
    }
