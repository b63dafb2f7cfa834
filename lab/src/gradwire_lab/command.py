"""The command line of `gradwire lab`."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire_lab.contest.interrupts import end_as_ctrl_c_does

if TYPE_CHECKING:
    from gradwire_lab.run.agenda import Agenda
    from gradwire_lab.run.journal import Journal
    from gradwire_lab.run.model import Results
    from gradwire_lab.scenario import Experiment

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)

EXPERIMENTS = Path("experiments")
"""Where scenario files are looked for; outside of the checkout, in the one that has this module."""
OWN_EXPERIMENTS = Path(__file__).resolve().parents[3] / EXPERIMENTS
OUT = Path("out/lab")
_INTERRUPTED = 130
_BAD_INPUT = 2


@app.callback()
def _root() -> None:
    """Run scenario files on real kernel networks: hosts, queues, loss, bursts, and TCP beside."""


@app.command(name="list")
def list_scenarios(
    folder: Annotated[Path, typer.Argument(help="where the scenario files are")] = EXPERIMENTS,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Name the scenarios there are."""
    files = sorted(folder.glob("*.toml"))
    if folder == EXPERIMENTS and not files:
        files = sorted(OWN_EXPERIMENTS.glob("*.toml"))
    if not files:
        _refuse(f"{folder}: no scenario files (*.toml) there")
    found = [_load(path, False) for path in files]
    rows = [
        {"file": str(each.path), "title": each.first.title, "cells": len(each.cells)}
        for each in found
    ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    named = folder == EXPERIMENTS  # the other commands take these by their names
    table = Table()
    for column in ("name" if named else "file", "title", "cells"):
        table.add_column(column, no_wrap=column == "name")
    for each, row in zip(found, rows, strict=True):
        first = each.path.stem if named else str(each.path)
        table.add_row(Text(first), Text(each.first.title), str(row["cells"]))
    Console().print(table)


@app.command()
def keys(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """List all keys of scenario files: defaults, what is allowed, and what they mean."""
    from gradwire_lab.scenario.keys import COLUMNS, key_rows

    rows = key_rows()
    if as_json:
        typer.echo(json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows]))
        return
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="scenario file, or its name in experiments/")],
    quick: Annotated[bool, typer.Option("--quick", help="check its short form")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    """Check whether a scenario file could run here; runs nothing."""
    from gradwire_lab.run.checks import check as check_machine
    from gradwire_lab.scenario import ScenarioError

    experiment = _load(file, quick)
    try:
        check_machine(experiment)
    except ScenarioError as error:
        _refuse(str(error))
    facts = {
        "file": str(file),
        "cells": [cell.name for cell in experiment.cells],
        "contestants": [each.name for each in experiment.first.contestants],
        "left_out": dict(experiment.left_out),
    }
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"{file}: {len(experiment.cells)} cells, contestants {facts['contestants']}")
    for cell in experiment.cells:
        typer.echo(f"cell: {cell.name}")
    for name, reason in experiment.left_out.items():
        typer.echo(f"left out: {name}: {reason}")


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="scenario file, or its name in experiments/")],
    quick: Annotated[
        bool, typer.Option("--quick", help="the short form: less than a minute on two cores")
    ] = False,
    cells: Annotated[
        list[str] | None,
        typer.Option(
            help="only cells whose name holds this, or matches it as a shell pattern; may be given "
            "again"
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="instead of the file's: how many (3), or which (0,1)")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="start over: forget the runs that are there")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="folder for runs.jsonl, results.json and report.html [out/lab/NAME]"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the JSON instead of tables")
    ] = False,
) -> None:
    """Run a scenario: all its cells, all contestants in turn, all seeds; write JSON and a page.

    Each finished cell is kept: called again, this carries on with what is missing. Status 0: it
    ran. 1: a cell failed; the rest is there. 2: it cannot run here. 130: interrupted.
    """
    from gradwire_lab.network.network import LabUnavailable
    from gradwire_lab.run.agenda import Agenda, choose_cells, choose_seeds
    from gradwire_lab.run.journal import Journal
    from gradwire_lab.scenario import ScenarioError

    progress = Console(stderr=True)
    experiment = _load(file, quick)
    folder = out or OUT / experiment.first.name
    try:
        agenda = Agenda(
            choose_cells(experiment, cells or []),
            experiment.first.work.seeds if seeds is None else choose_seeds(seeds),
        )
        everything = again and not cells and seeds is None
        if not everything:
            _check_folder(folder, experiment.first.name)
        with contextlib.ExitStack() as stack:
            with _writing(folder):
                journal = stack.enter_context(Journal(folder, again=everything))
                if again and not everything:
                    journal.forget([(cell.name, seed) for cell, seed in agenda.all])
            status = _run(experiment, agenda, journal, folder, progress, as_json)
    except (ScenarioError, LabUnavailable) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"the run ended early: {error}")
    except KeyboardInterrupt:  # Ctrl-C came again while the page was made
        progress.print("interrupted: nothing is left behind")
        status = _INTERRUPTED
    if status:
        raise typer.Exit(status)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="scenario file, or its name in experiments/")],
    out: Annotated[Path | None, typer.Option(help="folder of runs.jsonl [out/lab/NAME]")] = None,
    page: Annotated[Path | None, typer.Option(help="write the HTML page to this file, too")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print its tables in Markdown")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the JSON instead of tables")
    ] = False,
) -> None:
    """Show tables and marks of the runs in a folder, whichever gradwire and machine made them.

    It runs nothing, and may be called while a run goes on.
    """
    from gradwire_lab.report.markdown import as_markdown
    from gradwire_lab.report.terminal import show as show_tables
    from gradwire_lab.run.course import outcome_of
    from gradwire_lab.run.journal import NAME, Journal
    from gradwire_lab.run.results import document
    from gradwire_lab.scenario import ScenarioError

    experiment = _load(file, False)
    folder = out or OUT / experiment.first.name
    try:
        with Journal(folder, reading=True) as journal:
            outcome = outcome_of(experiment, journal)
    except OSError as error:
        _refuse(f"--out {folder}: {NAME} cannot be read: {error.strerror or error}")
    except ScenarioError as error:
        _refuse(str(error))
    if not outcome.records:
        _refuse(f"--out {folder}: holds no run of a cell of {file}")
    found = document(outcome, shlex.join(["gradwire", "lab", "run", str(file)]))
    if page is not None:
        from gradwire_lab.report.page import write_page

        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            write_page(found, page)
        except OSError as error:
            _refuse(f"--page {page}: cannot be written: {error.strerror}")
    if as_json:
        typer.echo(_text(found))
    elif markdown:
        typer.echo(as_markdown(found))
    else:
        show_tables(found, Console())


