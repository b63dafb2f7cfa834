"""A run that goes on from saved states applies what the uninterrupted run applies, to the bit.

With two workers, whose sums know no order of arrival, and in steps that nothing disturbs: what a
policy learns from measured times is another run's otherwise (docs/guides/checkpoints.md).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gradwire
from ddp_jobs import batch, fingerprint, model, wrap
from gradwire.sim.job import Job
from ranks import Ranks

TENSORS = {"front.weight": 9000, "front.bias": 50, "back.weight": 6000}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("reliable", {}),
    ("mlt", {"p": 0.3}),
    ("mlt", {"p": 0.3, "error_feedback": True, "max_age": 2}),
    ("mlt", {"p": 0.3, "priority": "results"}),
    ("mlt", {"p": 0.3, "priority": "magnitude"}),
    ("mlt", {"p": 0.3, "control": "probe", "pull": "exact"}),
    ("mlt", {"p": 0.3, "loss_rise": 0.2, "strict_steps": 3}),
    ("dblp", {"every": 5}),
    ("dblp", {"every": 5, "detector": "paper", "error_feedback": True}),
    ("dblp", {"every": 5, "detector": "layers"}),
    ("dblp", {"every": "epoch"}),
    ("dblp", {"every": "epoch", "detector": "layers"}),
    ("ltp", {"every": 100}),  # nothing is learned yet: all is waited for
    ("plot", {"table": {"*.weight": 0.2}}),
    ("optireduce", {"warmup": 3}),
    ("optireduce", {"warmup": 12}),
    ("netsenseml", {"momentum": 0.5}),
    ("adaptive", {"every": 5, "compress": "never"}),  # trials learn from times
    ("adaptive", {"every": 5, "compress": "never", "error_feedback": True}),
]
STEPS = 16


def gradients(step: int) -> list[NDArray[np.float32]]:
    """Those of the front grow and those of the back fall within a window, so phases come and go."""
    made = []
    for rank in range(2):
        values = np.random.default_rng([step, rank]).standard_normal(sum(TENSORS.values()))
        values[:9050] *= 1.0 + step % 5
        values[9050:] *= 0.3 ** (step % 7)
        made.append(values.astype(np.float32))
    return made


def job(policy: str, options: dict[str, Any]) -> Job:
    return Job(2, TENSORS, policy, buckets=[2, 1], datagram=256, **options)


def take_step(job: Job, step: int) -> tuple[bytes, str]:
    job.compute(1.0)
    for pipeline in job.pipelines:
        pipeline.add_loss(5.0 if step == 10 else 1.0)
        pipeline.begin_epoch(step // 3)
    applied, other = job.step(gradients(step))
    assert np.array_equal(applied, other)
    return applied.tobytes(), job.report.phase


@pytest.mark.parametrize(
    ("policy", "options"), KINDS, ids=[f"{p}-{'-'.join(map(str, o.values()))}" for p, o in KINDS]
)
def test_a_resumed_job_applies_what_the_uninterrupted_one_does(
    policy: str, options: dict[str, Any]
) -> None:
    whole = job(policy, options)
    expected, states = [], []
    for step in range(STEPS):
        states.append([saved(pipeline.state_dict()) for pipeline in whole.pipelines])
        expected.append(take_step(whole, step))
    for stop in (4, 7, 11, 13):
        later = resumed(policy, options, states[stop])
        for step in range(stop, STEPS):
            assert take_step(later, step) == expected[step], (stop, step)


def saved(state: object) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(state: bytes) -> object:
    return torch.load(io.BytesIO(state), weights_only=True)


def resumed(policy: str, options: dict[str, Any], states: list[bytes]) -> Job:
    made = job(policy, options)
    for pipeline, state in zip(made.pipelines, states, strict=True):
        pipeline.load_state_dict(loaded(state))
    return made


def test_a_flush_that_is_to_come_outlives_the_run_it_was_asked_in() -> None:
    options = {"p": 0.3, "error_feedback": True}
    first = job("mlt", options)
    take_step(first, 0)
    first.pipelines[0].flush()
    later = resumed("mlt", options, [saved(p.state_dict()) for p in first.pipelines])
    assert [pipeline.flush_pending for pipeline in later.pipelines] == [True, False]
    take_step(later, 1)
    assert all(pipeline.flush_pending for pipeline in later.pipelines)
    take_step(later, 2)
    assert later.report.delivered == 1.0
    assert not later.residual(0).any()
    assert not any(pipeline.flush_pending for pipeline in later.pipelines)


def test_steps_under_the_floor_are_counted_on() -> None:
    options = {"p": 0.3, "floor": 0.8}
    first = job("mlt", options)
    for step in range(2):
        take_step(first, step)
        assert first.report.guard == "resent"
    later = resumed("mlt", options, [saved(p.state_dict()) for p in first.pipelines])
    for policy in later.policies:
        policy.halt_after = 3
    with pytest.raises(RuntimeError, match="3 steps running delivered less than floor"):
        take_step(later, 2)


# ---------------------------------------------------------------------------- processes

REAL: list[tuple[str, dict[str, Any]]] = [
    ("reliable", {}),
    ("mlt", {"p": 0.3, "error_feedback": True}),
    ("dblp", {"every": 4, "detector": "layers"}),
    ("plot", {"table": {"*.weight": 0.2}}),
    ("optireduce", {"warmup": 100}),  # no times rule yet
]
HALF = 6


def train(rank: int, ddp: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()


def whole_run(rank: int, world: int, folder: str) -> list[bytes]:
    """What the models are after 2 · HALF steps; each rank saves what it is after HALF."""
    prints = []
    for number, (policy, options) in enumerate(REAL):
        ddp = wrap(model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        attachment = gradwire.attach(ddp, policy, optimizer=optimizer, **options)
        train(rank, ddp, optimizer, range(HALF))
        states = {
            "model": ddp.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "gradwire": attachment.state_dict(),
        }
        torch.save(states, Path(folder, f"{number}-{rank}.pt"))
        train(rank, ddp, optimizer, range(HALF, 2 * HALF))
        attachment.detach()
        prints.append(fingerprint(ddp))
    return prints


def second_half(rank: int, world: int, folder: str) -> list[bytes]:
    prints = []
    for number, (policy, options) in enumerate(REAL):
        ddp = wrap(model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        attachment = gradwire.attach(ddp, policy, optimizer=optimizer, **options)
        ddp(batch(rank, 0)).square().mean().backward()  # after which DDP rebuilds its buckets
        states = torch.load(Path(folder, f"{number}-{rank}.pt"), weights_only=True)
        ddp.module.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        attachment.load_state_dict(states["gradwire"])
        train(rank, ddp, optimizer, range(HALF, 2 * HALF))
        attachment.detach()
        prints.append(fingerprint(ddp))
    return prints


def test_new_processes_end_with_the_parameters_of_the_uninterrupted_run(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        expected = ranks.run(whole_run, folder=str(tmp_path))
    with Ranks(2) as ranks:
        assert ranks.run(second_half, folder=str(tmp_path)) == expected
