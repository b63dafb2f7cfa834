"""The study's tables are made here, as Markdown and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from gradwire_lab.study.results import Result
from gradwire_lab.study.tasks import TASKS

__all__ = ["markdown", "tables"]

COLORS = {"as good": "green", "better": "green", "worse": "red", "halts": "red"}


def tables(results: Sequence[Result]) -> Iterator[Table]:
    """Return one table for each training that has a row."""
    for training in dict.fromkeys(result.training for result in results):
        task = TASKS[training.task]
        table = Table(
            title=f"{training.task}, {training.optimizer}, {training.rounds} rounds"
            + (f" × {training.parts} folds" if training.parts > 1 else "")
            + f": difference to lossless in {task.unit}, 90 % interval, margin ± {task.margin:g}",
            box=box.SIMPLE_HEAD,
        )
        for column in ("table", "arm", "network", "data", "where"):
            table.add_column(column)
        for column in ("seeds", "lossless", "difference", "", "delivered", "critical", "resent"):
            table.add_column(column, justify="right")
        for result in results:
            if result.training == training:
                table.add_row(*_cells(result), style=None if result.seeds else "dim")
        yield table


def markdown(results: Sequence[Result]) -> Iterator[str]:
    """Return the same as lines of Markdown, for docs/accuracy.md, without rows that were never run.

    The time is that of a round's communication, virtual unless the row says "kernel".
    """
    done = [result for result in results if result.seeds]
    for training in dict.fromkeys(result.training for result in done):
        task = TASKS[training.task]
        rows = [result for result in done if result.training == training]
        for section in dict.fromkeys(result.row.section for result in rows):
            part = [result for result in rows if result.row.section == section]
            commits = sorted({commit for result in part for commit in result.commits})
            yield f"### `{section}`: {training.task}, {training.optimizer}"
            yield ""
            if commits:
                yield f"Commits: {', '.join(commits)}."
                yield ""
            yield (
                f"| arm | network | seeds | difference, {task.unit} | verdict | delivered "
                "| critical | comm, ms |"
            )
            yield "|---|---|---|---|---|---|---|---|"
            yield from (_line(result) for result in part)
            yield ""


def _line(result: Result) -> str:
    row, difference = result.row, result.difference
    network = row.scenario + (", own data" if row.data == "own" else "")
    if row.where != "virtual":
        network += f", {row.where}"
    shown = "–"
    if difference is not None:
        shown = f"{difference.mean:+.3f}"
        shown += "" if difference.half is None else f" ± {difference.half:.3f}"
    shares = "– | – | –"
    if result.delivered is not None and result.critical_share is not None:
        comm_ms = 1e3 * (result.comm_s or 0.0)
        shares = f"{result.delivered:.3f} | {result.critical_share:.0%} | {comm_ms:.2f}"
    return f"| `{row.arm}` | {network} | {result.seeds} | {shown} | {result.verdict} | {shares} |"


def _cells(result: Result) -> list[str]:
    row, difference = result.row, result.difference
    color = COLORS.get(result.verdict)
    words = f"[{color}]{result.verdict}[/{color}]" if color else result.verdict
    cells = [row.section, row.arm, row.scenario, row.data, row.where, str(result.seeds)]
    if difference is None or result.lossless is None:
        cells += ["–", "–"]
    else:
        spread = "" if difference.half is None else f" ± {difference.half:.3f}"
        cells += [f"{result.lossless:.3f}", f"{difference.mean:+.3f}{spread}"]
    if result.delivered is None or result.critical_share is None:
        return [*cells, words, "–", "–", "–"]
    return [
        *cells,
        words,
        f"{result.delivered:.3f}",
        f"{result.critical_share:.0%}",
        str(result.guarded),
    ]