def _run(
    experiment: Experiment,
    agenda: Agenda,
    journal: Journal,
    folder: Path,
    progress: Console,
    as_json: bool,
) -> int:
    """Run what is due and write what there is; returns the status."""
    from gradwire_lab.report.terminal import show
    from gradwire_lab.run.checks import check as check_machine
    from gradwire_lab.run.course import CodeChanged, done, outcome_of
    from gradwire_lab.run.course import run as run_course
    from gradwire_lab.run.results import document
    from gradwire_lab.run.voice import Voice

    end_as_ctrl_c_does()
    there = done(outcome_of(experiment, journal).records)
    due = agenda.due(there)
    if len(due) < len(agenda.all):
        progress.print(f"{agenda.text(there)}; --again starts over", highlight=False, markup=False)
    interrupted, changed = False, None
    try:
        if due:
            check_machine(experiment, [cell for cell, _ in due])
            with Voice(progress) as voice:
                run_course(experiment, due, journal, voice)
    except KeyboardInterrupt:
        interrupted = True
        progress.print(
            "interrupted: nothing is left behind; the same command, without --again, carries on"
        )
    except CodeChanged as error:
        changed = error
    outcome = outcome_of(experiment, journal)
    if outcome.records:
        found = document(outcome, shlex.join(["gradwire", *sys.argv[1:]]))
        with _writing(folder):
            _write(found, folder, progress)
        if as_json:
            typer.echo(_text(found))
        elif not interrupted:
            show(found, Console())
    if changed is not None:
        raise changed
    if interrupted:
        return _INTERRUPTED
    return 1 if outcome.errors else 0


def _check_folder(folder: Path, name: str) -> None:
    """Raises ScenarioError where another scenario's results would be written over."""
    from gradwire_lab.scenario import ScenarioError

    try:
        there = json.loads((folder / "results.json").read_text(encoding="utf-8"))["scenario"]
    except (OSError, ValueError, KeyError, TypeError):  # there is no file, or no run wrote it
        return
    if there != name:
        raise ScenarioError(
            f"--out {folder}: holds results of scenario {there!r}, not of {name!r}; name another "
            "folder, or start over with --again"
        )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Refuse to go on where the folder cannot be written."""
    try:
        yield
    except OSError as error:
        _refuse(f"--out {folder}: cannot be made or written: {error.strerror or error}")


def _text(found: Results) -> str:
    from gradwire_lab.run.model import as_json

    return json.dumps(as_json(found), allow_nan=False)


def _write(found: Results, folder: Path, progress: Console) -> None:
    """Write both files whole: what was there stays until then."""
    results, page = folder / "results.json", folder / "report.html"
    spare = folder / "results.json.new"
    spare.write_text(_text(found) + "\n", encoding="utf-8")
    spare.replace(results)
    from gradwire_lab.report.page import write_page

    spare = folder / "report.html.new"
    write_page(found, spare)
    spare.replace(page)
    progress.print(Text(f"wrote {results} and {page}"), highlight=False)


def _load(path: Path, quick: bool) -> Experiment:
    from gradwire_lab.scenario import ScenarioError, load

    listed = [folder / f"{path.stem}.toml" for folder in (EXPERIMENTS, OWN_EXPERIMENTS)]
    if not path.exists() and path in (Path(path.stem), listed[0]):  # as `gradwire lab list` has it
        path = next((each for each in listed if each.exists()), path)
    try:
        return load(path, quick=quick)
    except ScenarioError as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    line = Text(f"gradwire lab: {reason}")
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(_BAD_INPUT)
