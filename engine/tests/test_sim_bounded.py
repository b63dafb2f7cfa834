"""Bounded loss: what counts, what is given up, and that the masks explain every value."""

import numpy as np
import pytest

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from scenarios import (
    EAGER,
    chunks_of,
    expand,
    gradients,
    must_be_ok,
    plan,
    same_bits,
)

BY_TIME = (
    ("first_arrival", "all", 0, 1.0),
    ("first_arrival", "all", 2_000_000, -1.0),
)
SPENDS = {
    "anything": {"spend": "anything", "schedule": EAGER, "order": "shuffled"},
    "lost": {"spend": "lost", "order": "shuffled"},
    "late": {"spend": "late", "schedule": BY_TIME},
}


def explained(fabric: Fabric, of: _engine.Plan, values: list, op: int = 0) -> np.ndarray:
    """The result that the workers' masks promise, in float64."""
    masks = []
    for worker in range(fabric.workers):
        done = fabric.completion(worker, op)
        assert done is not None
        masks.append(expand(fabric, of, done.counted))
    total = sum(
        np.where(mask, value, 0.0).astype(np.float64)
        for mask, value in zip(masks, values, strict=False)
    )
    return np.asarray(total)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("spend", SPENDS)
def test_the_bound_holds_and_the_masks_explain_the_result(spend: str, servers: int) -> None:
    workers, elements, bound = 5, 60_000, 0.1
    made = plan(elements, bound, **SPENDS[spend])
    fabric = Fabric(workers, servers=servers, link=Link(loss=0.05), seed=2)
    values = [np.clip(v, -50, 50) for v in gradients(workers, elements)]
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    assert any(not fabric.completion(w, 0).counted.all() for w in range(workers))
    for worker in range(workers):
        done = fabric.completion(worker, 0)
        counted = expand(fabric, made, done.counted)
        assert done.delivered == [pytest.approx(counted.mean())]
        assert counted.mean() >= 1 - bound
        assert done.exceeded == []
        assert same_bits(fabric.result(worker, 0), fabric.result(0, 0))
        np.testing.assert_allclose(
            fabric.result(worker, 0), explained(fabric, made, values), rtol=1e-5, atol=1e-4
        )


def test_an_eager_close_leaves_out_the_same_chunks_for_all_and_sends_less() -> None:
    workers, elements = 4, 400_000
    sent = {}
    for bound in (0.0, 0.4):
        made = plan(elements, bound, **SPENDS["anything"], seed=9)
        fabric = Fabric(workers)
        values = gradients(workers, elements)
        fabric.all_reduce(0, made, values)
        fabric.run()
        must_be_ok(fabric)
        sent[bound] = sum(fabric.completion(w, 0).bytes_sent for w in range(workers))
        masks = [fabric.completion(w, 0).counted for w in range(workers)]
        assert all((mask == masks[0]).all() for mask in masks)
        # A chunk without any contributor is zero everywhere and is not pulled.
        assert (fabric.completion(0, 0).applied == masks[0]).all()
        assert not fabric.result(0, 0)[~expand(fabric, made, masks[0])].any()
    assert sent[0.4] < 0.65 * sent[0.0]


def test_shuffled_steps_leave_out_different_chunks_sequential_ones_the_same() -> None:
    def left_out(order: str, seed: int) -> np.ndarray:
        options = {**SPENDS["anything"], "order": order}
        fabric = Fabric(2)
        fabric.all_reduce(0, plan(100_000, 0.3, **options, seed=seed), gradients(2, 100_000))
        fabric.run()
        return fabric.completion(0, 0).counted

    assert (left_out("sequential", 1) == left_out("sequential", 2)).all()
    assert (left_out("shuffled", 1) != left_out("shuffled", 2)).any()


def test_mean_divides_by_those_who_arrived() -> None:
    workers, elements = 5, 50_000
    made = plan(elements, 0.3, fill="mean", scale=1 / workers, **SPENDS["lost"])
    fabric = Fabric(workers, link=Link(loss=0.15), seed=4)
    values = [np.full(elements, float(rank + 1), np.float32) for rank in range(workers)]
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    counted = np.stack([expand(fabric, made, fabric.completion(w, 0).counted) for w in range(5)])
    ranks = np.arange(1, workers + 1)[:, None]
    assert not counted.all()
    mean = (ranks * counted).sum(0) / np.maximum(counted.sum(0), 1)
    np.testing.assert_allclose(fabric.result(0, 0), mean, rtol=1e-6)


