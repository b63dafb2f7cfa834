"""A run is put into Markdown as docs/reproduction.md has it: published, ours and limit."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_lab.report.words import (
    MARK_COLUMNS,
    dates,
    failures,
    filled,
    mark_rows,
    missing,
    row,
)
from gradwire_lab.run.model import Results

__all__ = ["as_markdown"]

BAR = r"\|"
"""A bar within a cell, which a plain bar would end."""

COLUMNS = ("samples", "median", "p99", "limit", "throughput", "rivals", "final loss")


def as_markdown(document: Results) -> str:
    """Write a run as a section: published, command and date, marks, what is missing, cells."""
    machine = document.machine
    short = " (the short form: too few samples to judge by)" if document.quick else ""
    cells = [
        [cell.name, entry.name, *row(entry, COLUMNS)]
        for cell in document.cells
        for entry in cell.contestants
    ]
    lacking = [f"- {line}" for line in (*failures(document), *missing(document))]
    lines = [
        f"## {document.scenario}",
        "",
        f"Published: {document.published or 'nothing.'}",
        "",
        f"`{document.command}`, {dates(document)}{short}; {machine['cores']} cores "
        f"({machine['cpu']}), Linux {machine['kernel']}, torch {machine['torch']}.",
        "",
        *_table(MARK_COLUMNS, mark_rows(document.marks)),
        "",
        *([*lacking, ""] if lacking else []),
        *_table(*filled(("cell", "contestant", *COLUMNS), cells)),
        "",
    ]
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in rows),
    ]
