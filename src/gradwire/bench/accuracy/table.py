"""The study's tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from gradwire.bench.accuracy.results import Result
from gradwire.bench.accuracy.tasks import TASKS

__all__ = ["tables"]

COLORS = {"as good": "green", "better": "green", "worse": "red", "halts": "red"}


def tables(results: Sequence[Result]) -> Iterator[Table]:
    """One table for each training that has a row."""
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
