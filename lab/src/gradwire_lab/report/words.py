"""Numbers and marks are written here as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_lab.scenario.mark import P99_SAMPLES

__all__ = [
    "COLUMNS",
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

COLUMNS = (
    "",
    "samples",
    "median",
    "90 % interval",
    "p95",
    "p99",
    "p99.9",
    "max",
    "push",
    "limit",
    "× limit",
    "throughput",
    "goodput",
    "comm share",
    "delivered",
    "sent again",
    "passes",
    "critical",
    "bytes a round",
    "on the wire",
    "rivals",
    "final loss",
    "time to loss",
)


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


def row(entry: Mapping[str, Any]) -> list[str]:
    """Return a contestant's cells, in the order of `COLUMNS`."""
    low_high = entry["intervals"]["median_s"]
    moved, wired = entry["bytes_per_round"], entry["wire_bytes_per_round"]
    throughput = entry["throughput_bps"]
    steps = f"{entry['steps_per_s']:.3g} steps/s"
    passes, push = entry["passes_median"], entry["push"]
    return [
        entry["name"],
        str(entry["samples"]),
        seconds(entry["median_s"]),
        NONE if low_high is None else f"{seconds(low_high[0])} … {seconds(low_high[1])}",
        *(seconds(entry[name]) for name in ("p95_s", "p99_s", "p999_s", "max_s")),
        NONE if push is None else f"{seconds(push['median_s'])} (p95 {seconds(push['p95_s'])})",
        seconds(entry["limit_s"]),
        NONE if entry["over_limit"] is None else f"{entry['over_limit']:.2f}",
        rate(throughput) if throughput is not None else steps,
        rate(goodput) if (goodput := entry["goodput_bps"]) != throughput else NONE,
        share(entry["comm_share"]),
        share(entry["delivered"]),
        share(entry["retransmitted"]),
        NONE if passes is None else f"{passes} (max {entry['passes_max']})",
        share(entry["critical_share"]),
        NONE if moved is None else f"{moved / 1e6:.3g} MB",
        NONE if wired is None else f"{wired / 1e6:.3g} MB",
        rate(entry["rival_goodput_bps"]),
        number(entry["final_loss"]),
        seconds(entry["time_to_loss_s"]),
    ]


