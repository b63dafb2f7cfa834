"""The demo's table has the same columns on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire_lab.demo.words import Document, milliseconds, number, speed
from gradwire_lab.report.terminal import turned
from gradwire_lab.report.words import NONE, share

IDEAL = "header ideal"

COLUMNS = (
    "",
    "steps/s",
    "× peer",
    "peer",
    "comm median",
    "p90",
    "p99",
    "max",
    "× ideal",
    "comm share",
    "delivered",
    "critical",
    "final loss",
)


def rows(document: Document) -> list[list[str]]:
    ideal = document["header_ideal_s"]
    labels = {entry["name"]: entry["label"] for entry in document["contestants"]}
    cells = [_row(entry, ideal, labels) for entry in document["contestants"]]
    if ideal is not None:
        known = {"": IDEAL, "comm median": milliseconds(ideal), "× ideal": "1.00"}
        cells.append([known.get(column, NONE) for column in COLUMNS])
    return cells


def _row(
    entry: Mapping[str, Any], ideal: float | None, labels: Mapping[str | None, str]
) -> list[str]:
    median = entry["comm_median_s"]
    return [
        entry["label"],
        f"{entry['steps_per_s']:.2f}",
        speed(entry),
        labels.get(entry["peer"], NONE),
        milliseconds(median),
        milliseconds(entry["comm_p90_s"]),
        milliseconds(entry["comm_p99_s"]),
        milliseconds(entry["comm_max_s"]),
        NONE if ideal is None else f"{median / ideal:.2f}",
        share(entry["comm_share"]),
        share(entry["delivered"]),
        share(entry["critical_share"]),
        number(entry["final_loss"]),
    ]


def terminal_tables(document: Document, console: Console) -> list[Table]:
    """Return the table for the terminal, turned so that it fits into 80 columns."""
    return turned(COLUMNS, rows(document), console, faint=(IDEAL,))
