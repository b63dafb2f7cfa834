"""Lives of training: steps of a policy, with the pipelines of all ranks."""

from __future__ import annotations

import numpy as np

from gradwire.core.errors import TransferError
from gradwire.sim.fuzz.judge import MEETING, Course, Errors, Verdict, Wrong, check_errors, network
from gradwire.sim.fuzz.life import Life
from gradwire.sim.job import Job

TENSORS = 3
"""Tensors of a bucket."""


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
        **options,
    )
    errors: Errors = []
    try:
        course.run(MEETING, until_done=False)
        for step in range(life.steps):
            errors = _step(life, course, job, step)
            if errors:
                break
        fabric.check()
        check_errors(life, course, errors)
        verdict.causes.update(done.error_cause for _, done, _ in errors)
        verdict.outcome = "error" if errors else "done"
    finally:
        verdict.events, verdict.seconds = fabric.events, fabric.now


def _step(life: Life, course: Course, job: Job, step: int) -> Errors:
    """One step; returns its errors, or checks that replicas are equal."""
    numbers = np.random.default_rng([life.seed, step])
    shape = (life.workers, job.elements)
    gradients = numbers.standard_normal(shape, dtype=np.float32) / np.float32(step + 1)
    course.run(job.fabric.now + life.apart, until_done=False)
    results, futures = job.start(list(gradients))
    limit = job.fabric.now + life.timeout + 1800.0
    errors: Errors = []
    alive = list(range(life.workers))
    while any(job.engines[rank].pending for rank in alive):
        done = course.run(limit)
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
    job.fabric.forget()
    return errors


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
