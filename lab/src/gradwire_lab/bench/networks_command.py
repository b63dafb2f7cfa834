"""`gradwire bench networks` runs the engine on many kinds of networks in virtual time."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.bench.network_groups import GROUPS
from gradwire_lab.bench.network_marks import NO_WORSE, bounds_text
from gradwire_lab.bench.network_scenes import WORDS, figure_text
from gradwire_lab.bench.networks import Situation, run_networks
from gradwire_lab.bench.own_network import BUCKET_KIB, OPTIONS, own
from gradwire_lab.contest.measure import CONVENTION, environment

_CAPTION = (
    "first, time and worst: of the first op, and the median and the longest of later ones, over "
    "the header ideal; own drops: of the engine's packets, by queues and policers; sent: payload "
    f"over the bytes of the ops; ACKs: for a datagram received\n{CONVENTION}"
)
_SHORT = {
    "time": "time",
    "drops": "own drops",
    "payload": "sent",
    "acks": "ACKs",
    "time_over": "time over",
    "worst_over": "worst over",
}
_FIGURES = ("first", "time", "worst", "drops", "payload", "acks")


def networks(
    context: typer.Context,
    group: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(GROUPS)} [all]", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="run networks whose name contains this")] = "",
    rate: Annotated[
        float | None, typer.Option(help="one network of your own: Gbit/s of each port")
    ] = None,
    queue: Annotated[float, typer.Option(help="its ports' queue, KiB")] = 256.0,
    uplinks: Annotated[float, typer.Option(help="its hosts' rate over the ports'")] = 1.0,
    round_trip: Annotated[float, typer.Option(help="between two of its hosts, ms")] = 0.08,
    loss: Annotated[float, typer.Option(help="of the path between two of its hosts, %")] = 0.0,
    policer_out: Annotated[
        float | None,
        typer.Option(help="Gbit/s that a policer lets pass on each host's way out [no policer]"),
    ] = None,
    policer_in: Annotated[float | None, typer.Option(help="the same on the way in")] = None,
    bucket: Annotated[
        float, typer.Option(help="KiB that a policer lets pass at once")
    ] = BUCKET_KIB,
    ranks: Annotated[int, typer.Option(help="on it")] = 4,
    size: Annotated[float, typer.Option(help="of each rank's buffer on it, MB")] = 4.0,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each network")] = 5,
    jobs: Annotated[int, typer.Option(min=0, help="processes at a time [the cores]")] = 0,
    beside: Annotated[
        Path | None, typer.Option(help="a file of --out of another engine, to compare with")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="put the rows into this JSON file, in place of older ones")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Run exact sums in virtual time on racks, policers, incasts, long paths, networks A and B."""
    for name in group or ():
        if name not in GROUPS:
            why = f"{name}: {', '.join(GROUPS)}"
            raise typer.BadParameter(why, param_hint="GROUP")
    processes = jobs or len(os.sched_getaffinity(0))
    situations: Sequence[Situation]
    if options := _own_options(context):
        if group or only:
            raise typer.BadParameter("a network of your own has no group", param_hint="--rate")
        situations = [own(**options, processes=min(processes, seeds))]
    else:
        situations = [
            each for name in group or GROUPS for each in GROUPS[name]() if only in each.name
        ]
    if not situations:
        raise typer.BadParameter(f"{only}: no network's name contains it", param_hint="--only")
    older = {} if beside is None else _read("--beside", beside)
    kept = {} if out is None else _room(out)
    with Console(stderr=True).status("networks in virtual time") as status:
        rows = run_networks(situations, seeds, processes, progress=status.update)
    _compare(rows, older)
    if out is not None:
        _keep(out, kept, rows, seeds)
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, seeds)
    if any("failure" in row for row in rows):
        raise typer.Exit(1)


def _own_options(context: typer.Context) -> dict[str, Any]:
    """Return the options of a network of one's own; raises BadParameter where it has no rate."""
    if context.params["rate"] is not None:
        return {name: context.params[name] for name in OPTIONS}
    for name in OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            why = "it is about a network of your own, which needs --rate"
            raise typer.BadParameter(why, param_hint=f"--{name.replace('_', '-')}")
    return {}


# ---------------------------------------------------------------------------- files

Row = dict[str, Any]
_Key = tuple[str, str]


