"""Maps of grids: how long the tail is, over the quiet median, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from gradwire.lab.drawing import STYLE, plain, svg
from gradwire.lab.report.plots import literal

__all__ = ["grid_values", "map_plot"]


def grid_values(
    document: Mapping[str, Any], contestant: str
) -> tuple[list[str], list[str], list[list[float | None]], bool]:
    """A contestant's tail in each cell over its median in the quiet cell of the same column.

    Returns:
        Labels of the rows and of the columns, the values (None: not measured), and whether the
        tail is the 99th percentile: where a cell has too few samples for one it is the maximum.
    """
    axes = document["map"]
    entries = {
        (cell["labels"][axes["rows"]], cell["labels"][axes["columns"]]): entry
        for cell in document["cells"]
        for entry in cell["contestants"]
        if entry["name"] == contestant
    }
    labels = [cell["labels"] for cell in document["cells"]]
    rows = list(dict.fromkeys(each[axes["rows"]] for each in labels))
    columns = list(dict.fromkeys(each[axes["columns"]] for each in labels))
    exact = all(entry["p99_s"] is not None for entry in entries.values())
    values: list[list[float | None]] = []
    for row in rows:
        line: list[float | None] = []
        for column in columns:
            entry, quiet = entries.get((row, column)), entries.get((axes["quiet"], column))
            if entry is None or quiet is None:
                line.append(None)
            else:
                line.append(entry["p99_s" if exact else "max_s"] / quiet["median_s"])
        values.append(line)
    return rows, columns, values, exact


def map_plot(document: Mapping[str, Any]) -> str:
    """The map, a panel for each contestant; the same colours mean the same everywhere. Empty where
    no contestant has samples."""
    names = list(
        dict.fromkeys(each["name"] for cell in document["cells"] for each in cell["contestants"])
    )
    if not names:
        return ""
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(4.7 * len(names), 3.9), layout="constrained")
        panels = figure.subplots(1, len(names), squeeze=False)[0]
        found = [grid_values(document, name) for name in names]
        known = [v for _, _, values, _ in found for line in values for v in line if v is not None]
        norm = LogNorm(vmin=1.0, vmax=max([2.0, *known]))
        image = None
        for panel, name, (rows, columns, values, exact) in zip(panels, names, found, strict=True):
            numbers = [[float("nan") if v is None else max(1.0, v) for v in row] for row in values]
            image = panel.imshow(numbers, norm=norm, cmap="YlOrRd", aspect="auto")
            panel.set_xticks(range(len(columns)), [*map(literal, columns)], rotation=30, ha="right")
            panel.set_yticks(range(len(rows)), [*map(literal, rows)])
            panel.set_title(
                f"{literal(name)}: {'p99' if exact else 'maximum'} / quiet median", fontsize=9
            )
            for y, row in enumerate(values):
                for x, value in enumerate(row):
                    text = "–" if value is None else f"{value:.1f}"
                    panel.text(x, y, text, ha="center", va="center", fontsize=8)
        if image is not None:
            figure.colorbar(image, ax=list(panels), shrink=0.8, format=plain)
        return svg(figure)
