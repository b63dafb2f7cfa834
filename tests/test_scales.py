"""Ranks whose gradients are multiplied by different scales: an error, and on all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gradwire
from ddp_jobs import batch, model, wrap
from gradwire.sim.job import Job
from ranks import Failed, Ranks

TENSORS = {"a.weight": 600, "b.weight": 600}


def gradients(world: int, value: float = 1.0) -> list[np.ndarray]:
    return [np.full(sum(TENSORS.values()), value, np.float32) for _ in range(world)]


@pytest.mark.parametrize("policy", ["reliable", "mlt", "ltp", "adaptive"])
def test_the_step_that_scales_drift_apart_in_fails_on_all_ranks(policy: str) -> None:
    job = Job(3, TENSORS, policy, buckets=[1, 1])
    for pipeline in job.pipelines:
        pipeline.set_grad_scale(1024.0)
    for _ in range(2):
        job.step(gradients(3))
    job.pipelines[1].set_grad_scale(512.0)
    _, futures = job.start(gradients(3))
    while any(engine.pending for engine in job.engines):
        assert job.fabric.run(job.fabric.now + 60)
        for engine in job.engines:
            engine.collect()
    told = set()
    for last in futures[1::2]:  # each rank's last bucket
        with pytest.raises(RuntimeError) as raised:
            last.wait()
        told.add(str(raised.value).splitlines()[0])
    (text,) = told
    assert "ranks 0, 2 multiply their gradients by 1024, rank 1 by 512" in text
    _, futures = job.start(gradients(3))
    for future in futures:
        with pytest.raises(RuntimeError, match="stopped at an earlier failure"):
            future.wait()


def drifts(rank: int, world: int, scales: list[float | None]) -> None:
    """None: a rank whose attach was not given its scaler."""
    ddp = wrap(model())
    scale = scales[rank]
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    attachment = gradwire.attach(ddp, "reliable", scaler=scaler)
    try:
        loss = ddp(batch(rank, 0)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
    finally:
        attachment.detach()


@pytest.mark.parametrize(
    ("scales", "named"),
    [
        ([1024.0, 65536.0], "rank 0 multiplies its gradients by 1024, rank 1 by 65536"),
        ([None, 1000.0], "rank 0 multiplies its gradients by 1, rank 1 by 1000"),
    ],
)
def test_scalers_that_differ_are_named_with_their_ranks(
    two: Ranks, scales: list[float | None], named: str
) -> None:
    for outcome in two.outcomes(drifts, scales=scales):
        assert isinstance(outcome, Failed)
        assert outcome.kind == "RuntimeError"
        assert named in outcome.text
    two.run(drifts, scales=[256.0, 256.0])
