"""Memory of an endpoint: it goes with what arrived and is kept, and stays within the limit."""

import random
import struct
from typing import Any

import pytest

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from packets import OPEN, PROBE, PUSH, in_parts, open_to_server, packet, part, part_bytes
from scenarios import (
    gradients,
    heap_growth,
    must_be_ok,
    plan,
    rank_order_sum,
    resident_bytes,
    same_bits,
)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_what_is_lost_again_and_again_takes_no_more_memory_each_time(direction: str) -> None:
    """Fresh chunks go first, so that something always waits to be sent again."""
    elements = 57 * 20_000
    link = Link(rate=20e6)
    fabric = Fabric(1, servers=1, datagram_bytes=256, link=link)
    fabric.set_link(0, direction, Link(rate=20e6, loss=0.9))
    of = (
        plan(elements, 0.01, spend="lost", pull="none")
        if direction == "up"
        else plan(elements, pull="lossy", pull_bound=0.01)
    )
    fabric.all_reduce(0, of, gradients(1, elements))
    sender = 0 if direction == "up" else 1
    while fabric.counters(sender)["retransmissions"] < 20_000:  # all has gone once
        assert not fabric.run(fabric.now + 0.1)
    grown = heap_growth()
    most = 0
    while not fabric.run(fabric.now + 0.1):
        most = max(most, grown())
    must_be_ok(fabric)
    assert fabric.counters(sender)["retransmissions"] > 100_000
    assert most < 100_000


# ---------------------------------------------------------------------------- what others claim


def met(workers: int, **options: Any) -> Fabric:
    """All have found each other."""
    fabric = Fabric(workers, **options)
    fabric.run(0.1, until_done=False)
    return fabric


