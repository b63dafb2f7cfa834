"""Paths that come to carry shorter datagrams than was agreed, and losses that only look like it."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from gradwire import _engine
from gradwire.sim.fabric import NETWORK_A, Direction, Fabric, Link
from scenarios import gradients, must_be_ok, plan, rank_order_sum, same_bits

ELEMENTS = 400_000


def shorten(fabric: Fabric, host: int, direction: Direction, longest: int) -> None:
    fabric.set_link(host, direction, replace(NETWORK_A, longest=longest))


def reduce(fabric: Fabric, op: int, elements: int = ELEMENTS, **options: object) -> float:
    """One exact all-reduce; its result is checked. Returns how long it took."""
    values = gradients(fabric.workers, elements, seed=op)
    began = fabric.now
    fabric.all_reduce(op, plan(elements, **options), values, at=began)
    assert fabric.run(began + 20.0), "it hangs"
    must_be_ok(fabric, op + 1)
    for worker in range(fabric.workers):
        assert same_bits(fabric.result(worker, op), rank_order_sum(values))
    return fabric.now - began


def agreed(fabric: Fabric, op: int) -> set[int]:
    """What the workers' reports say that later plans should be cut for."""
    done = [fabric.completion(worker, op) for worker in range(fabric.workers)]
    return {each.datagram_bytes for each in done if each is not None}


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize(("workers", "servers"), [(2, 0), (4, 0), (3, 1)])
@pytest.mark.parametrize("longest", [1372, 300])
def test_a_step_goes_on_when_long_datagrams_get_lost_without_a_word(
    direction: Direction, workers: int, servers: int, longest: int
) -> None:
    fabric = Fabric(workers, servers=servers)
    quick = reduce(fabric, 0)
    assert agreed(fabric, 0) == {1472}
    shorten(fabric, 1, direction, longest)
    assert reduce(fabric, 1) < 5.0
    reduce(fabric, 2)
    (known,) = agreed(fabric, 2)
    assert 0.8 * longest < known <= longest
    before = sum(fabric.counters(host)["fragmented"] for host in range(workers + servers))
    assert reduce(fabric, 3, datagram_bytes=known) < 10 * quick
    after = sum(fabric.counters(host)["fragmented"] for host in range(workers + servers))
    assert after == before, "a later step still goes in parts"


def test_full_datagrams_of_earlier_steps_hide_no_shorter_one_that_never_arrives() -> None:
    fabric = Fabric(5)
    for op in range(3):
        reduce(fabric, op, 2_295)  # full datagrams and shorter ones, acknowledged in both orders
    reduce(fabric, 3, 1_050)  # one short datagram for each peer
    shorten(fabric, 1, "down", 672)
    assert reduce(fabric, 4, 1_050) < 5.0


def test_one_that_is_shortened_in_mid_op_goes_on() -> None:
    fabric = Fabric(3)
    values = gradients(3, 4 * ELEMENTS)
    fabric.all_reduce(0, plan(4 * ELEMENTS), values)
    fabric.run(0.02, until_done=False)
    shorten(fabric, 1, "up", 1400)
    assert fabric.run(6.0)
    must_be_ok(fabric)
    assert same_bits(fabric.result(0, 0), rank_order_sum(values))


def test_whole_trains_that_are_too_long_are_noticed_as_well() -> None:
    fabric = Fabric(2, whole_trains=True)
    reduce(fabric, 0)
    shorten(fabric, 0, "up", 1300)
    assert reduce(fabric, 1) < 5.0


def test_jumbo_datagrams_shrink_to_what_ethernet_carries() -> None:
    fabric = Fabric(2, datagram_bytes=8972)
    reduce(fabric, 0)
    shorten(fabric, 0, "down", 1472)
    assert reduce(fabric, 1) < 5.0
    reduce(fabric, 2)
    assert agreed(fabric, 2) == {1472}


def test_a_lossy_op_goes_on_within_its_bound() -> None:
    fabric = Fabric(3)
    reduce(fabric, 0)
    shorten(fabric, 2, "up", 1200)
    values = gradients(3, ELEMENTS)
    made = plan(ELEMENTS, 0.1, spend="lost", order="shuffled")
    fabric.all_reduce(1, made, values, at=fabric.now)
    began = fabric.now
    assert fabric.run(began + 20.0)
    must_be_ok(fabric, 2)
    assert fabric.now - began < 5.0


def test_a_path_that_is_short_from_the_start_is_met_at_its_length() -> None:
    fabric = Fabric(3, link=replace(NETWORK_A, longest=1352))
    assert reduce(fabric, 0) < 10.0
    reduce(fabric, 1)
    assert agreed(fabric, 1) == {1352}


@pytest.mark.parametrize("longest", [1400, 1000, 700, 300])
@pytest.mark.parametrize("one_way", [False, True])
def test_however_short_it_is_from_the_start_it_is_met_within_seconds(
    longest: int, one_way: bool
) -> None:
    fabric = Fabric(2, seed=longest)
    for direction in ("up",) if one_way else ("up", "down"):
        shorten(fabric, 1, direction, longest)
    assert reduce(fabric, 0, 10_000) < 5.0


