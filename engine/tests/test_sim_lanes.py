"""Lanes: ops that start in different orders on different workers, and that wait for none of
another lane."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from packets import OPEN, in_parts, open_to_server, packet, part
from scenarios import EAGER, gradients, heap_growth, plan, random_job, rank_order_sum, same_bits

LANES = (0, 1, 5, 4095)


def all_done(fabric: Fabric, ops: dict[int, int]) -> None:
    """Raises unless every worker has finished these many ops of these lanes."""
    for lane, count in ops.items():
        for op, worker in itertools.product(range(count), range(fabric.workers)):
            done = fabric.completion(worker, op, lane=lane)
            assert done is not None, f"rank {worker}, op {op} of lane {lane}: not done"
            assert done.ok, done.error
            assert (done.op, done.lane) == (op, lane)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_each_worker_may_start_the_lanes_in_an_order_of_its_own(servers: int, seed: int) -> None:
    workers, count = 4, 3
    fabric = Fabric(workers, servers=servers, seed=seed, link=Link(loss=0.05, reorder=0.1))
    random = np.random.default_rng(seed)
    values = {
        (lane, op): gradients(workers, 3000 * (1 + n), 10 * n + op)
        for n, lane in enumerate(LANES)
        for op in range(count)
    }
    for worker in range(workers):
        turns = random.permutation([lane for lane in LANES for _ in range(count)])
        ops = dict.fromkeys(LANES, 0)
        for n, lane in enumerate(map(int, turns)):
            data = values[lane, ops[lane]][worker]
            fabric.start(worker, ops[lane], plan(data.size), data, lane=lane, at=n * 1e-4)
            ops[lane] += 1
    assert fabric.run(20)
    all_done(fabric, dict.fromkeys(LANES, count))
    for (lane, op), data in values.items():
        for worker in range(workers):
            assert same_bits(fabric.result(worker, op, lane=lane), rank_order_sum(data))


def room_for_both(
    of: _engine.Plan, servers: int, workers: int = 2, datagram_bytes: int = 1472
) -> int:
    """The memory limit for one op of each of two lanes, beside contributions that wait."""
    return 36 * _engine.least_memory_limit(of, datagram_bytes, workers, servers) // 10


@pytest.mark.parametrize("servers", [0, 1])
def test_random_jobs_may_cross(servers: int) -> None:
    """Plans, networks and memory of all kinds; each worker begins with another lane."""
    for seed in range(60):
        job = random_job(seed)
        job.servers = servers
        if job.fabric_options["memory_limit"] < 1 << 31:
            job.fabric_options["memory_limit"] = room_for_both(
                job.plan, servers, job.workers, job.fabric_options["datagram_bytes"]
            )
        fabric = job.fabric()
        lanes = (3, 7)
        for worker in range(job.workers):
            for lane in lanes if worker % 2 else lanes[::-1]:
                for number, op in enumerate(job.ops):
                    fabric.start(
                        worker,
                        number,
                        job.plan,
                        op["data"][worker],
                        lane=lane,
                        critical=op["critical"][worker],
                        priorities=op["priorities"] and op["priorities"][worker],
                        stats=op["stats"][worker],
                        at=op["at"][worker] + (0.0 if lane == lanes[worker % 2 - 1] else 1e-3),
                    )
        assert fabric.run(300), f"seed {seed}"
        all_done(fabric, dict.fromkeys(lanes, len(job.ops)))


def crossed(fabric: Fabric, elements: int) -> None:
    """Two workers: each starts its own lane's two ops first, and then the other's."""
    made, values = plan(elements), gradients(2, elements)
    for worker in range(2):
        for lane in (1, 2) if worker == 0 else (2, 1):
            for op in range(2):
                fabric.start(worker, op, made, values[worker], lane=lane, at=0.01)


@pytest.mark.parametrize("servers", [0, 1])
def test_lanes_that_cross_without_memory_for_two_ops_of_a_lane(servers: int) -> None:
    """Each worker's second op is refused for as long as the first op of that lane lacks the other
    worker's part, which is to go behind a refused op there: lanes take turns."""
    elements = 361 * 3000
    limit = room_for_both(plan(elements), servers)
    fabric = Fabric(2, servers=servers, seed=1, memory_limit=limit)
    crossed(fabric, elements)
    assert fabric.run(30)
    all_done(fabric, {1: 2, 2: 2})


@pytest.mark.parametrize("servers", [0, 1])
def test_lanes_that_cross_without_memory_for_one_op_of_each_are_an_error_at_once(
    servers: int,
) -> None:
    """Each worker would wait for the other to begin what that has no memory for."""
    elements = 361 * 3000
    limit = 15 * _engine.least_memory_limit(plan(elements), 1472, 2, servers) // 10
    fabric = Fabric(2, servers=servers, seed=1, memory_limit=limit)
    crossed(fabric, elements)
    assert fabric.run(2)
    for worker, lane in itertools.product(range(2), (1, 2)):
        done = fabric.completion(worker, 0, lane=lane)
        assert done is not None
        assert done.error_cause == "memory"
        assert f"memory_limit={limit} " in done.error
        assert "with what runs beside it" in done.error