def rows(cell: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a cell, without the columns in which nothing stands."""
    return filled(COLUMNS, [row(entry) for entry in cell["contestants"]])


def filled(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    """Return a table without the columns in which nothing stands."""
    kept = [place for place in range(len(columns)) if any(each[place] != NONE for each in rows)]
    return [columns[place] for place in kept], [[each[place] for place in kept] for each in rows]


def verdict(mark: Mapping[str, Any]) -> str:
    """Return whether a mark is met, and by how much it is missed."""
    why = list(dict.fromkeys(row["why"] for row in mark["cells"] if row.get("why")))
    if mark["met"] is None and why:
        return f"open: {'; '.join(why)}"
    if mark["met"] is None and mark["value"] is None:
        return "not measured"
    found = "met"
    if mark["missed_by"] is None:  # it is missed infinitely
        found = "missed"
    elif mark["missed_by"] > 0:
        found = f"missed by {mark['missed_by'] * 100:.1f} %"
    return found if mark["met"] is not None else f"open, not all of it was run: so far {found}"


def reached(row: Mapping[str, Any]) -> str:
    """Return the value of a mark, or of a cell of it, with its interval; a difference is signed."""
    reach = row.get("interval")
    if reach is None or row["value"] is None:  # an infinite interval is None
        return number(row["value"])
    sign = "+" if row.get("difference") else ""
    return f"{row['value']:{sign}.3g} ({reach[0]:{sign}.3g} … {reach[1]:{sign}.3g})"


def wanted(mark: Mapping[str, Any]) -> str:
    """Return what a mark asks for."""
    sign = "± " if mark.get("difference") and mark["wanted"] is not None else ""
    return sign + number(mark["wanted"])


def dates(document: Mapping[str, Any]) -> str:
    """Return the days on which it was measured."""
    first, last = (day[:10] for day in document["dates"])
    return first if first == last else f"{first} to {last}"


def mark_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return the marks: text, ours, wanted, verdict."""
    found = []
    for mark in document["marks"]:
        scope = {"every": "every cell; the worst", "mean": "mean of cells", "max": "largest cell"}
        found.append(
            [
                mark["text"],
                reached(mark),
                wanted(mark),
                scope[mark["scope"]],
                verdict(mark),
            ]
        )
    return found


def failures(document: Mapping[str, Any]) -> list[str]:
    """Return what failed, a line each; a cell's numbers are those of its other seeds."""
    return [f"Failed: {error}" for error in document["errors"]]


def missing(document: Mapping[str, Any]) -> list[str]:
    """Return what was not run, or failed, in a line, if anything was."""
    count = document["missing"]
    if not count:
        return []
    total = len(document["cells"]) * len(document["work"]["seeds"])
    return [f"Not complete: {count} of {total} runs of this file (a cell, a seed) are not there."]


def notes(document: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know to judge the numbers."""
    lines = []
    if document["quick"]:
        lines.append(
            "The short form, made to see that everything works: too few samples to judge by."
        )
    lines += missing(document)
    if document["elsewhere"]:
        lines.append(
            f"Made by gradwire {document['gradwire']} "
            f"(commits: {', '.join(document['commits']) or 'unknown'}) on "
            + "; or ".join(
                f"{each['cores']} cores ({each['cpu']}), Linux {each['kernel']}"
                for each in document["machines"]
            )
            + "."
        )
    if others := document["other_forms"]:
        lines.append(f"Of another form of these cells than the file now has: {'; '.join(others)}.")
    if outside := document["settings"]:
        lines.append(
            "Set from outside, for all contestants of gradwire: "
            f"{', '.join(f'{name}={value}' for name, value in outside.items())}."
        )
    kernel = document["kernel"]
    lines.append(
        f"Real processes in network namespaces of one machine; "
        f"{' or '.join(kernel['topology'])}; {kernel['shaper']}; segmentation "
        f"offloads {' and '.join(kernel['offloads'])}, alike for all contestants; loss by "
        f"chance: {' or '.join(kernel['loss'])}; wires: {', '.join(kernel['wires'])}."
    )
    lines += [
        f"The machine carried only {each['reached'] / each['wanted']:.0%} of what {each['hosts']} "
        f"hosts at {each['network']} ask for: times here are the machine's, not the network's."
        for each in document["calibrations"]
        if each["reached"] < TOO_SLOW * each["wanted"]
    ]
    work = document["work"]
    lines.append(
        f"Contestants take turns of {work['block']} rounds in one run, so that what disturbs the "
        f"machine disturbs all alike; the first {work['warm_up']} of a turn are not timed. "
        f"Seeds: {', '.join(map(str, document['seeds']))}."
    )
    lines.append(
        "A 99th percentile is given from 300 samples on, a 99.9th from 3,000. Limit: the bytes "
        "that must arrive over what the links let through, without headers and round trips; all of "
        "them in float32, so that encodings, and bounds by time or by layer, can be below it."
    )
    for name, reason in document["left_out"].items():
        lines.append(f"{name} takes no part, because this gradwire lacks it: {reason}")
    for cell in document["cells"]:
        lines += _cell_notes(cell)
    return lines


def _tuned_to(tail: Mapping[str, Any]) -> str:
    """Say what ratio the tuning reached, if its attempts had enough samples."""
    if tail.get("rounds", 0) < P99_SAMPLES:
        return "; its attempts had too few rounds for a 99th percentile"
    return f" and gave one of {tail['reached']:.2f}"


def _cell_notes(cell: Mapping[str, Any]) -> list[str]:
    lines = []
    drops = sum(run["softnet_drops"] for run in cell["runs"])
    if drops:
        lines.append(
            f"{cell['name']}: the machine was too slow: it dropped {drops} packets or trains of "
            "them outside of any queue."
        )
    marked = sum(run["marked_packets"] for run in cell["runs"])
    if cell["ecn"] is not None:
        lines.append(f"{cell['name']}: the switches marked {marked} packets (ECN).")
    untold = sum(run["wire_failures"] for run in cell["runs"])
    if untold:
        lines.append(f"{cell['name']}: the lab's own wires lost {untold} packets untold.")
    for run in cell["runs"]:
        if (run["stolen"] or 0.0) >= STOLEN:
            lines.append(
                f"{cell['name']}, seed {run['seed']}: of the processor time that was wanted the "
                f"machine's host gave {run['stolen']:.0%} to others."
            )
        planned = sum(burst["planned"] for burst in run["bursts"])
        if planned and (sent := sum(burst["bytes"] for burst in run["bursts"])) < SHORT * planned:
            lines.append(
                f"{cell['name']}, seed {run['seed']}: the bursts had only {share(sent / planned)} "
                "of their bytes: the machine was too slow to send them."
            )
        if (tail := run["facts"].get("tail")) is not None:
            lines.append(
                f"{cell['name']}, seed {run['seed']}: bursts of {seconds(tail['on_s'])} were tuned "
                f"for a tail of {tail['wanted']:g}{_tuned_to(tail)}."
            )
        if (compute := run["facts"].get("compute_s")) is not None:
            lines.append(
                f"{cell['name']}, seed {run['seed']}: a step's computation is {seconds(compute)}."
            )
    asked = cell["communication_share"]
    if asked and cell["contestants"]:
        first = cell["contestants"][0]
        if abs(first["comm_share"] - asked) > ANOTHER_SHARE:
            lines.append(
                f"{cell['name']}: communication took {share(first['comm_share'])} of the time of "
                f"{first['name']}, set to {share(asked)}: with overlap it counts from a step's "
                "first bucket on, and lossy steps come on top."
            )
    for entry in cell["contestants"]:
        if entry["replicas_identical"] is False:
            lines.append(f"{cell['name']}: {entry['name']}: the replicas differ between ranks.")
    same = [entry["replicas_identical"] for entry in cell["contestants"]]
    if same and all(same):
        lines.append(f"{cell['name']}: all replicas ended bit-identical, for every contestant.")
    return lines
