"""Numbers and marks are written here as people read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradwire_lab.run.model import CellResult, Judgement, MarkedCell, Results, Summary
from gradwire_lab.scenario.mark import P99_SAMPLES, SCOPES

__all__ = [
    "COLUMNS",
    "MARK_COLUMNS",
    "NONE",
    "dates",
    "failures",
    "filled",
    "mark_rows",
    "missing",
    "notes",
    "rate",
    "reached",
    "row",
    "rows",
    "seconds",
    "share",
    "verdict",
]

NONE = "–"
TOO_SLOW = 0.85
STOLEN = 0.02
"""Smallest stolen share of the processor time asked for that a report mentions (ours)."""

SHORT = 0.9
"""Share of their bytes below which bursts count as others than the file's (ours)."""

ANOTHER_SHARE = 0.03
"""Distance from the communication share asked for that a report mentions (ours)."""


def seconds(value: float | None) -> str:
    """Return a time, in the unit that suits it."""
    if value is None:
        return NONE
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(value) * scale >= 0.9995:
            brief = abs(value) * scale < 999.5
            return f"{value * scale:.3g} {unit}" if brief else f"{value:.0f} s"
    return f"{value * 1e6:.0f} µs"


def rate(value: float | None) -> str:
    """Return a rate, given in bits per second."""
    return NONE if value is None else f"{value / 1e6:{'.4g' if value < 9999.5e6 else '.0f'}} Mbit/s"


def share(value: float | None) -> str:
    """Return a share; what is not all never reads as 100 %."""
    if value is None:
        return NONE
    text = f"{value * 100:.1f}"
    return "> 99.9 %" if text == "100.0" and value < 1 else f"{text} %"


def number(value: float | None) -> str:
    """Return a plain number."""
    return NONE if value is None else f"{value:.3g}"


def _interval(entry: Summary) -> str:
    reach = entry.intervals["median_s"]
    return NONE if reach is None else f"{seconds(reach[0])} … {seconds(reach[1])}"


def _push(entry: Summary) -> str:
    push = entry.push
    return NONE if push is None else f"{seconds(push.median_s)} (p95 {seconds(push.p95_s)})"


def _throughput(entry: Summary) -> str:
    rated = entry.throughput_bps is not None
    return rate(entry.throughput_bps) if rated else f"{number(entry.steps_per_s)} steps/s"


def _goodput(entry: Summary) -> str:
    return NONE if entry.goodput_bps == entry.throughput_bps else rate(entry.goodput_bps)


def _passes(entry: Summary) -> str:
    passes = entry.passes_median
    return NONE if passes is None else f"{passes:g} (max {entry.passes_max})"


def _megabytes(value: float | None) -> str:
    return NONE if value is None else f"{value / 1e6:.3g} MB"


COLUMNS: Mapping[str, Callable[[Summary], str]] = {
    "": lambda entry: entry.name,
    "samples": lambda entry: str(entry.samples),
    "median": lambda entry: seconds(entry.median_s),
    "90 % interval": _interval,
    "p95": lambda entry: seconds(entry.p95_s),
    "p99": lambda entry: seconds(entry.p99_s),
    "p99.9": lambda entry: seconds(entry.p999_s),
    "max": lambda entry: seconds(entry.max_s),
    "push": _push,
    "limit": lambda entry: seconds(entry.limit_s),
    "× limit": lambda entry: NONE if entry.over_limit is None else f"{entry.over_limit:.2f}",
    "throughput": _throughput,
    "goodput": _goodput,
    "comm share": lambda entry: share(entry.comm_share),
    "delivered": lambda entry: share(entry.delivered),
    "sent again": lambda entry: share(entry.retransmitted),
    "passes": _passes,
    "critical": lambda entry: share(entry.critical_share),
    "bytes a round": lambda entry: _megabytes(entry.bytes_per_round),
    "on the wire": lambda entry: _megabytes(entry.wire_bytes_per_round),
    "rivals": lambda entry: rate(entry.rival_goodput_bps),
    "final loss": lambda entry: number(entry.final_loss),
    "time to loss": lambda entry: seconds(entry.time_to_loss_s),
}
"""What tables say of a contestant, by column."""


