"""Our own policy: phase × layer, spent on what is lost or late, encoded under congestion."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gradwire.core.agreed import Summary
from gradwire.core.errors import ConfigError
from gradwire.policies import Adaptive
from gradwire.policies.parts.lateness import PushHistory
from gradwire.sim.fabric import NETWORK_B, Link
from gradwire.sim.job import Job
from gradwire.training.hook import HookState
from job_gradients import normal
from plan_contexts import context

TENSORS = {
    "stem.weight": 30 * 361,
    **{f"body{i}.weight": 30 * 361 for i in range(4)},
    **{f"body{i}.bias": 40 for i in range(4)},
    "norm1.weight": 40,
    "head.weight": 30 * 361,
}
SMALL = {"body.weight": 10_108}  # for long runs
ELEMENTS = sum(TENSORS.values())
gradients = partial(normal, ELEMENTS)


def test_bounds_are_phase_times_layer() -> None:
    policy = Adaptive(p_low=0.01, p_high=0.4)
    policy.prepare(TENSORS)
    assert policy.bounds_of("head.weight") == (0.01, 0.4)
    assert policy.bounds_of("stem.weight") == (0.005, 0.2)  # the front tenth
    for fragile in ("body1.bias", "norm1.weight", "layer1.0.bn2.weight", "h.0.ln_1.weight"):
        assert policy.bounds_of(fragile) == (0.0, 0.0)
    assert policy.bounds_of("blend.weight") == (0.01, 0.4)
    calibrated = Adaptive(p_low=0.01, table={"head.*": 0.1, "body*": 0.004})
    calibrated.prepare(TENSORS)
    assert calibrated.bounds_of("head.weight") == (0.01, 0.1)
    assert calibrated.bounds_of("body1.weight") == (0.004, 0.004)
    assert calibrated.bounds_of("stem.weight") == (0.0, 0.0)


def test_tensors_of_one_dimension_are_fragile_whatever_their_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.LayerNorm(9))
    more = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(10)))
    state = HookState("adaptive", model=torch.nn.Sequential(more, model))
    policy = state.policy
    assert isinstance(policy, Adaptive)
    assert policy.bounds_of("1.1.weight") == (0.0, 0.0)
    assert policy.bounds_of("1.0.weight") == (policy.p_low, policy.p_high)
    assert "vectors" not in policy.options()
    assert pickle.loads(pickle.dumps(policy)).vectors == policy.vectors


def test_it_needs_the_models_names() -> None:
    with pytest.raises(ConfigError) as refused:
        HookState("adaptive")
    assert (refused.value.setting, refused.value.value) == ("policy", "adaptive")
    copied = pickle.loads(pickle.dumps(HookState("adaptive", model=torch.nn.Linear(2, 2))))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError) as refused:
            _ = copied.pipeline
    finally:
        dist.destroy_process_group()
    assert (refused.value.setting, refused.value.value) == ("policy", "adaptive")


def test_it_spends_what_is_lost_within_each_layers_bound() -> None:
    job = Job(3, TENSORS, "adaptive", every=3, p_low=0.1, compress="never")
    for step in range(7):
        job.step(gradients(step))
        assert job.report.delivered == 1.0
    assert job.report.phase == "tolerant"
    job.fabric.set_link(0, "up", Link(loss=0.3))
    lost = 0.0
    for step in range(7, 12):
        results = job.step(gradients(step))
        assert all(np.array_equal(results[0], other) for other in results)
        for region in job.report.regions:
            assert region.delivered >= 1.0 - region.bound
        lost += 1.0 - job.report.delivered
    assert lost > 0.0


def in_trouble(policy: str, **options: object) -> tuple[float, float]:
    """A quiet job in which one worker's uplink carries a third for one step: how long that step's
    push took, in quiet ones, and the least share that a worker delivered."""
    tensors = {f"body{i}.weight": 80_000 for i in range(5)}
    job = Job(3, tensors, policy, error_feedback=False, **options)
    fresh = [np.ones(sum(tensors.values()), np.float32)] * 3
    for pipeline in job.pipelines:
        if pipeline.policy.phases is not None:
            pipeline.set_phase("tolerant")
    for _ in range(15):
        job.step(fresh)
        assert job.report.delivered == 1.0

    def slowest() -> float:
        return max(pipeline.report().push_s for pipeline in job.pipelines)

    quiet = slowest()
    job.fabric.set_link(1, "up", Link(rate=Link().rate / 3))
    job.step(fresh)
    least = min(pipeline.report().delivered for pipeline in job.pipelines)
    return slowest() / quiet, least


def test_what_is_merely_late_is_spent_once_it_is_later_than_pushes_are() -> None:
    slow, all_of_it = in_trouble("mlt", p=0.408, spend="lost")
    assert all_of_it > 0.99  # loss detection sees next to nothing
    learned, most = in_trouble("adaptive", compress="never")
    assert 1.0 - 0.408 <= most < 0.95
    assert learned < 0.75 * slow


def test_when_a_push_is_late_is_learned_from_the_last_ones() -> None:
    history = PushHistory()
    for step in range(60):
        history.observe(Summary(step, pushes=(0.010 + 0.001 * (step % 4), 0.0), rtprop_s=1e-4))
        assert (history.late_after(0) is None) == (step < 9)
    assert history.late_after(0) == pytest.approx(0.012 + 4 * 0.001)  # 10, 11, 12, 13 ms
    assert history.late_after(1) is None
    for step in range(5):  # a quarter in trouble: the others tell
        history.observe(Summary(step, pushes=(math.inf if step % 2 else 0.5,)))
    late = history.late_after(0)
    assert late is not None
    assert late < 0.03
    other = PushHistory()
    other.load_state_dict(history.state_dict())
    assert other == history
    for step in range(9):  # slower for good, it seems
        history.observe(Summary(step, pushes=(math.inf,)))
    assert history.late_after(0) is None
    for step in range(20):  # waiting has taught the new times
        history.observe(Summary(step, pushes=(0.1,)))
    assert history.late_after(0) == pytest.approx(0.1 + 2e-4)


def late(policy: Adaptive) -> float | None:
    """After how many seconds the first bucket's push is late in the next step."""
    schedule = policy.plan(context(TENSORS)).schedule
    return schedule[1].delay_s if len(schedule) > 1 else None


