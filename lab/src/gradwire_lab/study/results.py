"""Results are made of outcomes: differences to lossless, verdicts, and what the arm did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire_lab.study.arms import BAD, LOSSLESS
from gradwire_lab.study.cell import Cell, Outcome
from gradwire_lab.study.scenarios import QUIET
from gradwire_lab.study.statistics import Paired, compare
from gradwire_lab.study.study import Row, Training, applies, cell_of
from gradwire_lab.study.tasks import TASKS

__all__ = ["Result", "notes", "results"]


@dataclass(frozen=True)
class Result:
    """A result is one row of one training, over the seeds that are done.

    Attributes:
        training: task, optimizer, rounds and parts.
        row: arm, scenario and data.
        seeds: the number of seeds that have been trained with this arm and without loss.
        lossless: mean score without loss, of the same seeds.
        difference: the paired difference to lossless; None when no seed is done.
        verdict: see `statistics.Verdict`; "halts" when a training ended early.
        errors: why trainings ended early.
        delivered, critical_share, comm_s: means of the seeds'.
        lossy_rounds, guarded: sums over the seeds.
        commits: the commits that the arm and lossless training were run with, where known.
    """

    training: Training
    row: Row
    seeds: int
    lossless: float | None
    difference: Paired | None
    verdict: str
    errors: tuple[str, ...]
    delivered: float | None
    critical_share: float | None
    comm_s: float | None
    lossy_rounds: int
    guarded: int
    commits: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        values, task = asdict(self), TASKS[self.training.task]
        values |= {**values.pop("training"), **values.pop("row")}
        return {**values, "unit": task.unit, "margin": task.margin}


def results(
    trainings: Sequence[Training],
    rows: Sequence[Row],
    seeds: int,
    outcomes: Mapping[Cell, Outcome],
) -> list[Result]:
    """Return all rows of all trainings that they apply to, as far as they are done."""
    return [
        _result(training, row, seeds, outcomes)
        for training in trainings
        for row in rows
        if applies(row, training)
    ]


def notes(found: Sequence[Result]) -> list[str]:
    """Return what the reader has to know before believing the verdicts."""
    lines = []
    for result in found:
        if result.row.arm == BAD and result.difference is not None:
            where = f"{result.training.task}, {result.training.optimizer}"
            if result.verdict == "as good":
                lines.append(
                    f"{where}: the arm that is known to be bad counts as good: this task is too "
                    "easy to show a difference"
                )
            elif result.verdict != "worse":
                lines.append(
                    f"{where}: the arm that is known to be bad does not count as worse yet"
                )
    undone = sum(result.difference is None and not result.errors for result in found)
    if undone:
        lines.append(f"{undone} of {len(found)} rows have not been run yet")
    return lines


def _result(training: Training, row: Row, seeds: int, outcomes: Mapping[Cell, Outcome]) -> Result:
    pairs: list[tuple[float, float]] = []
    done: list[Outcome] = []
    commits: set[str] = set()
    for seed in range(seeds):
        outcome = outcomes.get(cell_of(training, row, seed))
        base = outcomes.get(cell_of(training, Row("", LOSSLESS, QUIET, row.data), seed))
        if outcome is None or base is None:
            continue
        done.append(outcome)
        commits.update(each.commit for each in (outcome, base) if each.commit)
        if outcome.score is not None and base.score is not None:
            pairs.append((outcome.score, base.score))
    difference = compare([p[0] for p in pairs], [p[1] for p in pairs]) if pairs else None
    errors = tuple(outcome.error for outcome in done if outcome.error)
    task = TASKS[training.task]
    if errors:
        verdict = "halts"
    elif difference is None:
        verdict = "not run"
    else:
        verdict = difference.verdict(task.margin, task.more_is_better)
    return Result(
        training=training,
        row=row,
        seeds=len(done),
        lossless=sum(base for _, base in pairs) / len(pairs) if pairs else None,
        difference=difference,
        verdict=verdict,
        errors=errors,
        delivered=_mean([outcome.delivered for outcome in done]),
        critical_share=_mean([outcome.critical_share for outcome in done]),
        comm_s=_mean([outcome.comm_s for outcome in done]),
        lossy_rounds=sum(outcome.lossy_rounds for outcome in done),
        guarded=sum(outcome.guarded for outcome in done),
        commits=tuple(sorted(commits)),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
