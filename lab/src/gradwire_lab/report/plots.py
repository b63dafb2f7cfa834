"""The plots of a run's page are drawn as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gradwire_lab.report.drawing import (
    BURST,
    IDEAL,
    STYLE,
    cumulate,
    figure_of,
    legend,
    line,
    logarithmic,
    svg,
)
from gradwire_lab.run.model import CellResult, Results

__all__ = ["cell_plots", "colours", "literal"]

_PALETTE = (
    "#2a9d76",
    "#d1603d",
    "#3b78b5",
    "#7a5195",
    "#b08a1e",
    "#5f6b6d",
    "#c2538a",
    "#4fa3c7",
    "#1c4f3f",
    "#8fbf5a",
    "#e39aa8",
    "#23355e",
    "#c9b3de",
    "#7a3b12",
    "#9aa39f",
    "#e0b84c",
)
_LOSS = "#8c1d40"
_FAR = 8
_MOST_WORDS = 20
"""With more events than this, they are drawn without their words."""


def colours(document: Results) -> dict[str, str]:
    """Return a colour for each contestant, the same in all cells."""
    names = dict.fromkeys(entry.name for cell in document.cells for entry in cell.contestants)
    return {name: _PALETTE[place % len(_PALETTE)] for place, name in enumerate(names)}


def literal(text: str) -> str:
    """Return a text as matplotlib draws it to the letter: no formulas between dollars."""
    return text.replace("$", r"\$")


def cell_plots(cell: CellResult, palette: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Draw a cell's plots: wide ones (the time line), and narrow ones (distribution, learning)."""
    if not cell.contestants:
        return [], []
    with matplotlib.rc_context(STYLE):
        wide = [time_line(cell, palette)]
        if not any(each.losses for entry in cell.contestants for each in cell.tracks(entry.name)):
            return [*wide, distribution(cell, palette, 9.6)], []
        learnt = [learning(cell, palette, over) for over in ("seconds", "step")]
        return wide, [distribution(cell, palette), *learnt]


def distribution(cell: CellResult, palette: Mapping[str, str], width: float = 4.9) -> str:
    """Draw what share of samples took no longer than a time, on so many inches."""
    figure, axes = figure_of(width, 3.4)
    for entry in cell.contestants:
        colour = palette[entry.name]
        cumulate(
            axes, [each for track in cell.tracks(entry.name) for each in track.seconds], colour
        )
        if entry.limit_s is not None:
            axes.axvline(entry.limit_s * 1000, color=colour, linestyle=":", linewidth=0.9)
    _time_axis(axes, cell, "x")
    axes.set(xlabel="ms", ylabel="no longer than that, %")
    dotted = Line2D([], [], color=IDEAL, linestyle=":", label="limit")
    legend(axes, [*_lines(cell, palette), dotted], 2)
    return svg(figure)


def time_line(cell: CellResult, palette: Mapping[str, str]) -> str:
    """Draw every sample over the time of the first seed that counts, with bursts and events."""
    figure, axes = figure_of(9.6, 3.3)
    run = next((each.run for each in cell.counted if each.run.tracks), cell.runs[0].run)
    for burst in run.bursts:
        span = burst.start - run.origin, burst.stop - run.origin
        axes.axvspan(*span, color=BURST, alpha=0.35, linewidth=0)
    for start, stop in run.lossy:
        axes.axvspan(start - run.origin, stop - run.origin, color=_LOSS, alpha=0.18, linewidth=0)
    for event in run.events:
        at = event.at - run.origin
        axes.axvline(at, color="#555555", linewidth=0.8, alpha=0.5)
        if len(run.events) > _MOST_WORDS:
            continue
        axes.annotate(
            event.what,
            (at, 0.98),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            rotation=90,
            va="top",
            ha="right",
        )
    for entry in cell.contestants:
        if track := run.tracks.get(entry.name):
            axes.scatter(
                [start - run.origin for start in track.starts],
                [1000 * each for each in track.seconds],
                s=9,
                color=palette[entry.name],
                linewidths=0,
                zorder=2,
            )
    _time_axis(axes, cell, "y")
    axes.set(xlabel="seconds since the cell began", ylabel="ms")
    axes.margins(x=0.01)
    bursts = [Patch(color=BURST, alpha=0.5, label="burst")] if run.bursts else []
    lossy = [Patch(color=_LOSS, alpha=0.3, label="links lose")] if run.lossy else []
    legend(axes, [*_lines(cell, palette), *bursts, *lossy])
    return svg(figure)


def learning(cell: CellResult, palette: Mapping[str, str], over: str) -> str:
    """Draw the held-out loss after each turn, over a contestant's seconds of training or steps."""
    figure, axes = figure_of(4.9, 3.4)
    for entry in cell.contestants:
        for track in cell.tracks(entry.name):
            axes.plot(
                [step if over == "step" else now for step, now, _ in track.losses],
                [loss for _, loss in track.curve],
                color=palette[entry.name],
                marker="o",
                markersize=3,
                linewidth=1.2,
            )
    axes.set(xlabel={"step": "step", "seconds": "s of training"}[over], ylabel="held-out loss")
    legend(axes, _lines(cell, palette), 2)
    return svg(figure)


def _lines(cell: CellResult, palette: Mapping[str, str]) -> list[Any]:
    names = [entry.name for entry in cell.contestants]
    return [line(literal(name), palette[name]) for name in names]


def _time_axis(axes: Axes, cell: CellResult, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic where the longest times would press all others together."""
    medians = [entry.median_s or 0.0 for entry in cell.contestants]
    if max(entry.max_s or 0.0 for entry in cell.contestants) > _FAR * min(medians):
        logarithmic(axes, which)