@pytest.mark.parametrize("spend", SPENDS)
def test_critical_chunks_always_count(spend: str) -> None:
    workers, elements = 4, 40_000
    made = plan(elements, 0.5, **SPENDS[spend])
    fabric = Fabric(workers, link=Link(loss=0.2), seed=6)
    chunks = len(chunks_of(fabric, made)[0])
    random = np.random.default_rng(0)
    critical = [random.choice(chunks, 20, replace=False) for _ in range(workers)]
    fabric.all_reduce(0, made, gradients(workers, elements), critical=critical)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(workers):
        assert fabric.completion(worker, 0).counted[critical[worker]].all()


@pytest.mark.parametrize("spend", SPENDS)
def test_regions_with_bound_zero_are_whole(spend: str) -> None:
    elements = 60_000
    regions = [(0, 20_000, 0.0), (20_000, 20_000, 0.5), (40_000, 20_000, 0.0)]
    made = _engine.Plan(elements=elements, regions=regions, **SPENDS[spend])
    fabric = Fabric(3, link=Link(rate=20e6, loss=0.2), seed=8)
    fabric.all_reduce(0, made, gradients(3, elements))
    fabric.run()
    must_be_ok(fabric)
    delivered = np.array([fabric.completion(worker, 0).delivered for worker in range(3)])
    assert (delivered[:, [0, 2]] == 1.0).all()
    assert (delivered[:, 1] >= 0.5).all()
    assert (delivered[:, 1] < 1.0).any()


def test_a_plan_by_time_may_exceed_its_bound_and_says_so() -> None:
    made = plan(200_000, 0.05, spend="late", schedule=[("first_arrival", "all", 3_000_000, 0.0)])
    fabric = Fabric(3, link=Link(rate=10e6))  # far too slow for the deadline
    fabric.all_reduce(0, made, gradients(3, 200_000))
    fabric.run()
    must_be_ok(fabric)
    done = fabric.completion(1, 0)
    assert done.exceeded == [0]
    assert 0.0 < done.delivered[0] < 0.95


def test_skew_of_the_workers_does_not_eat_a_deadline() -> None:
    """Scope "all": the clock starts when the last worker has."""
    schedule = [("open", "all", 0, 1.0), ("open", "all", 50_000_000, 0.0)]
    made = plan(50_000, 0.5, spend="late", schedule=schedule)
    fabric = Fabric(3)
    fabric.all_reduce(0, made, gradients(3, 50_000), at=[0.0, 0.0, 2.0])
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        assert fabric.completion(worker, 0).delivered == [1.0]


def test_a_clock_starts_with_the_tails_of_all_senders() -> None:
    """What is lost after them is not waited for; what a sender that starts later lets pass is."""
    elements, seeds = 50_000, range(24)
    whole = [("open", "worker", 0, 1.0), ("open", "all", 20_000_000_000, 0.0)]
    tail = [whole[0], ("tail", "all", 500_000, 0.0), whole[1]]
    ends = {"whole": 0.0, "tail": 0.0, "skew": 0.0}
    for name, schedule, last in [("whole", whole, 0.0), ("tail", tail, 0.0), ("skew", tail, 1.0)]:
        made = plan(elements, 0.9, spend="late", schedule=schedule)
        for seed in seeds:
            fabric = Fabric(3, link=Link(loss=0.3), seed=seed)
            fabric.all_reduce(0, made, gradients(3, elements), at=[0.0, 0.0, last])
            fabric.run()
            must_be_ok(fabric)
            shares = [fabric.completion(worker, 0).delivered[0] for worker in range(3)]
            ends[name] += max(fabric.finished_at(worker, 0) for worker in range(3))
            if name == "tail":
                assert min(shares) < 0.99, f"seed {seed}"
            else:
                assert shares[:2] == [1.0, 1.0], f"seed {seed}"
            assert min(shares) > 0.5, f"seed {seed}"
    assert ends["tail"] < ends["whole"]
    assert ends["whole"] < len(seeds) < ends["skew"]