def test_until_an_encoding_is_known_its_pushes_are_late_when_longer_ones_would_be() -> None:
    history = PushHistory()
    for step in range(20):
        history.observe(Summary(step, pushes=(0.010,), rtprop_s=1e-4))
    dense = history.late_after(0)
    for step in range(9):
        history.observe(Summary(step, pushes=(0.006,)), 0.5)
        assert history.late_after(0, 0.5) == dense
    history.observe(Summary(9, pushes=(0.006,)), 0.5)
    assert history.late_after(0, 0.5) == pytest.approx(0.006 + 2e-4)
    assert history.late_after(0, 0.25) == history.late_after(0, 0.5)
    assert history.late_after(0) == dense


class Fixed(Adaptive):
    """`adaptive` with one encoding throughout."""

    always = "f32"

    @property
    def encoding(self) -> tuple[str, float]:
        return self.always, 1.0


def encodings(
    job: Job, steps: int, compute_s: float, costs: dict[str, float] | None = None
) -> list[str]:
    """Runs steps; `costs`: the processor's seconds for an encoding."""
    seen = []
    fresh = normal(sum(SMALL.values()), 0, job.world)
    for _ in range(steps):
        encoding = job.policies[0].plan(context(SMALL)).encoding
        job.compute(compute_s + (costs or {}).get(encoding, 0.0))
        assert len({policy.plan(context(SMALL)).encoding for policy in job.policies}) == 1
        seen.append(encoding)
        job.step(fresh)
    return seen


def counts(seen: list[str]) -> tuple[str, int]:
    """The encoding of most steps, and in how many of them another one went."""
    usual = max(set(seen), key=seen.count)
    return usual, len(seen) - seen.count(usual)


CODING = {"f16": 2e-4, "int8": 2e-4}


@pytest.mark.parametrize(
    ("link", "compute_s", "costs", "used", "others"),
    [
        (NETWORK_B, 0.0, {}, "int8", 3),
        (NETWORK_B, 0.010, {}, "int8", 15),
        (NETWORK_B, 0.022, {}, "int8", 40),  # they differ by 2 and by 6 %
        (NETWORK_B, 0.2, {}, "f32", 3),  # they differ by less than 1 %
        (Link(rate=5e9), 0.0, CODING, "f32", 20),  # no step waits for anything but encodings
        (Link(rate=5e9), 0.003, CODING, "f32", 3),
    ],
)
def test_the_first_hundred_steps_cost_little_more_than_those_of_the_best_encoding(
    link: Link, compute_s: float, costs: dict[str, float], used: str, others: int
) -> None:
    took = {}
    for fixed in ("f32", "f16", "int8"):
        policy = Fixed()
        policy.always = fixed
        job = Job(2, SMALL, policy, link=link)
        encodings(job, 100, compute_s, costs)
        took[fixed] = job.fabric.now
    job = Job(2, SMALL, "adaptive", link=link)
    found = encodings(job, 100, compute_s, costs)
    assert job.fabric.now <= 1.03 * min(took.values())
    assert counts(found)[0] == used
    assert counts(found)[1] <= others
    assert counts(found[-10:]) == (used, 0)


