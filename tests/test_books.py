"""The books balance with every policy: what was applied and what is owed are all gradients."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from encoded import Encoded
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TransferPlan
from gradwire.policies import OptiReduce, PlanContext
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job, model_of
from gradwire.training.configure import configure
from gradwire.training.feedback.residuals import auto_feedback

STEPS = 120
TENSORS = {"a.weight": 9 * 358, "a.bias": 30, "b.weight": 11 * 358}
ELEMENTS = sum(TENSORS.values())
LOSSY = Link(loss=0.15, loss_burst=3.0)
DEADLY = Link(loss=0.9)  # no deadline learned without loss leaves a step its floor


class Wide(Encoded):
    """Pools for datagrams of twice as many elements, as encodings have them."""

    def plan(self, context: PlanContext) -> TransferPlan:
        return super().plan(replace(context, chunk_elements=2 * context.chunk_elements))


CASES: list[dict[str, Any]] = [
    {"policy": "reliable"},
    {"policy": "mlt", "p": 0.3},
    {"policy": "mlt", "p": 0.3, "pull": "committed"},
    {"policy": "mlt", "p": 0.3, "priority": "both"},
    {"policy": "mlt", "p": 0.3, "priority": "magnitude", "spend": "lost", "pull": "committed"},
    {"policy": "mlt", "p": 0.3, "control": "probe", "pull": "exact"},
    {"policy": "dblp", "p_low": 0.1, "every": 5},
    {"policy": "dblp", "p_low": 0.1, "every": 5, "control": "probe", "pull": "committed"},
    {"policy": "dblp", "p_low": 0.3, "spend": "lost", "pull": "committed"},
    {"policy": "dblp", "p_low": {"a.*": 0.3, "*": 0.0}, "detector": "layers", "every": 5},
    {"policy": "plot", "table": {"a.*": 0.3, "b.*": 0.1}},
    {"policy": "plot", "table": {"a.bias": 0.0, "*": 0.3}, "pull": "committed"},
    {"policy": "optireduce", "warmup": 5, "floor": 0.0, "halt_after": 0},
    {
        "policy": "optireduce",
        "warmup": 5,
        "excess": 0.2,
        "guard": "skip",
        "floor": 0.7,
        "halt_after": 0,
    },
    {
        "policy": "optireduce",
        "warmup": 5,
        "excess": 0.3,
        "pull": "committed",
        "halt_after": 0,
        "floor": 0.0,
    },
    {"policy": Wide(p=0.6, encoding="bf16"), "guard": "skip", "floor": 0.9},
    {"policy": Wide(p=0.5, encoding="f16")},
    {"policy": Wide(p=0.5, encoding="int8"), "datagram": 256},
    {"policy": Wide(p=0.5, encoding="topk", kept=0.2), "datagram": 256},
    {"policy": Wide(p=0.5, encoding="topk", kept=0.2, pull="committed"), "datagram": 256},
    {"policy": "netsenseml"},
    {"policy": "netsenseml", "start": 0.02, "share": 0.05, "prune": 0.3},
    {"policy": "netsenseml", "start": 0.02, "share": 0.05, "momentum": 0.9},
    {"policy": "netsenseml", "start": 0.3, "momentum": 0.5, "prune": 0.5, "guard": "off"},
    # In int8, 1,472 bytes hold half a tensor: no bound would have a chunk to spend.
    {"policy": "adaptive", "every": 5, "p_low": 0.2, "datagram": 256},
    {"policy": "adaptive", "compress": "topk", "every": 5, "p_low": 0.2, "datagram": 256},
    {"policy": "ltp", "every": 10, "slack": 0.0, "floor": 0.0},
    {"policy": "ltp", "every": 10, "slack": 0.0, "floor": 0.75},
    {"policy": "ltp", "every": 10, "slack": 0.0, "floor": 0.75, "guard": "skip"},
]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_applied_and_owed_are_all_gradients(case: dict[str, Any]) -> None:
    """Over many lossy steps; a gradient is applied once, whatever became of its datagrams.

    The sum over workers: applied · workers + residuals = all gradients, per element. With a
    momentum memory a step's gradient is its velocity, momentum · what was left of it + fresh.
    """
    world = 3
    job = Job(world, TENSORS, buckets=[2, 1], optimizer=sgd(), error_feedback=True, **case)
    chance = np.random.default_rng(7)
    total = np.zeros(ELEMENTS)
    applied = np.zeros(ELEMENTS)
    short = guarded = 0
    for step in range(STEPS):
        if step % 20 == 0:
            job.uplinks(LOSSY if step % 40 else Link())
        if "floor" in case and step % 40 in (10, 11):
            job.uplinks(DEADLY if step % 40 == 10 else Link())
        if case["policy"] == "adaptive":  # it learns to wait for what can be repaired in time
            job.uplinks(Link(loss=0.7) if step % 20 == 10 else Link())
        gradients = [chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(world)]
        total += np.sum(gradients, axis=0, dtype=np.float64)
        for rank in range(world):
            total += job.policies[0].momentum * job.velocity(rank)
        results = job.step(gradients)
        applied += world * results[0].astype(np.float64)
        assert all(np.array_equal(results[0], other) for other in results[1:])
        short += job.report.delivered < 1.0
        guarded += bool(job.report.guard)
    owed = np.sum([job.residual(rank) for rank in range(world)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + owed, total, atol=2e-3)
    assert (short > 0) == (case["policy"] not in ("reliable", "netsenseml"))
    assert (guarded > 0) == (case.get("floor", 0.0) > 0.0)
    job.pipelines[-1].flush()
    for _ in range(2):
        job.step([np.zeros(ELEMENTS, np.float32)] * world)
    assert not any(job.residual(rank).any() for rank in range(world))


DRIFTING: list[dict[str, Any]] = [
    {"policy": "mlt", "p": 0.3, "control": "probe"},
    {"policy": "mlt", "p": 0.3, "pull": "lossy", "guard": "resend", "floor": 0.75},
    {"policy": "dblp", "p_low": 0.1, "every": 5, "control": "probe"},
]


@pytest.mark.parametrize("case", DRIFTING, ids=lambda case: "-".join(map(str, case.values())))
def test_nobody_owes_what_a_lossy_pull_left_out(case: dict[str, Any]) -> None:
    """The books of such a step are about its results, which their aggregators have whole; what a
    worker did not get of them is zero there, at most the bound's share, and is in no residual."""
    world = 3
    job = Job(world, TENSORS, optimizer=sgd(), error_feedback=True, link=LOSSY, **case)
    chance = np.random.default_rng(7)
    total = np.zeros(ELEMENTS)
    applied = np.zeros(ELEMENTS)
    missed = 0
    for _ in range(60):
        gradients = [chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(world)]
        total += np.sum(gradients, axis=0, dtype=np.float64)
        results = np.stack(job.step(gradients))
        whole = np.take_along_axis(results, np.abs(results).argmax(axis=0)[None], axis=0)[0]
        applied += world * whole.astype(np.float64)
        gone = (results == 0) & (whole != 0)
        assert np.array_equal(results, np.where(gone, np.float32(0), whole))
        assert gone.mean(axis=1).max() <= job.report.bound
        missed += gone.sum()
    assert missed
    owed = np.sum([job.residual(rank) for rank in range(world)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + owed, total, atol=2e-3)
    job.pipelines[0].flush()
    for _ in range(2):
        last = job.step([np.zeros(ELEMENTS, np.float32)] * world)
    assert all(np.array_equal(last[0], other) for other in last[1:])
    assert not any(job.residual(rank).any() for rank in range(world))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_state_survives_torch_load_with_its_defaults(case: dict[str, Any]) -> None:
    options = {"optimizer": sgd(), "error_feedback": True, **case}
    one = Job(2, TENSORS, link=LOSSY, **options)
    chance = np.random.default_rng(3)
    for _ in range(12):
        one.step([chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(2)])
    two = Job(2, TENSORS, link=LOSSY, **options)
    for saved, loaded in zip(one.pipelines, two.pipelines, strict=True):
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file))
        assert loaded.policy.state_dict() == saved.policy.state_dict()
        assert loaded.step == saved.step
    for rank in range(2):
        np.testing.assert_array_equal(two.residual(rank), one.residual(rank))
    two.step([np.zeros(ELEMENTS, np.float32)] * 2)


