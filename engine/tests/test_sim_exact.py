"""Exact plans: the rank-order sum to the bit, on every replica, by every route."""

import numpy as np
import pytest

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from scenarios import gradients, must_be_ok, plan, rank_order_sum, same_bits

LOSSY = Link(loss=0.02, reorder=0.1, duplicate=0.05)


def reduce_once(fabric: Fabric, values: list, **options) -> list:
    fabric.all_reduce(0, plan(len(values[0]), **options), values)
    fabric.run()
    must_be_ok(fabric)
    return [fabric.result(worker, 0) for worker in range(fabric.workers)]


@pytest.mark.parametrize("servers", [0, 1, 3])
@pytest.mark.parametrize("workers", range(2, 10))
def test_equals_the_rank_order_sum_to_the_bit(workers: int, servers: int) -> None:
    values = gradients(workers, 20_011, seed=workers)
    for link in (Link(), LOSSY):
        results = reduce_once(Fabric(workers, servers=servers, link=link), values)
        for result in results:
            assert same_bits(result, rank_order_sum(values))


def test_the_order_of_the_sum_shows_in_these_gradients() -> None:
    values = gradients(4, 20_011)
    assert not same_bits(rank_order_sum(values), rank_order_sum(values[::-1]))


@pytest.mark.parametrize("elements", [1, 2, 3, 7, 361, 362, 1000])
def test_fewer_elements_than_workers_or_than_a_chunk(elements: int) -> None:
    values = gradients(5, elements)
    for result in reduce_once(Fabric(5), values):
        assert same_bits(result, rank_order_sum(values))


@pytest.mark.parametrize("datagram", [256, 1200, 1472, 8972])
def test_any_datagram_size(datagram: int) -> None:
    values = gradients(3, 10_000)
    for result in reduce_once(Fabric(3, datagram_bytes=datagram, link=LOSSY), values):
        assert same_bits(result, rank_order_sum(values))


def test_the_scale_multiplies_the_finished_sum() -> None:
    values = gradients(3, 5000)
    for result in reduce_once(Fabric(3), values, scale=1 / 3):
        assert same_bits(result, rank_order_sum(values, 1 / 3))


def test_one_worker_keeps_its_values() -> None:
    values = gradients(1, 1000)
    assert same_bits(reduce_once(Fabric(1), values)[0], values[0])
    (result,) = reduce_once(Fabric(1, servers=1), values, scale=0.5)
    assert same_bits(result, values[0] * np.float32(0.5))


def test_negative_zero_stays() -> None:
    values = [np.full(1000, -0.0, np.float32)] * 3
    for result in reduce_once(Fabric(3), values):
        assert np.signbit(result).all()


def test_nan_and_infinity_pass() -> None:
    values = gradients(4, 3000)
    for value in values:
        np.clip(value, -1e30, 1e30, out=value)
    values[1][5] = np.nan
    values[2][700] = np.inf
    values[3][700] = -np.inf
    values[0][2999] = -np.inf
    for spend in ("nothing", "lost"):
        for result in reduce_once(Fabric(4, link=LOSSY), values, spend=spend):
            assert np.isnan(result[5])
            assert np.isnan(result[700])
            assert result[2999] == -np.inf
            assert np.isfinite(np.delete(result, [5, 700, 2999])).all()


@pytest.mark.parametrize("servers", [0, 2])
def test_many_ops_at_once_and_skewed_workers(servers: int) -> None:
    random = np.random.default_rng(3)
    fabric = Fabric(4, servers=servers, link=LOSSY, seed=3)
    jobs = [gradients(4, int(random.integers(1, 9000)), seed) for seed in range(12)]
    starts = np.zeros(4)
    for op, values in enumerate(jobs):
        starts += random.uniform(0, 2e-3, 4)
        fabric.all_reduce(op, plan(len(values[0])), values, at=starts.tolist())
    assert fabric.run()
    must_be_ok(fabric, len(jobs))
    for op, values in enumerate(jobs):
        assert same_bits(fabric.result(0, op), rank_order_sum(values))


@pytest.mark.parametrize("more", [1.0, 1.2])
def test_memory_for_contributions_out_of_turn_is_bounded_and_cannot_deadlock(more: float) -> None:
    """The highest ranks are first by far; what may wait for rank 0 is nothing, or a fifth."""
    of = plan(60_000)
    limit = int(more * _engine.least_memory_limit(of, 1472, 6))
    fabric = Fabric(6, memory_limit=limit, link=Link(loss=0.01), seed=1)
    for op in range(3):
        values = gradients(6, 60_000, op)
        fabric.all_reduce(op, of, values, at=[0.05 * (5 - w) for w in range(6)])
    assert fabric.run()
    must_be_ok(fabric, 3)


@pytest.mark.parametrize(("more", "refused"), [(1.0, True), (20.0, False)])
def test_contributions_wait_in_buffers_then_in_memory_then_come_again(
    more: float, refused: bool
) -> None:
    """Rank 0 is slow, so most of the others' wait for it; a host's buffers are soon held."""
    workers, elements = 3, 150_000
    of = plan(elements, scale=0.1)
    limit = int(more * _engine.least_memory_limit(of, 1472, workers))
    fabric = Fabric(workers, memory_limit=limit, seed=2)
    fabric.set_link(0, "up", Link(rate=5e6))
    values = gradients(workers, elements)
    fabric.all_reduce(0, of, values)
    assert fabric.run()
    must_be_ok(fabric)
    assert (sum(fabric.counters(rank)["refused"] for rank in range(workers)) > 0) == refused
    total = rank_order_sum(values) * np.float32(0.1)
    assert all(same_bits(fabric.result(rank, 0), total) for rank in range(workers))