def row(entry: Summary, columns: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """Return a contestant's cells."""
    return [COLUMNS[name](entry) for name in columns]


def rows(cell: CellResult) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a cell, without the columns in which nothing stands."""
    return filled([*COLUMNS], [row(entry) for entry in cell.contestants])


def filled(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns in which nothing stands."""
    kept = [place for place in range(len(columns)) if any(each[place] != NONE for each in rows)]
    return [columns[place] for place in kept], [[each[place] for place in kept] for each in rows]


def verdict(mark: Judgement) -> str:
    """Return whether a mark is met, and by how much it is missed."""
    why = list(dict.fromkeys(row.why for row in mark.cells if row.why))
    if mark.met is None and why:
        return f"open: {'; '.join(why)}"
    if mark.met is None and mark.value is None:
        return "not measured"
    found = "met"
    if mark.missed_by is None:  # it is missed infinitely
        found = "missed"
    elif mark.missed_by > 0:
        found = f"missed by {mark.missed_by * 100:.1f} %"
    return found if mark.met is not None else f"open, not all of it was run: so far {found}"


def reached(row: Judgement | MarkedCell) -> str:
    """Return the value of a mark, or of a cell of it, with its interval; a difference is signed."""
    reach = row.interval
    if reach is None or row.value is None:  # an infinite interval is None
        return number(row.value)
    sign = "+" if row.difference else ""
    return f"{row.value:{sign}.3g} ({reach[0]:{sign}.3g} … {reach[1]:{sign}.3g})"


def dates(document: Results) -> str:
    """Return the days on which it was measured."""
    first, last = (day[:10] for day in document.dates)
    return first if first == last else f"{first} to {last}"


MARK_COLUMNS = ("wanted", "ours", "mark", "of", "")


def mark_rows(marks: Sequence[Judgement]) -> list[list[str]]:
    """Return the marks' cells, in the order of `MARK_COLUMNS`."""
    return [
        [
            mark.text,
            reached(mark),
            ("± " if mark.difference and mark.wanted is not None else "") + number(mark.wanted),
            SCOPES[mark.scope],
            verdict(mark),
        ]
        for mark in marks
    ]


def failures(document: Results) -> list[str]:
    """Return what failed, a line each; a cell's numbers are those of its other seeds."""
    return [f"Failed: {error}" for error in document.errors]


def missing(document: Results) -> list[str]:
    """Return what was not run, or failed, in a line, if anything was."""
    count = document.missing
    if not count:
        return []
    total = len(document.cells) * len(document.work.seeds)
    return [f"Not complete: {count} of {total} runs of this file (a cell, a seed) are not there."]


def notes(document: Results) -> list[str]:
    """Return what a reader must know to judge the numbers."""
    lines = []
    if document.quick:
        lines.append(
            "The short form, made to see that everything works: too few samples to judge by."
        )
    lines += missing(document)
    if document.elsewhere:
        lines.append(
            f"Made by gradwire {document.gradwire} "
            f"(commits: {', '.join(document.commits) or 'unknown'}) on "
            + "; or ".join(
                f"{each['cores']} cores ({each['cpu']}), Linux {each['kernel']}"
                for each in document.machines
            )
            + "."
        )
    if others := document.other_forms:
        lines.append(f"Of another form of these cells than the file now has: {'; '.join(others)}.")
    if outside := document.settings:
        lines.append(
            "Set from outside, for all contestants of gradwire: "
            f"{', '.join(f'{name}={value}' for name, value in outside.items())}."
        )
    kernel = document.kernel
    lines.append(
        f"Real processes in network namespaces of one machine; "
        f"{' or '.join(kernel.topology)}; {kernel.shaper}; segmentation "
        f"offloads {' and '.join(kernel.offloads)}, alike for all contestants; loss by "
        f"chance: {' or '.join(kernel.loss)}; wires: {', '.join(kernel.wires)}."
    )
    lines += [
        f"The machine carried only {each.reached / each.wanted:.0%} of what {each.hosts} "
        f"hosts at {each.network} ask for: times here are the machine's, not the network's."
        for each in document.calibrations
        if each.reached < TOO_SLOW * each.wanted
    ]
    work = document.work
    lines.append(
        f"Contestants take turns of {work.block} rounds in one run, so that what disturbs the "
        f"machine disturbs all alike; the first {work.warm_up} of a turn are not timed. "
        f"Seeds: {', '.join(map(str, document.seeds))}."
    )
    lines.append(
        "A 99th percentile is given from 300 samples on, a 99.9th from 3,000. Limit: the bytes "
        "that must arrive over what the links let through, without headers and round trips; all of "
        "them in float32, so that encodings, and bounds by time or by layer, can be below it."
    )
    for name, reason in document.left_out.items():
        lines.append(f"{name} takes no part, because this gradwire lacks it: {reason}")
    for cell in document.cells:
        lines += _cell_notes(cell)
    return lines


def _tuned_to(tail: Mapping[str, Any]) -> str:
    """Say what ratio the tuning reached, if its attempts had enough samples."""
    if tail.get("rounds", 0) < P99_SAMPLES:
        return "; its attempts had too few rounds for a 99th percentile"
    return f" and gave one of {tail['reached']:.2f}"


def _cell_notes(cell: CellResult) -> list[str]:
    lines = []
    drops = sum(each.run.softnet_drops for each in cell.runs)
    if drops:
        lines.append(
            f"{cell.name}: the machine was too slow: it dropped {drops} packets or trains of "
            "them outside of any queue."
        )
    marked = sum(each.run.marked for each in cell.runs)
    if cell.topology.ecn is not None:
        lines.append(f"{cell.name}: the switches marked {marked} packets (ECN).")
    untold = sum(each.run.wire_failures for each in cell.runs)
    if untold:
        lines.append(f"{cell.name}: the lab's own wires lost {untold} packets untold.")
    for record in cell.runs:
        run, where = record.run, f"{cell.name}, seed {record.seed}"
        if (record.stolen or 0.0) >= STOLEN:
            lines.append(
                f"{where}: of the processor time that was wanted the "
                f"machine's host gave {record.stolen:.0%} to others."
            )
        planned = sum(burst.planned for burst in run.bursts)
        if planned and (sent := sum(burst.bytes for burst in run.bursts)) < SHORT * planned:
            lines.append(
                f"{where}: the bursts had only {share(sent / planned)} "
                "of their bytes: the machine was too slow to send them."
            )
        if (tail := run.facts.get("tail")) is not None:
            lines.append(
                f"{where}: bursts of {seconds(tail['on_s'])} were tuned "
                f"for a tail of {tail['wanted']:g}{_tuned_to(tail)}."
            )
        if (compute := run.facts.get("compute_s")) is not None:
            lines.append(f"{where}: a step's computation is {seconds(compute)}.")
    asked = cell.model.communication_share
    if asked and cell.contestants:
        first = cell.contestants[0]
        if abs((first.comm_share or 0.0) - asked) > ANOTHER_SHARE:
            lines.append(
                f"{cell.name}: communication took {share(first.comm_share)} of the time of "
                f"{first.name}, set to {share(asked)}: with overlap it counts from a step's "
                "first bucket on, and lossy steps come on top."
            )
    for entry in cell.contestants:
        if entry.replicas_identical is False:
            lines.append(f"{cell.name}: {entry.name}: the replicas differ between ranks.")
    same = [entry.replicas_identical for entry in cell.contestants]
    if same and all(same):
        lines.append(f"{cell.name}: all replicas ended bit-identical, for every contestant.")
    return lines
