"""`gradwire report` makes the page of a run again, or shows several runs side by side."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
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

__all__ = ["app"]

app = typer.Typer(add_completion=False)

RESULTS = "results.json"
FORMAT = 1
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
    alone, page = len(documents) == 1, ""
    # Each is tried by itself, so that an error names its file.
    for folder, document in documents.items():
        with _whole(Path(folder)):
            _tables(compare({folder: document}))
            mark_rows(document)
            if markdown:
                as_markdown(document)
            if out is not None:
                page = _page(document) if alone else _comparison({folder: document})
    found = compare(documents)
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(page if alone else _comparison(documents), encoding="utf-8")
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
        for text, ours, wanted, _, verdict in mark_rows(document):
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


def read(folder: Path) -> dict[str, Any]:
    """Return the JSON of a run's folder, or of the file itself."""
    path = _file(folder)
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
    if not isinstance(document, dict) or document.get("kind") != "gradwire lab":
        _refuse(f"{path}: not written by `gradwire lab run`")
    if document.get("format") != FORMAT:
        _refuse(f"{path}: format={document.get('format')!r}: this gradwire reads {FORMAT}")
    return document


def _file(folder: Path) -> Path:
    return folder / RESULTS if folder.is_dir() else folder


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Refuse a run's JSON that lacks something or has it in another form, in a sentence."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        missing = isinstance(error, KeyError)
        words = f"{error} is missing" if missing else " ".join(str(error).split())
        _refuse(f"{_file(folder)}: not as `gradwire lab run` writes it: {words}")


def _page(document: dict[str, Any]) -> str:
    from gradwire_lab.report.page import render

    return render(document)


def _comparison(documents: dict[str, dict[str, Any]]) -> str:
    from gradwire_lab.report.template import fill

    found = compare(documents)
    columns, rows = filled(COLUMNS, [[str(row[name]) for name in COLUMNS] for row in found])
    return fill(
        Path(__file__).with_name("compare.html.j2"),
        title="Runs side by side",
        columns=columns,
        rows=rows,
        marks=[
            (folder, *row) for folder, document in documents.items() for row in mark_rows(document)
        ],
        documents=documents,
        dates=dates,
    )


def _refuse(reason: str) -> NoReturn:
    line = Text(f"gradwire report: {reason}")
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(_BAD_INPUT)