def test_a_message_takes_what_has_come_of_it_not_what_it_is_said_to_be() -> None:
    """250 first parts of messages of 4 MiB each, which took a gigabyte."""
    fabric = met(2, servers=1)
    grown = heap_growth()
    for op in range(250):
        fabric.inject(op % 2, 2, packet(OPEN, op % 2, 1 + op // 2, op, 0, part(4 << 20)))
    fabric.run(0.2, until_done=False)
    assert fabric.counters(2)["malformed"] == 0
    assert grown() < 250 * 4096
    assert 250 * part_bytes() < fabric.counters(2)["memory"] < 250 * 4096


def test_an_op_takes_no_memory_before_something_of_it_arrives() -> None:
    """An OPEN of 217 bytes took a gigabyte. It is reserved, and counts, but is not there yet."""
    fabric = met(2, servers=1)
    (only,) = in_parts(open_to_server(1 << 28, [(0, 1 << 28, 0.0)]), source=0, op=0, number=1)
    assert len(only) < 250
    before = resident_bytes()
    fabric.inject(0, 2, only)
    fabric.run(0.2, until_done=False)
    assert fabric.failure(2) == ""
    assert fabric.counters(2)["memory"] > 1 << 30
    assert resident_bytes() - before < 32 << 20


@pytest.mark.parametrize("regions", [1, 20_000])
def test_what_ops_need_is_reserved_within_the_limit_before_it_is_allocated(regions: int) -> None:
    """One after the other comes, and none ends: a few run, the others wait or come again."""
    limit, elements = 64 << 20, 1 << 20
    length = elements // regions
    lengths = [length] * (regions - 1) + [elements - length * (regions - 1)]
    message = open_to_server(elements, [(at * length, n, 0.0) for at, n in enumerate(lengths)])
    fabric = met(2, servers=1, memory_limit=limit)
    grown, number = heap_growth(), 1
    for op in range(100):
        for each in in_parts(message, source=0, op=op, number=number):
            fabric.inject(0, 2, each)
            number += 1
        fabric.run(fabric.now + 1e-5, until_done=False)
        assert fabric.counters(2)["memory"] <= limit
        assert grown() < limit + (4 << 20)
    assert fabric.failure(2) == ""
    assert fabric.counters(2)["memory"] > limit / 4


@pytest.mark.parametrize("servers", [0, 1])
def test_no_flood_of_datagrams_takes_more_than_the_limit(servers: int) -> None:
    """Every kind, of ops that have not started, in the names of two workers: 60 MB of them."""
    limit = 4 << 20
    fabric = met(3, servers=servers, memory_limit=limit)
    target = 3 if servers else 0
    noise = random.Random(1)
    grown = heap_growth()
    for number in range(1, 20_001):
        for source in (1, 2):
            op, chunk = noise.randrange(2000), noise.randrange(100)
            payload = part(noise.choice([part_bytes(), 1 << 16, 4 << 20]))
            each = packet(noise.randint(1, 11), source, number, op, chunk, payload)
            fabric.inject(source, target, each)
        if number % 100 == 0:
            fabric.run(fabric.now + 1e-5, until_done=False)
            assert fabric.counters(target)["memory"] <= limit
            assert grown() < limit + (2 << 20)
    assert fabric.counters(target)["memory"] > limit / 16


@pytest.mark.parametrize("servers", [0, 1])
def test_what_is_held_of_later_ops_never_keeps_the_next_one_out(servers: int) -> None:
    """The memory that there is for them is full of forged packets of ops to come."""
    elements, ops = 200_000, 3
    of = plan(elements)
    limit = _engine.least_memory_limit(of, 1472, 3, servers)
    fabric = met(3, servers=servers, memory_limit=limit)
    target = 3 if servers else 0
    for number in range(1, 2001):
        for source in (1, 2):
            kind, op = (PUSH, 900) if number % 2 else (OPEN, 10 + number % 900)
            each = packet(kind, source, number, op, 5, part(1 << 20))
            fabric.inject(source, target, each)
    fabric.run(0.2, until_done=False)
    assert fabric.counters(target)["refused"] > 1000
    for op in range(ops):
        fabric.all_reduce(op, of, gradients(3, elements, op), at=0.2)
    while not fabric.run(fabric.now + 1e-3):
        assert fabric.now < 60
        assert fabric.counters(target)["memory"] <= limit
    must_be_ok(fabric, ops)


def test_answers_to_probes_that_nobody_takes_do_not_pile_up() -> None:
    """Each PROBE asks for a bitmap of 4 kB, and is a packet of 36 bytes."""
    elements = 12_000_000
    message = open_to_server(elements, [(0, elements, 0.0)], control="probe")
    fabric = met(2, servers=1)
    fabric.inject(0, 2, in_parts(message, source=0, op=0, number=1)[0])
    fabric.set_link(0, "down", Link(loss=0.999))
    fabric.run(0.2, until_done=False)
    assert fabric.counters(2)["memory"] > 4 * elements
    grown = heap_growth()
    for asked in range(1, 20_001):
        probe = struct.pack("<II", 0, asked)
        fabric.inject(0, 2, packet(PROBE, 0, 1 + asked, 0, 0, probe))
        if asked % 100 == 0:
            fabric.run(fabric.now + 1e-5, until_done=False)
    assert fabric.failure(2) == ""
    assert fabric.counters(2)["malformed"] == 0
    assert grown() < 8 << 20


# ---------------------------------------------------------------------------- what ops need


@pytest.mark.parametrize("servers", [0, 1])
def test_an_op_that_does_not_fit_is_an_error_everywhere(servers: int) -> None:
    of = plan(200_000)
    least = _engine.least_memory_limit(of, 1472, 3, servers)
    for limit in (1000, least - 8):
        fabric = Fabric(3, servers=servers, memory_limit=limit)
        fabric.all_reduce(0, of, gradients(3, 200_000), step=5)
        assert fabric.run(5.0)
        for worker in range(3):
            done = fabric.completion(worker, 0)
            assert done.error_cause == "memory"
            assert (done.error_rank == 3) if servers else (done.error_rank in range(3))
            assert f"memory_limit={limit} " in done.error
    fabric = Fabric(3, servers=servers, memory_limit=least)
    fabric.all_reduce(0, of, gradients(3, 200_000))
    fabric.run()
    must_be_ok(fabric)


def test_a_plan_that_does_not_even_fit_by_itself_is_an_error_everywhere() -> None:
    """The OPENs of 20,000 regions, 320 kB each, at a server of 200 kB."""
    regions = [(at * 10, 10, 0.0) for at in range(20_000)]
    of = _engine.Plan(elements=200_000, regions=regions)
    fabric = Fabric(3, servers=1, memory_limit=200_000)
    fabric.all_reduce(0, of, gradients(3, 200_000))
    assert fabric.run(5.0)
    for worker in range(3):
        done = fabric.completion(worker, 0)
        assert (done.error_rank, done.error_cause) == (3, "memory")
        assert "memory_limit=200000 " in done.error


@pytest.mark.parametrize("servers", [0, 1])
def test_ops_that_do_not_fit_together_go_one_after_the_other(servers: int) -> None:
    elements, ops = 100_000, 12
    of = plan(elements)
    limit = int(2.5 * _engine.least_memory_limit(of, 1472, 4, servers))
    fabric = Fabric(4, servers=servers, memory_limit=limit, link=Link(loss=0.01), seed=2)
    jobs = [gradients(4, elements, op) for op in range(ops)]
    for op, values in enumerate(jobs):
        fabric.all_reduce(op, of, values)
    most = 0.0
    while not fabric.run(fabric.now + 1e-3):
        most = max(most, *(fabric.counters(host)["memory"] for host in range(4 + servers)))
    must_be_ok(fabric, ops)
    assert limit / 2 < most <= limit
    for op, values in enumerate(jobs):
        assert same_bits(fabric.result(1, op), rank_order_sum(values))


def test_ops_that_wait_for_memory_end_with_the_engine() -> None:
    of = plan(100_000)
    fabric = Fabric(2, memory_limit=_engine.least_memory_limit(of, 1472, 2))
    for op in range(4):
        fabric.start(0, op, of, gradients(1, 100_000)[0], step=op)
    fabric.run(0.05)
    fabric.close(0)
    fabric.run(1.0)
    for op in range(4):
        done = fabric.completion(0, op)
        assert done.error_cause == "closed"
        assert f"step {op}" in done.error


def test_ops_that_wait_for_memory_fail_with_a_peer() -> None:
    of = plan(100_000)
    limit = _engine.least_memory_limit(of, 1472, 3)
    fabric = Fabric(3, memory_limit=limit, peer_timeout=2.0, ping_interval=0.2)
    for op in range(4):
        fabric.all_reduce(op, of, gradients(3, 100_000), at=[0.0, 0.0, 50.0])
    fabric.run(0.05)
    fabric.kill(2)
    fabric.run(10.0)
    for worker in (0, 1):
        for op in range(4):
            done = fabric.completion(worker, op)
            assert (done.error_rank, done.error_cause) == (2, "silence")


@pytest.mark.parametrize("workers", [2, 64])
@pytest.mark.parametrize("datagram_bytes", [256, 1472, 8972])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoding": "int8"},
        {"encoding": "topk", "kept": 0.01, "spend": "lost"},
        {"spend": "anything", "pull": "committed", "pull_bound": 0.1},
        {"pull": "lossy", "pull_bound": 0.1, "control": "probe"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("regions", [1, 5000])
def test_what_is_reserved_for_an_op_is_enough_for_it(
    options: dict[str, Any], regions: int, datagram_bytes: int, workers: int
) -> None:
    """At a server that has heard one OPEN: what is allocated then; messages come on top."""
    elements = 2_000_000
    length = elements // regions
    bounds = [(at * length, length, 0.1) for at in range(regions)]
    message = open_to_server(elements, bounds, **options)
    fabric = met(workers, servers=1, datagram_bytes=datagram_bytes)
    grown = heap_growth()
    for each in in_parts(message, source=0, op=0, number=1, datagram_bytes=datagram_bytes):
        fabric.inject(0, workers, each)
    fabric.run(0.2, until_done=False)
    assert fabric.failure(workers) == ""
    reserved = fabric.counters(workers)["memory"]
    assert 4 * elements < grown() <= reserved
    assert reserved < 3 * 4 * elements + workers * (2 * len(message) + elements / 4)