def test_the_last_worker_s_first_chunk_closes_what_others_have_sent() -> None:
    """Rank 0 has pushed what the bound asks for, and is cut off when rank 1 starts."""
    made = plan(200_000, 0.5, spend="anything", schedule=[("first_arrival", "all", 0, -1.0)])
    fabric = Fabric(2, servers=1)
    fabric.set_link(0, "up", Link(rate=4e6))
    fabric.all_reduce(0, made, gradients(2, 200_000), at=[0.0, 0.25])
    fabric.run(0.15, until_done=False)
    fabric.partition(0, 2)
    fabric.run(3.0)
    fabric.heal(0, 2)
    fabric.run()
    must_be_ok(fabric)
    assert fabric.finished_at(1, 0) < 0.5


@pytest.mark.parametrize("elements", [5_000, 20_000])
def test_the_last_tail_starts_the_clock_though_it_completes_its_shard(elements: int) -> None:
    """Of less than a hundred chunks only the very last is a tail. Rank 0 lost some, and is cut."""
    early, hard = ("tail", "all", 5_000_000, 0.0), ("open", "all", 200_000_000, 0.0)
    made = plan(elements, 0.9, spend="late", schedule=[("open", "worker", 0, 1.0), early, hard])
    fabric = Fabric(3, servers=1, seed=2)
    fabric.set_link(0, "up", Link(loss=0.5))
    fabric.all_reduce(0, made, gradients(3, elements), at=[0.0, 0.05, 0.05])
    fabric.run(2e-3, until_done=False)
    fabric.partition(0, 3)
    fabric.run(2.0)
    assert fabric.completion(1, 0) is not None
    assert 0.055 < fabric.finished_at(1, 0) < 0.07


def test_a_worker_s_first_chunk_starts_the_clock_of_all_its_regions() -> None:
    """It completes the second region, and nothing at all comes of the first."""
    schedule = [("open", "worker", 0, 1.0), ("first_arrival", "worker", 3_000_000, 0.0)]
    made = _engine.Plan(
        elements=6000, regions=[(0, 5900, 0.9), (5900, 100, 0.9)], spend="late", schedule=schedule
    )
    fabric = Fabric(2, servers=1)
    last = len(chunks_of(fabric, made)[0]) - 1
    fabric.set_link(0, "up", Link(rate=1e6))
    critical = [[last], None]
    fabric.all_reduce(0, made, gradients(2, 6000), critical=critical, at=[0.05, 0.0])
    fabric.run(0.0515, until_done=False)
    fabric.partition(0, 2)
    fabric.run(2.0)
    assert fabric.completion(1, 0) is not None
    assert fabric.finished_at(1, 0) < 0.06


def test_what_was_stopped_takes_no_credit_from_others() -> None:
    """Three of four workers are stopped early; the fourth, all of whose chunks are critical, has
    the port to itself, and then again in the next op."""
    elements, chunks = 500_000, 1386
    schedule = [("first_arrival", "worker", 0, -1.0)]
    made = plan(elements, 0.9, spend="anything", schedule=schedule, pull="none")
    fabric = Fabric(4, servers=1, link=Link(rate=25e6, delay=10e-3), seed=2)
    took = []
    for op in range(2):
        start = fabric.now
        critical = [None, None, None, range(chunks)]
        fabric.all_reduce(op, made, gradients(4, elements), critical=critical, at=start)
        fabric.run()
        took.append(fabric.finished_at(3, op) - start)
    must_be_ok(fabric, ops=2)
    assert took[0] < 0.6
    assert took[1] < 0.3


def test_nothing_is_spent_where_nothing_is_lost() -> None:
    for spend in ("lost", "late"):
        made = plan(60_000, 0.3, **{**SPENDS[spend], "schedule": [("open", "all", 0, 1.0)]})
        fabric = Fabric(4)
        fabric.all_reduce(0, made, gradients(4, 60_000))
        fabric.run()
        for worker in range(4):
            assert fabric.completion(worker, 0).delivered == [1.0]


