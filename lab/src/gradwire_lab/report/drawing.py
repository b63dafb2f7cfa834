"""How the pages of the demo and the lab draw: one style, figures as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["BURST", "IDEAL", "STYLE", "figure_of", "legend", "plain", "smooth", "svg"]

BURST = "#c9a227"
IDEAL = "#888888"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gradwire",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": "#444444",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#666666",
    "ytick.color": "#666666",
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def plain(value: float, position: float) -> str:
    """Label a tick without powers of ten."""
    return f"{value:g}"


def smooth(values: Sequence[float], keep: float = 0.8) -> list[float]:
    """A running mean that forgets."""
    smoothed: list[float] = []
    for value in values:
        smoothed.append(value if not smoothed else keep * smoothed[-1] + (1 - keep) * value)
    return smoothed


def legend(axes: Axes, handles: Sequence[Any], columns: int | None = None) -> None:
    """A legend above the axes."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=columns or len(handles),
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.4,
    )


def figure_of(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Figure) -> str:
    """A figure as the text of an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
