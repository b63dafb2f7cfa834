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
    row = result.row
    network = row.scenario + (", own data" if row.data == "own" else "")
    if row.where != "virtual":
        network += f", {row.where}"
    delivered, critical = _shares(result)
    comm = "–" if delivered == "–" else f"{1e3 * (result.comm_s or 0.0):.2f}"
    cells = (f"`{row.arm}`", network, str(result.seeds), _difference(result), result.verdict)
    return f"| {' | '.join((*cells, delivered, critical, comm))} |"


def _cells(result: Result) -> list[str]:
    row, color = result.row, COLORS.get(result.verdict)
    delivered, critical = _shares(result)
    return [
        *(row.section, row.arm, row.scenario, row.data, row.where, str(result.seeds)),
        "–" if result.lossless is None else f"{result.lossless:.3f}",
        _difference(result),
        f"[{color}]{result.verdict}[/{color}]" if color else result.verdict,
        delivered,
        critical,
        "–" if delivered == "–" else str(result.guarded),
    ]


def _difference(result: Result) -> str:
    found = result.difference
    if found is None:
        return "–"
    return f"{found.mean:+.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def _shares(result: Result) -> tuple[str, str]:
    if result.delivered is None or result.critical_share is None:
        return "–", "–"
    return f"{result.delivered:.3f}", f"{result.critical_share:.0%}"
