"""The plot of `gradwire bench transport`: ratios to Gloo over sizes, one line a contestant."""

from __future__ import annotations

from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gradwire_lab.report.drawing import IDEAL, STYLE, legend, line, logarithmic, svg

_COLOURS = {
    "gloo f16": "#7a3b12",
    "exact": "#3b78b5",
    "f16": "#2a9d76",
    "int8": "#c9a227",
    "adaptive": "#8a5a9e",
    "floor": IDEAL,
}
_WIDTH, _HEIGHT, _COLUMNS = 4.2, 2.8, 3


def ratios(cells: list[dict[str, Any]]) -> str:
    """Return a figure as SVG text, with a field for each network and number of ranks."""
    fields: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        fields.setdefault((cell["network"]["name"], cell["ranks"]), []).append(cell)
    names = [name for name in _COLOURS if any(name in cell["contestants"] for cell in cells)]
    columns = min(len(fields), _COLUMNS)
    rows = -(-len(fields) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows + 0.4), layout="constrained")
        for number, ((network, ranks), found) in enumerate(fields.items()):
            axes = figure.add_subplot(rows, columns, number + 1)
            axes.axhline(1.0, color=IDEAL, linewidth=0.8)
            for name in names:
                points = [
                    (cell["bytes"] / 1024, cell["contestants"][name]["ratio"])
                    for cell in found
                    if name in cell["contestants"]
                ]
                if points:
                    axes.plot(*zip(*points, strict=True), color=_COLOURS[name], marker=".")
            logarithmic(axes, "x")
            logarithmic(axes, "y")
            axes.set_xlabel(f"KiB, {network}, {ranks} ranks")
            axes.set_ylabel("Gloo's time over it")
            if number == 0:
                legend(axes, [line(name, _COLOURS[name]) for name in names], columns=3)
        return svg(figure)
