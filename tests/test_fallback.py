"""on_failure="host": an engine ends at every event of two steps, and training goes on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.sim.fabric import NETWORK_A, Link
from gradwire.sim.job import Job

WORLD, STEPS = 3, 2
TENSORS = {"a.weight": 1500, "b.weight": 700}
SLICE_S, SILENCE_S = 1e-6, 120.0
LOSSY = Link(rate=NETWORK_A.rate, queue=NETWORK_A.queue, loss=0.1)

Flat = NDArray[np.float32]

CASES: dict[str, dict[str, Any]] = {
    "exact": {"policy": "reliable"},
    "lossy": {"policy": "mlt", "p": 0.3, "error_feedback": True, "link": LOSSY},
    "guarded": {"policy": "mlt", "p": 0.5, "floor": 0.9, "error_feedback": True},
    "by layers": {"policy": "dblp", "detector": "layers", "every": 2, "error_feedback": True},
    "encoded": {"policy": "netsenseml", "error_feedback": True},
}
LOSSY_CASES = [case for case in CASES if case != "exact"]


def gradients(step: int) -> list[Flat]:
    numbers = np.random.default_rng(step)
    return list(numbers.standard_normal((WORLD, sum(TENSORS.values())), dtype=np.float32))


class Run:
    """Two steps of a job, in which each rank goes on as soon as it can.

    Args:
        victim: The rank whose engine's thread ends.
        at: When it ends; None for never.
        told: Whether the others learn of it at once, as by the store; else by its silence.
        known: The times of the events before the end, where they are known.

    Attributes:
        applied: What each rank has applied, by step and rank.
    """

    def __init__(
        self,
        case: str,
        victim: int = 0,
        at: float | None = None,
        *,
        told: bool = True,
        known: Sequence[float] = (),
    ) -> None:
        self.job = Job(WORLD, TENSORS, buckets=[1, 1], on_failure="host", **CASES[case])
        self.times: list[float] = []
        self.applied: list[list[Flat]] = []
        self._known = iter(known)
        self._slice = SLICE_S
        self._victim, self._at, self._told = victim, at, told
        for step in range(STEPS):
            self._step(step)

    def _step(self, step: int) -> None:
        results, futures = self.job.start(gradients(step))
        limit = self.job.fabric.now + SILENCE_S
        while any(engine.pending for engine in self.job.engines) and self.job.fabric.now < limit:
            self._end_at()
            self._advance()
        if not all(future.done() for future in futures):
            self._look()  # those who have finished learn of the others by the store
        for future in futures:
            future.wait()
        self.applied.append([result.numpy().copy() for result in results])

    def _end_at(self) -> None:
        if self._at is None or self.job.fabric.now < self._at or self.ended:
            return
        self.job.engines[self._victim].end()
        if self._told:
            self._look()

    def _advance(self) -> None:
        fabric = self.job.fabric
        if self.ended:
            self._slice = min(2.0 * self._slice, 1.0)
        until = next(self._known, 0.0) if not self.ended else 0.0
        before = fabric.events
        fabric.run(max(until, fabric.now + self._slice), until_done=False, check=False)
        if fabric.events != before:
            self.times.append(fabric.now)
        for engine in self.job.engines:
            engine.collect_done()

    def _look(self) -> None:
        for rank in range(WORLD):
            self.job.table.close(rank)

    @property
    def ended(self) -> bool:
        return any(engine.ended for engine in self.job.engines)

    def replicas(self) -> list[bytes]:
        """The bits of each step's result, which all ranks have alike."""
        for ranks in self.applied:
            assert len({each.tobytes() for each in ranks}) == 1
        return [ranks[0].tobytes() for ranks in self.applied]

    def owed(self) -> float:
        """The largest element by which what was applied and is owed differs from all gradients."""
        given = np.sum([np.sum(gradients(step), axis=0) for step in range(STEPS)], axis=0)
        applied = np.sum([ranks[0] for ranks in self.applied], axis=0)
        kept = np.sum([self.job.residual(rank) for rank in range(WORLD)], axis=0)
        return float(np.abs(WORLD * applied + kept - given).max())

    def phases(self) -> set[str]:
        """What the ranks' detectors know, as their checkpoints have it."""
        return {str(pipeline.state_dict().get("phases")) for pipeline in self.job.pipelines}


@functools.cache
def undisturbed(case: str) -> Run:
    return Run(case)


def disturbed(case: str, every: int) -> Iterator[Run]:
    """Runs with an engine that ends after each event in turn, of one rank after the other.

    Every other time the remaining ranks learn of it by its silence alone.
    """
    times = undisturbed(case).times
    assert len(times) > 100
    for index in range(0, len(times), every):
        told = index // every % 2 == 0
        yield Run(case, index % WORLD, times[index], told=told, known=times)


def check_exact(every: int) -> None:
    expected, adopted = undisturbed("exact").replicas(), 0
    for run in disturbed("exact", every):
        assert run.replicas() == expected
        adopted += len(set(run.job.table.votes)) > 1
    assert adopted  # where a rank had committed a step that another one had not


def check_books(case: str, every: int) -> None:
    (expected,) = undisturbed(case).phases()
    for run in disturbed(case, every):
        run.replicas()
        assert run.owed() < 1e-4
        assert run.phases() == {expected}
        assert all(pipeline.step == STEPS for pipeline in run.job.pipelines)


def test_exact_steps_lose_nothing_at_whichever_event_an_engine_ends() -> None:
    check_exact(every=1)


@pytest.mark.parametrize("case", LOSSY_CASES)
def test_lossy_steps_keep_replicas_and_books_when_an_engine_ends(case: str) -> None:
    check_books(case, every=29)


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSY_CASES)
def test_lossy_steps_keep_replicas_and_books_at_whichever_event_it_ends(case: str) -> None:
    check_books(case, every=1)


def test_later_steps_go_over_the_host_and_are_whole() -> None:
    run = Run("lossy", 1, undisturbed("lossy").times[5])
    assert run.job.report.delivered == 1.0
    assert run.job.report.bytes == 0


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        Settings(on_failure="skip")
    assert (refused.value.setting, refused.value.value) == ("on_failure", "skip")