@pytest.mark.parametrize("empty", [(0,), (1,), (2,), (0, 1, 4), (2, 3, 4)])
@pytest.mark.parametrize(
    "options",
    [{"policy": "mlt"}, {"policy": "mlt", "floor": 0.9}, {"policy": "adaptive", "every": 1}],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("world", [1, 2])
def test_buckets_without_elements_count_for_their_step_and_travel_nowhere(
    empty: tuple[int, ...], options: dict[str, Any], world: int
) -> None:
    """First, in between, last; with one worker the others are done before the last one begins."""
    sizes = {"a.weight": 9 * 358, "b.weight": 11 * 358}
    names = iter(sizes.items())
    buckets = len(sizes) + len(empty)
    tensors = dict((f"e{i}.weight", 0) if i in empty else next(names) for i in range(buckets))
    job = Job(world, tensors, buckets=[1] * buckets, **options)
    plain = Job(world, sizes, buckets=[1, 1], **options)
    for step in range(4):
        chance = np.random.default_rng(step)
        gradients = [
            chance.standard_normal(sum(sizes.values())).astype(np.float32) for _ in range(world)
        ]
        for each in (job, plain):
            each.pipelines[0].add_loss(3.0)
        for mine, expected in zip(job.step(gradients), plain.step(gradients), strict=True):
            np.testing.assert_array_equal(mine, expected)
        assert job.report.agreed == plain.report.agreed
        assert job.report.step == step
        assert (job.report.buckets, job.report.agreed.loss) == (2, 3.0)


def test_a_step_without_any_element_is_no_step() -> None:
    job = Job(2, {"a.weight": 0, "b.weight": 0}, "mlt", buckets=[1, 1])
    job.step([np.zeros(0, np.float32)] * 2)
    assert [pipeline.step for pipeline in job.pipelines] == [0, 0]


def test_empty_residuals_load_without_feedback() -> None:
    one = Job(2, TENSORS, "mlt", p=0.3, error_feedback=True)
    gradients = [np.ones(ELEMENTS, np.float32)] * 2
    one.uplinks(LOSSY)
    one.step(gradients)
    two = Job(2, TENSORS, "mlt", p=0.3, error_feedback=False)
    with pytest.raises(ConfigError, match="residuals loaded with error_feedback off"):
        two.pipelines[0].load_state_dict(one.pipelines[0].state_dict())
    one.pipelines[0].flush()
    for _ in range(2):
        one.step(gradients)
    two.pipelines[0].load_state_dict(one.pipelines[0].state_dict())


def test_a_jump_of_the_loss_scale_keeps_the_books() -> None:
    job = Job(2, TENSORS, "mlt", p=0.3, error_feedback=True)
    true, applied = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    for step in range(12):
        scale = 1.0 if step % 3 else 256.0
        for pipeline in job.pipelines:
            pipeline.set_grad_scale(scale)
        chance = np.random.default_rng(step)
        gradients = [chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(2)]
        true += np.mean(gradients, axis=0, dtype=np.float64)
        if step == 10:
            job.pipelines[0].flush()
        applied += job.step([np.float32(scale) * each for each in gradients])[0] / scale
    np.testing.assert_allclose(applied, true, atol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_exact_lossy_and_void_steps_in_any_order_keep_the_books(seed: int) -> None:
    """Void: a loss scaler skips it, because somebody's gradient was infinite."""
    chance = np.random.default_rng(seed)
    job = Job(2, TENSORS, "mlt", p=0.3, error_feedback=True, link=LOSSY)
    scale = np.float32(256.0)
    total, applied = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    for pipeline in job.pipelines:
        pipeline.set_grad_scale(scale)
    for _ in range(40):
        gradients = [chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(2)]
        void = bool(chance.random() < 0.3)
        if void:
            gradients[1][chance.integers(ELEMENTS)] = np.inf
        exact = job.pipelines[0].flush_pending
        if chance.random() < 0.6:
            job.pipelines[1].flush()
        found = job.step([scale * each for each in gradients])[0]
        if exact and not void:
            assert not any(job.residual(rank).any() for rank in range(2))
        if not void:
            total += np.sum(gradients, axis=0, dtype=np.float64)
            applied += 2 * found.astype(np.float64) / scale
    owed = np.sum([job.residual(rank) for rank in range(2)], axis=0, dtype=np.float64) / scale
    np.testing.assert_allclose(applied + owed, total, atol=2e-3)


@dataclass
class Turned(OptiReduce):
    """Coefficients in int8, which no policy of gradwire's sends; a policy of a user's may."""

    def plan(self, context: PlanContext) -> TransferPlan:
        return replace(super().plan(context), encoding="int8")


@pytest.mark.parametrize("tensors", [TENSORS, {"a.weight": 300}], ids=["many", "one chunk"])
def test_what_an_encoding_took_of_coefficients_is_owed(tensors: dict[str, int]) -> None:
    """Also to a rank that aggregates nothing, and so has no results' error to turn back."""
    elements = sum(tensors.values())
    policy = Turned(warmup=5, halt_after=0)
    job = Job(3, tensors, policy, error_feedback=True, floor=0.0)
    chance = np.random.default_rng(3)
    total, applied = np.zeros(elements), np.zeros(elements)
    for _ in range(20):
        gradients = [chance.standard_normal(elements).astype(np.float32) for _ in range(3)]
        total += np.sum(gradients, axis=0, dtype=np.float64)
        applied += 3 * job.step(gradients)[0].astype(np.float64)
    owed = np.sum([job.residual(rank) for rank in range(3)], axis=0, dtype=np.float64)
    assert np.abs(owed).max() > 1e-3
    np.testing.assert_allclose(applied + owed, total, atol=2e-3)


def test_a_flush_that_a_scaler_skips_comes_again() -> None:
    """Its step delivered nothing of what was owed: the next one has to."""
    job = Job(2, TENSORS, "mlt", p=0.3, error_feedback=True, link=LOSSY)
    for pipeline in job.pipelines:
        pipeline.set_grad_scale(256.0)
    ordinary, void = (np.full(ELEMENTS, value, np.float32) for value in (1.0, np.inf))
    for gradient, flush, pending, owed in (
        (ordinary, False, False, True),
        (void, True, True, True),
        (void, False, True, True),
        (ordinary, False, False, False),
        (ordinary, False, False, True),
    ):
        if flush:
            job.pipelines[1].flush()
        job.step([gradient, ordinary])
        assert [each.flush_pending for each in job.pipelines] == [pending] * 2
        assert any(job.residual(rank).any() for rank in range(2)) == owed


def test_a_state_that_is_loaded_outlasts_what_a_scaler_drops_of_before() -> None:
    """As a run does that goes back to its last checkpoint once its loss is no number."""
    model = model_of(TENSORS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(2, model, "mlt", p=0.3, error_feedback=True, link=LOSSY, optimizer=optimizer)
    states = []
    for _ in range(2):
        states.append([pipeline.state_dict() for pipeline in job.pipelines])
        for pipeline in job.pipelines:
            pipeline.set_grad_scale(256.0)
        job.step([np.ones(ELEMENTS, np.float32)] * 2)
        for pipeline in job.pipelines:
            pipeline.stepped(optimizer)
    job.step([np.ones(ELEMENTS, np.float32)] * 2)
    for pipeline, state in zip(job.pipelines, states[1], strict=True):
        pipeline.load_state_dict(state)
    owed = job.residual(0)
    assert owed.any()
    for pipeline in job.pipelines:
        pipeline.set_grad_scale(128.0)
    np.testing.assert_array_equal(job.residual(0), owed / 2)


def test_a_vote_for_a_phase_outlives_a_restart() -> None:
    def job() -> Job:
        return Job(2, TENSORS, "dblp", every=1, eta=1000.0)

    def phases(of: Job) -> list[str]:
        gradients = [np.ones(ELEMENTS, np.float32)] * 2
        return [(of.step(gradients), of.report.phase)[1] for _ in range(4)]

    first, second, third = job(), job(), job()
    for pipeline in first.pipelines:
        pipeline.set_phase("critical")
    assert phases(first) == ["critical"] * 4
    assert phases(third)[-1] == "tolerant"
    for old, new in zip(first.pipelines, second.pipelines, strict=True):
        new.load_state_dict(old.state_dict())
    assert phases(second) == ["critical"] * 4
    for pipeline in second.pipelines:
        pipeline.set_phase(None)
    assert phases(second)[-1] == "tolerant"
    for old, new in zip(third.pipelines, first.pipelines, strict=True):
        new.load_state_dict(old.state_dict())  # which has no vote: the one that stands stays
    assert phases(first)[1:] == ["critical"] * 3
    state = third.pipelines[0].state_dict()
    with pytest.raises(ConfigError, match=r"state\['vote'\]='later': 'critical' or 'tolerant'"):
        third.pipelines[0].load_state_dict({**state, "vote": "later"})


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_one_worker_keeps_its_gradient(case: dict[str, Any]) -> None:
    job = Job(1, TENSORS, optimizer=sgd(), **{"error_feedback": True, **case})
    for step in range(12):
        gradient = np.random.default_rng(step).standard_normal(ELEMENTS).astype(np.float32)
        expected = job.policies[0].momentum * job.velocity(0) + gradient
        np.testing.assert_allclose(job.step([gradient])[0], expected, atol=1e-5)
        assert job.report.guard == ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_replicas_agree_on_the_server_route_too(case: dict[str, Any]) -> None:
    job = Job(2, TENSORS, optimizer=sgd(), servers=1, link=LOSSY, error_feedback=True, **case)
    for step in range(12):
        chance = np.random.default_rng(step)
        gradients = [chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(2)]
        first, second = job.step(gradients)
        assert np.array_equal(first, second)
        assert first.any() != (job.report.guard == "skipped")


class Mine(torch.optim.AdamW):
    """Somebody's own AdamW."""


def test_auto_goes_by_the_optimizers_family() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    assert auto_feedback(torch.optim.SGD(parameters, lr=0.1))
    for family in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, Mine):
        assert not auto_feedback(family(parameters, lr=0.1))
    assert not auto_feedback(None)
    assert not auto_feedback(object())
    assert configure("mlt", {}, {}, sgd())[1].feedback
    assert not configure("mlt", {}, {})[1].feedback
    assert not configure("mlt", {"error_feedback": False}, {}, sgd())[1].feedback
    assert not configure("mlt", {"fill": "mean"}, {}, sgd())[1].feedback  # it would count twice


@pytest.mark.parametrize(
    "case",
    [
        {"policy": "mlt", "p": 0.3},
        {"policy": "netsenseml", "start": 0.02, "share": 0.05, "momentum": 0.9, "prune": 0.3},
        {"policy": "ltp", "every": 10, "slack": 0.0, "floor": 0.7},
        {"policy": "ltp", "every": 10, "slack": 0.0, "floor": 0.9, "guard": "skip"},
    ],
    ids=lambda case: str(case["policy"]),
)
def test_nothing_is_owed_in_vain_to_tensors_that_nobody_used(case: dict[str, Any]) -> None:
    """DDP drops the results of such a tensor: were something of them, it would be lost."""
    job = Job(2, TENSORS, buckets=[2, 1], optimizer=sgd(), error_feedback=True, **case)
    for pipeline in job.pipelines:
        pipeline.find_unused()
    job.uplinks(LOSSY)
    total, applied = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    tensor = slice(0, TENSORS["a.weight"])
    kept = 0
    for step in range(60):
        chance = np.random.default_rng(step)
        gradients = [chance.standard_normal(ELEMENTS).astype(np.float32) for _ in range(2)]
        users = (0, 1, 2)[step % 3]  # how many use it
        for gradient in gradients[users:]:
            gradient[tensor] = 0.0
        total += np.sum(gradients, axis=0, dtype=np.float64)
        for rank in range(2):
            total += job.policies[0].momentum * job.velocity(rank)
        result = job.step(gradients)[0]
        if users == 0:
            assert not result[tensor].any()
            kept += bool(job.residual(0)[tensor].any())
        applied += 2 * result.astype(np.float64)
    assert kept
    owed = np.sum([job.residual(rank) for rank in range(2)], axis=0, dtype=np.float64)
    np.testing.assert_allclose(applied + owed, total, atol=2e-3)
    for used in (0.0, 0.0, 1.0):  # what an exact step does not use waits for another
        gradients = [np.ones(ELEMENTS, np.float32) for _ in range(2)]
        for gradient, pipeline in zip(gradients, job.pipelines, strict=True):
            gradient[tensor] = used
            pipeline.flush()
        job.step(gradients)
    assert not any(job.residual(rank).any() for rank in range(2))
