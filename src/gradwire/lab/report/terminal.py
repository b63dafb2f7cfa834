"""A run's tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradwire.lab.report.words import mark_rows, notes, rows

__all__ = ["show"]

_COLOURS = {"met": "green", "missed": "red"}


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print cells, marks and notes."""
    for cell in document["cells"]:
        columns, found = rows(cell)
        if not found:
            continue
        # Turned, a column for each contestant: a terminal is narrow.
        table = Table(title=f"{document['scenario']}: {cell['name']}", box=box.SIMPLE_HEAD)
        table.add_column("")
        for row in found:
            table.add_column(row[0], justify="right")
        for place, column in enumerate(columns[1:], 1):
            table.add_row(column, *(row[place] for row in found))
        console.print(table)
    if document["marks"]:
        table = Table(title="marks", box=box.SIMPLE_HEAD)
        for column in ("wanted", "ours", "mark", "of", ""):
            table.add_column(column)
        for text, ours, wanted, scope, verdict in mark_rows(document):
            colour = _COLOURS.get(verdict.split(" ")[0], "dim")
            table.add_row(text, ours, wanted, scope, f"[{colour}]{verdict}[/]")
        console.print(table)
    for line in notes(document):
        console.print(f"· {line}", style="dim", highlight=False, markup=False)
    for error in document["errors"]:
        console.print(f"failed: {error}", style="bold red", highlight=False, markup=False)
