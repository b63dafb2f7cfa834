"""`gradwire report` makes the page of a run again, or shows several runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire_lab.report.compare import COLUMNS, compare
from gradwire_lab.report.markdown import as_markdown
from gradwire_lab.report.words import dates, filled, mark_rows
from gradwire_lab.run.model import FORMAT, KIND, Results
from gradwire_lab.scenario.reader import ScenarioError, build

__all__ = ["app"]

app = typer.Typer(add_completion=False)

RESULTS = "results.json"
_BAD_INPUT = 2


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="folders of `gradwire lab run`")],
    out: Annotated[
        Path | None,
        typer.Option(help="write an HTML page to this file, of one run or of the comparison"),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print each run's tables in Markdown")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Compare runs of the lab: the same contestants in the same cells, run beside run."""
    documents = {str(folder): read(folder) for folder in folders}
    found = compare(documents)
    if out is not None:
        page = _page if len(documents) == 1 else _comparison
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(page(documents), encoding="utf-8")
        except OSError as error:
            _refuse(f"--out {out}: cannot be written: {error.strerror}")
    if as_json:
        typer.echo(json.dumps(found))
        return
    if markdown:
        for document in documents.values():
            typer.echo(as_markdown(document))
        return
    console = Console()
    for table in _tables(found):
        console.print(table)
    for folder, document in documents.items():
        for text, ours, wanted, _, verdict in mark_rows(document.marks):
            line = Text(f"{folder}: {text}: {ours} (mark {wanted}): {verdict}")
            console.print(line, highlight=False)


def _tables(found: list[dict[str, Any]]) -> list[Table]:
    """Return a table for each cell: a row for each contestant, a column for each run."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found:
        cells.setdefault((row["scenario"], row["cell"]), []).append(row)
    tables = []
    for (scenario, cell), rows in cells.items():
        runs = list(dict.fromkeys(row["run"] for row in rows))
        table = Table(title=Text(f"{scenario}: {cell}", "table.title"), box=box.SIMPLE_HEAD)
        table.add_column("median (× the first run), p99, × limit")
        for run in runs:
            table.add_column(Text(run), justify="right")
        for name in dict.fromkeys(row["contestant"] for row in rows):
            mine = {row["run"]: row for row in rows if row["contestant"] == name}
            table.add_row(Text(name), *(_cell(mine.get(run)) for run in runs))
        tables.append(table)
    return tables


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['median']} ({row['× the first run']}), {row['p99']}, {row['× limit']}"


def read(folder: Path) -> Results:
    """Return the results of a run's folder, or of the file itself."""
    path = folder / RESULTS if folder.is_dir() else folder
    if folder.is_dir() and not path.exists() and (folder / "runs.jsonl").exists():
        _refuse(
            f"{folder}: has samples of its rounds only; type "
            f"`gradwire lab show SCENARIO.toml --out {folder}`"
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        _refuse(f"{path}: cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        _refuse(f"{path}: not JSON")
    if not isinstance(document, dict) or document.get("kind") != KIND:
        _refuse(f"{path}: not written by `gradwire lab run`")
    if document.get("format") != FORMAT:
        _refuse(
            f"{path}: format={document.get('format')!r}: this gradwire reads {FORMAT}; "
            "`gradwire lab show` shows the runs beside it, and `gradwire lab run` makes it anew"
        )
    try:
        return build(Results, document, f"{path}: not as `gradwire lab run` writes it:")
    except ScenarioError as error:
        _refuse(str(error))


def _page(documents: dict[str, Results]) -> str:
    from gradwire_lab.report.page import render

    (document,) = documents.values()
    return render(document)


def _comparison(documents: dict[str, Results]) -> str:
    from gradwire_lab.report.template import fill

    found = compare(documents)
    columns, rows = filled(COLUMNS, [[str(row[name]) for name in COLUMNS] for row in found])
    return fill(
        Path(__file__).with_name("compare.html.j2"),
        title="Runs side by side",
        columns=columns,
        rows=rows,
        marks=[
            (folder, *row)
            for folder, document in documents.items()
            for row in mark_rows(document.marks)
        ],
        documents=documents,
        dates=dates,
    )


def _refuse(reason: str) -> NoReturn:
    line = Text(f"gradwire report: {reason}")
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(_BAD_INPUT)
