"""The plots of the demo's page are drawn as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gradwire_lab.demo.words import Document
from gradwire_lab.report.drawing import (
    BURST,
    IDEAL,
    STYLE,
    cumulate,
    figure_of,
    legend,
    line,
    logarithmic,
    smooth,
    svg,
)

COLOURS = {
    "gloo": "#d1603d",
    "gloo-fp16": "#7a3b12",
    "reliable": "#3b78b5",
    "dblp": "#2a9d76",
    "adaptive": "#8a5a9e",
}
"""People with colour blindness can tell these colours apart, too."""

_ZOOM_SECONDS = 3.0
_FAR = 8

Entry = Mapping[str, Any]


def all_plots(document: Document) -> dict[str, str]:
    """Draw every plot, by its name in the page's template."""
    plots: dict[str, Callable[[Document], str]] = {
        "over_time": over_time,
        "close_up": close_up,
        "distribution": distribution,
        "losses": losses,
    }
    with matplotlib.rc_context(STYLE):
        return {name: plot(document) for name, plot in plots.items()}


def over_time(document: Document) -> str:
    """Draw every step's communication time over the time of the demo, with the bursts."""
    figure, axes = figure_of(9.6, 3.4)
    starts = [burst["start"] for burst in document["bursts_sent"]]
    axes.vlines(starts, 0, 0.03, color=BURST, linewidth=0.5, transform=axes.get_xaxis_transform())
    for entry in document["contestants"]:
        axes.plot(  # the untimed steps, with which a turn begins, break the line
            [step["start"] for step in entry["series"]],
            [step["comm"] * 1000 if step["timed"] else math.nan for step in entry["series"]],
            color=_colour(entry),
            alpha=0.5,
            linewidth=0.8,
        )
        for dots, alpha in ((True, 0.85), (False, 0.3)):
            steps = [step for step in entry["series"] if step["timed"] is dots]
            axes.scatter(
                [step["start"] for step in steps],
                [step["comm"] * 1000 for step in steps],
                s=9,
                color=_colour(entry),
                alpha=alpha,
                linewidths=0,
                zorder=2,
            )
    handles = [_dot(entry) for entry in document["contestants"]]
    handles += _ideal_line(document, axes.axhline) + _burst_patch(document)
    axes.set(xlabel="seconds since the start", ylabel="communication of a step, ms")
    if _has_far_outliers(document):
        logarithmic(axes, "y")
    else:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    legend(axes, handles)
    return svg(figure)


def close_up(document: Document) -> str:
    """Draw the first seconds of one turn of each contestant, on a clock set to the bursts."""
    entries = document["contestants"]
    figure, axes = figure_of(9.6, 0.9 + 0.62 * len(entries))
    for row, entry in enumerate(entries):
        _lane(axes, -row, entry, document)
    axes.set_yticks([-row for row in range(len(entries))], [entry["label"] for entry in entries])
    axes.grid(axis="y", visible=False)
    axes.set(
        xlabel="seconds since the turn began",
        xlim=(0, _ZOOM_SECONDS),
        ylim=(0.62 - len(entries), 0.5),
    )
    handles = [Patch(color="#777777", label="communication"), *_burst_patch(document)]
    handles.append(Patch(color="#dddddd", label="computation"))
    legend(axes, handles)
    return svg(figure)


