"""The pages of demo and lab draw in one style, with figures as SVG text."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("svg")

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Locator, NullLocator

__all__ = [
    "BURST",
    "IDEAL",
    "STYLE",
    "RoundNumbers",
    "cumulate",
    "figure_of",
    "legend",
    "line",
    "logarithmic",
    "plain",
    "smooth",
    "svg",
    "write_forms",
]

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


_INK = {"light": "#1f2328", "dark": "#e6edf3"}
_SOFT = {"light": "#59636e", "dark": "#9198a1"}


def plain(value: float, position: float) -> str:
    """Label a tick without powers of ten."""
    return f"{value:g}"


def smooth(values: Sequence[float], keep: float = 0.8) -> list[float]:
    """Return a running mean that forgets."""
    smoothed: list[float] = []
    for value in values:
        smoothed.append(value if not smoothed else keep * smoothed[-1] + (1 - keep) * value)
    return smoothed


def legend(axes: Axes, handles: Sequence[Any], columns: int | None = None) -> None:
    """Draw a legend above the axes."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=columns or len(handles),
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.4,
    )


def line(label: str, colour: str) -> Line2D:
    """Return a contestant's line in a legend."""
    return Line2D([], [], color=colour, linewidth=1.7, label=label)


def cumulate(axes: Axes, seconds: Sequence[float], colour: str) -> None:
    """Draw what share of samples took no longer than a time, in per cent over milliseconds."""
    times = sorted(1000 * each for each in seconds)
    shares = [(number + 1) / len(times) * 100 for number in range(len(times))]
    axes.step([times[0], *times], [0.0, *shares], where="post", color=colour, linewidth=1.7)
    axes.set_ylim(0, 102)


class RoundNumbers(Locator):
    """Ticks of a logarithmic axis stand at round numbers, as many as their labels have room for."""

    _STEPS = ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,))

    def __call__(self) -> list[float]:
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        """Return the ticks between two positive numbers."""
        assert isinstance(self.axis, Axis)
        low, high = math.log10(vmin), math.log10(vmax)
        powers = range(math.floor(low), math.ceil(high) + 1)
        for steps in self._STEPS:
            gaps = [math.log10(b / a) for a, b in itertools.pairwise([*steps, 10])]
            if min(gaps) * self.axis.get_tick_space() >= high - low:
                break
        ticks = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in ticks if vmin <= tick <= vmax]


def logarithmic(axes: Axes, which: Literal["x", "y"]) -> None:
    """Let one of the axes be logarithmic, with plain numbers."""
    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis: Axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(RoundNumbers())
    axis.set_major_formatter(plain)
    axis.set_minor_locator(NullLocator())


def figure_of(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Figure) -> str:
    """Return a figure as the text of an SVG element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def write_forms(path: Path, draw: Callable[[], Figure]) -> list[Path]:
    """Write a figure for light and for dark pages, which differ by text and lines alone.

    Args:
        path: an SVG file; "-dark" is added to the name of the dark form.
        draw: makes the figure in the style that is set while it runs.

    Returns:
        The files written.
    """
    written = []
    for form, target in (("light", path), ("dark", path.with_stem(f"{path.stem}-dark"))):
        ink, soft = _INK[form], _SOFT[form]
        style: dict[str, Any] = dict.fromkeys(("text.color", "axes.labelcolor"), ink)
        style |= dict.fromkeys(("xtick.color", "ytick.color", "grid.color", "axes.edgecolor"), soft)
        with matplotlib.rc_context({**STYLE, **style, "grid.alpha": 0.3}):
            target.write_text(svg(draw()) + "\n", encoding="utf-8")
        written.append(target)
    return written
