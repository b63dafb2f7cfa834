"""LTP in virtual time: Early Close before, from and after its learned threshold."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from gradwire.core.agreed import Summary
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan
from gradwire.policies import LTP
from gradwire.policies.parts.timing import EpochClock
from gradwire.sim.fabric import NETWORK_A, Link
from gradwire.sim.job import Job
from job_gradients import normal
from plan_contexts import CHUNK, context

TENSORS = {"a.weight": 120 * CHUNK, "a.bias": 64, "b.weight": 120 * CHUNK}
BURST = Link(loss=0.8)
gradients = partial(normal, sum(TENSORS.values()))


def run(job: Job, steps: range) -> list[list[np.ndarray]]:
    return [job.step(gradients(step, job.world)) for step in steps]


def last_plans(job: Job) -> list[TransferPlan]:
    """The plans that the ranks would write next."""
    whole = context({"all": sum(TENSORS.values())}, "tolerant", world_size=job.world)
    return [policy.plan(whole) for policy in job.policies]


@pytest.mark.parametrize("servers", [0, 1])
def test_the_threshold_starts_by_the_estimate_and_becomes_the_best_whole_push(servers: int) -> None:
    job = Job(4, TENSORS, "ltp", every=10, servers=servers)
    assert [len(plan.schedule) for plan in last_plans(job)] == [1] * 4  # nothing is known yet
    run(job, range(6))
    first = {policy.threshold(0) for policy in job.policies}
    assert len(first) == 1
    estimate = first.pop()
    assert estimate is not None
    run(job, range(6, 20))
    pushes = job.report.agreed.pushes
    learned = {policy.threshold(0) for policy in job.policies}
    assert len(learned) == 1
    threshold = learned.pop()
    assert threshold is not None
    assert threshold != estimate
    assert threshold <= pushes[0]
    plan = last_plans(job)[0]
    assert [(s.clock, s.scope, s.fraction) for s in plan.schedule] == [
        ("first_arrival", "worker", 1.0),
        ("first_arrival", "worker", 0.8),
        ("first_arrival", "worker", 0.0),
    ]
    assert plan.schedule[2].delay_s == pytest.approx(threshold + 0.030)
    assert last_plans(job)[1:] == [plan] * 3


def test_a_quiet_network_loses_next_to_nothing() -> None:
    job = Job(3, TENSORS, "ltp", every=5)
    for step in range(15):
        run(job, range(step, step + 1))
        assert job.report.delivered >= 0.8


def test_a_burst_ends_at_the_deadline_and_replicas_stay_alike() -> None:
    """Of sixteen courses of the network together: a single one may lose a CLOSE and end late, once
    enough has come."""
    seconds = {"ltp": 0.0, "reliable": 0.0}
    exceeded = 0
    for policy, options in (("ltp", {"every": 5, "slack": 0.005, "floor": 0.0}), ("reliable", {})):
        for seed in range(16):
            job = Job(3, TENSORS, policy, seed=seed, **options)
            run(job, range(10))
            job.uplinks(BURST)
            (results,) = run(job, range(10, 11))
            seconds[policy] += job.report.push_s
            assert all(np.array_equal(results[0], other) for other in results)
            if policy == "ltp":
                assert job.report.delivered < 0.9
                exceeded += bool(job.report.exceeded)
            job.uplinks(NETWORK_A)
            run(job, range(11, 14))
    assert exceeded >= 15
    assert seconds["ltp"] < 0.95 * seconds["reliable"], seconds


def test_what_is_missing_is_a_bubble_of_zeros() -> None:
    """All workers hold ones, so each element is a count of the contributors over the workers."""
    job = Job(3, TENSORS, "ltp", every=5, slack=0.0, floor=0.0)
    run(job, range(10))
    job.uplinks(BURST)
    result = job.step([np.ones(sum(TENSORS.values()), np.float32)] * 3)[0]
    counts = set(np.round(result * 3).astype(int).tolist())
    assert np.allclose(result * 3, np.round(result * 3), atol=1e-5)
    assert counts <= {0, 1, 2, 3}
    assert min(counts) < 3


def test_critical_chunks_outlast_the_deadline() -> None:
    job = Job(2, TENSORS, "ltp", every=5, slack=0.0, max_age=1, floor=0.0)
    run(job, range(8))
    missed = np.zeros(sum(TENSORS.values()), int)
    job.uplinks(Link(loss=0.7))
    for step in range(8, 14):
        chance = np.random.default_rng(step)
        ones = [np.ones(missed.size, np.float32) + chance.random(missed.size) for _ in range(2)]
        result = job.step([each.astype(np.float32) for each in ones])[0]
        missed = np.where(result == 0.0, missed + 1, 0)
        assert missed.max() <= 1  # no element misses two steps running


def test_state_survives_a_restart() -> None:
    job = Job(2, TENSORS, "ltp", every=5)
    run(job, range(9))
    state = job.policies[0].state_dict()
    other = LTP(every=5)
    other.load_state_dict(state)
    assert other.threshold(0) == job.policies[0].threshold(0)
    assert other.state_dict() == state


def test_an_epoch_without_a_whole_push_does_not_shorten_the_wait() -> None:
    policy = LTP(every=1)
    policy.load_state_dict(
        {
            "path": {"rtprop_s": 1e-3, "btlbw": 1e6},
            "clock": {"every": 1, "steps": 0, "epoch": -1},
            "best": {0: 0.5},
            "learned": {0: 0.2},
            "step_bytes": 1000,
        }
    )
    assert policy.threshold(0) == 0.2
    for step in range(2):
        report = type("R", (), {"agreed": Summary(step, pushes=(math.inf,)), "elements": 250})
        policy.observe(report)  # type: ignore[arg-type]
        assert policy.threshold(0) == 0.5


def test_a_loaded_state_leaves_the_configured_epoch() -> None:
    policy = LTP(every=7)
    policy.load_state_dict(LTP(every=100).state_dict())
    assert policy.state_dict()["clock"] == {"every": 7, "steps": 0, "epoch": -1}


def test_no_schedule_is_later_than_the_engine_takes() -> None:
    policy = LTP(slack=600)
    policy.load_state_dict({**policy.state_dict(), "learned": {0: 5000.0}})
    schedule = policy.plan(context({"all": 9999})).schedule
    assert [step.delay_s for step in schedule] == [0.0, 3000.0, 3600.0]


def test_epochs_end_by_steps_or_by_hand() -> None:
    clock = EpochClock(3)
    assert [clock.observe(Summary(step)) for step in range(6)] == [False, False, True] * 2
    clock = EpochClock("epoch")
    epochs = [-1, 0, 0, 1, 1, 1, 2]
    ends = [clock.observe(Summary(step, epoch=epoch)) for step, epoch in enumerate(epochs)]
    assert ends == [False, False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.0}, "fraction=1.0: a number above 0 and below 1"),
        ({"fraction": "most"}, "fraction='most'"),
        ({"slack": "moon"}, "slack='moon': 'lan', 'wan' or seconds"),
        ({"slack": [1]}, "slack=[1]: 'lan', 'wan' or seconds"),
        ({"slack": -1.0}, "slack=-1.0"),
        ({"slack": 601}, "slack=601: 'lan', 'wan' or seconds from 0 to 600"),
        ({"every": 0}, "every=0"),
        ({"pull": "none"}, "pull='none'"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LTP(**options)  # type: ignore[arg-type]
    assert message in str(raised.value)
