"""NetSenseML: its signal, its ratio, its stages."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from gradwire.core.agreed import Summary
from gradwire.core.errors import ConfigError
from gradwire.core.regions import TensorSlot
from gradwire.policies import NetSenseML
from gradwire.policies.parts.compression import (
    FLOOR,
    INT8,
    CompressionRatio,
    congested,
    encoding_for,
)
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from gradwire.training.configure import configure
from gradwire.training.feedback.pruning import smallest_weights
from job_gradients import normal, set_ratio

TENSORS = {"a.weight": 200 * 361, "b.weight": 200 * 361}
ELEMENTS = sum(TENSORS.values())
SLOW = Link(rate=12.5e6)
gradients = partial(normal, ELEMENTS, world=2)


def encodings(job: Job, steps: range, compute: float) -> list[str]:
    seen = []
    for step in steps:
        job.compute(compute)
        seen.append(encoding_for(job.policies[0].ratio)[0])
        results = job.step(gradients(step))
        assert np.array_equal(results[0], results[1])
        assert len({policy.ratio for policy in job.policies}) == 1
    return seen


def test_a_free_network_is_dense_after_the_ramp_and_stays_so() -> None:
    job = Job(2, TENSORS, "netsenseml")
    seen = encodings(job, range(20), compute=0.5)
    assert seen[0] == "topk"
    assert seen[4:] == ["f32"] * 16


def test_a_link_that_is_busy_all_the_time_is_compressed_until_it_is_not() -> None:
    job = Job(2, TENSORS, "netsenseml", link=SLOW, share=0.6, start=1.0)
    dense = 4 * ELEMENTS
    encodings(job, range(40), compute=0.002)
    assert job.policies[0].ratio < 0.75
    assert job.report.bytes < 0.6 * dense  # float16 brings it below the share
    before = job.policies[0].ratio
    encodings(job, range(40, 50), compute=1.0)  # now it hides behind computation
    assert job.policies[0].ratio > before


def test_what_compression_takes_comes_back_by_error_feedback() -> None:
    job = Job(2, TENSORS, "netsenseml", link=SLOW, start=0.01)
    job.step(gradients(0))
    assert encoding_for(NetSenseML(start=0.01).ratio)[0] == "topk"
    assert job.residual(0).any()
    job.pipelines[0].flush()
    for step in (1, 2):
        job.step(gradients(step))
    assert not job.residual(0).any()


def test_a_server_is_never_sent_top_k() -> None:
    """It keeps no residuals, so what top-k leaves out of a result would be gone."""
    job = Job(2, TENSORS, "netsenseml", servers=1, start=0.01)
    assert job.policies[0].ratio == INT8
    result = job.step(gradients(0))[0]
    np.testing.assert_allclose(result, np.mean(gradients(0), axis=0), atol=0.1)


def test_beside_servers_the_ratio_sinks_no_further_than_it_counts() -> None:
    """It would take hundreds of steps to come back from where nothing changes on the wire."""
    ratio = CompressionRatio(0.4, False)
    ratio.stop_at(INT8)
    for step in range(50):
        ratio.observe(Summary(step, congested=True))
    assert ratio.ratio == INT8
    ratio.observe(Summary(50))
    assert ratio.ratio > INT8


def test_one_congested_rank_slows_all() -> None:
    ratio = CompressionRatio(1.0, False)
    ratio.observe(Summary(0, congested=True))
    assert ratio.ratio == 0.95
    ratio.observe(Summary(1))
    assert ratio.ratio == pytest.approx(0.951)
    for step in range(500):
        ratio.observe(Summary(step, congested=True))
    assert ratio.ratio == FLOOR
    ramp = CompressionRatio(0.1)
    ratios = []
    for step in range(5):
        ramp.observe(Summary(step))
        ratios.append(ramp.ratio)
    assert ratios == [0.2, 0.4, 0.8, 1.0, 1.0]


def test_the_first_congestion_of_a_ramp_takes_back_what_caused_it() -> None:
    ratio = CompressionRatio(0.1)
    for step in range(2):
        ratio.observe(Summary(step))
    assert ratio.ratio == 0.4  # of the next step; the flag that comes with it is of 0.2
    ratio.observe(Summary(2, congested=True))
    assert ratio.ratio == 0.1
    ratio.observe(Summary(3, congested=True))  # of the step with 0.4, which was under way
    assert ratio.ratio == pytest.approx(0.1 * 0.95)
    ratio.observe(Summary(4))
    assert ratio.ratio == pytest.approx(0.1 * 0.95 + 0.001)


def test_a_ramp_ends_when_a_dense_step_was_free() -> None:
    late, free = CompressionRatio(0.4), CompressionRatio(0.4)
    for step in range(2):  # 0.4 and 0.8 were free
        late.observe(Summary(step))
        free.observe(Summary(step))
    assert late.ratio == free.ratio == 1.0
    for step in range(2):
        free.observe(Summary(step))
    late.observe(Summary(2))
    late.observe(Summary(3, congested=True))  # the first dense one was not
    free.observe(Summary(4, congested=True))
    assert late.ratio == 0.5
    assert free.ratio == 0.95


def test_the_signal_is_the_mean_in_flight_against_the_bdp() -> None:
    job = Job(2, TENSORS, "netsenseml")
    job.step(gradients(0))
    report = replace(job.report, bytes=1000, period_s=1.0, btlbw=1100.0)
    assert congested(report, 0.9)
    assert not congested(replace(report, btlbw=1200.0), 0.9)
    assert not congested(replace(report, period_s=2.0), 0.9)
    assert not congested(replace(report, btlbw=0.0), 0.9)
    assert not congested(replace(report, period_s=0.0), 0.9)


def test_stages_count_index_bytes() -> None:
    assert encoding_for(1.0) == ("f32", 1.0)
    assert encoding_for(0.999) == ("f16", 1.0)
    assert encoding_for(0.3) == ("int8", 1.0)
    assert encoding_for(0.15) == ("topk", pytest.approx(0.1))
    assert encoding_for(0.0)[1] > 0


def test_state_survives_a_restart() -> None:
    one = NetSenseML()
    set_ratio(one, 0.2)
    two = NetSenseML()
    two.load_state_dict(one.state_dict())
    assert two.ratio == one.ratio == 0.2


# ---------------------------------------------------------------------------- pruning, momentum


def weights(job: Job, seed: int = 0) -> np.ndarray:
    """Gives the job's model weights, and returns them in the buckets' order."""
    chance = torch.Generator().manual_seed(seed)
    flat = []
    for group in job.groups:
        for parameter in group:
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=chance))
            flat.append(parameter.detach().numpy())
    return np.concatenate(flat)


def test_the_gradients_of_the_smallest_weights_wait_in_the_residual() -> None:
    job = Job(2, TENSORS, "netsenseml", link=SLOW, start=0.3, prune=0.4, buckets=[1, 1])
    magnitude = np.abs(weights(job)).reshape(2, -1)  # by tensor
    small = (magnitude < np.quantile(magnitude, 0.4, axis=1, keepdims=True)).reshape(-1)
    for pipeline in job.pipelines:
        set_ratio(pipeline.policy, 0.15)  # a tenth of the elements
    fresh = gradients(0)
    result = job.step(fresh)[0]
    assert not result[small].any()
    assert result[~small].any()
    for rank in range(2):
        assert np.array_equal(job.residual(rank)[small], fresh[rank][small])
    for pipeline in job.pipelines:
        set_ratio(pipeline.policy, 1.0)  # the network is free again
    result = job.step([np.zeros(ELEMENTS, np.float32)] * 2)[0]
    np.testing.assert_allclose(result[small], np.mean(fresh, axis=0)[small], rtol=1e-6)
    assert not job.residual(0).any()


def test_norm_layers_and_biases_are_not_pruned() -> None:
    slots = (TensorSlot("a.weight", 0, 8), TensorSlot("a.bias", 8, 8))
    parameters = [torch.arange(8.0), torch.zeros(0), -torch.arange(8.0)]
    assert set(smallest_weights(slots, parameters, 0.26, frozenset({"a.bias"}))) == {0, 1}
    assert set(smallest_weights(slots, parameters, 0.26, frozenset())) == {0, 1, 8, 9}
    assert not len(smallest_weights(slots, parameters, 0.1, frozenset()))


def test_the_smallest_weights_are_found_where_ddp_lays_their_gradients() -> None:
    numbers = torch.arange(24.0).view(2, 3, 2, 2)
    weight = numbers.to(memory_format=torch.channels_last)
    where = smallest_weights((TensorSlot("w", 0, 24),), [weight], 0.5, frozenset())
    assert set(numbers.permute(0, 2, 3, 1).flatten()[where].tolist()) == set(range(12))


def test_dense_steps_with_the_momentum_memory_are_momentum_sgd() -> None:
    job = Job(2, TENSORS, "netsenseml", start=1.0, momentum=0.9)
    velocity = np.zeros(ELEMENTS)
    for step in range(6):
        job.compute(0.5)
        velocity = 0.9 * velocity + np.mean(gradients(step), axis=0, dtype=np.float64)
        np.testing.assert_allclose(job.step(gradients(step))[0], velocity, atol=1e-5)


def test_elements_that_were_selected_start_their_momentum_anew() -> None:
    job = Job(2, TENSORS, "netsenseml", link=SLOW, start=0.02, share=0.01, momentum=0.9)
    job.compute(0.001)
    fresh = gradients(0)
    result = job.step(fresh)[0]
    waiting = job.velocity(0) != 0.0
    assert np.array_equal(job.velocity(0)[waiting], fresh[0][waiting])
    assert 0 < (~waiting).sum() < ELEMENTS / 10
    assert np.abs(fresh[0][~waiting]).min() > np.median(np.abs(fresh[0]))  # the selected ones
    job.step([np.zeros(ELEMENTS, np.float32)] * 2)
    still = waiting & (job.velocity(0) != 0.0) & (result == 0.0)
    assert still.any()
    np.testing.assert_allclose(job.velocity(0)[still], 0.9 * fresh[0][still], rtol=1e-6)
    owed = job.residual(0)[still] / fresh[0][still]
    assert np.isclose(owed, 1.9).mean() > 0.9  # but for what results left here


def test_no_velocity_keeps_what_is_not_finite() -> None:
    job = Job(2, TENSORS, "netsenseml", start=1.0, momentum=0.9)
    bad = gradients(0)
    bad[0][5] = np.inf
    assert np.isinf(job.step(bad)[0][5])
    assert np.isfinite(job.velocity(0)).all()
    assert np.isfinite(job.step(gradients(1))[0]).all()


def test_velocities_survive_a_restart_and_a_loss_scaler() -> None:
    one, two = (Job(2, TENSORS, "netsenseml", start=1.0, momentum=0.9) for _ in range(2))
    one.step(gradients(0))
    for old, new in zip(one.pipelines, two.pipelines, strict=True):
        new.load_state_dict(old.state_dict())
        new.set_grad_scale(4.0)
    scaled = two.step([4 * g for g in gradients(1)])[0]
    np.testing.assert_allclose(scaled, 4 * one.step(gradients(1))[0], rtol=1e-5, atol=1e-6)


def test_what_needs_feedback_or_a_plain_optimizer_says_so() -> None:
    def make(optimizer: torch.optim.Optimizer | None = None, **options: object) -> None:
        configure("netsenseml", options, {}, optimizer)

    with pytest.raises(ConfigError, match=r"error_feedback off.*or compress='int8'"):
        make(error_feedback=False)
    with pytest.raises(ConfigError, match=r"momentum=0\.5 with error_feedback off"):
        make(error_feedback=False, compress="int8", momentum=0.5)
    ours = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match=r"optimizer=SGD\(momentum=0\.9\): the workers'"):
        make(torch.optim.SGD(ours, lr=0.1, momentum=0.9), momentum=0.9)
    for adaptive in ("AdamW", "RMSprop", "Adagrad", "Adadelta", "Rprop", "NAdam"):
        with pytest.raises(ConfigError, match=f"optimizer={adaptive}: the workers'"):
            make(getattr(torch.optim, adaptive)(ours), momentum=0.9)
    make(torch.optim.SGD(ours, lr=0.1), momentum=0.9)
    make(torch.optim.ASGD(ours), momentum=0.9)
    make(error_feedback=False, compress="int8")


def test_int8_is_as_far_as_it_goes_when_told_so() -> None:
    policy = NetSenseML(compress="int8", start=0.01)
    assert encoding_for(policy.ratio)[0] == "int8"
    set_ratio(policy, 0.01)
    assert encoding_for(policy.ratio)[0] == "int8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "f16"}, "compress='f16': allowed are 'topk', 'int8'"),
        ({"prune": 1.0}, "prune=1.0: a number in [0, 1)"),
        ({"momentum": -0.1}, "momentum=-0.1: a number in [0, 1)"),
        ({"prune": 0.5, "compress": "int8"}, "prune=0.5 with compress='int8'"),
        ({"start": 0.001}, "start=0.001: a number from 0.005 to 1"),
        ({"start": "low"}, "start='low'"),
        ({"share": 0.0}, "share=0.0: a number above 0"),
        ({"share": 1.5}, "share=1.5"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        NetSenseML(**options)  # type: ignore[arg-type]
    assert message in str(raised.value)