@pytest.mark.parametrize("limit", [200_000, 400_000])
def test_what_waits_for_a_late_rank_is_bounded_in_all_ops_together(limit: int) -> None:
    """What the others had no room for, and did not acknowledge, comes again when it starts."""
    workers, ops, elements, late = 4, 8, 90_000, 2.0
    fabric = Fabric(workers, memory_limit=limit)
    jobs = [gradients(workers, elements, op) for op in range(ops)]
    for op, values in enumerate(jobs):
        fabric.all_reduce(op, plan(elements), values, at=[late, 0.1, 0.1, 0.1])
    assert not fabric.run(1.0)
    for aggregator in range(1, workers):
        assert 0.5 * limit < fabric.counters(aggregator)["memory"] <= limit
        assert fabric.counters(aggregator)["refused"] > 0
    while not fabric.run(fabric.now + 1e-3):
        assert all(fabric.counters(rank)["memory"] <= limit for rank in range(workers))
    must_be_ok(fabric, ops)
    for op, values in enumerate(jobs):
        assert same_bits(fabric.result(3, op), rank_order_sum(values))


def test_statistics_are_folded_in_rank_order() -> None:
    fabric = Fabric(3, link=LOSSY)
    stats = [[0.1, 1e16, 3.0, 0.0, 5.0, -2.0, 0.0, 7.0],
             [0.2, 1.0, 4.0, 0.0, 6.0, -3.0, 0.0, 2.0],
             [0.3, -1e16, 5.0, 0.0, 4.0, -1.0, 0.0, 9.0]]  # fmt: skip
    fabric.all_reduce(0, plan(100), gradients(3, 100), stats=stats)
    fabric.run()
    for worker in range(3):
        done = fabric.completion(worker, 0)
        assert done is not None
        assert done.stats_sum == [0.1 + 0.2 + 0.3, 1e16 + 1.0 - 1e16, 12.0, 0.0]
        assert done.stats_max == [6.0, -1.0, 0.0, 9.0]


def test_a_report_says_how_it_went() -> None:
    fabric = Fabric(2, link=Link(rate=125e6, delay=50e-6))
    values = gradients(2, 200_000)
    fabric.all_reduce(0, plan(200_000), values, step=17)
    fabric.run()
    done = fabric.completion(0, 0)
    assert done is not None
    assert (done.op, done.step, done.ok, done.error, done.error_rank) == (0, 17, True, "", -1)
    assert done.counted.dtype == np.uint8
    assert done.counted.all()
    assert done.applied.all()
    assert done.delivered == [1.0]
    assert done.exceeded == []
    assert len(done.withheld_chunks) == len(done.withheld_values) == 0
    assert 0 < done.push_ns <= done.total_ns
    assert 0 < done.pull_ns <= done.total_ns
    assert done.total_ns == round(fabric.finished_at(0, 0) * 1e9)
    assert 200e-6 <= done.rtprop_ns * 1e-9 <= 400e-6  # two hops each way
    # Push out a half, and send back a half, each with its headers.
    assert 780_000 < done.bytes_sent < 900_000
    assert done.packets_sent >= done.bytes_sent // 1472
    assert done.retransmissions == 0


def test_the_bottleneck_is_measured() -> None:
    for rate in (10e6, 125e6):
        fabric = Fabric(2, link=Link(rate=rate))
        fabric.all_reduce(0, plan(2_000_000), gradients(2, 2_000_000))
        fabric.run()
        done = fabric.completion(0, 0)
        assert done is not None
        assert 0.9 * rate < done.btlbw < 1.15 * rate


def test_a_chunk_costs_one_round_trip() -> None:
    """No handshake before data that fits the first credit."""
    fabric = Fabric(2, link=Link(rate=1e9, delay=1e-3))
    fabric.run(1.0, until_done=False)  # the pings are done
    fabric.all_reduce(0, plan(100), gradients(2, 100), at=1.0)
    fabric.run()
    done = fabric.completion(1, 0)
    assert done is not None
    assert done.total_ns < 4.2e6  # two ways of two hops of 1 ms


def test_a_quiet_all_reduce_comes_near_the_header_ideal() -> None:
    fabric = Fabric(4)
    elements = 2_500_000
    for op in range(2):
        fabric.all_reduce(op, plan(elements), gradients(4, elements, op), at=0.0)
        fabric.run()
    ideal = elements * 4 * 2 * 3 / 4 / 125e6 * 1514 / 1432
    took = fabric.finished_at(0, 1) - fabric.finished_at(0, 0)
    assert took < 1.15 * ideal


def test_a_fabric_that_forgets_goes_on_as_one_that_does_not() -> None:
    """Beside losses, so that packets of forgotten ops are still sent again."""
    hashes = []
    for forgets in (False, True):
        fabric = Fabric(3, link=LOSSY, seed=5)
        for op in range(6):
            fabric.all_reduce(op, plan(20_000), gradients(3, 20_000, op), at=fabric.now)
            assert fabric.run(fabric.now + 60)
            if forgets:
                fabric.forget()
                assert fabric.completion(0, op) is None
        hashes.append(fabric.trace_hash)
    assert hashes[0] == hashes[1]


def test_an_op_that_runs_is_not_forgotten() -> None:
    fabric = Fabric(2)
    values = gradients(2, 50_000)
    fabric.all_reduce(0, plan(50_000), values)
    fabric.run(1e-3)
    fabric.forget()
    fabric.run()
    must_be_ok(fabric)
    assert same_bits(fabric.result(1, 0), rank_order_sum(values))