def _read(option: str, path: Path) -> dict[_Key, Row]:
    """Return the rows of a file by group and name; raises BadParameter where it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = found["rows"] if isinstance(found, dict) else found
        for row in rows:
            _check(row)
        return {(row["group"], row["name"]): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{path}: no file of `gradwire bench networks`: {error}"
        raise typer.BadParameter(why, param_hint=option) from error


def _check(row: Row) -> None:
    """Raise ValueError where a row has a figure that is no number."""
    for key in (*_FIGURES, *WORDS):
        value = row.get(key, 0.0)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"{row['name']}: {key} is {value!r}; a finite number is needed")


def _room(path: Path) -> dict[_Key, Row]:
    """Return the rows that a file has; raises BadParameter where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        why = f"{path}: cannot be written: {error.strerror}"
        raise typer.BadParameter(why, param_hint="--out") from error
    return _read("--out", path) if path.stat().st_size else {}


def _keep(path: Path, kept: dict[_Key, Row], rows: Sequence[Row], seeds: int) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for row in rows:
        kept[row["group"], row["name"]] = {**row, "date": now, "seeds": seeds}
    order = list(GROUPS)
    known = sorted(
        kept.values(), key=lambda row: order.index(row["group"]) if row["group"] in order else -1
    )
    lines = ",\n".join(json.dumps(_rounded(row), ensure_ascii=False) for row in known)
    machine = json.dumps(environment())
    path.write_text(f'{{"machine": {machine},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _rounded(row: Row) -> Row:
    """Return a row with as many digits as anybody reads."""
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def _compare(rows: Sequence[Row], older: Mapping[_Key, Row]) -> None:
    """Add to each row its time and its worst over those of an older engine."""
    for row in rows:
        was = older.get((row["group"], row["name"]), {})
        for key in ("time", "worst"):
            if key in row and was.get(key):
                row[f"{key}_over"] = row[key] / was[key]
        if row["group"] == "known" and "failure" not in row:
            row["marks"] += [
                {**asdict(mark), "met": mark.met(row[mark.figure])}
                for mark in NO_WORSE
                if mark.figure in row
            ]


# ---------------------------------------------------------------------------- tables


def _print(rows: Sequence[Row], seeds: int) -> None:
    console = Console(width=None if Console().is_terminal else 180)
    ops = [row for row in rows if "first" in row or "failure" in row]
    if ops:
        table = Table(title=f"exact sums in virtual time, {seeds} seeds", caption=_CAPTION)
        table.add_column("network")
        compared = any("time_over" in row for row in rows)
        head = ["first", "time", "worst", "own drops", "sent", "ACKs"]
        for column in (*head, *(("time over", "worst over") if compared else ())):
            table.add_column(column, justify="right")
        table.add_column("marks")
        last = ops[0]["group"]
        for row in ops:
            if row["group"] != last:
                table.add_section()
            last = row["group"]
            if "failure" in row:
                table.add_row(row["name"], f"{row['failed']} of {seeds} failed: {row['failure']}")
                continue
            times = (f"{row[key]:.2f}" for key in ("first", "time", "worst"))
            rest = f"{row['drops']:.2%}", f"{row['payload']:.2f}", f"{row['acks']:.3f}"
            over = (
                (f"{row[key]:.2f}" if key in row else "" for key in ("time_over", "worst_over"))
                if compared
                else ()
            )
            table.add_row(row["name"], *times, *rest, *over, _marks(row))
        console.print(table)
    for row in rows:
        if "first" not in row and "failure" not in row:
            console.print(_scene(row, seeds))
    judged = [mark["met"] for row in rows for mark in row.get("marks", ())]
    if judged:
        console.print(f"{sum(judged)} of {len(judged)} marks met", highlight=False)


def _scene(row: Row, seeds: int) -> Table:
    table = Table(title=f"{row['name']}, {seeds} seeds")
    table.add_column("figure")
    table.add_column("found", justify="right")
    table.add_column("mark")
    for key, words in WORDS.items():
        if key in row:
            said = [mark_text(mark) for mark in row["marks"] if mark["figure"] == key]
            table.add_row(words, figure_text(key, row[key]), *said)
    return table


def mark_text(mark: Mapping[str, Any]) -> str:
    """Return a mark's bounds, and whether it is met."""
    return f"{bounds_text(mark)}: {'met' if mark['met'] else 'MISSED'}"


def _marks(row: Row) -> str:
    return "; ".join(f"{_SHORT[mark['figure']]} {mark_text(mark)}" for mark in row["marks"])
