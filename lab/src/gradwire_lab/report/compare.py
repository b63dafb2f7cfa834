"""Runs are compared with one row for each contestant of each cell and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire_lab.report.words import NONE, rate, seconds, share

__all__ = ["COLUMNS", "compare"]

COLUMNS = (
    "scenario",
    "cell",
    "contestant",
    "run",
    "samples",
    "median",
    "× the first run",
    "p99",
    "max",
    "× limit",
    "throughput",
    "delivered",
)


def compare(documents: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the keys of `COLUMNS`, a contestant's rows of one cell together.

    The first run is the first one of the scenario.

    Args:
        documents: a run's JSON by its folder.
    """
    found: dict[tuple[str, str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    first: dict[str, str] = {}
    for folder, document in documents.items():
        first.setdefault(document["scenario"], folder)
        for cell in document["cells"]:
            for entry in cell["contestants"]:
                key = (document["scenario"], cell["name"], entry["name"])
                found.setdefault(key, []).append((folder, entry))
    return [
        _row(key, folder, entry, dict(entries).get(first[key[0]]))
        for key, entries in found.items()
        for folder, entry in entries
    ]


def _row(
    key: tuple[str, str, str],
    folder: str,
    entry: Mapping[str, Any],
    first: Mapping[str, Any] | None,
) -> dict[str, Any]:
    scenario, cell, contestant = key
    throughput, over = entry["throughput_bps"], entry["over_limit"]
    return {
        "scenario": scenario,
        "cell": cell,
        "contestant": contestant,
        "run": folder,
        "samples": entry["samples"],
        "median": seconds(entry["median_s"]),
        "× the first run": (
            NONE if first is None else f"{entry['median_s'] / first['median_s']:.2f}"
        ),
        "p99": seconds(entry["p99_s"]),
        "max": seconds(entry["max_s"]),
        "× limit": NONE if over is None else f"{over:.2f}",
        "throughput": (
            f"{entry['steps_per_s']:.3g} steps/s" if throughput is None else rate(throughput)
        ),
        "delivered": share(entry["delivered"]),
    }