@pytest.mark.parametrize("late", [0.2, 0.7, 3.0])
@pytest.mark.parametrize("longest", [1000, 700])
def test_a_late_endpoint_meets_over_a_short_path_as_well(longest: int, late: float) -> None:
    """The other one has found the length by then, or finds it meanwhile, and reports it."""
    fabric = Fabric(2, seed=longest)
    for direction in ("up", "down"):
        shorten(fabric, 1, direction, longest)
    fabric.pause(0)
    fabric.run(late, until_done=False)
    fabric.resume(0)
    assert reduce(fabric, 0, 10_000) < 6.0


def test_a_path_that_carries_too_little_fails_by_its_name() -> None:
    fabric = Fabric(2)
    reduce(fabric, 0)
    shorten(fabric, 1, "up", 100)
    fabric.all_reduce(1, plan(ELEMENTS), gradients(2, ELEMENTS), at=fabric.now, timeout=8.0)
    fabric.run(fabric.now + 60.0)
    for worker in range(2):
        done = fabric.completion(worker, 1)
        assert done is not None
        assert done.error_cause in ("mtu", "silence", "timeout")


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(("size", "longest"), [(1472, 300), (8972, 1472)])
def test_a_path_that_carries_long_datagrams_again_gets_them_within_seconds(
    size: int, longest: int, servers: int
) -> None:
    fabric = Fabric(3, servers=servers, datagram_bytes=size)
    quick = reduce(fabric, 0)
    shorten(fabric, 1, "up", longest)
    reduce(fabric, 1)
    reduce(fabric, 2)
    (known,) = agreed(fabric, 2)
    assert known <= longest
    fabric.set_link(1, "up", NETWORK_A)
    fabric.run(fabric.now + 15.0, until_done=False)
    for host in range(3 + servers):
        assert fabric.counters(host)["path_limit"] == size
    reduce(fabric, 3, datagram_bytes=known)
    assert agreed(fabric, 3) == {size}
    assert reduce(fabric, 4) < 2 * quick


def claim(fabric: Fabric, source: int, destination: int, longest: int) -> None:
    """A forged PING: the path carries datagrams of this length at the most."""
    head = struct.pack("<BBHI", _engine.PROTOCOL_VERSION, 17, source, 1)
    fabric.inject(source, destination, head + struct.pack("<QH", 0, longest))


@pytest.mark.parametrize("busy", [False, True])
def test_a_claim_alone_shortens_no_datagrams(busy: bool) -> None:
    fabric = Fabric(3)
    reduce(fabric, 0)
    values = gradients(3, ELEMENTS)
    if busy:
        fabric.all_reduce(1, plan(ELEMENTS), values, at=fabric.now)
        fabric.run(fabric.now + 0.01, until_done=False)
    claim(fabric, 1, 0, 256)
    fabric.run(fabric.now + 3.0, until_done=False)
    if not busy:
        fabric.all_reduce(1, plan(ELEMENTS), values, at=fabric.now)
        assert fabric.run(fabric.now + 20.0)
    must_be_ok(fabric, 2)
    assert agreed(fabric, 1) == {1472}
    for host in range(3):
        assert fabric.counters(host)["path_limit"] == 1472
        assert fabric.counters(host)["fragmented"] == 0


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(
    ("loss", "burst"), [(0.1, 1.0), (0.4, 1.0), (0.8, 1.0), (0.4, 50.0), (0.8, 50.0), (0.8, 400.0)]
)
def test_loss_alone_never_shortens_datagrams(loss: float, burst: float, servers: int) -> None:
    for seed in range(3):
        lossy = replace(NETWORK_A, loss=loss, loss_burst=burst)
        fabric = Fabric(3, servers=servers, seed=seed)
        reduce(fabric, 0)
        for host in range(3):
            for direction in ("up", "down"):
                fabric.set_link(host, direction, lossy)
        values = gradients(3, ELEMENTS // 4)
        fabric.all_reduce(1, plan(ELEMENTS // 4), values, at=fabric.now, timeout=100.0)
        fabric.run(fabric.now + 100.0)
        for host in range(3 + servers):
            assert fabric.counters(host)["path_limit"] == 1472, (seed, host)


def test_a_pause_of_the_network_never_shortens_datagrams() -> None:
    """All is lost for seconds, and then again nothing."""
    fabric = Fabric(3)
    reduce(fabric, 0)
    values = gradients(3, ELEMENTS)
    fabric.all_reduce(1, plan(ELEMENTS), values, at=fabric.now)
    for loss in (0.999999, 0.0, 0.999999, 0.0):
        for direction in ("up", "down"):
            fabric.set_link(1, direction, Link(loss=loss))
        fabric.run(fabric.now + 4.0, until_done=False)
    must_be_ok(fabric, 2)
    for host in range(3):
        assert fabric.counters(host)["path_limit"] == 1472


def test_a_late_rank_never_shortens_datagrams() -> None:
    """What it refuses until it starts is not acknowledged, and is not lost."""
    fabric = Fabric(3)
    reduce(fabric, 0)
    values = gradients(3, ELEMENTS)
    for worker in range(3):
        late = 10.0 if worker == 2 else 0.0
        fabric.start(worker, 1, plan(ELEMENTS), values[worker], at=fabric.now + late)
    assert fabric.run(fabric.now + 30.0)
    must_be_ok(fabric, 2)
    for host in range(3):
        assert fabric.counters(host)["path_limit"] == 1472
        assert fabric.counters(host)["fragmented"] == 0