def _lane(axes: Axes, height: float, entry: Entry, document: Document) -> None:
    """Draw one contestant's steps as bars, from the middle one of its turns."""
    turns = sorted({step["turn"] for step in entry["series"]})
    turn = turns[len(turns) // 2]
    steps = [step for step in entry["series"] if step["turn"] == turn]
    origin = document["turns"][turn]["start"]
    before = origin
    for step in steps:
        end = step["start"] + step["comm"]
        begun = step["start"] - origin
        axes.barh(height, step["start"] - before, left=before - origin, height=0.3, color="#dddddd")
        axes.barh(height, step["comm"], left=begun, height=0.6, color=_colour(entry), zorder=2)
        before = end
    for burst in document["bursts_sent"]:
        if origin <= burst["stop"] and burst["start"] <= origin + _ZOOM_SECONDS:
            axes.barh(
                height,
                burst["stop"] - burst["start"],
                left=burst["start"] - origin,
                height=0.9,
                color=BURST,
                alpha=0.55,
                zorder=3,
            )


def distribution(document: Document) -> str:
    """Draw what share of steps communicated no longer than a time."""
    figure, axes = figure_of(4.7, 3.3)
    for entry in document["contestants"]:
        times = [step["comm"] for step in entry["series"] if step["timed"]]
        cumulate(axes, times, _colour(entry))
    handles = [_line(entry) for entry in document["contestants"]]
    handles += _ideal_line(document, axes.axvline)
    axes.set(xlabel="communication of a step, ms", ylabel="steps no longer than that, %")
    if _has_far_outliers(document):
        logarithmic(axes, "x")
    else:
        axes.set_xlim(left=0)
    legend(axes, handles, 2)
    return svg(figure)


def losses(document: Document) -> str:
    """Draw the smoothed training loss, and the held-out loss after each turn."""
    figure, axes = figure_of(4.7, 3.3)
    for entry in document["contestants"]:
        steps, training = _training_curve(entry)
        held_out = [point for point in entry["validation"] if point["loss"] is not None]
        axes.plot(steps, training, color=_colour(entry), alpha=0.45, linewidth=1.2)
        axes.plot(
            [point["step"] for point in held_out],
            [point["loss"] for point in held_out],
            color=_colour(entry),
            marker="o",
            markersize=4,
            linewidth=1.6,
        )
    handles = [_line(entry) for entry in document["contestants"]]
    handles.append(
        Line2D([], [], color="#777777", marker="o", markersize=4, label="held-out (thin: training)")
    )
    axes.set(xlabel="step", ylabel="loss, nats per character", ylim=_loss_range(document))
    legend(axes, handles, 2)
    return svg(figure)


def _training_curve(entry: Entry) -> tuple[list[int], list[float]]:
    """Return steps and smoothed training loss, where it is a number."""
    known = [step for step in entry["series"] if step["loss"] is not None]
    return [step["step"] + 1 for step in known], smooth([step["loss"] for step in known])


def _loss_range(document: Document) -> tuple[float, float]:
    """Return a range without the steep first steps, beside which all curves look the same."""
    points: list[float] = []
    for entry in document["contestants"]:
        training = _training_curve(entry)[1]
        points += training[len(training) // 2 :]
        points += [point["loss"] for point in entry["validation"] if point["loss"] is not None]
    low, high = min(points, default=0.0), max(points, default=1.0)
    margin = 0.15 * (high - low) + 0.05
    return low - margin, high + 2 * margin


def _has_far_outliers(document: Document) -> bool:
    """Return whether the longest steps would press all others together on a linear axis."""
    entries = document["contestants"]
    typical = max(entry["comm_median_s"] for entry in entries)
    return bool(max(entry["comm_max_s"] for entry in entries) > _FAR * typical)


def _colour(entry: Entry) -> str:
    return COLOURS.get(entry["name"], "#7a5195")


def _dot(entry: Entry) -> Line2D:
    return Line2D(
        [], [], color=_colour(entry), marker="o", markersize=4, linestyle="", label=entry["label"]
    )


def _line(entry: Entry) -> Line2D:
    return line(entry["label"], _colour(entry))


def _burst_patch(document: Document) -> list[Any]:
    return [Patch(color=BURST, alpha=0.55, label="burst")] if document["bursts_sent"] else []


def _ideal_line(document: Document, draw: Callable[..., Any]) -> list[Any]:
    ideal = document["header_ideal_s"]
    if ideal is None:
        return []
    return [draw(ideal * 1000, color=IDEAL, linestyle="--", linewidth=1, label="header ideal")]
