"""A map of a grid shows the tail over the quiet median, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from gradwire_lab.report.drawing import STYLE, plain, svg
from gradwire_lab.report.plots import literal
from gradwire_lab.run.model import Results

__all__ = ["grid_values", "map_plot", "sheets"]


def sheets(document: Results) -> list[dict[str, str]]:
    """Return the labels on all other axes than rows and columns; each gets its own map."""
    shown = {document.map.rows, document.map.columns}
    others = [
        {axis: label for axis, label in cell.labels.items() if axis not in shown}
        for cell in document.cells
    ]
    return [each for at, each in enumerate(others) if each not in others[:at]]


def grid_values(
    document: Results, contestant: str, sheet: Mapping[str, str] | None = None
) -> tuple[list[str], list[str], list[list[float | None]], bool]:
    """Return a contestant's tail in each cell over its median in the quiet cell of the same column.

    Args:
        sheet: labels of the cells; see `sheets`.

    Returns:
        Labels of the rows and of the columns, the values (None: not measured), and whether the
        tail is the 99th percentile: where a cell has too few samples for one it is the maximum.
    """
    axes, wanted = document.map, (sheet or {}).items()
    cells = [cell for cell in document.cells if wanted <= cell.labels.items()]
    entries = {
        (cell.labels[axes.rows], cell.labels[axes.columns]): entry
        for cell in cells
        for entry in cell.contestants
        if entry.name == contestant
    }
    labels = [cell.labels for cell in cells]
    rows = list(dict.fromkeys(each[axes.rows] for each in labels))
    columns = list(dict.fromkeys(each[axes.columns] for each in labels))
    exact = all(entry.p99_s is not None for entry in entries.values())
    values: list[list[float | None]] = []
    for row in rows:
        line: list[float | None] = []
        for column in columns:
            entry, quiet = entries.get((row, column)), entries.get((axes.quiet, column))
            tail = None if entry is None else entry.p99_s if exact else entry.max_s
            if tail is None or quiet is None or not quiet.median_s:
                line.append(None)
            else:
                line.append(tail / quiet.median_s)
        values.append(line)
    return rows, columns, values, exact


def map_plot(document: Results) -> str:
    """Draw the map: a panel for each contestant, in a line for each label of further axes.

    All panels share their colours. The map is empty where no contestant has samples.
    """
    names = list(dict.fromkeys(each.name for cell in document.cells for each in cell.contestants))
    if not names:
        return ""
    lines = sheets(document)
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(4.7 * len(names), 3.9 * len(lines)), layout="constrained")
        panels = figure.subplots(len(lines), len(names), squeeze=False).flat
        places = [(sheet, name) for sheet in lines for name in names]
        found = [grid_values(document, name, sheet) for sheet, name in places]
        known = [v for _, _, values, _ in found for line in values for v in line if v is not None]
        norm = LogNorm(vmin=1.0, vmax=max([2.0, *known]))
        image = None
        for panel, (sheet, name), (rows, columns, values, exact) in zip(
            panels, places, found, strict=True
        ):
            numbers = [[float("nan") if v is None else max(1.0, v) for v in row] for row in values]
            image = panel.imshow(numbers, norm=norm, cmap="YlOrRd", aspect="auto")
            panel.set_xticks(range(len(columns)), [*map(literal, columns)], rotation=30, ha="right")
            panel.set_yticks(range(len(rows)), [*map(literal, rows)])
            title = ", ".join(map(literal, [name, *sheet.values()]))
            panel.set_title(f"{title}: {'p99' if exact else 'maximum'} / quiet median", fontsize=9)
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    text = "–" if value is None else f"{value:.1f}"
                    panel.text(x, y, text, ha="center", va="center", fontsize=8)
        if image is not None:
            figure.colorbar(image, ax=figure.axes, shrink=0.8, format=plain)
        return svg(figure)
