"""Reduce-scatter: a push without a pull whose plan names each worker's shard."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from scenarios import expand, gradients, must_be_ok, plan, rank_order_sum, same_bits

SHARDS = [(9000, 1, 4999, 6011), (0, 20_011, 0, 0), (5003, 5003, 5003, 5002), (20_010, 0, 1, 0)]


def edges_of(shards: tuple[int, ...]) -> list[int]:
    return [0, *(int(end) for end in np.cumsum(shards))]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("encoding", ["f32", "int8"])
def test_each_worker_has_its_shard_to_the_bit(shards: tuple[int, ...], encoding: str) -> None:
    values = gradients(4, 20_011)
    made = plan(20_011, pull="none", shards=shards, scale=0.25, encoding=encoding)
    fabric = Fabric(4, link=Link(loss=0.02, reorder=0.1, duplicate=0.05))
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    sent = [_engine.round_trip(made, each, fabric.datagram_bytes, 4) for each in values]
    total = rank_order_sum(sent, 0.25)
    for worker, (begin, end) in enumerate(pairwise(edges_of(shards))):
        result = fabric.result(worker, 0)
        assert same_bits(result[begin:end], total[begin:end])
        assert same_bits(result[:begin], values[worker][:begin])
        assert same_bits(result[end:], values[worker][end:])


def test_an_all_reduce_takes_shards_too() -> None:
    values = gradients(3, 5000)
    fabric = Fabric(3)
    fabric.all_reduce(0, plan(5000, shards=(4000, 0, 1000)), values)
    fabric.run()
    must_be_ok(fabric)
    assert all(same_bits(fabric.result(w, 0), rank_order_sum(values)) for w in range(3))


@pytest.mark.parametrize("spend", ["lost", "anything"])
def test_lossy_shards_hold_what_counted_and_the_bound_holds(spend: str) -> None:
    shards, bound = (30_000, 11, 9_989, 20_000), 0.2
    schedule = [("open", "all", 0, -1.0 if spend == "anything" else 1.0)]
    made = plan(
        60_000, bound, spend=spend, schedule=schedule, order="shuffled", pull="none", shards=shards
    )
    values = gradients(4, 60_000)
    fabric = Fabric(4, link=Link(loss=0.1), seed=4)
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    done = [fabric.completion(worker, 0) for worker in range(4)]
    counted = [expand(fabric, made, each.counted) for each in done if each is not None]
    assert min(mask.mean() for mask in counted) < 1.0
    assert min(mask.mean() for mask in counted) >= 1.0 - bound
    parts = zip(counted, values, strict=True)
    total = sum(np.where(mask, each, np.float32(0)).astype(np.float64) for mask, each in parts)
    for worker, (begin, end) in enumerate(pairwise(edges_of(shards))):
        result = fabric.result(worker, 0)[begin:end]
        np.testing.assert_allclose(result, total[begin:end], rtol=1e-4, atol=1e-3)


@given(data=st.data())
@settings(max_examples=60)
def test_the_grid_is_cut_where_the_shards_end(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=6))
    elements = sum(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, elements), max_size=5)))
    ends = [0, *cuts, elements]
    shards = [b - a for a, b in pairwise(ends)]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    regions = [(int(a), int(b - a), 0.25) for a, b in pairwise(starts)]
    made = _engine.Plan(elements=elements, regions=regions, spend="lost", shards=shards)
    offset, length, region, aggregator = _engine.chunk_grid(made, 1472, len(shards))
    assert (offset[:-1] + length[:-1] == offset[1:]).all()
    assert int(length.sum()) == elements
    assert length.min() >= 1
    assert (region == np.searchsorted(starts, offset, "right") - 1).all()
    for shard, (begin, end) in enumerate(pairwise(ends)):
        mine = offset[aggregator == shard]
        assert int(length[aggregator == shard].sum()) == end - begin
        assert ((mine >= begin) & (mine < end)).all()
    assert all(0.0 <= bound <= 0.25 for bound in made.effective_bounds(1472, len(shards)))


@pytest.mark.parametrize(
    ("shards", "text"),
    [((50, 51), "shards hold more"), ((50, 49), "shards leave 1"), ((101,), "shards hold more")],
)
def test_shards_that_do_not_fit_are_named(shards: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan(100, shards=shards)


def test_a_plan_has_one_shard_for_each_aggregator() -> None:
    made: Any = plan(100, pull="none", shards=(50, 50))
    with pytest.raises(ValueError, match="one for each of 3"):
        _engine.chunk_grid(made, 1472, 3)
    with pytest.raises(ValueError, match="one for each"):
        _engine.least_memory_limit(made, 1472, 3)
    fabric = Fabric(3)
    fabric.all_reduce(0, made, gradients(3, 100))
    fabric.run(1.0)
    refused = [fabric.completion(worker, 0) for worker in range(3)]
    assert all(each is not None and each.error_cause == "plan" for each in refused)


def test_shards_are_part_of_the_plan_that_all_agree_on() -> None:
    fabric = Fabric(2)
    values = gradients(2, 1000)
    for worker, shards in enumerate([(500, 500), (400, 600)]):
        made = plan(1000, pull="none", shards=shards)
        fabric.start(worker, 0, made, values[worker])
    fabric.run(5.0)
    done = fabric.completion(0, 0)
    assert done is not None
    assert not done.ok
    assert done.error_cause == "plan"