@pytest.mark.parametrize("bound", [0.0, 0.2])
def test_a_committed_pull_withholds_the_same_chunks_from_all_and_keeps_them(bound: float) -> None:
    workers, elements = 4, 80_000
    made = plan(elements, bound, pull="committed", pull_bound=0.2, scale=0.25, **SPENDS["lost"])
    fabric = Fabric(workers, link=Link(loss=0.1), seed=5)
    values = [np.clip(v, -50, 50) for v in gradients(workers, elements)]
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    offsets, lengths, _, aggregators = chunks_of(fabric, made)
    applied = fabric.completion(0, 0).applied
    total = explained(fabric, made, values) * 0.25
    books = fabric.result(0, 0).astype(np.float64)
    withheld = 0
    for worker in range(workers):
        done = fabric.completion(worker, 0)
        assert same_bits(fabric.result(worker, 0), fabric.result(0, 0))
        assert (done.applied == applied).all()
        at = 0
        for chunk in done.withheld_chunks:
            assert aggregators[chunk] == worker
            assert not applied[chunk]
            span = slice(int(offsets[chunk]), int(offsets[chunk] + lengths[chunk]))
            books[span] += done.withheld_values[at : at + lengths[chunk]]
            at += lengths[chunk]
            withheld += 1
        assert at == len(done.withheld_values)
    assert withheld > 0, "this network should have made it withhold something"
    assert expand(fabric, made, applied).mean() >= 1 - 0.2 - 0.2 * (bound > 0)
    # The books balance: applied + withheld is everything that counted.
    np.testing.assert_allclose(books, total, rtol=1e-5, atol=1e-4)


def test_a_committed_pull_withholds_nothing_that_has_arrived_everywhere() -> None:
    """Of a result that went twice a copy may get lost that nobody needed. Nothing but what the
    server sends gets lost here, so what arrived was acknowledged."""
    workers, elements = 3, 60_000
    late = withheld = 0
    for seed in range(8):
        made = plan(elements, 0.3, pull="committed", pull_bound=0.3, **SPENDS["lost"])
        link = Link(delay=0.005)
        fabric = Fabric(workers, servers=1, link=link, seed=seed, trace=1_000_000)
        for worker in range(workers):
            fabric.set_link(worker, "down", Link(delay=0.005, loss=0.4))
        fabric.all_reduce(0, made, gradients(workers, elements))
        fabric.run()
        must_be_ok(fabric)
        there: dict[int, set[int]] = {}
        for each in fabric.trace():
            if each.kind == "pull" and each.fate == "delivered":
                there.setdefault(each.chunk, set()).add(each.destination)
        for chunk in np.flatnonzero(fabric.completion(0, 0).applied == 0):
            withheld += 1
            late += len(there.get(int(chunk), ())) == workers
    assert withheld > 100
    assert late == 0


def test_a_push_alone_leaves_each_result_with_its_aggregator() -> None:
    workers, elements = 4, 30_000
    made = plan(elements, pull="none")
    values = gradients(workers, elements)
    fabric = Fabric(workers, link=Link(loss=0.02))
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    _offsets, lengths, _, aggregators = chunks_of(fabric, made)
    owner = np.repeat(aggregators, lengths)
    total = values[0] + values[1] + values[2] + values[3]
    for worker in range(workers):
        result = fabric.result(worker, 0)
        assert same_bits(result[owner == worker], total[owner == worker])
        assert same_bits(result[owner != worker], values[worker][owner != worker])


def test_non_finite_values_pass_where_they_count() -> None:
    made = plan(50_000, 0.3, **SPENDS["lost"])
    values = [np.clip(v, -50, 50) for v in gradients(3, 50_000)]
    values[1][40_000] = np.nan
    values[2][100] = np.inf
    fabric = Fabric(3, link=Link(loss=0.1), seed=3)
    offsets = chunks_of(fabric, made)[0]
    critical = [
        None,
        [int(np.searchsorted(offsets, 40_000, "right")) - 1],
        [int(np.searchsorted(offsets, 100, "right")) - 1],
    ]
    fabric.all_reduce(0, made, values, critical=critical)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        result = fabric.result(worker, 0)
        assert np.isnan(result[40_000])
        assert np.isposinf(result[100])
        assert np.isfinite(np.delete(result, [100, 40_000])).all()


def test_late_contributions_change_nothing() -> None:
    """A worker that starts after the deadline: its chunks count neither in sum nor in fraction."""
    schedule = [("first_arrival", "worker", 5_000_000, 0.0), ("open", "worker", 0, 0.0)]
    made = plan(30_000, 0.9, spend="late", schedule=schedule)
    fabric = Fabric(3)
    values = gradients(3, 30_000)
    fabric.all_reduce(0, made, values, at=[0.0, 0.0, 0.5])
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        assert same_bits(fabric.result(worker, 0), fabric.result(0, 0))
