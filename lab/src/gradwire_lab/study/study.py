"""The study has rows, which are made of cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gradwire.training.feedback.optimizer_moments import keeps_first_moment
from gradwire_lab.study.arms import ARMS, BAD, LOSSLESS, POLICIES, THIRDS
from gradwire_lab.study.cell import Cell
from gradwire_lab.study.scenarios import BURSTS, BY_LEVEL, QUIET
from gradwire_lab.study.tasks import TASKS

__all__ = [
    "QUICK",
    "SECTIONS",
    "Row",
    "Training",
    "applies",
    "cell_of",
    "cells",
    "left_out",
    "rows",
]


@dataclass(frozen=True)
class Row:
    """A row is an arm in a scenario; `section` is its table, and `where` is that of `cell.Cell`."""

    section: str
    arm: str
    scenario: str = QUIET
    data: str = "mixed"
    where: str = "virtual"


@dataclass(frozen=True)
class Training:
    """A training is what all rows have in common."""

    task: str
    optimizer: str
    rounds: int
    parts: int


_QUIET = tuple(Row("quiet", arm) for arm in (BAD, *(arm.name for arm in POLICIES)))
_BURSTS = tuple(Row("bursts", arm.name, each.name) for each in BURSTS for arm in POLICIES)
_LEVELS = tuple(Row("levels", arm.name, each.name) for each in BY_LEVEL for arm in POLICIES)
_MOTIVATION = tuple(Row("thirds", f"{loss}-{when}") for loss in (40, 80) for when in THIRDS)
_CHOICES = tuple(
    Row("choices", arm, scenario)
    for scenario, arms in (
        (
            QUIET,
            "eager-40 eager-40-mean eager-40-momentum eager-40-own eager-40-own-mean "
            "eager-40-feedback eager-40-fixed-order eager-40-results dblp-buckets dblp-zero "
            "dblp-random dblp-random-momentum dblp-plain",
        ),
        ("even-40", "eager-40 eager-40-mean vesting-40 vesting-40-mean vesting-40-feedback"),
        ("congested", "reliable netsenseml adaptive adaptive-topk"),
        ("bursts-critical", "adaptive-topk"),
    )
    for arm in arms.split()
)
_PRIORITY = tuple(
    Row("priority", arm)
    for arm in (
        "mlt",
        "mlt-priority",
        "eager-40",
        "priority-40",
        "eager-40-feedback",
        "priority-40-feedback",
    )
)
_SHAPES = tuple(
    Row("shapes", arm, scenario, data)
    for data in ("mixed", "own")
    for scenario in ("even-10", "runs-10", "uneven-10")
    for arm in (
        "vesting-40",
        "vesting-40-mean",
        "reliable",
        "dblp-vesting",
        "ltp",
        "plot",
        "adaptive",
    )
)
_CHECK = tuple(
    Row("check", arm, scenario, where=where)
    for arm, scenario in (
        ("reliable", "even-10"),
        (BAD, QUIET),
        ("vesting-40", "even-40"),
        ("dblp-vesting", "runs-10"),
    )
    for where in ("virtual", "kernel")
)
_ALL = (*_QUIET, *_BURSTS, *_LEVELS, *_MOTIVATION, *_CHOICES, *_PRIORITY, *_SHAPES, *_CHECK)

SECTIONS = tuple(dict.fromkeys(row.section for row in _ALL))

QUICK = (Row("quiet", BAD), Row("quiet", "dblp"))


def rows(
    sections: Sequence[str] = (), arms: Sequence[str] = (), scenarios: Sequence[str] = ()
) -> tuple[Row, ...]:
    """Return the rows of these sections, arms and scenarios; empty: of all."""
    return tuple(
        row
        for row in _ALL
        if (not sections or row.section in sections)
        and (not arms or row.arm in arms)
        and (not scenarios or row.scenario in scenarios)
    )


def cells(trainings: Sequence[Training], chosen: Sequence[Row], seeds: int) -> list[Cell]:
    return list(dict.fromkeys(_cells(trainings, chosen, seeds)))


def _cells(trainings: Sequence[Training], chosen: Sequence[Row], seeds: int) -> Iterator[Cell]:
    for seed in range(seeds):
        for training in trainings:
            there = [row for row in chosen if applies(row, training)]
            for data in dict.fromkeys(row.data for row in there):
                yield cell_of(training, Row("", LOSSLESS, QUIET, data), seed)
            for row in there:
                yield cell_of(training, row, seed)


def applies(row: Row, training: Training) -> bool:
    """Return whether the row is trained so.

    A task may have only some sections, and an arm that fills from a running mean of gradients
    needs an optimizer that keeps one.
    """
    return _asked(row, training) and (not _needs_mean(row) or _keeps_mean(training))


def _asked(row: Row, training: Training) -> bool:
    sections = TASKS[training.task].sections
    return not sections or row.section in sections


def _needs_mean(row: Row) -> bool:
    return ARMS[row.arm].options.get("fill") == "momentum"


def _keeps_mean(training: Training) -> bool:
    made = TASKS[training.task].optimizers[training.optimizer](torch.nn.Linear(1, 1))
    return keeps_first_moment(made)


def left_out(trainings: Sequence[Training], chosen: Sequence[Row]) -> list[str]:
    """Return a sentence for each training that some of the rows do not apply to."""
    sentences = []
    for training in trainings:
        if chosen and not any(_asked(row, training) for row in chosen):
            known = ", ".join(TASKS[training.task].sections)
            sentences.append(f"{training.task}, {training.optimizer}: its only tables are {known}")
            continue
        asked = [row for row in chosen if _asked(row, training)]
        arms = dict.fromkeys(row.arm for row in asked if not applies(row, training))
        if arms:
            sentences.append(
                f"{training.task}, {training.optimizer}: without {', '.join(arms)}, for this "
                "optimizer keeps no running mean of the gradients"
            )
    return sentences


def cell_of(training: Training, row: Row, seed: int) -> Cell:
    """Return the cell of one seed of a row."""
    assert row.arm in ARMS
    assert training.task in TASKS
    return Cell(
        task=training.task,
        optimizer=training.optimizer,
        data=row.data,
        arm=row.arm,
        scenario=row.scenario,
        seed=seed,
        rounds=training.rounds,
        parts=training.parts,
        where=row.where,
    )
