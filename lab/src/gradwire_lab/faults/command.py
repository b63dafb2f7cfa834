"""`gradwire bench faults` runs the table of faults of processes and hosts."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Shown

from gradwire_lab.contest.measure import environment
from gradwire_lab.faults.cells import Cell, every
from gradwire_lab.network.network import probe

LONGEST_FAULT = 160
"""Characters of what was wrong that the table shows."""


def faults(
    only: Annotated[
        list[str] | None, typer.Option(help="only cells whose name holds this; may be given again")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="of each cell")] = 1,
    peer_timeout: Annotated[
        float, typer.Option(min=1.0, help="of the jobs, in seconds; 1 is the shortest there is")
    ] = 1.0,
    rendezvous_timeout: Annotated[
        float, typer.Option(min=1.0, help="of the jobs whose ranks do not meet, in seconds")
    ] = 5.0,
    slack: Annotated[
        float, typer.Option(help="seconds beyond a time-out until a rank has to have stopped")
    ] = 3.0,
    named: Annotated[bool, typer.Option("--list", help="name the cells; run nothing")] = False,
    out: Annotated[Path | None, typer.Option(help="write all repetitions as JSON there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Bring about faults of processes and hosts in jobs that train, and judge what became of them.

    Each job goes on with the right result, or every rank stops in time with an error that names the
    rank, the step and the cause. Status 1: some did neither.
    """
    cells = [cell for cell in every() if not only or any(text in cell.name for text in only)]
    if not cells:
        raise typer.BadParameter(f"--only {', '.join(only or [])}: no cell has such a name")
    if named:
        for cell in cells:
            typer.echo(f"{cell.name}: {cell.fate}")
        return
    if (reason := probe(lossy=True)) is not None:
        Console(stderr=True).print(f"gradwire bench: no lab network here: {reason}", markup=False)
        raise typer.Exit(2)
    from gradwire_lab.faults.ground import Ground
    from gradwire_lab.faults.run import HOSTS, Patience, Table

    progress = Console(stderr=True)
    patience = Patience(peer_timeout, rendezvous_timeout, slack)
    rows: list[dict[str, Any]] = []
    with Ground(HOSTS) as ground:
        table = Table(ground, patience)
        for repetition in range(repetitions):
            for cell in cells:
                began = time.monotonic()
                verdict = table.run(cell)
                rows.append(_row(cell, repetition, began, vars(verdict)))
                said = "as it has to be" if not verdict.faults else verdict.faults[0]
                line = f"{cell.name}: {verdict.fate}, {said}"
                progress.print(line[: 2 * LONGEST_FAULT], markup=False, highlight=False)
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "peer_timeout": peer_timeout,
        "rendezvous_timeout": rendezvous_timeout,
        "repetitions": repetitions,
        "cells": rows,
        "environment": environment(),
    }
    if out is not None:
        out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _show(rows, repetitions)
    if any(row["faults"] for row in rows):
        raise typer.Exit(1)


def _row(cell: Cell, repetition: int, began: float, verdict: dict[str, Any]) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "wanted": cell.fate,
        "repetition": repetition,
        "seconds": time.monotonic() - began,
        **verdict,
    }


def _show(rows: list[dict[str, Any]], repetitions: int) -> None:
    """Print one line for each cell."""
    shown = Shown("cell", "is to", "right", "until all stopped", "what was wrong")
    for name in dict.fromkeys(row["cell"] for row in rows):
        own = [row for row in rows if row["cell"] == name]
        wrong = [fault for row in own for fault in row["faults"]]
        longest = max(row["after_s"] for row in own)
        shown.add_row(
            name,
            own[0]["wanted"],
            f"{sum(not row['faults'] for row in own)} of {repetitions}",
            f"{longest:.1f} s" if longest else "–",
            wrong[0][:LONGEST_FAULT] if wrong else "",
        )
    Console().print(shown)
