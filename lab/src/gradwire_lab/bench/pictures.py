"""The pictures of the page of benchmarks, each with its figures beside it as JSON."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gradwire_lab.bench.networks_page import write
from gradwire_lab.bench.transport import run_ground
from gradwire_lab.bench.transport_grid import Ground, quick_grounds
from gradwire_lab.bench.where import LOSSES, ROUND_TRIPS, SIZES, run_map
from gradwire_lab.contest.measure import environment
from gradwire_lab.network.presets import ETHERNET_MTU
from gradwire_lab.report.drawing import legend, line, logarithmic, write_forms

__all__ = ["PARTS", "SIZE_GROUNDS", "measure_sizes"]

_COLOURS = ("#d1603d", "#3b78b5", "#2a9d76", "#8a5a9e")
_QUICKEST = 64.0
"""What is this many times as fast has the colour of everything beyond."""
SIZE_GROUNDS = [
    ground
    for ground in quick_grounds("on")
    if ground.ranks == 4 and ground.network.mtu == ETHERNET_MTU
]
"""The networks on which buffers are summed by size."""
_SUMS = ("exact", "int8")
"""Whose times are drawn, over Gloo's."""

Progress = Callable[[str], None]


def where(folder: Path, command: str, jobs: int, progress: Progress) -> list[Path]:
    """Draw where exact sums pay, by loss, round trip and size."""
    cells = run_map(jobs, progress)
    return _write(folder / "where-it-pays.svg", command, {"cells": cells}, lambda: _map(cells))


def networks(folder: Path, command: str, jobs: int, progress: Progress) -> list[Path]:
    """Draw the map of racks, and write the page of networks, from the rows that were kept."""
    return write(folder)


def sizes(folder: Path, command: str, jobs: int, progress: Progress) -> list[Path]:
    """Draw the transports alone by size, as networks of namespaces take them."""
    rows = measure_sizes(SIZE_GROUNDS, progress)
    return _write(folder / "sizes.svg", command, {"rows": rows}, lambda: _sizes(rows))


PARTS: Mapping[str, Callable[[Path, str, int, Progress], list[Path]]] = {
    "where": where,
    "networks": networks,
    "sizes": sizes,
}
"""The pictures that this module draws, by the name of their part."""


def _write(
    path: Path, command: str, found: Mapping[str, Any], draw: Callable[[], Figure]
) -> list[Path]:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    values = {"date": now, "command": command, "machine": environment(), **found}
    figures = path.with_suffix(".json")
    figures.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return [*write_forms(path, draw), figures]


# ---------------------------------------------------------------------------- where it pays


def _map(cells: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9.6, 3.5), layout="constrained")
    colours = matplotlib.colormaps["BrBG"]
    norm = TwoSlopeNorm(0.0, -2.0, math.log2(_QUICKEST))
    with matplotlib.rc_context({"axes.grid": False}):
        for number, size in enumerate(SIZES):
            axes = figure.add_subplot(1, len(SIZES), number + 1)
            for cell in (each for each in cells if each["bytes"] == size):
                column = LOSSES.index(cell["loss"])
                row = ROUND_TRIPS.index(cell["round_trip_s"])
                ratio = cell["times_as_fast"]
                level = -2.0 if ratio is None else math.log2(ratio)
                colour = colours(norm(min(max(level, -2.0), math.log2(_QUICKEST))))
                box = matplotlib.patches.Rectangle((column - 0.5, row - 0.5), 1, 1, color=colour)
                axes.add_patch(box)
                dark = sum(colour[:3]) < 1.5
                axes.text(
                    column,
                    row,
                    "–" if ratio is None else f"{ratio:.2g}" if ratio < 100 else f"{ratio:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if dark else "#1f2328",
                )
            axes.set_xlim(-0.5, len(LOSSES) - 0.5)
            axes.set_ylim(-0.5, len(ROUND_TRIPS) - 0.5)
            axes.set_xticks(range(len(LOSSES)), [f"{100 * loss:g} %" for loss in LOSSES])
            trips = [f"{1000 * trip:g} ms" for trip in ROUND_TRIPS] if number == 0 else []
            axes.set_yticks(range(len(ROUND_TRIPS)) if number == 0 else [], trips)
            axes.tick_params(length=0)
            axes.spines[["left", "bottom"]].set_visible(False)
            axes.set_xlabel("loss of the path")
            if number == 0:
                axes.set_ylabel("round trip")
            axes.set_title(_size(size), loc="left", fontsize=9)
    return figure


def _size(size: int) -> str:
    return f"{size >> 20} MiB a rank" if size >= 1 << 20 else f"{size >> 10} KiB a rank"


# ---------------------------------------------------------------------------- sizes


def measure_sizes(
    grounds: Sequence[Ground], progress: Progress, blocks: int = 5
) -> list[dict[str, Any]]:
    """Sum buffers of several sizes by Gloo and gradwire in turn.

    Returns:
        For each network and size in KiB how many times as fast as Gloo's exact sums and those in
        int8 are, by their medians.
    """
    rows = []
    for ground in grounds:
        rate = ground.network.rate
        for cell in run_ground(ground, names=_SUMS, blocks=blocks, progress=progress):
            found = {name: round(cell["contestants"][name]["ratio"], 3) for name in _SUMS}
            network = f"{rate / 1e9:g} Gbit/s" if rate else ground.network.name
            size = cell["bytes"] / 1024
            rows.append({"network": network, "ranks": ground.ranks, "kib": size, **found})
    return rows


def _sizes(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    networks = list(dict.fromkeys(row["network"] for row in rows))
    handles: list[Line2D] = [line(name, _COLOURS[place]) for place, name in enumerate(networks)]
    for number, (key, title) in enumerate((("exact", "exact sums"), ("int8", "int8"))):
        axes = figure.add_subplot(1, 2, number + 1)
        axes.axhline(1.0, color=matplotlib.rcParams["xtick.color"], linewidth=0.8)
        for place, name in enumerate(networks):
            points = [(row["kib"], row[key]) for row in rows if row["network"] == name]
            axes.plot(*zip(*points, strict=True), color=_COLOURS[place], marker=".")
        logarithmic(axes, "x")
        axes.set(xlabel="KiB of each rank's buffer, 4 ranks", ylabel=f"{title}: × Gloo's speed")
        axes.set_ylim(bottom=0)
        if number == 0:
            legend(axes, handles, 2)
    return figure
