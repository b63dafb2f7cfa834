"""The command line of `gradwire bench accuracy`."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradwire.core.errors import suggestion
from gradwire_lab.contest.measure import environment
from gradwire_lab.contest.ranks import RankError
from gradwire_lab.network import network
from gradwire_lab.study.arms import ARMS
from gradwire_lab.study.ledger import Ledger, LedgerError
from gradwire_lab.study.lesson import MissingDataError
from gradwire_lab.study.results import Result, notes, results
from gradwire_lab.study.runner import run
from gradwire_lab.study.scenarios import SCENARIOS
from gradwire_lab.study.study import (
    QUICK,
    SECTIONS,
    Row,
    Training,
    applies,
    cells,
    left_out,
    rows,
)
from gradwire_lab.study.table import markdown, tables
from gradwire_lab.study.tasks import TASKS

__all__ = ["accuracy"]

_INTERRUPTED = 130
NARROWEST = 112
"""Columns that a table needs; a narrower terminal wraps its lines."""
SEEDS, QUICK_SEEDS, QUICK_ROUNDS = 10, 2, 44


def accuracy(
    task: Annotated[str, typer.Option(help="digits, digits-decay, text, tuning, or all")] = "all",
    optimizer: Annotated[str, typer.Option(help="sgd, adam (digits), adamw (text), all")] = "all",
    section: Annotated[
        str,
        typer.Option(help="only these tables (docs/accuracy.md); comma between"),
    ] = "",
    arms: Annotated[str, typer.Option(help="only these arms; comma between")] = "",
    scenarios: Annotated[str, typer.Option(help="only these networks; comma between")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="paired seeds, from 0 on")] = SEEDS,
    rounds: Annotated[int, typer.Option(min=0, help="of each training (0: the task's own)")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="processes (0: one for each core)")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="append every cell there, as JSON lines; what is there is not run again"),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="run nothing, show what is there")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="a few short trainings, to see that all works")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="print the tables as Markdown")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Measure what loss costs in quality, in virtual time: each arm beside lossless training.

    Masks come from the shipping protocol code. All arms share initialisation and data order, seed
    by seed; differences to lossless training are paired. Can be interrupted and resumed (--out).
    """
    if quick:
        seeds, rounds = min(seeds, QUICK_SEEDS), rounds or QUICK_ROUNDS
        task = "digits" if task == "all" else task
        optimizer = "sgd" if optimizer == "all" and task == "digits" else optimizer
    trainings = _trainings(task, optimizer, rounds, quick)
    chosen = _rows(section, arms, scenarios)
    if quick and not (section or arms or scenarios):
        chosen = QUICK
    without = left_out(trainings, chosen)
    if not any(applies(row, training) for training in trainings for row in chosen):
        raise typer.BadParameter("; ".join(without), param_hint="--arms")
    try:
        ledger = Ledger(out)
    except (OSError, LedgerError) as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    console = Console(stderr=True)
    wanted = [] if show else cells(trainings, chosen, seeds)
    kernel = any(cell.where == "kernel" and cell not in ledger.outcomes for cell in wanted)
    if kernel and (reason := network.probe()) is not None:
        wanted = [cell for cell in wanted if cell.where != "kernel"]
        without.append(f"nothing was run over a kernel network: {reason}")
    try:
        with console.status("training") as status:
            run(
                wanted,
                ledger,
                jobs or os.cpu_count() or 1,
                lambda done, of, cell: status.update(
                    f"{done} of {of} cells; last: {cell.task}, {cell.arm}, {cell.scenario}"
                ),
            )
    except MissingDataError as error:
        console.print(f"gradwire bench accuracy: {error}", highlight=False, markup=False)
        raise typer.Exit(2) from None
    except RankError as error:
        console.print(f"gradwire bench accuracy: {error}", highlight=False, markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        kept = f"what is done is in {out}" if out else "nothing is kept without --out"
        console.print(f"interrupted: {kept}", highlight=False)
        raise typer.Exit(_INTERRUPTED) from None
    found = results(trainings, chosen, seeds, ledger.outcomes)
    _print(found, [*notes(found), *without], as_json, as_markdown)


def _trainings(task: str, optimizer: str, rounds: int, quick: bool) -> list[Training]:
    tasks = list(TASKS.values()) if task == "all" else [TASKS[_known(task, TASKS, "--task")]]
    offered = list(dict.fromkeys(name for each in tasks for name in each.optimizers))
    if optimizer != "all":
        _known(optimizer, offered, "--optimizer")
    return [
        Training(each.name, name, rounds or each.rounds, 1 if quick else each.parts)
        for each in tasks
        for name in each.optimizers
        if optimizer in ("all", name)
    ]


def _rows(section: str, arms: str, scenarios: str) -> tuple[Row, ...]:
    chosen = rows(
        _list(section, SECTIONS, "--section"),
        _list(arms, ARMS, "--arms"),
        _list(scenarios, SCENARIOS, "--scenarios"),
    )
    if not chosen:
        raise typer.BadParameter("no row of the study has these sections, arms and networks")
    return chosen


def _list(text: str, known: Collection[str], option: str) -> list[str]:
    return [_known(word.strip(), known, option) for word in text.split(",") if word.strip()]


def _known(word: str, known: Collection[str], option: str) -> str:
    if word not in known:
        allowed = ", ".join(known)
        raise typer.BadParameter(
            f"{word!r}: allowed are {allowed}{suggestion(word, known)}", param_hint=option
        )
    return word


def _print(found: list[Result], lines: list[str], as_json: bool, as_markdown: bool) -> None:
    if as_json:
        entries = [result.to_json() for result in found]
        document = {"rows": entries, "notes": lines, "environment": environment()}
        typer.echo(json.dumps(document, allow_nan=False))
        return
    if as_markdown:
        typer.echo("\n".join([*markdown(found), *(f"- {line}" for line in lines)]))
        return
    console = Console(width=max(Console().width, NARROWEST))
    for table in tables(found):
        console.print(table)
    for line in lines:
        console.print(f"· {line}", highlight=False, markup=False)
