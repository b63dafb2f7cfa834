"""Lives of training: steps of a policy, with the pipelines of all ranks and their books."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.errors import TransferError
from gradwire.sim.fuzz.judge import Course, Errors, Verdict, Wrong, check_errors, network
from gradwire.sim.fuzz.life import Life
from gradwire.sim.job import Job

TENSORS = 3
"""Tensors of a bucket."""
ROUNDING = 2e-3
"""By how much the books may be off at an element, after steps of some units each."""


def live(life: Life, verdict: Verdict) -> None:
    """Runs a life of training; raises `Wrong` or BrokenInvariantError."""
    fabric, ports = network(life)
    course = Course(life, fabric, ports)
    count = TENSORS * life.lanes
    tensors = {
        f"layer{i}.weight": max(1, life.elements * (i + 1) // (count * (count + 1) // 2))
        for i in range(count)
    }
    options = {name: value for name, value in life.options.items() if name != "policy"}
    job = Job(
        life.workers,
        tensors,
        life.options.get("policy", "reliable"),
        buckets=[TENSORS] * life.lanes,
        servers=life.servers,
        fabric=fabric,
        optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1),
        error_feedback=True,
        **options,
    )
    sums = Sums(job)
    errors: Errors = []
    try:
        for step in range(life.steps):
            errors = _step(life, course, job, step, sums)
            if errors:
                break
        fabric.check()
        if not errors and not course.out() and _keeps_all(life):
            sums.check()
        check_errors(life, course, errors)
        verdict.causes.update(done.error_cause for _, done, _ in errors)
        verdict.outcome = "error" if errors else "done"
    finally:
        verdict.events, verdict.seconds = fabric.events, fabric.now


def _keeps_all(life: Life) -> bool:
    """Whether ranks keep all that was not applied: servers have no residuals."""
    exact = life.options.get("pull", "exact") == "exact"
    encodes = life.options.get("policy") in ("adaptive", "netsenseml")
    return not life.servers or (exact and not encodes)


class Sums:
    """What went into a job and what came out of it, by element."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._given = np.zeros(job.elements)
        self._applied = np.zeros(job.elements)

    def give(self, gradients: NDArray[np.float32]) -> None:
        """Adds the gradients of all ranks, before their step."""
        self._given += gradients.sum(axis=0, dtype=np.float64)
        if momentum := self._job.policies[0].momentum:
            for rank in range(self._job.world):
                self._given += momentum * self._job.velocity(rank)

    def apply(self, result: NDArray[np.float32]) -> None:
        """Adds what all ranks apply after a step, which is a mean."""
        self._applied += self._job.world * result.astype(np.float64)

    def check(self) -> None:
        """Raises `Wrong` unless what was applied and what is owed are all gradients."""
        owed = np.sum([self._job.residual(rank) for rank in range(self._job.world)], axis=0)
        off = np.abs(self._applied + owed - self._given)
        if off.max() > ROUNDING:
            at = int(off.argmax())
            raise Wrong(
                "books",
                f"element {at}: {self._applied[at]:g} applied and {owed[at]:g} owed of "
                f"{self._given[at]:g}",
            )


def _step(life: Life, course: Course, job: Job, step: int, sums: Sums) -> Errors:
    """One step; returns its errors, or checks that replicas are equal."""
    numbers = np.random.default_rng([life.seed, step])
    shape = (life.workers, job.elements)
    gradients = numbers.standard_normal(shape, dtype=np.float32) / np.float32(step + 1)
    course.run(job.fabric.now + life.apart, until_done=False)
    sums.give(gradients)
    results, futures = job.start(list(gradients))
    limit = job.fabric.now + life.timeout + 1800.0
    errors: Errors = []
    alive = list(range(life.workers))
    while any(job.engines[rank].pending for rank in alive):
        done = _ends(course, job, limit)
        out = course.out()
        alive = [rank for rank in range(life.workers) if rank not in out]
        for rank in alive:
            errors += _collect(job, rank)
        if not done and any(job.engines[rank].pending for rank in alive):
            raise Wrong("stall", f"step {step}: not done at {job.fabric.now:.3f} s")
        if errors:
            break
    if errors or course.out():
        return errors
    if waiting := sum(not future.done() for future in futures):
        raise Wrong("stall", f"step {step}: {waiting} buckets are not done, and nothing is pending")
    for future in futures:
        future.wait()
    for rank in range(1, life.workers):
        if results[rank].numpy().tobytes() != results[0].numpy().tobytes():
            raise Wrong("replicas", f"step {step}: rank {rank} applies other bits than rank 0")
    sums.apply(results[0].numpy())
    job.fabric.forget()
    return errors


def _ends(course: Course, job: Job, limit: float) -> bool:
    """Runs until no op of a rank is open that is not out; returns whether that came in time.

    A rank that hangs has its ops for good, and others may go on when theirs are done.
    """
    while not course.run(min(limit, job.fabric.now + course.life.peer_timeout)):
        if job.fabric.now >= limit:
            return False
        out = course.out()
        if all(
            rank in out or job.fabric.completion(rank, op, lane=request.lane) is not None
            for rank, engine in enumerate(job.engines)
            for op, request, _ in engine.pending
        ):
            return True
    return True


def _collect(job: Job, rank: int) -> Errors:
    """Ends the handles of one rank; returns its first error."""
    engine = job.engines[rank]
    pending = [(request.lane, op) for op, request, _ in engine.pending]
    try:
        engine.collect()
    except TransferError:
        for lane, op in pending:
            done = job.fabric.completion(rank, op, lane=lane)
            if done is not None and not done.ok:
                engine.pending.clear()
                return [(rank, done, job.fabric.finished_at(rank, op, lane=lane))]
    return []
