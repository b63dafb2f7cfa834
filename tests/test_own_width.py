"""Buckets of float16 and bfloat16 travel in their own width under every policy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.core.plan import TransferPlan
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from job_gradients import normal

TENSORS = {"a.weight": 20_011, "a.bias": 7, "b.weight": 9_001}
ELEMENTS = sum(TENSORS.values())
gradients = partial(normal, ELEMENTS)
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
POLICIES: dict[str, dict[str, Any]] = {
    "reliable": {},
    "mlt": {"p": 0.1, "spend": "lost"},
    "dblp": {"p_low": 0.0},
    "ltp": {"floor": 0.0},
    "plot": {"table": {"*": 0.1}},
    "optireduce": {"warmup": 2},
    "netsenseml": {"start": 1.0, "compress": "int8"},
    "adaptive": {"compress": "never"},
}


def exact(each: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    """The sum in rank order of what the workers hold, times 1/n, rounded once."""
    total = torch.from_numpy(each[0]).to(dtype).float()
    for other in each[1:]:
        total = total + torch.from_numpy(other).to(dtype).float()
    return (total * torch.tensor(1.0 / len(each))).to(dtype).float()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_sends_half_of_the_bytes(policy: str, name: str) -> None:
    dtype, options = TYPES[name], POLICIES[policy]
    job = Job(3, TENSORS, policy, dtype=dtype, error_feedback=False, **options)
    wide = Job(3, TENSORS, policy, error_feedback=False, **options)
    each = gradients(0)
    results = job.step(each)
    wide.step(each)
    assert job.report.encoded_share == 0.5
    assert job.report.bytes < 0.56 * wide.report.bytes
    assert all(np.array_equal(results[0], other) for other in results)
    if policy == "optireduce":  # its coefficients are rounded, and not to the type itself
        np.testing.assert_allclose(results[0], exact(each, dtype), rtol=0.02, atol=0.02)
    else:
        np.testing.assert_array_equal(results[0], exact(each, dtype))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("guard", ["off", "resend"])
def test_what_a_lossy_policy_owes_is_delivered_by_a_flush(name: str, guard: str) -> None:
    """Losses, and what the type cannot hold of a sum, stay in the books until then."""
    dtype = TYPES[name]
    job = Job(
        3,
        TENSORS,
        "mlt",
        p=0.3,
        spend="lost",
        guard=guard,
        error_feedback=True,
        dtype=dtype,
        link=Link(loss=0.2),
    )
    held = np.zeros(ELEMENTS)
    applied = np.zeros(ELEMENTS)
    for step in range(6):
        each = gradients(step)
        held += sum(torch.from_numpy(g).to(dtype).double().numpy() for g in each) / 3
        if step == 4:
            job.pipelines[1].flush()
        applied += job.step(each)[0]
    assert not any(job.residual(rank).any() for rank in range(3))
    ulp = torch.finfo(dtype).eps * 4.0
    np.testing.assert_allclose(applied, held, atol=ulp)


@pytest.mark.parametrize("name", TYPES)
def test_a_sum_that_exceeds_the_range_leaves_no_residual(name: str) -> None:
    dtype = TYPES[name]
    most = torch.finfo(dtype).max
    job = Job(3, TENSORS, "mlt", p=0.3, spend="lost", error_feedback=True, dtype=dtype)
    each = gradients(0)
    for gradient in each:
        gradient[5] = most
        gradient[6] = np.nan
    results = job.step(each)
    assert np.isnan(results[0][6])
    for rank in range(3):
        assert np.isfinite(job.residual(rank)).all()
    assert np.isfinite(job.step(gradients(1))[0]).all()


@pytest.mark.parametrize("name", TYPES)
def test_an_infinite_sum_is_seen_by_a_loss_scaler(name: str) -> None:
    """A step whose result exceeds the range is skipped on all ranks alike."""
    dtype = TYPES[name]
    each = gradients(0)
    each[1][3] = np.inf
    job = Job(3, TENSORS, "reliable", dtype=dtype)
    for pipeline in job.pipelines:
        pipeline.set_grad_scale(2.0)
    assert all(np.isposinf(result[3]) for result in job.step(each))
    assert np.isfinite(job.step(gradients(1))[0]).all()


def test_what_a_policy_asks_for_is_kept_where_it_is_smaller() -> None:
    for encoding, sent in {"f32": "bf16", "f16": "bf16", "int8": "int8", "topk": "topk"}.items():
        plan = TransferPlan.whole(5, encoding=encoding).in_width_of("bf16")
        assert plan.encoding == sent
        assert TransferPlan.whole(5, encoding=encoding).in_width_of("f32").encoding == encoding
