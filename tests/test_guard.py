"""The guard: steps that delivered too little, and a loss that rises."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.core.agreed import Summary
from gradwire.core.errors import ConfigError, TransferError
from gradwire.core.plan import TransferPlan
from gradwire.core.saved_state import State
from gradwire.sim.fabric import NETWORK_A, Link
from gradwire.sim.job import Job
from gradwire.training.configure import configure
from gradwire.training.loss_watch import LossWatch
from gradwire.training.staging import Stage
from job_gradients import normal

TENSORS = {"a.weight": 60 * 358, "b.weight": 60 * 358}
ELEMENTS = sum(TENSORS.values())
BURST = Link(loss=0.7)
gradients = partial(normal, ELEMENTS)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def learned(**options: object) -> Job:
    """A job under LTP that has learned its threshold and then meets a burst."""
    job = Job(3, TENSORS, "ltp", every=4, slack=0.0, buckets=[1, 1], **options)
    for step in range(8):
        job.step(gradients(step))
        assert job.report.guard == ""
    job.uplinks(BURST)
    return job


def average(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part
    return total * np.float32(1.0 / len(parts))


@pytest.mark.parametrize("feedback", [True, False])
def test_a_step_under_its_floor_is_resent_exactly(feedback: bool) -> None:
    job = learned(floor=0.9, error_feedback=feedback)
    owed = [job.residual(rank) for rank in range(3)]
    sent = [gradient + rest for gradient, rest in zip(gradients(8), owed, strict=True)]
    results = job.step(gradients(8))
    assert job.report.guard == "resent"
    assert job.report.encoded_share == 2.0
    assert job.report.delivered == 1.0
    assert job.report.exceeded
    for result in results:
        np.testing.assert_array_equal(result, average(sent))
    for rank in range(3):
        assert not job.residual(rank).any()
    job.uplinks(NETWORK_A)
    job.step(gradients(9))
    assert job.report.guard == ""


def test_without_a_floor_the_deadlines_cut_stands() -> None:
    for options in ({"floor": 0.0}, {"floor": 0.9, "guard": "off"}):
        job = learned(**options)
        job.step(gradients(8))
        assert job.report.guard == ""
        assert job.report.delivered < 0.8


def test_a_skipped_step_applies_nothing_and_returns_to_the_residuals() -> None:
    job = learned(floor=0.9, guard="skip", optimizer=sgd())
    owed = [job.residual(rank) for rank in range(3)]
    results = job.step(gradients(8))
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in job.groups]
    assert job.report.guard == "skipped"
    assert job.report.delivered == 0.0
    for rank, pipeline in enumerate(job.pipelines):
        assert not results[rank].any()
        np.testing.assert_array_equal(job.residual(rank), owed[rank] + gradients(8)[rank])
        if rank:
            continue  # nobody asks: a loss scaler keeps the optimizer from the step
        for optimizer, group in zip(optimizers, job.groups, strict=True):
            skipped = pipeline.take_skipped(optimizer)
            assert [id(each) for each in skipped] == [id(each) for each in group]
            assert not pipeline.take_skipped(optimizer)
    job.uplinks(NETWORK_A)
    job.pipelines[0].flush()
    job.step(gradients(9))
    sent = [job.residual(rank) + gradients(10)[rank] for rank in range(3)]
    for result in job.step(gradients(10)):
        np.testing.assert_array_equal(result, average(sent))
    assert not any(pipeline.take_skipped(optimizers[0]) for pipeline in job.pipelines)


@pytest.mark.parametrize("large", [np.inf, 3e38])
def test_a_step_that_is_not_finite_is_not_skipped(large: float) -> None:
    """Nor is one whose sum alone overflows: the optimizer, or a loss scaler, has to see it."""
    job = learned(floor=1.0, guard="skip", optimizer=sgd())
    optimizer = torch.optim.SGD([p for group in job.groups for p in group], lr=0.1)
    bad = gradients(8)
    for gradient in bad:
        gradient[77:1077] = large
    results = job.step(bad)
    assert job.report.guard == ""
    for rank, pipeline in enumerate(job.pipelines):
        assert np.isinf(results[rank][77:1077]).any()
        assert np.isfinite(job.residual(rank)).all()
        assert not pipeline.take_skipped(optimizer)


def test_what_is_owed_outlasts_an_overflow_in_a_step_under_its_floor() -> None:
    job = learned(floor=1.0, guard="skip", optimizer=sgd())
    for pipeline in job.pipelines:
        pipeline.set_grad_scale(2.0)
    job.step(gradients(8))
    assert job.report.guard == "skipped"
    owed = [job.residual(rank) for rank in range(3)]
    bad = gradients(9)
    bad[1][77] = np.inf
    job.step(bad)
    assert job.report.guard == ""
    assert job.report.delivered < 1.0
    for rank in range(3):
        assert owed[rank].any()
        np.testing.assert_array_equal(job.residual(rank), owed[rank])


def seeds_of_a_step(number: int) -> list[int]:
    """The seeds of all transfers that two ranks start in a guarded step of attachment `number`."""
    job = Job(2, TENSORS, "mlt", p=0.1, floor=0.5, buckets=[1, 1], number=number)
    seeds: list[int] = []
    for pipeline in job.pipelines:
        start = pipeline.communicator.all_reduce

        def noting(
            array: Any, plan: TransferPlan | None = None, start: Any = start, **more: Any
        ) -> Any:
            seeds.append(0 if plan is None else plan.seed)
            return start(array, plan, **more)

        pipeline.communicator.all_reduce = noting  # type: ignore[method-assign]
    job.step(gradients(0, 2))
    return seeds


def test_a_consultation_is_told_from_any_other_transfer() -> None:
    first, second = seeds_of_a_step(0), seeds_of_a_step(1)
    assert len(first) == len(second) == 2 * 3  # two buckets and the consultation
    assert len(set(first)) == 3  # alike on both ranks
    assert not set(first) & set(second)


def test_skipping_needs_an_optimizer_and_feedback() -> None:
    for options, optimizer in (({}, None), ({"error_feedback": False}, sgd())):
        with pytest.raises(ConfigError) as raised:
            configure("ltp", {"guard": "skip", **options}, {}, optimizer)
        assert (raised.value.setting, raised.value.value) == ("guard", "skip")
        assert raised.value.allowed.startswith("needs attach")
    configure("ltp", {"guard": "skip"}, {}, sgd())


def test_skipping_needs_a_floor_to_act_on() -> None:
    def make(policy: str, **options: object) -> None:
        configure(policy, {"guard": "skip", "error_feedback": True, **options}, {}, sgd())

    for policy, options in (("mlt", {}), ("ltp", {"floor": 0.0})):
        with pytest.raises(ConfigError, match=rf"with floor=.* and policy '{policy}'") as raised:
            make(policy, **options)
        assert (raised.value.setting, raised.value.value) == ("guard", "skip")
        assert "give floor" in raised.value.allowed
    make("mlt", floor=0.5)
    make("ltp")


def test_too_many_guarded_steps_running_halt_all_ranks() -> None:
    job = learned(floor=0.9)
    for policy in job.policies:
        policy.halt_after = 2
    job.step(gradients(8))
    with pytest.raises(RuntimeError, match=r"2 steps running delivered less than floor=0\.9"):
        job.step(gradients(9))
    with pytest.raises(RuntimeError, match="stopped at an earlier failure"):
        job.step(gradients(10))


def test_the_last_bucket_waits_though_an_earlier_one_is_delivered_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two buckets end on two threads: the first is about to be delivered when the last ends."""
    job = Job(2, TENSORS, "dblp", p_low=0.1, every=1, detector="layers", buckets=[1, 1])
    _, futures = job.start(gradients(0, 2))
    assert job.fabric.run(job.fabric.now + 60)
    engine = job.engines[0]
    last = engine.pending[1]
    deliver = Stage.deliver

    def overtaken(stage: Stage, *error: BaseException) -> None:
        if not last[2].done():
            engine.finish(*last)
        deliver(stage, *error)

    monkeypatch.setattr(Stage, "deliver", overtaken)
    engine.collect()
    assert [future.done() for future in futures[:2]] == [True, False]
    assert len(engine.pending) == 1  # the consultation


