"""DBLP in virtual time: its bounds per tensor, its phases, what it gives up, its fill."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch

from gradwire.core.errors import ConfigError
from gradwire.policies import DBLP
from gradwire.policies.parts.regions import regions_by_tensor
from gradwire.sim.fabric import NETWORK_A, Link
from gradwire.sim.job import Job
from gradwire.training.ballots import BallotBox
from job_gradients import normal
from plan_contexts import CHUNK, context

TENSORS = {"body.weight": 40 * CHUNK, "body.bias": 64, "head.weight": 40 * CHUNK}
LOSSY = Link(loss=0.1)


gradients = partial(normal, sum(TENSORS.values()))


def test_a_table_bounds_each_tensor_by_its_first_matching_pattern() -> None:
    policy = DBLP(p_low={"head.*": 0.0, "*.weight": 0.1})
    strict = {
        region.name: region.bound for region in policy.plan(context(TENSORS, "critical")).regions
    }
    loose = {
        region.name: region.bound for region in policy.plan(context(TENSORS, "tolerant")).regions
    }
    assert strict["head.weight"] == 0.0
    assert loose["head.weight"] == 0.40
    assert strict["body.weight … body.bias"] == 0.008  # the bias matches nothing: the default
    assert loose["body.weight … body.bias"] == 0.408
    assert DBLP(p_low=0.0).plan(context(TENSORS, "tolerant")).bound == 0.40


def test_pools_keep_the_strictest_bound_and_critical_tensors_apart() -> None:
    slots = context(TENSORS, "critical").tensors
    regions = regions_by_tensor(slots, [0.5, 0.25, 0.1], [0.5, 0.25, 0.1], CHUNK)
    assert [r.bound for r in regions] == [0.25, 0.1]
    regions = regions_by_tensor(slots, [0.5, 0.0, 0.5], [0.5, 0.0, 0.5], CHUNK)
    assert [(r.length, r.bound) for r in regions] == [
        (40 * CHUNK, 0.5),
        (64, 0.0),
        (40 * CHUNK, 0.5),
    ]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "p_low={}: at least one pattern"),
        ({"*": 1.5}, "p_low['*']=1.5: a bound is a number in [0, 1)"),
        ({"*": 0.7}, "p_low={'*': 0.7} without p_high"),
        ({"": 0.1}, "pattern ''"),
    ],
)
def test_impossible_tables_name_themselves(table: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DBLP(p_low=table)
    assert message in str(raised.value)


def test_a_pattern_that_matches_nothing_is_an_error_before_the_first_step() -> None:
    with pytest.raises(ConfigError) as raised:
        Job(2, TENSORS, "dblp", p_low={"haed.weight": 0.0})
    assert "p_low['haed.weight']: matches no tensor of the model (did you mean 'head.weight'?)" in (
        str(raised.value)
    )
    with pytest.raises(ConfigError, match="without a model"):
        DBLP(p_low={"*": 0.1}).prepare(None)


def test_tensors_that_no_pattern_matches_are_no_stricter_in_tolerant_phases_either() -> None:
    with pytest.raises(ConfigError) as raised:
        Job(2, TENSORS, "dblp", p_low={"head.*": 0.0}, p_high=0.004)
    assert "p_high=0.004 is below p_low=0.008 of tensor 'body.weight', which no pattern mat" in (
        str(raised.value)
    )
    Job(2, TENSORS, "dblp", p_low={"head.*": 0.0, "body.*": 0.001}, p_high=0.004)  # none is left


def test_the_eager_close_leaves_out_what_the_phase_allows_on_a_clean_network() -> None:
    job = Job(3, TENSORS, "dblp", p_low=0.1, every=2)
    phases = []
    for step in range(8):
        results = job.step(gradients(step, 3))
        assert all(np.array_equal(results[0], other) for other in results)
        low, high = (0.9, 0.94) if job.report.phase == "critical" else (0.5, 0.54)
        assert low <= job.report.delivered <= high  # bounds are rounded down to whole chunks
        phases.append(job.report.phase)
    assert phases == ["critical"] * 4 + ["tolerant"] * 4
    job.step(gradients(8, 3, scale=5.0))
    job.step(gradients(9, 3, scale=5.0))
    assert job.report.phase == "tolerant"
    assert {policy.phase for policy in job.policies} == {"critical"}  # the norm rose


def test_vesting_gives_up_only_what_the_network_lost() -> None:
    options = {"p_low": 0.2, "p_high": 0.2, "spend": "lost"}
    clean = Job(3, TENSORS, "dblp", **options)
    for step in range(4):
        clean.step(gradients(step, 3))
        assert clean.report.delivered == 1.0
    lossy = Job(3, TENSORS, "dblp", link=LOSSY, **options)
    lost = []
    for step in range(12):
        lossy.step(gradients(step, 3))
        lost.append(1.0 - lossy.report.delivered)
        assert lost[-1] <= 0.2
        assert all(region.delivered >= 0.8 for region in lossy.report.regions)
    assert max(lost) > 0.0


def test_the_mean_of_arrivals_is_unbiased_where_zero_fill_shrinks() -> None:
    """All workers hold ones: whoever is missing, the mean of those that arrived is one."""
    ones = [np.ones(sum(TENSORS.values()), np.float32)] * 3
    link = Link(loss=0.3)
    options = {"p_low": 0.5, "p_high": 0.5, "spend": "lost", "error_feedback": False}
    mean = Job(3, TENSORS, "dblp", link=link, fill="mean", **options).step(ones)[0]
    zero = Job(3, TENSORS, "dblp", link=link, **options).step(ones)[0]
    assert set(np.round(mean, 5)) <= {0.0, 1.0}
    assert {0.66667, 1.0} <= set(np.round(zero, 5).astype(np.float64).round(5))


def test_the_epochs_cadence_looks_at_epochs() -> None:
    job = Job(2, TENSORS, "dblp", every="epoch", link=NETWORK_A)
    phases = []
    for step in range(12):
        if step % 4 == 0:
            job.pipelines[1].begin_epoch(step // 4)
        job.step(gradients(step, 2))
        phases.append(job.report.phase)
    assert phases == ["critical"] * 9 + ["tolerant"] * 3


@pytest.mark.parametrize("policy", ["dblp", "ltp", "adaptive"])
def test_epochs_that_never_begin_are_a_warning_once(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.policies.base.PATIENCE", 3)
    for epochs, warned in ((0, 1), (1, 0)):
        job = Job(1, TENSORS, policy, every="epoch")
        if epochs:
            job.pipelines[0].begin_epoch(0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for step in range(7):
                job.step(gradients(step, 1))
        assert len(seen) == warned
        for each in seen:
            assert f"policy '{policy}' with every='epoch': 3 steps have" in str(each.message)


@pytest.mark.parametrize("every", [1, "epoch"])
def test_the_papers_detector_compares_with_no_norm_that_nobody_measured(every: object) -> None:
    job = Job(2, TENSORS, "dblp", every=every, detector="paper", link=NETWORK_A)
    for step in range(9):
        job.pipelines[0].begin_epoch(step // 3)
        job.step(gradients(0, 2))
        assert (job.report.agreed.applied_norm is None) == (step == 0)
    assert {policy.phase for policy in job.policies} == {"tolerant"}
    assert {policy.phases.fired for policy in job.policies} == {0}
    resumed = Job(2, TENSORS, "dblp", every=every, detector="paper", link=NETWORK_A)
    for saved, loaded in zip(job.pipelines, resumed.pipelines, strict=True):
        loaded.load_state_dict(saved.state_dict())
    resumed.step(gradients(0, 2))
    assert resumed.report.agreed.applied_norm > 0.0


def test_each_layer_is_bound_by_its_own_phase() -> None:
    job = Job(3, TENSORS, "dblp", p_low=0.1, every=3, detector="layers")
    body = TENSORS["body.weight"] + TENSORS["body.bias"]
    for step in range(9):
        step_gradients = gradients(step, 3)
        if step >= 6:
            for gradient in step_gradients:
                gradient[body:] *= 5.0
        job.step(step_gradients)
    assert {policy.phases.phase_of("body") for policy in job.policies} == {"tolerant"}
    assert {policy.phases.phase_of("head") for policy in job.policies} == {"critical"}
    assert set(job.report.agreed.layers) == {"body", "head"}
    head = job.report.agreed.layers["head"]
    assert head == pytest.approx(5.0 * np.sqrt(TENSORS["head.weight"]), rel=0.05)
    job.step(gradients(9, 3))
    bounds = {region.name: region.bound for region in job.report.regions}
    assert bounds == {"body.weight … body.bias": 0.5, "head.weight": 0.1}


def test_a_drop_of_the_learning_rate_is_critical() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    job = Job(2, TENSORS, "dblp", p_low=0.1, every=2, optimizer=optimizer)
    for step in range(8):
        job.step(gradients(step, 2))
    assert job.report.phase == "tolerant"
    optimizer.param_groups[0]["lr"] = 0.01
    phases = []
    for step in range(8, 14):
        job.step(gradients(step, 2))
        phases.append(job.report.phase)
    assert phases == ["tolerant"] + ["critical"] * 3 + ["tolerant"] * 2


def test_the_rates_that_are_there_are_watched_and_no_others() -> None:
    """As transformers' Adafactor with relative steps: lr=None; other groups' rates still count."""
    parts = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [each]} for each in parts], lr=torch.tensor([0.1]))
    optimizer.param_groups[0]["lr"] = None
    del optimizer.param_groups[1]["lr"]
    box = BallotBox(DBLP(), [optimizer])
    assert [box.cast(step, None).falling for step in range(2)] == [False, False]
    optimizer.param_groups[2]["lr"] = torch.tensor([0.01])
    assert [box.cast(step, None).falling for step in range(2)] == [True, False]
    assert box.state_dict()["rates"] == [pytest.approx(0.01)]
    optimizer.param_groups[2]["lr"] = None
    assert not box.cast(4, None).falling
