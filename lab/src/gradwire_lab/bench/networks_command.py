"""`gradwire bench networks` runs the engine on many kinds of networks in virtual time."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.bench.networks import GROUPS, run_networks
from gradwire_lab.contest.measure import CONVENTION

_CAPTION = (
    "first, time and worst: of the first op, and the median and the longest of later ones, over "
    "the header ideal; own drops: of the engine's packets, by queues and policers; sent: bytes "
    f"over those of the ops; ACKs: for a datagram received\n{CONVENTION}"
)


def networks(
    group: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(GROUPS)} [all]", show_default=False)
    ] = None,
    only: Annotated[str, typer.Option(help="run networks whose name contains this")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="runs of each network")] = 5,
    jobs: Annotated[int, typer.Option(min=0, help="processes at a time [the cores]")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Run exact sums in virtual time on racks, policers, incasts, long paths, networks A and B."""
    for name in group or ():
        if name not in GROUPS:
            why = f"{name}: {', '.join(GROUPS)}"
            raise typer.BadParameter(why, param_hint="GROUP")
    cells = [cell for name in group or GROUPS for cell in GROUPS[name]() if only in cell.name]
    if not cells:
        raise typer.BadParameter(f"{only}: no network's name contains it", param_hint="--only")
    with Console(stderr=True).status("networks in virtual time") as status:
        processes = jobs or len(os.sched_getaffinity(0))
        rows = run_networks(cells, seeds, processes, progress=status.update)
    if as_json:
        print(json.dumps(rows))
    else:
        _print(rows, seeds)
    if any("failure" in row for row in rows):
        raise typer.Exit(1)


def _print(rows: list[dict[str, Any]], seeds: int) -> None:
    table = Table(title=f"exact sums in virtual time, {seeds} seeds", caption=_CAPTION)
    table.add_column("network")
    for column in ("first", "time", "worst", "own drops", "sent", "ACKs"):
        table.add_column(column, justify="right")
    last = rows[0]["group"]
    for row in rows:
        if row["group"] != last:
            table.add_section()
        last = row["group"]
        if "failure" in row:
            table.add_row(row["name"], f"{row['failed']} of {seeds} failed: {row['failure']}")
            continue
        times = (f"{row[key]:.2f}" for key in ("first", "time", "worst"))
        rest = f"{row['drops']:.2%}", f"{row['payload']:.2f}", f"{row['acks']:.3f}"
        table.add_row(row["name"], *times, *rest)
    Console(width=None if Console().is_terminal else 160).print(table)