def test_lanes_without_memory_for_one_op_of_each_take_turns_where_all_have_begun() -> None:
    """What all have begun ends by itself, so the next may wait for it."""
    elements = 361 * 3000
    limit = 15 * _engine.least_memory_limit(plan(elements), 1472, 2) // 10
    fabric = Fabric(2, seed=1, memory_limit=limit)
    for turn in range(6):
        values = gradients(2, elements, turn)
        fabric.all_reduce(turn // 2, plan(elements), values, lane=turn % 2, at=fabric.now)
        while fabric.completion(0, turn // 2, lane=turn % 2) is None:
            fabric.run(fabric.now + 1e-4, until_done=False)
    assert fabric.run(5)
    all_done(fabric, {0: 3, 1: 3})


def test_no_number_of_lanes_takes_more_than_the_memory_limit() -> None:
    """A peer opens an op in each of 2,000 lanes at a server, some of them by halves."""
    limit, elements = 16 << 20, 1 << 18
    message = open_to_server(elements, [(0, elements, 0.0)])
    fabric = Fabric(2, servers=1, memory_limit=limit)
    fabric.run(0.1, until_done=False)
    grown = heap_growth()
    for lane in range(1, 2001):
        whole = in_parts(message, source=0, op=0, number=2 * lane, lane=lane)
        half = packet(OPEN, 0, 2 * lane + 1, 1, 0, part(4 << 20), lane=lane)
        for each in [*whole, half]:
            fabric.inject(0, 2, each)
        fabric.run(fabric.now + 1e-5, until_done=False)
        assert fabric.counters(2)["memory"] <= limit
        assert grown() < limit + (4 << 20)
    assert "memory_limit=16777216 " in fabric.failure(2)


@pytest.mark.parametrize("servers", [0, 1])
def test_a_lane_that_one_worker_has_not_started_keeps_no_other_waiting(servers: int) -> None:
    """Rank 1 starts two large ops of lane 1 only when the one of lane 2 is done, rank 0 before it;
    the second one is more than there is memory for."""
    elements = 361 * 6000
    limit = room_for_both(plan(elements), servers)
    fabric = Fabric(2, servers=servers, seed=1, memory_limit=limit)
    for op in range(4):
        fabric.all_reduce(op, plan(100), gradients(2, 100), lane=2)
    assert fabric.run(1)
    made, values = plan(elements, 0.2, spend="lost", order="shuffled"), gradients(2, elements)
    for op in range(2):
        fabric.start(0, op, made, values[0], lane=1, at=1.0)
    fabric.all_reduce(4, made, values, lane=2, at=1.001)
    fabric.run(10, until_done=False)
    assert fabric.completion(0, 0, lane=1) is None
    all_done(fabric, {2: 5})
    for op in range(2):
        fabric.start(1, op, made, values[1], lane=1, at=fabric.now)
    assert fabric.run(fabric.now + 10)
    all_done(fabric, {1: 2, 2: 5})


def test_an_eager_close_waits_for_no_other_lane() -> None:
    elements = 361 * 1000
    fabric = Fabric(3, seed=2, link=Link(loss=0.1))
    made = plan(elements, 0.4, spend="anything", schedule=EAGER, order="shuffled")
    values = gradients(3, elements)
    for worker in range(3):
        for n in range(3):
            lane = (worker + n) % 3
            fabric.start(worker, 0, made, values[worker], lane=lane, at=n * 1e-4)
    assert fabric.run(20)
    all_done(fabric, {0: 1, 1: 1, 2: 1})


def test_the_ops_of_a_lane_are_in_order() -> None:
    fabric = Fabric(2, seed=1)
    made, values = plan(100), gradients(2, 100)
    fabric.start(0, 0, made, values[0], lane=2)
    fabric.start(0, 2, made, values[0], lane=2)
    fabric.start(0, 1, made, values[0], lane=3)
    fabric.run(1)
    for op, lane in ((2, 2), (1, 3)):
        refused = fabric.completion(0, op, lane=lane)
        assert refused is not None
        assert not refused.ok
        assert f"op {op} of lane {lane} is out of order" in refused.error


def test_there_are_so_many_lanes() -> None:
    fabric = Fabric(2, seed=1)
    with pytest.raises(ValueError, match="lanes are 0 to 4095"):
        fabric.start(0, 0, plan(100), gradients(1, 100)[0], lane=4096)


def test_who_leaves_has_finished_the_ops_of_all_lanes() -> None:
    """Others may still fetch what they lack of them, whichever order they have started them in; an
    op that starts later fails at once."""
    elements = 361 * 200
    fabric = Fabric(3, seed=4, link=Link(loss=0.2))
    made, values = plan(elements), gradients(3, elements)
    for worker in range(3):
        for lane in (1, 2) if worker == 0 else (2, 1):
            fabric.start(worker, 0, made, values[worker], lane=lane)
    while any(fabric.completion(0, 0, lane=lane) is None for lane in (1, 2)):
        fabric.run(fabric.now + 1e-4, until_done=False)
    fabric.close(0)
    assert fabric.run(20)
    all_done(fabric, {1: 1, 2: 1})
    fabric.start(1, 1, made, values[1], lane=1, at=fabric.now)
    assert fabric.run(fabric.now + 5)
    late = fabric.completion(1, 1, lane=1)
    assert late is not None
    assert (late.error_cause, late.error_rank) == ("left", 0)


def begun_in_order(first: int, servers: int, seed: int) -> Fabric:
    """Runs until lane 2 is done at rank 0, which began lane `first` first; rank 2 has not begun
    lane 1."""
    elements = 361 * 200
    fabric = Fabric(3, servers=servers, seed=seed, link=Link(loss=0.2), peer_timeout=20.0)
    made, values = plan(elements), gradients(3, elements)
    for worker in range(3):
        for lane in (first, 3 - first) if worker == 0 else (1, 2):
            if (worker, lane) != (2, 1):
                fabric.start(worker, 0, made, values[worker], lane=lane, step=10 * lane)
    while fabric.completion(0, 0, lane=2) is None:
        fabric.run(fabric.now + 1e-4, until_done=False)
    return fabric


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("first", [1, 2], ids=["same-order", "opposite-order"])
def test_who_leaves_in_mid_step_says_which_lane_s_op_is_not_complete(
    first: int, servers: int
) -> None:
    """One lane's op is complete at rank 0 and not yet at the others, for whom it still counts; the
    other lane's can never be. That holds in whichever order each has begun them."""
    for seed in range(20):
        fabric = begun_in_order(first, servers, seed)
        if any(fabric.completion(worker, 0, lane=2) is None for worker in (1, 2)):
            break
    else:
        raise AssertionError("rank 0 is never the first to be done")
    fabric.close(0)
    left = fabric.now
    fabric.run(left + 5.0)
    failed = fabric.completion(1, 0, lane=1)
    assert failed is not None
    assert (failed.error_cause, failed.error_rank, failed.step) == ("left", 0, 10)
    assert fabric.finished_at(1, 0, lane=1) - left < 1.0


def test_a_farewell_names_more_lanes_than_a_datagram_holds() -> None:
    fabric = Fabric(2, seed=1, link=Link(loss=0.3), datagram_bytes=256)
    made, values = plan(100), gradients(2, 100)
    last = 500
    for lane in (0, last):
        fabric.all_reduce(0, made, values, lane=lane)
    assert fabric.run(20)
    fabric.start(1, 1, made, values[1], lane=last, at=fabric.now)
    fabric.run(fabric.now + 0.05)
    fabric.close(0)
    fabric.run(fabric.now + 5.0)
    failed = fabric.completion(1, 1, lane=last)
    assert failed is not None
    assert (failed.error_cause, failed.error_rank) == ("left", 0)


def test_another_plan_in_a_lane_is_told_by_number_and_lane() -> None:
    fabric = Fabric(2, seed=1)
    for worker in range(2):
        fabric.start(worker, 0, plan(100, seed=worker), gradients(1, 100)[0], lane=9)
    assert fabric.run(5)
    done = fabric.completion(0, 0, lane=9)
    assert done is not None
    assert done.error_cause == "plan"
    assert "op 0 of lane 9" in done.error


@pytest.mark.parametrize("elements", [10, 50_000])
def test_a_rank_that_has_not_begun_an_op_of_one_lane_is_named(elements: int) -> None:
    """Also by those that hear of it by its pings alone, which tell of each lane; what it has begun
    in other lanes is no excuse."""
    fabric = Fabric(4, ping_interval=0.2)
    made, values = plan(elements), gradients(4, elements)
    for op in range(5):
        fabric.all_reduce(op, made, values, lane=1)
    for worker in range(4):
        if worker != 2:
            fabric.start(worker, 0, made, values[worker], lane=2, step=7, timeout=3.0)
    fabric.run(10)
    all_done(fabric, {1: 5})
    for worker in (0, 1, 3):
        done = fabric.completion(worker, 0, lane=2)
        assert done is not None
        assert (done.error_rank, done.error_cause, done.step) == (2, "timeout", 7)
        assert "rank 2 has not begun it" in done.error