def test_no_bucket_of_a_step_that_fails_is_handed_over_unjudged() -> None:
    """Its guard has not seen it: neither resent nor skipped, nor settled in the books."""
    job = learned(floor=0.9)
    _, futures = job.start(gradients(8))
    assert job.fabric.run(job.fabric.now + 60)
    engine = job.engines[0]
    first, last = engine.pending
    engine.finish(*first)
    assert not futures[0].done()
    last[2].finish(TransferError("rank 1 has left", rank=1, step=8, cause="left"))
    for future in futures[:2]:
        with pytest.raises(RuntimeError, match="rank 1 has left"):
            future.wait()


def test_a_floor_guards_other_policies_too() -> None:
    job = Job(2, TENSORS, "mlt", p=0.3, floor=0.8)
    results = job.step(gradients(0, 2))
    assert job.report.guard == "resent"
    np.testing.assert_array_equal(results[0], average(gradients(0, 2)))


def test_a_rising_loss_makes_the_next_steps_exact_on_all_ranks() -> None:
    job = Job(2, TENSORS, "mlt", p=0.3, loss_rise=0.5, strict_steps=3)
    seen = []
    for step in range(20):
        job.pipelines[0].add_loss(2.0 if step == 12 else 1.0)  # one rank is enough
        job.step(gradients(step, 2))
        seen.append(job.report.guard)
        assert (job.report.delivered == 1.0) == (job.report.guard == "strict")
    assert seen == [""] * 13 + ["strict"] * 3 + [""] * 4


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_rise_on_all_ranks(broken: float) -> None:
    job = Job(2, TENSORS, "mlt", p=0.3, loss_rise=0.5, strict_steps=3)
    seen, agreed = [], []
    for step in range(8):
        job.pipelines[0].add_loss(1.0)
        job.pipelines[1].add_loss(broken if step == 2 else 1.0)  # one rank, long before ten losses
        job.step(gradients(step, 2))
        seen.append([pipeline.report().guard for pipeline in job.pipelines])
        agreed.append(job.report.agreed.loss)
    assert seen == [["", ""]] * 3 + [["strict", "strict"]] * 3 + [["", ""]] * 2
    assert agreed[:2] == agreed[3:5] == [1.0, 1.0]
    assert math.isnan(agreed[2])


