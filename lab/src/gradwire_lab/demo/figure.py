"""The picture of the README is drawn from a demo, with the figures that documents quote beside it.

A light and a dark form differ by the colours of text and lines alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from gradwire_lab.demo.plots import COLOURS
from gradwire_lab.demo.words import Document, milliseconds
from gradwire_lab.report.drawing import figure_of, write_forms
from gradwire_lab.report.words import share

__all__ = ["QUOTED", "quoted", "write_figure"]

QUOTED = ("timed_steps", "comm_median_s", "comm_p90_s", "comm_max_s", "steps_per_s", "peer")
"""What documents quote of each contestant."""


def write_figure(document: Document, path: Path) -> list[Path]:
    """Draw how long steps wait, and write the figures.

    Args:
        path: an SVG file; "-dark" is added for the dark form, and .json replaces .svg.

    Returns:
        The files written.
    """
    figures = path.with_suffix(".json")
    figures.write_text(json.dumps(quoted(document), indent=1) + "\n", encoding="utf-8")
    return [*write_forms(path, lambda: _draw(document)), figures]


def quoted(document: Document) -> dict[str, Any]:
    """Return the figures that documents quote, with date, command and machine."""
    return {
        "date": document["date"],
        "command": document["command"],
        "machine": document["machine"],
        "header_ideal_s": document["header_ideal_s"],
        "round_trip_s": document["scenario"]["round_trip_s"],
        "loss": document["scenario"]["loss"],
        "contestants": {
            entry["name"]: {
                "label": entry["label"],
                **{key: entry[key] for key in QUOTED},
                "speed_over": entry["speed_over"],
                "speed_over_peer": entry["speed_over"].get(entry["peer"]),
            }
            for entry in document["contestants"]
        },
    }


def _draw(document: Document) -> Figure:
    ink, soft = (matplotlib.rcParams[name] for name in ("text.color", "xtick.color"))
    entries = list(document["contestants"])
    with matplotlib.rc_context({"axes.grid.axis": "x", "ytick.color": ink}):
        figure, axes = figure_of(7.5, 0.8 + 0.42 * len(entries))
        for row, entry in enumerate(reversed(entries)):
            median, tail, longest = (
                1000 * entry[key] for key in ("comm_median_s", "comm_p90_s", "comm_max_s")
            )
            colour = COLOURS.get(entry["name"], "#888888")
            axes.barh(row, median, 0.55, color=colour)
            axes.barh(row, tail, 0.14, color=colour, alpha=0.55)
            axes.plot(longest, row, "o", color=colour, markersize=6)
            axes.annotate(
                f"{median:.0f} · {tail:.0f} · {longest:.0f}{_over_peer(entry, entries)}",
                (max(tail, longest), row),
                (9, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                color=ink,
            )
        if document["header_ideal_s"] is not None:
            ideal = 1000 * document["header_ideal_s"]
            axes.axvline(ideal, color=soft, linestyle=":", linewidth=1)
            axes.annotate(
                f"{ideal:.0f}: the bytes alone, in float32",
                (ideal, -0.7),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=soft,
            )
        axes.set_yticks(range(len(entries)), [entry["label"] for entry in reversed(entries)])
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.set_ylim(-1.0, len(entries) - 0.5)
        axes.set_xlim(0, 1.22 * max(1000 * entry["comm_max_s"] for entry in entries))
        steps = min(entry["timed_steps"] for entry in entries)
        title = (
            "milliseconds that a step waits for its gradients: median · 90th percentile · longest"
        )
        axes.set_title(f"{title}\n{_where(document)}, {steps} steps each", loc="left", fontsize=9)
        return figure


def _where(document: Document) -> str:
    ranks, network = document["scenario"]["ranks"], document["network"]
    if network is None:
        return f"{ranks} processes on loopback"
    scenario = document["scenario"]
    what = "bursts into one port"
    if scenario["round_trip_s"]:
        trip = milliseconds(scenario["round_trip_s"])
        what = f"a round trip of {trip}, {share(scenario['loss'])} of loss"
    return f"{ranks} hosts, {_rate(network['rate'])}, {what}"


def _rate(bits: float) -> str:
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def _over_peer(entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> str:
    """Return how many times as fast as its peer a contestant trained, where that is known."""
    ratio = entry["speed_over"].get(entry["peer"])
    if ratio is None:
        return ""
    peer = next(each["label"] for each in entries if each["name"] == entry["peer"])
    return f"; trained {ratio:.2f} × as fast as {peer}"
