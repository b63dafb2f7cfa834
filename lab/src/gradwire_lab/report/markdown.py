"""A run is put into Markdown as docs/reproduction.md has it: published, ours and limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_lab.report.words import (
    dates,
    failures,
    filled,
    mark_rows,
    missing,
    number,
    rate,
    seconds,
)

__all__ = ["as_markdown"]

BAR = r"\|"
"""A bar within a cell, which a plain bar would end."""

CELLS = (
    "cell",
    "contestant",
    "samples",
    "median",
    "p99",
    "limit",
    "throughput",
    "rivals",
    "final loss",
)


def as_markdown(document: Mapping[str, Any]) -> str:
    """Write a run as a section: published, command and date, marks, what is missing, cells."""
    machine = document["machine"]
    short = " (the short form: too few samples to judge by)" if document["quick"] else ""
    lines = [
        f"## {document['scenario']}",
        "",
        f"Published: {document['published'] or 'nothing.'}",
        "",
        f"`{document['command']}`, {dates(document)}{short}; {machine['cores']} cores "
        f"({machine['cpu']}), Linux {machine['kernel']}, torch {machine['torch']}.",
        "",
        *_table(("wanted", "ours", "mark", "of", ""), mark_rows(document)),
        "",
        *_incomplete(document),
        *_table(*filled(CELLS, _cells(document))),
        "",
    ]
    return "\n".join(lines)


def _incomplete(document: Mapping[str, Any]) -> list[str]:
    """Return what is not in the table, a line each."""
    lines = [*failures(document), *missing(document)]
    return [*(f"- {line}" for line in lines), ""] if lines else []


def _cells(document: Mapping[str, Any]) -> list[list[str]]:
    found = []
    for cell in document["cells"]:
        for entry in cell["contestants"]:
            throughput = entry["throughput_bps"]
            found.append(
                [
                    cell["name"],
                    entry["name"],
                    str(entry["samples"]),
                    seconds(entry["median_s"]),
                    seconds(entry["p99_s"]),
                    seconds(entry["limit_s"]),
                    f"{entry['steps_per_s']:.3g} steps/s"
                    if throughput is None
                    else rate(throughput),
                    rate(entry["rival_goodput_bps"]),
                    number(entry["final_loss"]),
                ]
            )
    return found


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in rows),
    ]
