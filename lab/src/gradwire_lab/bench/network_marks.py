"""Whether networks came to an end and their marks are met, in the words of tables and pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gradwire_lab.bench.network_scenes import SHARES, WORDS, figure_text
from gradwire_lab.bench.networks import Mark

TITLES = {
    "grid": "Racks",
    "small": "Smaller queues",
    "policers": "Policers",
    "incast": "Many into one port",
    "far": "One host elsewhere",
    "sites": "Long paths",
    "clocks": "Clocks that run apart",
    "long": "A minute without a pause",
    "sharing": "Several jobs",
    "rates": "A rate that changes",
    "tcp": "Flows of TCP",
    "known": "The lab's networks",
}
"""Groups of networks, as headings have them."""
NO_WORSE = (Mark("time_over", most=1.05), Mark("worst_over", most=1.15))
"""What an engine shall keep of an older one's times, on the networks that it was made for."""
_WORDS = {
    **WORDS,
    "payload": "sent",
    "acks": "ACKs",
    "time_over": "time over that of the engine before",
    "worst_over": "longest over that of the engine before",
}
_MOST_DIGITS = 5

Row = Mapping[str, Any]


def failed_text(row: Row) -> str:
    """Return how many runs of a network came to no end; "" where all did."""
    return f"{row['failed']} of {row['seeds']} runs did not end" if "failure" in row else ""


def bounds_text(mark: Mapping[str, Any]) -> str:
    """Return a mark's bounds."""
    return ", ".join(
        f"{sign} {_bound(mark['figure'], mark[key])}"
        for sign, key in (("≥", "least"), ("≤", "most"))
        if mark[key] is not None
    )


def _bound(key: str, value: float) -> str:
    return f"{100 * value:g} %" if key in SHARES else f"{value:.3g}"


def compared(rows: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """Return rows with their times over those of the engine before, and whether these are no worse.

    Args:
        rows: rows of one engine.
        before: rows of the engine before, with a list of times by seed; those of a row's own seeds
            are taken, and a row that had more seeds is not compared.
    """
    older = {(row["group"], row["name"]): row for row in before}
    return [_compared(row, older.get((row["group"], row["name"]))) for row in rows]


def _compared(row: Row, was: Row | None) -> Row:
    compared_ones = [mark.figure for mark in NO_WORSE]
    marks = [mark for mark in row.get("marks", ()) if mark["figure"] not in compared_ones]
    found = {key: value for key, value in row.items() if key not in compared_ones}
    if was is None or row["seeds"] > len(was["time"]):
        return {**found, "marks": marks}
    if "failure" not in row:
        found["time_over"] = row["time"] / median(was["time"][: row["seeds"]])
        found["worst_over"] = row["worst"] / max(was["worst"][: row["seeds"]])
    no_worse = [
        {**asdict(mark), "met": mark.figure in found and mark.met(found[mark.figure])}
        for mark in NO_WORSE
    ]
    return {**found, "marks": [*marks, *no_worse]}


def no_worse(rows: Sequence[Row]) -> tuple[int, int]:
    """Return how many of the networks that are compared are no worse, and how many these are."""
    keys = [mark.figure for mark in NO_WORSE]
    every = [[mark["met"] for mark in row["marks"] if mark["figure"] in keys] for row in rows]
    return sum(all(each) for each in every if each), sum(bool(each) for each in every)


@dataclass(frozen=True)
class Tally:
    """How many networks there are, how many have runs that did not end, and how many marks."""

    title: str
    networks: int
    stuck: int
    marks: int
    met: int


def tally(rows: Sequence[Row]) -> list[Tally]:
    """Return the counts of each group that has networks, and those of all."""
    found = [
        _tally(title, every)
        for group, title in TITLES.items()
        if (every := [row for row in rows if row["group"] == group])
    ]
    return [*found, _tally("all", rows)]


def _tally(title: str, rows: Sequence[Row]) -> Tally:
    met = [bool(mark["met"]) for row in rows for mark in row.get("marks", ())]
    return Tally(title, len(rows), sum("failure" in row for row in rows), len(met), sum(met))


def missed(rows: Sequence[Row]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a line for each mark that is missed, and for each network that came to no end."""
    for group, title in TITLES.items():
        for row in rows:
            if row["group"] != group:
                continue
            head = title, row["name"]
            if "failure" in row:
                yield (*head, "–", "–", f"{failed_text(row)} ({row['failure']})")
                continue
            for mark in row.get("marks", ()):
                if not mark["met"]:
                    key = mark["figure"]
                    yield (*head, _WORDS[key], bounds_text(mark), _found(mark, row[key]))


def _found(mark: Mapping[str, Any], value: float) -> str:
    """Return a figure with as many digits as show that it misses its mark."""
    key = mark["figure"]
    bounds = Mark(key, mark["most"], mark["least"])
    scale, unit = (100, " %") if key in SHARES else (1, "")
    for digits in range(2, _MOST_DIGITS):
        text = f"{scale * value:.{digits}f}"
        if not bounds.met(float(text) / scale):
            return text + unit
    return figure_text(key, value)
