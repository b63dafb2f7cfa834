"""A run's tables are printed on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rich import box
from rich.console import Console
from rich.measure import measure_renderables
from rich.table import Table
from rich.text import Text

from gradwire_lab.report.words import MARK_COLUMNS, filled, mark_rows, notes, rows
from gradwire_lab.run.model import Results

__all__ = ["show", "turned"]

_COLOURS = {"met": "green", "missed": "red"}


def show(document: Results, console: Console) -> None:
    """Print cells, marks and notes."""
    for cell in document.cells:
        columns, found = rows(cell)
        if not found:
            continue
        title = Text(f"{document.scenario}: {cell.name}", "table.title")
        for table in turned(columns, found, console, title=title):
            console.print(table)
    if document.marks:
        table = Table(*MARK_COLUMNS, title="marks", box=box.SIMPLE_HEAD)
        for text, ours, wanted, scope, verdict in mark_rows(document.marks):
            colour = _COLOURS.get(verdict.split(" ")[0], "dim")
            table.add_row(Text(text), ours, wanted, scope, Text(verdict, colour))
        console.print(table)
    for line in notes(document):
        console.print(Text(f"· {line}"), style="dim", highlight=False)
    for error in document.errors:
        console.print(Text(f"failed: {error}"), style="bold red", highlight=False)


def turned(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    console: Console,
    *,
    title: Text | None = None,
    faint: Collection[str] = (),
) -> list[Table]:
    """Return a table with contestants as columns; several where the terminal is too narrow for it.

    A line in which nothing stands is left out.

    Args:
        columns: what stands in the rows, whose first is the contestant's name.
    """
    whole = _turned(columns, rows, title, faint, _as_it_is)
    if _fits(whole, console):
        return [whole]
    tables: list[Table] = []
    part: list[Sequence[str]] = []
    for row in rows:
        if part and not _fits(_turned(columns, [*part, row], title, faint, _two_lines), console):
            tables.append(_turned(columns, part, title, faint, _two_lines))
            part = []
        part = [*part, row]
    return [*tables, _turned(columns, part, title, faint, _two_lines)]


def _fits(table: Table, console: Console) -> bool:
    roomy = console.options.update(max_width=10_000)
    return measure_renderables(console, roomy, [table]).maximum <= console.width


def _turned(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: Text | None,
    faint: Collection[str],
    heading: Callable[[str], str],
) -> Table:
    columns, rows = filled(columns, rows)
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("")
    for row in rows:
        style = "dim" if row[0] in faint else None
        table.add_column(Text(heading(row[0])), justify="right", style=style)
    for place, column in enumerate(columns[1:], 1):
        table.add_row(column, *(Text(row[place]) for row in rows))
    return table


def _as_it_is(name: str) -> str:
    return name


def _two_lines(name: str) -> str:
    """Break a name at one of its spaces, so that a column need not be as wide."""
    words = name.split(" ")
    broken = [(" ".join(words[:place]), " ".join(words[place:])) for place in range(1, len(words))]
    return "\n".join(min(broken, key=lambda lines: max(map(len, lines)), default=(name,)))
