"""A step works in memory that steps before it have had."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ddp_jobs import batch, model
from encoded import Encoded
from gradwire.sim.job import Job
from gradwire.training.step import Transfer
from ranks import Ranks


def most_memory(rank: int, world: int, policy: str | Encoded, options: dict[str, Any]) -> float:
    """The most that a later step's backward pass takes anew, over the gradient's bytes."""
    ddp = DistributedDataParallel(model(width=3000), bucket_cap_mb=100)
    family = torch.optim.SGD if "momentum" in options else torch.optim.AdamW
    optimizer = family(ddp.parameters(), lr=1e-3)
    attachment = gradwire.attach(ddp, policy, optimizer=optimizer, **options)
    most = 0
    try:
        for step in range(8):
            optimizer.zero_grad(set_to_none=False)
            loss = ddp(batch(rank, step)).square().mean()
            if step == 4:
                tracemalloc.start()
            if step > 4:  # what the step before left is given back while this one runs
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
            loss.backward()
            if step > 4:
                most = max(most, tracemalloc.get_traced_memory()[1] - before)
            optimizer.step()
    finally:
        tracemalloc.stop()
        attachment.detach()
    return most / sum(4 * p.numel() for p in ddp.parameters())


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("reliable", {}),
        ("dblp", {"every": 1}),  # magnitudes and momentum
        ("dblp", {"every": 1, "error_feedback": True}),
        ("optireduce", {"warmup": 2}),  # guarded: what was sent is kept
        ("mlt", {"floor": 0.5}),
        ("netsenseml", {"momentum": 0.9}),
        (Encoded(encoding="int8"), {}),  # its results leave an error
        (Encoded(encoding="int8"), {"error_feedback": True}),
    ],
)
def test_a_step_takes_no_memory_anew(
    two: Ranks, policy: str | Encoded, options: dict[str, Any]
) -> None:
    assert max(two.run(most_memory, policy=policy, options=options)) < 0.2


@pytest.mark.parametrize("options", [{"p": 0.3}, {"p": 0.3, "floor": 0.5}])
def test_a_step_is_freed_without_the_garbage_collector(options: dict[str, Any]) -> None:
    job = Job(2, {"a.weight": 4096, "b.weight": 512}, "mlt", buckets=[1, 1], **options)

    def train(steps: int) -> int:
        for _ in range(steps):
            job.step([np.ones(4608, np.float32) for _ in range(2)])
        return sum(type(each) is Transfer for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        few = train(2)
        assert train(10) <= few  # what tests before have left may go meanwhile
    finally:
        gc.enable()
