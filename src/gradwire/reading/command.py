"""`gradwire report`, `gradwire diff` and `gradwire why`, which read report files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gradwire.core.lab import lab_command
from gradwire.core.report import finite
from gradwire.reading.compare import compare
from gradwire.reading.page import page
from gradwire.reading.records import Run, UnreadableError, read
from gradwire.reading.summary import summarize
from gradwire.reading.why import explain, slowest

report, diff, why = (typer.Typer(add_completion=False) for _ in range(3))

LAB_FILES = ("results.json", "runs.jsonl")
"""What a folder of the lab holds."""
BAD_INPUT = 2
JSON = Annotated[bool, typer.Option("--json", help="print JSON")]


@report.command("report")
def _report(
    paths: Annotated[list[Path], typer.Argument(help="report files, or folders with some")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="write an HTML page to this file, too")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="of folders of the lab: print Markdown")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Say what a job's report files hold: what was lost, what it cost, what to try."""
    if any(_of_the_lab(path) for path in paths):
        options = ["--out", str(out)] if out else []
        options += ["--markdown"] * markdown + ["--json"] * as_json
        _hand_to_the_lab([*map(str, paths), *options])
    if markdown:
        _refuse("report", "--markdown: it is for folders of the lab")
    runs = [run for path in paths for run in _read("report", path)]
    found = [(run, summarize(run)) for run in runs]
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(page(found), encoding="utf-8")
        except OSError as error:
            _refuse("report", f"--out {out}: cannot be written: {error.strerror}")
        typer.echo(f"gradwire report: wrote {out}", err=True)
    if as_json:
        typer.echo(json.dumps([summary.json() for _, summary in found]))
        return
    for number, (run, summary) in enumerate(found):
        typer.echo(("\n" if number else "") + run.name)
        width = max(len(what) for what, _ in summary.lines())
        _show((f"  {what:{width}}  ", text) for what, text in summary.lines())


@diff.command("diff")
def _diff(
    a: Annotated[Path, typer.Argument(help="the report file to compare with")],
    b: Annotated[Path, typer.Argument(help="the report file that is judged")],
    threshold: Annotated[
        float, typer.Option(min=0.0, help="per cent by which times and loss may grow")
    ] = 5.0,
    as_json: JSON = False,
) -> None:
    """Compare two runs: status 0 when the second is no worse, 1 when it is, 2 for neither."""
    runs = [_one("diff", path) for path in (a, b)]
    try:
        measures = compare(runs[0], runs[1], threshold / 100)
    except UnreadableError as error:
        _refuse("diff", f"cannot compare: {error}")
    worse = [each.name for each in measures if each.verdict == "worse"]
    verdict = f"worse: {', '.join(worse)}" if worse else "no worse"
    if as_json:
        typer.echo(json.dumps({"worse": worse, "measures": finite([asdict(m) for m in measures])}))
    else:
        for each in measures:
            _show([(f"{each.name}: ", each.text())])
        for label, run in zip(("the first", "the second"), runs, strict=True):
            _show((f"{label}: ", text) for text in run.missing)
        _show([("", f"{verdict} (threshold {threshold:g} %)")])
    raise typer.Exit(1 if worse else 0)


@why.command("why")
def _why(
    path: Annotated[
        Path, typer.Argument(help="a report file, or a folder with those of all ranks")
    ],
    step: Annotated[
        int | None, typer.Option(help="the step; the slowest one unless it is given")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Say in five lines why a step was slow, as far as the records tell."""
    run = _one("why", path)
    record = slowest(run) if step is None else run.at(step)
    if record is None:
        first, last = run.records[0].step, run.records[-1].step
        _refuse("why", f"--step {step}: no record in {run.name}; it has steps {first} to {last}")
    found = explain(run, record)
    if as_json:
        typer.echo(json.dumps(finite(asdict(found))))
        return
    for line in found.lines:
        what, _, rest = line.partition(": ")
        _show([(f"{what}: ", rest)])


def _show(lines: Iterable[tuple[str, str]]) -> None:
    """Prints lines, folded where a terminal is narrower; a pipe gets them whole."""
    folds = sys.stdout.isatty() or "COLUMNS" in os.environ
    columns = max(20, shutil.get_terminal_size().columns)
    for head, text in lines:
        indent = " " * min(len(head), columns // 4)
        folded = textwrap.wrap(head + text, columns, subsequent_indent=indent) if folds else []
        typer.echo("\n".join(folded) or head + text)


def _read(command: str, path: Path) -> list[Run]:
    try:
        return read(path)
    except UnreadableError as error:
        _refuse(command, str(error))


def _one(command: str, path: Path) -> Run:
    """Reads a path that holds one run."""
    if _of_the_lab(path):
        _refuse(command, f"{path}: a folder of the lab; `gradwire report` compares those")
    runs = _read(command, path)
    if len(runs) > 1:
        names = ", ".join(run.name for run in runs[:4])
        _refuse(command, f"{path}: holds {len(runs)} runs, name one of them: {names}")
    return runs[0]


def _of_the_lab(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".json" or path.name in LAB_FILES
    return any((path / name).exists() for name in LAB_FILES)


def _hand_to_the_lab(arguments: Sequence[str]) -> NoReturn:
    try:
        command: Any = typer.main.get_command(lab_command("report"))
    except LookupError as error:
        _refuse("report", f"a folder of the lab needs the lab: {error.args[0]}")
    raise typer.Exit(command.main(list(arguments), "gradwire report", standalone_mode=False) or 0)


def _refuse(command: str, reason: str) -> NoReturn:
    typer.echo(f"gradwire {command}: {reason}", err=True)
    raise typer.Exit(BAD_INPUT)
