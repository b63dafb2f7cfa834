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
from gradwire.policies.parts.compression import encoding_for
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
    assert all_of_it == 1.0  # loss detection sees nothing
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


def test_another_encoding_is_no_reason_to_be_late() -> None:
    job = Job(2, TENSORS, "adaptive")
    for step in range(14):
        job.compute(0.5)
        job.step(gradients(step, 2))
    policy = job.policies[0]
    assert isinstance(policy, Adaptive)
    assert late(policy) is not None
    policy.observe(replace(job.report, agreed=replace(job.report.agreed, rest=0.8)))
    assert encoding_for(policy.ratio)[0] == "f16"
    assert late(policy) is None
    half = replace(job.report, encoded_share=0.5)
    for _ in range(10):  # the first tells of the dense step before it
        policy.observe(half)
        assert late(policy) is None
    policy.observe(half)
    assert late(policy) is not None
    while encoding_for(policy.ratio)[0] == "f16":
        policy.observe(replace(half, agreed=replace(half.agreed, rest=1.0)))
    assert late(policy) is not None  # as it was known before


def test_an_exact_step_counts_as_the_dense_one_that_it_is() -> None:
    """Its wait is that of all bytes, not of the half that other steps send: no reason for int8."""
    job = Job(3, TENSORS, "adaptive", link=NETWORK_B)
    assert encodings(job, range(12), compute_s=0.055)[-1] == "f16"
    for step in range(12, 32):
        for pipeline in job.pipelines:
            pipeline.flush()
        assert encodings(job, range(step, step + 1), compute_s=0.055) == ["f16"]
        assert job.report.encoded_share == 1.0
    assert encodings(job, range(32, 36), compute_s=0.055) == ["f16"] * 4
    assert job.report.encoded_share == 0.5


def encodings(job: Job, steps: range, compute_s: float) -> list[str]:
    seen = []
    for step in steps:
        job.compute(compute_s)
        stages = {encoding_for(policy.ratio) for policy in job.policies}
        assert len(stages) == 1  # the same on all ranks
        seen.append(stages.pop()[0])
        job.step(gradients(step))
    return seen


def test_a_step_that_waits_for_its_transfer_is_compressed_at_once_and_only_then() -> None:
    job = Job(3, TENSORS, "adaptive", link=NETWORK_B)
    busy = encodings(job, range(30), compute_s=0.0)
    assert busy[:2] == ["f32", "f32"]
    assert busy[2:] == ["int8"] * 28  # no top-k unless asked for
    compressed = job.report
    free = encodings(job, range(30, 60), compute_s=1.0)  # now there is something to wait for
    assert free[-1] == "f32"
    assert free == sorted(free, key=["int8", "f16", "f32"].index)  # never back
    assert compressed.bytes < 0.3 * job.report.bytes
    never = Job(3, TENSORS, "adaptive", link=NETWORK_B, compress="never")
    assert encodings(never, range(6), compute_s=0.0) == ["f32"] * 6


def test_top_k_where_asked_for_is_the_last_stage() -> None:
    job = Job(3, TENSORS, "adaptive", link=NETWORK_B, compress="topk", error_feedback=True)
    assert encodings(job, range(8), compute_s=0.0)[2:] == ["topk"] * 6
    assert job.report.encoded_share == 3 / 16  # and steps that do nothing else still wait


def test_servers_get_int8_where_top_k_is_asked_for_and_learn_what_is_late() -> None:
    options = {"link": NETWORK_B, "error_feedback": True, "servers": 1}
    job = Job(3, TENSORS, "adaptive", compress="topk", **options)
    plain = Job(3, TENSORS, "adaptive", **options)
    for each in (job, plain):
        assert encodings(each, range(20), compute_s=0.0)[2:] == ["int8"] * 18
    assert job.report.encoded_share == 0.25
    assert late(job.policies[0]) == late(plain.policies[0])
    assert late(job.policies[0]) is not None


@pytest.mark.parametrize(("compute_s", "encoding"), [(0.1, "f32"), (0.01, "f16")])
def test_a_free_network_stays_dense_while_little_is_waited_for(
    compute_s: float, encoding: str
) -> None:
    job = Job(3, TENSORS, "adaptive")
    assert encodings(job, range(12), compute_s)[2:] == [encoding] * 10


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
