"""NetSenseML: its signal, its ratio, its stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradwire.errors import ConfigError
from gradwire.phases import Summary
from gradwire.policies import NetSenseML
from gradwire.policies.congestion import FLOOR, Ladder, congested, stage
from gradwire.sim import Link
from gradwire.virtual import Job

TENSORS = {"a.weight": 200 * 361, "b.weight": 200 * 361}
ELEMENTS = sum(TENSORS.values())
SLOW = Link(rate=12.5e6)


def gradients(step: int, world: int = 2) -> list[np.ndarray]:
    chance = np.random.default_rng(step)
    return [chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(world)]


def encodings(job: Job, steps: range, compute: float) -> list[str]:
    seen = []
    for step in steps:
        job.compute(compute)
        seen.append(stage(job.policies[0].ratio)[0])
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
    assert job.policies[0].ratio < 0.6
    assert job.report.bytes < 0.6 * dense
    before = job.policies[0].ratio
    encodings(job, range(40, 50), compute=1.0)  # now it hides behind computation
    assert job.policies[0].ratio > before


def test_what_compression_takes_comes_back_by_error_feedback() -> None:
    job = Job(2, TENSORS, "netsenseml", link=SLOW, start=0.01)
    job.step(gradients(0))
    assert stage(NetSenseML(start=0.01).ratio)[0] == "topk"
    assert job.residual(0).any()
    for pipeline in job.pipelines:
        pipeline.flush()
    job.step(gradients(1))
    assert not job.residual(0).any()


def test_a_server_is_never_sent_top_k() -> None:
    """It keeps no residuals, so what top-k leaves out of a result would be gone."""
    job = Job(2, TENSORS, "netsenseml", servers=1, start=0.01)
    assert stage(job.policies[0].ratio)[0] == "topk"
    result = job.step(gradients(0))[0]
    np.testing.assert_allclose(result, np.mean(gradients(0), axis=0), atol=0.1)


def test_one_congested_rank_slows_all() -> None:
    ladder = Ladder(1.0, False)
    ladder.observe(Summary(0, congested=True))
    assert ladder.ratio == 0.95
    ladder.observe(Summary(1))
    assert ladder.ratio == pytest.approx(0.951)
    for step in range(500):
        ladder.observe(Summary(step, congested=True))
    assert ladder.ratio == FLOOR
    ramp = Ladder(0.1)
    ratios = []
    for step in range(5):
        ramp.observe(Summary(step))
        ratios.append(ramp.ratio)
    assert ratios == [0.2, 0.4, 0.8, 1.0, 1.0]
    stopped = Ladder(0.1)
    stopped.observe(Summary(0, congested=True))
    stopped.observe(Summary(1))
    assert stopped.ratio == pytest.approx(0.1 * 0.95 + 0.001)


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
    assert stage(1.0) == ("f32", 1.0)
    assert stage(0.999) == ("f16", 1.0)
    assert stage(0.3) == ("int8", 1.0)
    assert stage(0.15) == ("topk", pytest.approx(0.1))
    assert stage(0.0)[1] > 0


def test_state_survives_a_restart() -> None:
    one = NetSenseML()
    one._ladder.observe(Summary(0))
    two = NetSenseML()
    two.load_state_dict(one.state_dict())
    assert two.ratio == one.ratio == 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
