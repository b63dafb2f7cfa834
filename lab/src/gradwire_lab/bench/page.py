"""The page of benchmarks is written from the figures beside its pictures."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from gradwire_lab.bench.where import tcp_seconds

__all__ = ["NAME", "filled", "paying", "render", "write_page"]

NAME = "benchmarks.md"
TITLES = {
    "step-times": "[while the network bursts](#while-the-network-bursts)",
    "far-times": "[hosts far from each other](#hosts-far-from-each-other)",
    "where-it-pays": "[where it pays](#where-it-pays)",
    "sizes": "[quiet networks, by size](#quiet-networks-by-size)",
}
_VIRTUAL = ("where-it-pays",)
"""The pictures whose figures do not depend on the machine."""
_QUIET_S = 0.001
_PARAMETERS = 2_150_000
"""Of the demo's model; each moves as two bytes in half precision."""

Figures = Mapping[str, Any]


def write_page(folder: Path) -> Path:
    path = folder / NAME
    path.write_text(render(folder), encoding="utf-8")
    return path


def render(folder: Path) -> str:
    """Return the page that belongs to the figures in a folder.

    Raises:
        FileNotFoundError: the figures of a picture are not there.
    """
    known = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in TITLES
    }
    template = Path(__file__).with_name("benchmarks.md.j2").read_text(encoding="utf-8")
    machine = known["step-times"]["machine"]
    drawn = [
        {
            "title": TITLES[name],
            "date": each["date"][:10],
            "load": "–" if name in _VIRTUAL else _load(each["machine"]["load"]),
            "command": each["command"],
        }
        for name, each in known.items()
    ]
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    page = environment.from_string(template).render(
        drawn=drawn,
        cores=machine["cores"],
        cpu=machine["cpu"],
        bursts=_bursts(known["step-times"]),
        far=_far(known["far-times"]),
        map=paying(known["where-it-pays"]["cells"]),
        sizes=_sizes(known["sizes"]),
    )
    return "\n\n".join(map(filled, page.split("\n\n")))


def _load(load: float | None) -> str:
    """Return the load of a machine; of earlier measurements it is not always known."""
    return "not noted" if load is None else f"{load:.1f}"


def filled(paragraph: str) -> str:
    """Return a paragraph, or a list, in lines of the pages' length."""
    if paragraph.startswith(("|", "!", "#", "```")):
        return paragraph
    found: list[str] = []
    for item in re.split(r"\n(?=- )", paragraph.rstrip("\n")):
        text, indent = " ".join(item.split()), "  " if item.startswith("- ") else ""
        found += textwrap.wrap(
            text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(found) + ("\n" if paragraph.endswith("\n") else "")


def _bursts(figures: Figures) -> dict[str, str]:
    ours, theirs = (figures["contestants"][name] for name in ("adaptive", "gloo-fp16"))
    return {
        "steps": ours["timed_steps"],
        "ratio": f"{ours['speed_over_peer']:.2f}",
        "ours": f"{1000 * ours['comm_max_s']:.0f}",
        "theirs": f"{1000 * theirs['comm_max_s']:.0f}",
    }


def _far(figures: Figures) -> dict[str, str]:
    ours, theirs = (figures["contestants"][name] for name in ("adaptive", "gloo-fp16"))
    trip, loss = figures["round_trip_s"], figures["loss"]
    return {
        "trip": f"{1000 * trip:g}",
        "loss": f"{100 * loss:g}",
        "steps": ours["timed_steps"],
        "ratio": f"{ours['steps_per_s'] / theirs['steps_per_s']:.1f}",
        "estimate": f"{tcp_seconds(2 * _PARAMETERS, trip, loss):.1f}",
        "measured": f"{theirs['comm_median_s']:.1f}",
    }


def paying(cells: Sequence[Figures]) -> dict[str, str]:
    """Return in words what the map of where it pays says."""
    quiet = [
        cell["times_as_fast"]
        for cell in cells
        if cell["loss"] == 0 and cell["round_trip_s"] <= _QUIET_S
    ]
    trips = [
        cell["times_as_fast"]
        for cell in cells
        if cell["loss"] == 0 and cell["round_trip_s"] > _QUIET_S
    ]
    (middle,) = (
        cell["times_as_fast"]
        for cell in cells
        if (cell["bytes"], cell["round_trip_s"], cell["loss"]) == (1 << 20, 0.01, 0.01)
    )
    return {
        "quiet_low": f"{min(quiet):.2f}",
        "quiet_high": f"{max(quiet):.2f}",
        "trips_low": f"{min(trips):.1f}",
        "trips_high": f"{max(trips):.1f}",
        "middle": f"{middle:.0f}",
    }


def _sizes(figures: Figures) -> dict[str, str]:
    rows = figures["rows"]
    small = [row["exact"] for row in rows if row["kib"] <= 256]
    large = [row["exact"] for row in rows if row["kib"] >= 4096]
    return {
        "small_low": f"{min(small):.2f}",
        "small_high": f"{max(small):.2f}",
        "large_low": f"{min(large):.2f}",
        "large_high": f"{max(large):.2f}",
    }
