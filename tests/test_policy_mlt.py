"""MLT's priorities: classes from layers and magnitudes, and what an eager close then leaves out."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chunk_grids import grid
from gradwire.core.errors import ConfigError
from gradwire.core.regions import TensorSlot
from gradwire.policies import MLT, PlanContext
from gradwire.policies.mlt import CLASS_DSCP
from gradwire.policies.parts.priorities import LayerOrder, by_size, lowest
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from gradwire.training.hook import HookState

CHUNK = 361
TENSORS = {f"layer{i}.weight": 40 * CHUNK for i in range(8)}
ELEMENTS = sum(TENSORS.values())

Flat = NDArray[np.float32]


def uneven(step: int, world: int) -> list[Flat]:
    """Gradients whose magnitude differs from chunk to chunk and from worker to worker."""
    chance = np.random.default_rng(step)
    return [
        (
            chance.standard_normal(ELEMENTS)
            * np.repeat(np.exp(chance.standard_normal(ELEMENTS // CHUNK)), CHUNK)
        ).astype(np.float32)
        for _ in range(world)
    ]


def mean_sizes(values: Flat) -> NDArray[np.float64]:
    return np.abs(values.astype(np.float64)).reshape(-1, CHUNK).mean(axis=1)


# ---------------------------------------------------------------------------- classes


def test_a_chunks_magnitude_is_its_mean() -> None:
    gradient = np.array([1, -3, 5, -5, 5, 0, np.nan, 2, -np.inf], np.float32)
    found = grid(2, 3, 1, 2, 1).mean_magnitudes(gradient)
    np.testing.assert_array_equal(found, [2, 5, 0, np.inf, np.inf])
    assert found.dtype == np.float32
    huge = np.full(4, 3e38, np.float32)
    np.testing.assert_array_equal(grid(4).mean_magnitudes(huge), [np.inf])  # and no warning


def test_classes_by_size_are_equally_large() -> None:
    order = np.argsort([0.5, 9.0, 3.0, 7.0, 1.0, 2.0])
    np.testing.assert_array_equal(by_size(order, 3), [2, 0, 1, 0, 2, 1])
    assert by_size(np.array([0]), 8).tolist() == [0]


def test_the_lowest_are_counted_by_region_and_aggregator() -> None:
    chunks = grid(*[1] * 8, regions=[0, 0, 0, 0, 1, 1, 1, 1], owners=[0, 0, 0, 1, 1, 1, 1, 1])
    order = np.argsort([3.0, 1.0, 2.0, 9.0, 5.0, 4.0, 7.0, 6.0])
    np.testing.assert_array_equal(
        np.flatnonzero(lowest(order, chunks, 0.5)),
        [1, 2, 3, 4, 5],  # of 3 two, of 1 that one, of 4 two
    )
    assert not lowest(order, chunks, 0.0).any()


def test_front_layers_come_first() -> None:
    names = ["a.weight", "a.bias", "b.weight", "c.weight", "d.weight"]
    slots = tuple(
        TensorSlot(name, 10 * i, 10) for i, name in enumerate(["d.weight", "a.bias", "c.weight"])
    )
    classes = LayerOrder(names).classes(slots, grid(10, 5, 5, 10), 4)
    assert classes.tolist() == [3, 0, 0, 2]
    assert LayerOrder(names).classes(slots, grid(10, 10, 10), 2).tolist() == [1, 0, 1]


@pytest.mark.parametrize("priority", ["layer", "magnitude", "both"])
def test_the_classes_of_a_bucket(priority: str) -> None:
    policy = MLT(p=0.1, priority=priority)
    policy.prepare(TENSORS)
    names = list(reversed(TENSORS))
    slots = tuple(TensorSlot(n, i * 40 * CHUNK, 40 * CHUNK) for i, n in enumerate(names))
    context = PlanContext(slots, ELEMENTS, 1, "tolerant", 2, 5, CHUNK)
    plan = policy.plan(context)
    assert (plan.order, plan.class_dscp) == ("priority", ())
    assert plan.exact().order == "shuffled"  # an exact sum wants the same order everywhere
    values = uneven(1, 1)[0]
    chunks = grid(*[CHUNK] * 320, regions=[c // 40 for c in range(320)])
    classes = policy.priorities(context, values, chunks)
    assert classes is not None
    sizes = mean_sizes(values)
    layer = 7 - np.arange(320) // 40
    if priority == "layer":
        np.testing.assert_array_equal(classes, layer)
        return
    for region in range(8):  # what may go is last: of each tensor its smallest tenth
        here = np.arange(320) // 40 == region
        assert set(np.flatnonzero(here & (classes == 7))) == set(
            np.flatnonzero(here)[np.argsort(sizes[here])[:4]]
        )
    kept = classes < 7
    assert set(classes[kept]) == set(range(7))
    if priority == "magnitude":
        means = [sizes[classes == c].min() for c in range(6)]
        nexts = [sizes[classes == c].max() for c in range(1, 7)]
        assert all(a >= b for a, b in zip(means, nexts, strict=True))
    else:
        quarter = classes[kept].astype(int) - layer[kept] // 2  # of the magnitudes
        assert set(quarter) == {0, 1, 2, 3}
        for q in range(3):
            assert sizes[kept][quarter == q].min() >= sizes[kept][quarter == q + 1].max()


# ---------------------------------------------------------------------------- a job


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("pull", ["exact", "committed"])
def test_what_is_left_out_is_the_smallest_of_each_workers_tensors(servers: int, pull: str) -> None:
    world, p = 3, 0.2
    job = Job(
        world,
        TENSORS,
        "mlt",
        p=p,
        priority="both",
        pull=pull,
        servers=servers,
        link=Link(loss=0.03),
        error_feedback=True,
        max_age=254,
    )
    gradients = uneven(1, world)
    results = job.step(gradients)
    assert all(np.array_equal(results[0], other) for other in results[1:])
    assert 1 - p <= job.report.delivered < 1 - p / 2
    slots = tuple(TensorSlot(n, i * 40 * CHUNK, 40 * CHUNK) for i, n in enumerate(TENSORS))
    context = PlanContext(slots, ELEMENTS, 0, "tolerant", world, 0, CHUNK)
    plan = job.policies[0].plan(context)
    chunks = job.pipelines[0].communicator.chunk_grid(plan)
    assert len(chunks) == ELEMENTS // CHUNK
    left = []
    for rank in range(world):
        sent = gradients[rank].reshape(-1, CHUNK)
        # What this rank withheld of the results is in its residual, too; that is not its gradient.
        out = (job.residual(rank).reshape(-1, CHUNK) == sent).all(axis=1)
        left.append(out)
        for place in {*zip(chunks.regions.tolist(), chunks.aggregators.tolist(), strict=True)}:
            here = (chunks.regions == place[0]) & (chunks.aggregators == place[1])
            smallest = np.flatnonzero(here)[np.argsort(mean_sizes(sent)[here])]
            allowed = smallest[: int(np.ceil(p * here.sum() - 1e-9))]
            assert set(np.flatnonzero(here & out)) <= set(allowed)
        assert out.mean() > p / 2
    assert any((out != left[0]).any() for out in left[1:])  # masks are each worker's own


def test_a_small_chunk_is_not_left_out_for_ever() -> None:
    world = 2
    job = Job(world, TENSORS, "mlt", p=0.2, priority="magnitude", max_age=2, error_feedback=False)
    small = np.ones(ELEMENTS, np.float32)
    small.reshape(-1, CHUNK)[::10] = 1e-3
    arrived = np.zeros(ELEMENTS // CHUNK, int)
    for _ in range(6):
        result = job.step([small] * world)[0]
        arrived += result.reshape(-1, CHUNK).any(axis=1)
    assert arrived[::10].min() >= 2  # at the latest every third step
    assert arrived[::10].max() < 6


def test_feedback_makes_what_was_left_out_grow_until_it_goes() -> None:
    """The classes are of what is sent, residual included: max_age has little to do."""
    job = Job(2, TENSORS, "mlt", p=0.1, priority="magnitude", max_age=254, error_feedback=True)
    same = uneven(3, 1)[0]
    applied = np.zeros(ELEMENTS)
    steps = 40
    for _ in range(steps):
        applied += job.step([same, same])[0]
    share = mean_sizes((applied / steps).astype(np.float32)) / mean_sizes(same)
    assert share.min() > 0.5
    np.testing.assert_allclose(applied + job.residual(0), steps * same, rtol=1e-3, atol=1e-3)


def test_priorities_cost_nothing_where_the_bound_is_small() -> None:
    def seconds(priority: str) -> float:
        job = Job(4, TENSORS, "mlt", p=0.008, priority=priority, error_feedback=False)
        total = 0.0
        for step in range(4):
            job.step(uneven(step, 4))
            total += job.report.comm_s
        return total

    assert seconds("both") < 1.1 * seconds("none")


# ---------------------------------------------------------------------------- options


def test_dscps_are_the_plans() -> None:
    context = PlanContext((TensorSlot("a.weight", 0, 9999),), 9999, 1, "tolerant", 2, 5, CHUNK)

    def table(**options: object) -> tuple[int, ...]:
        policy = MLT(**options)  # type: ignore[arg-type]
        policy.prepare({"a.weight": 9999})
        return policy.plan(context).class_dscp

    assert table(priority="both", class_dscp=True) == CLASS_DSCP
    assert table(priority="both") == ()
    assert table(priority="both", class_dscp=[46, 0]) == (46, 0)
    assert table(priority="layer", class_dscp=(10,)) == (10,)
    assert table() == ()
    assert all(a >= b for a, b in pairwise(CLASS_DSCP))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"priority": "size"},
            "priority='size': allowed are 'none', 'layer', 'magnitude', 'both', 'results'",
        ),
        (
            {"priority": "layer", "order": "sequential"},
            "order='sequential' with priority='layer': chunks go by priority",
        ),
        ({"order": "priority"}, "order='priority': allowed are 'shuffled', 'sequential'"),
        ({"class_dscp": True}, "class_dscp=True with priority='none': there are no classes"),
        ({"class_dscp": (46,)}, "class_dscp=(46,) with priority='none'"),
        (
            {"priority": "both", "class_dscp": (64,)},
            "class_dscp=(64,): a DSCP is a whole number from 0 to 63",
        ),
        ({"priority": "both", "class_dscp": (1.5,)}, "class_dscp=(1.5,): a DSCP is a whole"),
        ({"priority": "both", "class_dscp": (0,) * 9}, "a tuple of up to 8 DSCPs"),
        ({"priority": "both", "class_dscp": 46}, "class_dscp=46: a tuple of up to 8 DSCPs"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        MLT(**options)  # type: ignore[arg-type]


def test_layers_need_the_model() -> None:
    for priority in ("layer", "both"):
        with pytest.raises(ConfigError, match=f"priority='{priority}': needs the model"):
            HookState("mlt", priority=priority)
        HookState("mlt", priority=priority, model=torch.nn.Linear(2, 2))
    HookState("mlt", priority="magnitude")
