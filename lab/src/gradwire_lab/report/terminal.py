"""A run's tables are printed on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire_lab.report.words import mark_rows, notes, rows

__all__ = ["show"]

_COLOURS = {"met": "green", "missed": "red"}


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print cells, marks and notes."""
    for cell in document["cells"]:
        columns, found = rows(cell)
        if not found:
            continue
        # Contestants are columns, because a terminal is narrow.
        title = Text(f"{document['scenario']}: {cell['name']}", "table.title")
        table = Table(title=title, box=box.SIMPLE_HEAD)
        table.add_column("")
        for row in found:
            table.add_column(Text(row[0]), justify="right")
        for place, column in enumerate(columns[1:], 1):
            table.add_row(column, *(Text(row[place]) for row in found))
        console.print(table)
    if document["marks"]:
        table = Table(title="marks", box=box.SIMPLE_HEAD)
        for column in ("wanted", "ours", "mark", "of", ""):
            table.add_column(column)
        for text, ours, wanted, scope, verdict in mark_rows(document):
            colour = _COLOURS.get(verdict.split(" ")[0], "dim")
            table.add_row(Text(text), ours, wanted, scope, Text(verdict, colour))
        console.print(table)
    for line in notes(document):
        console.print(Text(f"· {line}"), style="dim", highlight=False)
    for error in document["errors"]:
        console.print(Text(f"failed: {error}"), style="bold red", highlight=False)