def test_without_a_watch_a_loss_that_is_not_finite_is_a_warning_once() -> None:
    job = Job(2, TENSORS, "mlt", p=0.3)
    with pytest.warns(RuntimeWarning, match=r"attachment.loss\(nan\): the training loss is not"):
        job.pipelines[0].add_loss(math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.pipelines[0].add_loss(math.nan)
    job.step(gradients(0, 2))
    assert math.isnan(job.report.agreed.loss)


def test_losses_that_pile_up_between_two_steps_change_no_vote() -> None:
    """As of an evaluation that reports each batch's loss: half a million of them in one step."""
    job = Job(2, TENSORS, "dblp")
    job.pipelines[0].set_phase("tolerant")
    for _ in range(1 << 19):
        job.pipelines[0].add_loss(1.0)
    job.pipelines[1].add_loss(3.0)
    job.step(gradients(0, 2))
    assert job.report.agreed.vote == "tolerant"
    assert job.report.agreed.loss == 2.0


def test_losses_that_never_come_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a run that goes on from a state; not once a loss has come, however long ago."""
    monkeypatch.setattr("gradwire.training.loss_watch.PATIENCE", 3)
    heard, silent = LossWatch(0.2, 5), LossWatch(0.2, 5)
    heard.observe(Summary(0, loss=1.0))
    silent.load_state_dict(State(heard.state_dict()))
    told = []
    for step in range(1, 9):
        for watch in (heard, silent):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                watch.observe(Summary(step))
            told += [(watch, step, each) for each in seen]
    ((watch, step, warning),) = told
    assert (watch, step) == (silent, 3)
    assert warning.category is RuntimeWarning
    assert "loss_rise=0.2: 3 steps have passed without any loss" in str(warning.message)


def test_the_watch_judges_by_the_running_mean() -> None:
    watch = LossWatch(0.2, 5)
    for step in range(30):
        watch.observe(Summary(step, loss=3.0 - 0.05 * step))
        assert not watch.exact
    watch.observe(Summary(30, loss=None))
    assert not watch.exact
    watch.observe(Summary(31, loss=3.0))
    assert watch.exact
    other = LossWatch(0.2, 5)
    other.load_state_dict(State(watch.state_dict()))
    for step in range(32, 37):
        assert watch.exact
        assert other.exact
        for each in (watch, other):
            each.observe(Summary(step, loss=1.5))
    assert not watch.exact
    negative = LossWatch(0.2, 5)
    for step in range(20):
        negative.observe(Summary(step, loss=-2.0))
    negative.observe(Summary(20, loss=-1.0))
    assert negative.exact


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floor": 1.5}, "floor=1.5: a share of a step in [0, 1]"),
        ({"guard": "pray"}, "guard='pray': allowed are 'resend', 'skip', 'off'"),
        ({"loss_rise": 0.0}, "loss_rise=0.0"),
        ({"strict_steps": 0}, "strict_steps=0"),
    ],
)
def test_impossible_settings_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure("ltp", options, {})
    assert message in str(raised.value)
