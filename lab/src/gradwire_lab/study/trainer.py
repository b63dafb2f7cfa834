"""The trainer trains one cell: an arm carries four workers' gradients through a network."""

from __future__ import annotations

import itertools
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.calibration.calibrate import calibrate
from gradwire.policies import Policy
from gradwire.policies.base import option_names
from gradwire.sim.job import Job
from gradwire.training.bucket import ParameterNames
from gradwire.transport.native import load_engine
from gradwire_lab.study.arms import ARMS, Arm
from gradwire_lab.study.cell import Cell, Outcome
from gradwire_lab.study.lesson import WORKERS, Lesson
from gradwire_lab.study.own_order import OwnOrder
from gradwire_lab.study.replica import Replica, exact_mean
from gradwire_lab.study.scenarios import SCENARIOS
from gradwire_lab.study.tasks import TASKS
from gradwire_lab.study.weather import PhaseWatch, Weather

__all__ = ["DATAGRAM", "shuffle_of", "train"]

DATAGRAM = 256
"""Bytes of a datagram: 57 elements, so that a net this small has as many chunks as a larger one's
tensors have (about 600)."""


@dataclass
class _Tally:
    """A tally counts over the rounds of a cell's trainings."""

    rounds: int = 0
    delivered: float = 0.0
    critical: float = 0.0
    lossy: int = 0
    guarded: int = 0
    comm_s: float = 0.0

    def add(self, job: Job) -> None:
        reports = [pipeline.report() for pipeline in job.pipelines]
        self.rounds += 1
        self.delivered += sum(report.delivered for report in reports) / len(reports)
        self.lossy += any(report.delivered < 1.0 for report in reports)
        self.guarded += reports[0].guard == "resent"
        self.comm_s += max(report.comm_s for report in reports)

    def close(self, job: Job, rounds: int) -> None:
        self.critical += job.report.critical_share * rounds


def shuffle_of(cell: Cell, part: int) -> int:
    """Return the `seed` setting: of the order in which chunks are sent."""
    return 1 + 100 * cell.seed + part


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as kernel ranks do; on some CPUs two threads' sums differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def train(cell: Cell) -> Outcome:
    """Train all parts of a cell, with one thread.

    Raises:
        MissingDataError: the task's data are not on this machine.
        BrokenInvariantError: the protocol did what it must not.
    """
    started = time.perf_counter()
    tally = _Tally()
    scores: list[float] = []
    error = ""
    for part in range(cell.parts):
        try:
            scores.append(_train_part(cell, part, tally))
        except RuntimeError as failure:  # the policy has halted training
            error = str(failure).strip().splitlines()[0]
            break
    rounds = max(tally.rounds, 1)
    return Outcome(
        score=None if error else float(np.mean(scores)),
        scores=tuple(scores),
        delivered=tally.delivered / rounds if tally.rounds else 1.0,
        critical_share=tally.critical / rounds,
        lossy_rounds=tally.lossy,
        guarded=tally.guarded,
        comm_s=tally.comm_s / rounds,
        error=error,
        seconds=time.perf_counter() - started,
    )


def _train_part(cell: Cell, part: int, tally: _Tally) -> float:
    task, arm = TASKS[cell.task], ARMS[cell.arm]
    lesson = task.open(cell.seed, part, cell.data)
    replica = Replica(lesson.model, task.optimizers[cell.optimizer](lesson.model), task.clip)
    carrier = None if arm.policy is None else _Carrier(cell, part, arm, lesson, replica)
    for number in range(cell.rounds):
        replica.set_rate(task.rate(number / cell.rounds))
        gradients = [replica.gradient(lesson.loss(number, w)) for w in range(WORKERS)]
        if carrier is None:
            replica.apply(exact_mean(gradients))
        else:
            replica.apply(carrier.carry(number, gradients))
            tally.add(carrier.job)
    if carrier is not None:
        tally.close(carrier.job, cell.rounds)
    return lesson.score()


class _Carrier:
    """A carrier is an arm with a policy, over a scenario's network."""

    def __init__(self, cell: Cell, part: int, arm: Arm, lesson: Lesson, replica: Replica) -> None:
        scenario = SCENARIOS[cell.scenario]
        options: dict[str, Any] = dict(arm.options)
        if arm.calibrated:
            options["table"] = _calibration(lesson)
        policy: str | Policy | None = arm.policy
        if arm.own_order:
            own = {name: options.pop(name) for name in option_names(OwnOrder) if name in options}
            policy = OwnOrder(**own)
        assert policy is not None
        chances = [cell.seed, part, zlib.crc32(scenario.name.encode())]
        self.job = Job(
            WORKERS,
            lesson.model,
            policy,
            buckets=_buckets(lesson.model, arm.buckets),
            backwards=True,
            link=scenario.link,
            datagram=DATAGRAM,
            seed=zlib.crc32(repr(chances).encode()),
            shuffle=shuffle_of(cell, part),
            optimizer=replica.optimizer,
            **options,
        )
        self._weather = Weather(scenario, self.job, chances)
        self._watch = PhaseWatch(replica.optimizer)
        self._arm = arm
        self._rounds = cell.rounds
        self._epoch = lesson.rounds_per_epoch

    def carry(self, number: int, gradients: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return what all workers apply in this round."""
        if number % self._epoch == 0:
            for pipeline in self.job.pipelines:
                pipeline.begin_epoch(number // self._epoch)
        if self._arm.thirds:  # a vote decides from the next round on
            loose = 3 * (number + 1) // self._rounds in self._arm.thirds
            for pipeline in self.job.pipelines:
                pipeline.set_phase("tolerant" if loose else "critical")
        self._weather.before_round(self._watch.phase)
        applied = self.job.step(gradients)
        if not all(np.array_equal(applied[0], other) for other in applied[1:]):
            raise AssertionError(f"round {number} of {self._arm.name}: the replicas differ")
        self._watch.observe(number, gradients)
        return applied[0]


def _buckets(model: torch.nn.Module, count: int) -> list[int]:
    """Return how many tensors each of at most `count` buckets holds.

    They are those that begin in its share of all elements.
    """
    elements = list(reversed((ParameterNames(model).trained or {}).values()))
    begins = itertools.accumulate(elements[:-1], initial=0)
    return list(Counter(begin * count // sum(elements) for begin in begins).values())


def _calibration(lesson: Lesson) -> dict[str, float]:
    """Find bounds by tensor on the fresh model, with worker 0's first batches."""

    def loss(model: torch.nn.Module, batch: int) -> torch.Tensor:
        return lesson.loss(batch, 0)

    elements = load_engine().chunk_elements("f32", 1.0, DATAGRAM)
    return calibrate(lesson.model, loss, range(8), chunk_elements=elements).bounds
