"""What a dense step would wait for its transfer, and the encoding that follows from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradwire.core.agreed import GAUGES, Ballot, Summary
from gradwire.core.report import StepReport
from gradwire.policies.parts.waiting import (
    EASE,
    HOLD,
    LONGEST_HOLD,
    SHARE,
    SHARE_OF_INT8,
    Choice,
    Waiting,
)
from gradwire.sim.job import Job


@pytest.fixture(scope="module")
def report() -> StepReport:
    """A step that waits for 10.3 ms of 20, of which 0.3 are three round trips."""
    job = Job(2, {"a.weight": 1000}, "adaptive")
    job.step([np.ones(1000, np.float32)] * 2)
    return replace(
        job.report, elements=10**6, exposed_s=0.0103, period_s=0.02, rtprop_s=1e-4, btlbw=1e8
    )


def settled(report: StepReport) -> float:
    waiting = Waiting()
    for _ in range(40):
        waiting.observe(report)
    return waiting.rest(report.period_s)


def test_nothing_is_waiting_while_nothing_is_known(report: StepReport) -> None:
    assert Waiting().rest(1.0) == 1.0
    for unknown in ({"btlbw": 0.0}, {"rtprop_s": 0.0}):
        assert settled(replace(report, **unknown)) == 1.0
    first = Waiting()
    first.observe(replace(report, exposed_s=5.0, period_s=0.0, btlbw=0.0))
    first.observe(replace(report, period_s=5.0))  # a step like this is not one of rest
    assert first.rest(0.02) == pytest.approx(0.5)  # known as soon as the step's time is


def test_a_compressed_wait_counts_as_the_dense_one_it_stands_for(report: StepReport) -> None:
    assert settled(report) == pytest.approx(0.5)
    assert settled(replace(report, encoded_share=0.25)) == pytest.approx(10 / (10 + 4 * 10))


def test_a_transfer_that_hides_behind_computation_waits_for_nothing(report: StepReport) -> None:
    assert settled(replace(report, exposed_s=0.0)) == 1.0
    assert settled(replace(report, exposed_s=0.0003)) == 1.0


def test_a_gradient_shorter_than_the_path_has_nothing_to_save(report: StepReport) -> None:
    assert settled(replace(report, elements=2400)) == 1.0


def test_the_last_steps_count_most(report: StepReport) -> None:
    waiting = Waiting()
    for _ in range(40):
        waiting.observe(report)
    for _ in range(10):
        waiting.observe(replace(report, exposed_s=0.0))
    assert waiting.rest(0.02) > 0.93


def test_a_pause_is_not_the_computation_of_the_steps_to_come(report: StepReport) -> None:
    waiting = Waiting()
    for _ in range(10):
        waiting.observe(replace(report, exposed_s=0.0153))  # 15 of 20 ms are waiting
    before = waiting.rest(0.02)
    assert before == pytest.approx(0.25)
    assert waiting.rest(60.0) < 0.5  # an evaluation: not a dense step's rest of 0.99
    # what stays is believed: steps of a second, each with the same 15 ms of waiting
    for _ in range(25):
        waiting.observe(replace(report, exposed_s=0.0153, period_s=1.0))
    assert waiting.rest(1.0) > 0.9


def test_the_worker_that_waits_least_is_agreed_on() -> None:
    step = GAUGES.index("rest")
    buckets = [((0.0,) * 4, Ballot(gauge=gauge).slots()[4:]) for gauge in (0.3, 0.8)]
    assert Summary.fold(step, 2, buckets).rest == 0.8
    assert Summary.fold(step + 1, 2, buckets).rest is None


def needs(ratio: float, share: float = SHARE) -> Summary:
    """A rest with which waiting for this share of the dense bytes takes `share` of a step."""
    odds = ratio * (1.0 - share) / share
    return Summary(0, rest=odds / (1.0 + odds))


def test_the_mildest_ratio_that_is_enough_is_taken_at_once() -> None:
    for need, taken in ((1.01, 1.0), (0.99, 0.5), (0.51, 0.5), (0.49, 0.25), (0.01, 0.25)):
        choice = Choice(0.25)
        choice.observe(needs(need))
        assert choice.ratio == taken
    deep = Choice(3 / 16)
    deep.observe(needs(0.01, SHARE_OF_INT8))
    assert deep.ratio == 3 / 16
    deep.observe(Summary(1))
    assert deep.ratio == 3 / 16


@pytest.mark.parametrize(("waited", "taken"), [(0.14, 1.0), (0.16, 0.5), (0.26, 0.5), (0.27, 0.25)])
def test_a_step_waits_for_little_of_its_time(waited: float, taken: float) -> None:
    """0.15 of it: 0.15 / 0.85 of the rest, for which the dense one waits in f16 twice: 6/23."""
    assert SHARE == 0.15
    choice = Choice(0.25)
    choice.observe(Summary(0, rest=1.0 - waited))
    assert choice.ratio == taken


@pytest.mark.parametrize(("waited", "taken"), [(0.72, 0.25), (0.73, 3 / 16)])
def test_top_k_needs_a_better_reason(waited: float, taken: float) -> None:
    """In int8 a step may wait for 0.4: 0.4 / 0.6 of the rest, the dense one four times: 8/11."""
    assert SHARE_OF_INT8 == 0.4
    choice = Choice(3 / 16)
    choice.observe(Summary(0, rest=1.0 - waited))
    assert choice.ratio == taken


@pytest.mark.parametrize(("waited", "taken"), [(0.65, 3 / 16), (0.63, 0.25)])
def test_top_k_is_left_only_with_room(waited: float, taken: float) -> None:
    """The dense step may wait for four times 0.4 / 0.6 / 1.5 of the rest: 16/25."""
    choice = Choice(3 / 16, ratio=3 / 16)
    for _ in range(HOLD):
        choice.observe(Summary(0, rest=1.0 - waited))
    assert choice.ratio == taken


def test_a_ratio_of_before_is_lifted_to_the_last_stage() -> None:
    choice = Choice(3 / 16)
    choice.load_state_dict({"ratio": 1 / 128, "age": 3, "hold": HOLD, "eased": False})
    assert choice.ratio == 3 / 16


def test_dense_steps_come_back_only_with_room() -> None:
    choice = Choice(0.25)
    choice.observe(needs(0.99))
    assert choice.ratio == 0.5
    for _ in range(100):
        choice.observe(needs(0.99 * EASE))
    assert choice.ratio == 0.5
    choice.observe(needs(1.01 * EASE))
    assert choice.ratio == 1.0


def until_dense(choice: Choice, summary: Summary) -> int:
    for step in range(1, 2000):
        choice.observe(summary)
        if choice.ratio == 1.0:
            return step
    raise AssertionError("it never is")


def test_it_is_eased_only_with_room_and_after_a_while() -> None:
    choice = Choice(0.25)
    choice.observe(needs(0.3))
    for _ in range(100):
        choice.observe(needs(0.99 * EASE * 0.5))
    assert choice.ratio == 0.25
    choice.observe(needs(1.01 * EASE * 0.5))
    assert choice.ratio == 0.5
    again = Choice(0.25)
    again.observe(needs(0.3))
    assert until_dense(again, Summary(0, rest=1.0)) == HOLD


def test_a_return_that_does_not_last_makes_the_next_one_wait_longer() -> None:
    choice = Choice(0.25)
    choice.observe(needs(0.3))
    waits = []
    for _ in range(8):
        waits.append(until_dense(choice, Summary(0, rest=1.0)))
        choice.observe(needs(0.3))
    assert waits == [16, 32, 64, 128, 256, 512, LONGEST_HOLD, LONGEST_HOLD]


def test_state_survives_a_restart(report: StepReport) -> None:
    waiting, choice = Waiting(), Choice(0.25)
    for _ in range(3):
        waiting.observe(report)
    choice.observe(needs(0.3))
    other, same = Waiting(), Choice(0.25)
    other.load_state_dict(waiting.state_dict())
    same.load_state_dict(choice.state_dict())
    assert other.state_dict() == waiting.state_dict()
    assert same == choice
