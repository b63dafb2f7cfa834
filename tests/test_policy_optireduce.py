"""OptiReduce: its limits of time, its transform, its guard."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire import _engine
from gradwire.core.agreed import Summary
from gradwire.core.errors import ConfigError
from gradwire.policies import OptiReduce
from gradwire.policies.parts.timing import MovingAverages, quantile
from gradwire.sim.fabric import NETWORK_A, Link
from gradwire.sim.job import Job
from gradwire.transport import transforms
from job_gradients import normal

TENSORS = {"a.weight": 60 * 358, "a.bias": 64, "b.weight": 60 * 358}
ELEMENTS = sum(TENSORS.values())
BLOCK = _engine.HADAMARD_BLOCK
gradients = partial(normal, ELEMENTS)


# ---------------------------------------------------------------------------- the transform


@given(elements=st.integers(1, 20_000), seed=st.integers(0, 2**64 - 1))
def test_the_transform_is_its_own_way_back_and_keeps_norms(elements: int, seed: int) -> None:
    values = np.random.default_rng(1).standard_normal(elements).astype(np.float32)
    there = values.copy()
    transforms.forward(there, seed)
    assert np.linalg.norm(there) == pytest.approx(np.linalg.norm(values), rel=1e-4)
    transforms.inverse(there, seed)
    np.testing.assert_allclose(there, values, atol=1e-5)


def test_the_transform_is_that_of_walsh_and_hadamard() -> None:
    """Row k of the matrix is what a one at k becomes; 2,048 + 1 elements are two blocks."""
    elements = BLOCK // 2 + 1
    for k in (0, 1, 6, 2047):
        values = np.zeros(elements, np.float32)
        values[k] = 1.0
        transforms.forward(values, 9)
        parity = [bin(k & i).count("1") % 2 for i in range(elements - 1)]
        expected = (1.0 - 2.0 * np.array(parity)) / np.sqrt(elements - 1)
        flipped = np.sign(values[0])
        np.testing.assert_allclose(values[:-1], flipped * expected, rtol=1e-5)
        assert values[-1] == 0.0


def test_signs_differ_from_seed_to_seed_and_from_place_to_place() -> None:
    drawn = []
    for seed in (1, 2):
        each = []
        for k in range(200):
            one = np.zeros(BLOCK, np.float32)
            one[k] = 1.0
            transforms.forward(one, seed)
            each.append(one[0] > 0)
        drawn.append(np.array(each))
    assert 60 < (drawn[0] != drawn[1]).sum() < 140
    assert 60 < drawn[0].sum() < 140


def test_a_lost_chunk_costs_every_element_of_its_block_a_little() -> None:
    values = np.zeros(2 * BLOCK, np.float32)
    values[100] = 64.0  # one large element
    there = values.copy()
    transforms.forward(there, 5)
    assert np.abs(there[:BLOCK]).max() == pytest.approx(1.0)
    assert not there[BLOCK:].any()
    there[:358] = 0.0
    transforms.inverse(there, 5)
    assert there[100] == pytest.approx(64.0 * (1 - 358 / BLOCK), rel=1e-3)
    rest = np.delete(there - values, 100)
    assert np.abs(rest).max() < 6.4  # a tenth, where without it the element would be gone


# ---------------------------------------------------------------------------- the limits


def test_limits_follow_the_warm_up_and_are_alike_on_all_ranks() -> None:
    job = Job(4, TENSORS, "optireduce", warmup=6)
    for step in range(8):
        job.step(gradients(step, 4))
        if step < 6:
            assert all(policy.limits(0) is None for policy in job.policies[1:]) or step == 5
            assert job.report.delivered == 1.0
    limits = {policy.limits(0) for policy in job.policies}
    assert len(limits) == 1
    bound, early = limits.pop()
    assert 0 < early < bound < 0.1
    state: dict[str, Any] = job.policies[0].state_dict()
    warm = state["warm"][0]
    assert 5 <= len(warm) <= 6
    assert bound == quantile(warm, 0.95)


def test_a_burst_ends_in_time_and_replicas_stay_alike() -> None:
    """How much of it arrives in time goes by where the losses fall."""
    delivered, exceeded = [], 0
    for seed in range(5):
        job = Job(4, TENSORS, "optireduce", warmup=4, floor=0.0, seed=seed)
        for step in range(8):
            job.step(gradients(step, 4))
        job.uplinks(Link(loss=0.5))
        results = job.step(gradients(8, 4))
        delivered.append(job.report.delivered)
        exceeded += bool(job.report.exceeded)
        assert all(np.array_equal(results[0], other) for other in results)
        true = np.mean(gradients(8, 4), axis=0)
        error = np.linalg.norm(results[0] - true) / np.linalg.norm(true)
        assert error < 1.0
    assert np.median(delivered) < 0.9
    assert exceeded > 2


def test_a_bucket_without_a_push_in_the_warm_up_gets_its_limit_later() -> None:
    policy = OptiReduce(warmup=1)
    for push in (0.0, 0.0, 0.01, 0.5):
        assert policy.limits(0) is None or push == 0.5
        report = type("R", (), {"agreed": Summary(0, pushes=(push,))})
        policy.observe(report)  # type: ignore[arg-type]
    limits = policy.limits(0)
    assert limits is not None
    assert limits[0] == 0.01


def test_the_share_behind_tc_doubles_under_loss_and_creeps_back() -> None:
    policy = OptiReduce(warmup=1)
    shares = []
    for lost in [None, None, 0.01, 0.01, 0.01, 0.0, 0.0, 0.0005]:
        report = type("R", (), {"agreed": Summary(0, pushes=(0.01,), lost=lost)})
        policy.observe(report)  # type: ignore[arg-type]
        state: dict[str, Any] = policy.state_dict()
        shares.append(round(state["share"], 6))
    assert shares == [0.1, 0.1, 0.2, 0.4, 0.5, 0.49, 0.48, 0.48]


def test_excessive_loss_is_resent_and_then_halts() -> None:
    job = Job(3, TENSORS, "optireduce", warmup=4, excess=0.05, halt_after=2)
    for step in range(8):
        job.step(gradients(step, 3))
    job.uplinks(Link(loss=0.6))
    results = job.step(gradients(8, 3))
    assert job.report.guard == "resent"
    np.testing.assert_allclose(results[0], np.mean(gradients(8, 3), axis=0), atol=1e-5)
    with pytest.raises(RuntimeError, match="'optireduce' halts"):
        job.step(gradients(9, 3))


def test_it_comes_back_to_whole_steps() -> None:
    job = Job(3, TENSORS, "optireduce", warmup=4, floor=0.0)
    for step in range(6):
        job.step(gradients(step, 3))
    job.uplinks(Link(loss=0.4))
    for step in range(6, 10):
        job.step(gradients(step, 3))
    job.uplinks(NETWORK_A)
    delivered = []
    for step in range(10, 20):
        job.step(gradients(step, 3))
        delivered.append(job.report.delivered)
    assert np.mean(delivered) > 0.9


def test_state_survives_a_restart() -> None:
    job = Job(2, TENSORS, "optireduce", warmup=3)
    for step in range(7):
        job.step(gradients(step, 2))
    other = OptiReduce(warmup=3)
    other.load_state_dict(job.policies[0].state_dict())
    assert other.limits(0) == job.policies[0].limits(0)
    assert other.state_dict() == job.policies[0].state_dict()


def test_averages_and_quantiles() -> None:
    average = MovingAverages(0.5)
    average.observe({0: 4.0})
    average.observe({0: 2.0, 1: 8.0})
    assert average.means == {0: 3.0, 1: 8.0}
    assert quantile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert quantile(list(range(100)), 0.95) == 94
    assert quantile([5.0], 0.01) == 5.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 0}, "warmup=0: a number of steps, 1 or more"),
        ({"halt_after": -1}, "halt_after=-1"),
        ({"quantile": 1.0}, "quantile=1.0"),
        ({"excess": 0.0}, "excess=0.0"),
        ({"hadamard": "yes"}, "hadamard='yes'"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        OptiReduce(**options)  # type: ignore[arg-type]
    assert message in str(raised.value)