def test_a_network_that_changes_half_way_is_looked_at_again() -> None:
    job = Job(2, SMALL, "adaptive", link=Link(rate=5e9))
    assert counts(encodings(job, 60, 0.01, CODING)) == ("f32", 3)
    for host in range(2):
        for way in ("up", "down"):
            job.fabric.set_link(host, way, NETWORK_B)
    assert counts(encodings(job, 60, 0.003, CODING)[-40:]) == ("int8", 0)
    for host in range(2):
        for way in ("up", "down"):
            job.fabric.set_link(host, way, Link(rate=5e9))
    assert counts(encodings(job, 60, 0.003, CODING)[-12:]) == ("f32", 0)


def test_a_worker_that_computes_longer_than_others_is_not_taken_for_the_network() -> None:
    """The others wait for it, and no encoding would spare them that."""
    job = Job(2, SMALL, "adaptive", link=Link(rate=5e9))
    fresh = normal(sum(SMALL.values()), 0, 2)
    seen = []
    for _ in range(40):
        seen.append(job.policies[0].plan(context(SMALL)).encoding)
        job.compute(0.001)
        job.step(fresh, apart_s=0.02)
    assert counts(seen) == ("f32", 3)


def test_a_pause_in_every_few_steps_counts_in_no_encoding() -> None:
    job = Job(2, SMALL, "adaptive", link=NETWORK_B)
    for turn in range(11):
        seen = encodings(job, 10, 0.005)
        job.compute(5.0)
        assert turn < 10 or counts(seen)[0] == "int8"


@pytest.mark.slow
def test_top_k_is_tried_where_asked_for() -> None:
    job = Job(2, SMALL, "adaptive", link=NETWORK_B, compress="topk", error_feedback=True)
    assert counts(encodings(job, 100, 0.0)[-8:]) == ("topk", 0)
    assert job.report.encoded_share == 3 / 16
    never = Job(2, SMALL, "adaptive", link=NETWORK_B, compress="never")
    assert set(encodings(never, 40, 0.0)) == {"f32"}
    served = Job(
        2, SMALL, "adaptive", link=NETWORK_B, compress="topk", error_feedback=True, servers=1
    )
    assert "topk" not in encodings(served, 100, 0.0)


def test_buckets_of_two_bytes_are_tried_in_int8_and_know_what_is_late() -> None:
    job = Job(2, SMALL, "adaptive", link=NETWORK_B, dtype=torch.bfloat16)
    encodings(job, 1, 0.0)
    assert job.report.encoded_share == 0.5
    assert counts(encodings(job, 40, 0.0)[-8:]) == ("int8", 0)
    narrow = replace(context(SMALL), encoding="bf16")
    assert len(job.policies[0].plan(narrow).schedule) == 2


def test_state_survives_a_restart() -> None:
    job = Job(2, TENSORS, "adaptive", every=3)
    for step in range(5):
        job.step(gradients(step, 2))
    other = Adaptive(every=3)
    other.load_state_dict(job.policies[0].state_dict())
    assert other.state_dict() == job.policies[0].state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p_low": 0.5, "p_high": 0.4}, "p_high=0.4 is below p_low=0.5"),
        ({"table": {"*": 0.1}, "p_high": 0.3}, "p_high=0.3 beside table"),
        (
            {"table": 5},
            "table=5: the file of a calibration (`gradwire calibrate` makes one), or",
        ),
        ({"compress": "much"}, "compress='much': allowed are 'auto', 'topk', 'never'"),
        ({"table": {"*": 2.0}}, "table['*']=2.0"),
        ({"detector": "eye"}, "detector='eye': allowed are 'ours', 'paper', 'layers'"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Adaptive(**options)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_beside_a_table_only_p_low_is_asked_for() -> None:
    strict = Adaptive(p_low=0.5, table={"*": 0.3})  # p_high's default is below, and is not used
    strict.prepare(TENSORS)
    assert {strict.bounds_of(name) for name in TENSORS} == {(0.3, 0.3)}


def test_a_pattern_that_matches_nothing_is_an_error_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="matches no tensor"):
        Job(2, TENSORS, "adaptive", table={"tail.*": 0.1})
