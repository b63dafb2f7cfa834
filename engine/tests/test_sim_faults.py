"""Dead, frozen, foreign and hostile peers: a clear error in bounded time, or no effect at all."""

import random
import re
import struct

import numpy as np
import pytest

from gradwire import _engine
from gradwire.sim.fabric import Direction, Fabric, Link
from packets import HEADER, LANES, PUSH, SESSION, ack, packet
from scenarios import gradients, must_be_ok, plan, random_job, rank_order_sum, same_bits

VERSION = _engine.PROTOCOL_VERSION
ERROR = 19
TIMEOUT = 2.0
MEGA = 1_000_000  # elements: the better part of a tenth of a second


def errors(fabric: Fabric, op: int = 0, but: int = -1) -> list[str]:
    found = []
    for worker in range(fabric.workers):
        if worker == but:
            continue
        done = fabric.completion(worker, op)
        assert done is not None, f"rank {worker} still waits at {fabric.now:.3f} s"
        found.append(done.error)
    return found


def fault(what: str, host: int, servers: int = 0) -> tuple[Fabric, float]:
    fabric = Fabric(4, servers=servers, peer_timeout=TIMEOUT, ping_interval=0.2)
    fabric.all_reduce(0, plan(MEGA), gradients(4, MEGA))
    assert not fabric.run(0.02)
    getattr(fabric, what)(host)
    fabric.run(30.0)
    return fabric, 0.02


@pytest.mark.parametrize("what", ["kill", "pause"])
@pytest.mark.parametrize("servers", [0, 1])
def test_a_silent_rank_is_named_within_the_time(what: str, servers: int) -> None:
    fabric, when = fault(what, 2, servers)
    for worker, error in zip((0, 1, 3), errors(fabric, but=2), strict=True):
        assert "rank 2" in error
        assert "step 0" in error
        assert fabric.completion(worker, 0).error_rank == 2
        assert fabric.finished_at(worker, 0) - when < 1.5 * TIMEOUT
        assert "rank 2" in fabric.failure(worker)


def test_who_fails_tells_the_others_at_once() -> None:
    """Two that are cut off from each other; whom the others hear of both, and seldom by pings."""
    fabric = Fabric(4, peer_timeout=20.0, ping_interval=8.0)
    fabric.all_reduce(0, plan(MEGA), gradients(4, MEGA))
    fabric.run(0.02)
    fabric.partition(0, 2)
    fabric.run(60.0)
    first = min(fabric.finished_at(worker, 0) for worker in range(4))
    causes = [fabric.completion(worker, 0).error_cause for worker in range(4)]
    assert causes == ["silence"] * 4
    assert all(fabric.finished_at(worker, 0) - first < 0.2 for worker in range(4))


@pytest.mark.parametrize("direction", ["down", "up"])
def test_a_host_that_is_cut_off_is_named_itself(direction: Direction) -> None:
    """Where it hears none of its peers, they are not to blame, whoever was silent first."""
    fabric = Fabric(3, peer_timeout=TIMEOUT, ping_interval=0.2)
    fabric.all_reduce(0, plan(MEGA), gradients(3, MEGA))
    fabric.run(0.02)
    fabric.set_link(1, direction, Link(loss=0.999999))
    fabric.run(30.0)
    for worker in range(3):
        done = fabric.completion(worker, 0)
        assert (done.error_rank, done.error_cause) == (1, "silence"), done.error


@pytest.mark.parametrize("seed", range(20))
def test_a_host_that_is_cut_off_under_loss_blames_no_other(seed: int) -> None:
    """It heard some of the others last more than a second before it was cut off."""
    link = Link(delay=1e-3, loss=0.2)
    fabric = Fabric(4, link=link, peer_timeout=4.0, ping_interval=0.8, seed=seed)
    fabric.run(5.0, until_done=False)
    for peer in range(3):
        fabric.partition(3, peer)
    fabric.all_reduce(0, plan(10), gradients(4, 10), at=fabric.now)
    fabric.run(30.0)
    done = fabric.completion(3, 0)
    assert (done.error_rank, done.error_cause) == (3, "silence"), f"seed {seed}: {done.error}"


def test_of_two_that_do_not_hear_each_other_nobody_is_blamed() -> None:
    fabric = Fabric(2, peer_timeout=TIMEOUT, ping_interval=0.2)
    fabric.all_reduce(0, plan(MEGA), gradients(2, MEGA))
    fabric.run(0.02)
    fabric.partition(0, 1)
    fabric.run(30.0)
    for worker in range(2):
        done = fabric.completion(worker, 0)
        assert (done.error_rank, done.error_cause) == (-1, "silence")
        assert f"rank {worker} has heard nothing of rank {1 - worker}" in done.error


def test_all_that_fall_silent_together_are_named() -> None:
    """As the ranks of a host that dies."""
    fabric = Fabric(5, peer_timeout=TIMEOUT, ping_interval=0.2)
    fabric.all_reduce(0, plan(MEGA), gradients(5, MEGA))
    fabric.run(0.02)
    for host in (3, 4):
        fabric.kill(host)
    fabric.run(30.0)
    for worker in range(3):
        done = fabric.completion(worker, 0)
        assert done.error_rank == 3
        assert "rank 3, rank 4" in done.error


@pytest.mark.parametrize("servers", [0, 1])
def test_who_said_goodbye_is_not_missed_beside_the_dead(servers: int) -> None:
    """A peer that left in order is silent as well, but says nothing about the others' network."""
    fabric = Fabric(3, servers=servers, peer_timeout=TIMEOUT, ping_interval=0.2)
    fabric.all_reduce(0, plan(1000), gradients(3, 1000))
    fabric.run()
    must_be_ok(fabric)
    gone = (0, 1) if servers else (1,)
    for rank in gone:
        fabric.close(rank)
    fabric.run(fabric.now + 1.0, until_done=False)
    for host in (*gone, 2):
        fabric.kill(host)
    fabric.run(fabric.now + 3 * TIMEOUT, until_done=False)
    assert "has heard nothing of rank 2" in fabric.failure(3 if servers else 0)


@pytest.mark.parametrize("elements", [10, MEGA])
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_has_not_begun_is_named_at_the_time_out(elements: int, absent: int) -> None:
    """Also by those that wait for an aggregator which waits for it, and could not know otherwise:
    of ten elements rank 0 is the only aggregator."""
    fabric = Fabric(4)
    values = gradients(4, elements)
    for worker in range(4):
        if worker != absent:
            fabric.start(worker, 0, plan(elements), values[worker], step=7, timeout=3.0)
    fabric.run(10.0)
    for worker in range(4):
        if worker == absent:
            continue
        done = fabric.completion(worker, 0)
        assert (done.error_rank, done.error_cause, done.step) == (absent, "timeout", 7)
        assert f"rank {absent} has not begun it and was last heard" in done.error
        assert "timeout=3" in done.error


def test_a_dead_server_is_named() -> None:
    fabric, _ = fault("kill", 4, servers=1)
    assert all("server 0" in error for error in errors(fabric))


def test_a_failed_endpoint_refuses_what_comes_later_and_says_why() -> None:
    fabric, _ = fault("kill", 2)
    fabric.start(0, 1, plan(10), gradients(1, 10)[0], at=fabric.now)
    fabric.run(40.0)
    assert "rank 2" in fabric.completion(0, 1).error


def test_a_short_freeze_is_no_failure() -> None:
    fabric = Fabric(4, peer_timeout=TIMEOUT, ping_interval=0.2)
    values = gradients(4, MEGA)
    fabric.all_reduce(0, plan(MEGA), values)
    fabric.run(0.02)
    fabric.pause(1)
    fabric.run(0.02 + 0.7 * TIMEOUT)
    fabric.resume(1)
    assert fabric.run(30.0)
    must_be_ok(fabric)
    assert same_bits(fabric.result(1, 0), rank_order_sum(values))


def test_a_rank_that_was_frozen_for_long_learns_why_it_is_alone() -> None:
    fabric, _ = fault("pause", 2)
    fabric.resume(2)
    fabric.run(fabric.now + 10.0)
    assert fabric.completion(2, 0).error
    assert fabric.failure(2)


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_a_cut_that_heals_in_time_is_no_failure(seconds: float) -> None:
    fabric = Fabric(3, peer_timeout=TIMEOUT, ping_interval=0.2)
    values = gradients(3, MEGA)
    fabric.all_reduce(0, plan(MEGA), values)
    fabric.run(0.02)
    fabric.partition(0, 1)
    fabric.run(0.02 + seconds)
    fabric.heal(0, 1)
    assert fabric.run(30.0)
    must_be_ok(fabric)
    assert same_bits(fabric.result(1, 0), rank_order_sum(values))


def test_a_cut_that_stays_is_an_error_at_all_ranks() -> None:
    fabric = Fabric(3, peer_timeout=TIMEOUT, ping_interval=0.2)
    fabric.all_reduce(0, plan(MEGA), gradients(3, MEGA))
    fabric.run(0.02)
    fabric.partition(0, 1)
    fabric.run(30.0)
    assert all(re.search("rank [01]", error) for error in errors(fabric))


def test_one_rank_may_take_ten_minutes_longer() -> None:
    """Rank 0 validates, the others wait: they are alive, so this is no error."""
    fabric = Fabric(4)
    values = gradients(4, 10_000)
    fabric.all_reduce(0, plan(10_000), values, at=[600.0, 0.0, 0.0, 0.0])
    assert fabric.run(700.0)
    must_be_ok(fabric)
    assert same_bits(fabric.result(3, 0), rank_order_sum(values))


def test_a_live_rank_that_does_not_take_part_is_named_at_the_op_s_time_out() -> None:
    fabric = Fabric(3)
    for worker in (0, 1):
        fabric.start(worker, 0, plan(5000), gradients(1, 5000)[0], step=7, timeout=5.0)
    fabric.run(60.0)
    for worker in (0, 1):
        done = fabric.completion(worker, 0)
        assert "rank 2" in done.error
        assert "step 7" in done.error
        assert fabric.finished_at(worker, 0) == pytest.approx(5.0, abs=0.1)


def test_the_longest_time_out_that_can_be_said_does_not_lie_in_the_past() -> None:
    fabric = Fabric(2)
    fabric.run(1.0, until_done=False)
    fabric.all_reduce(0, plan(5000), gradients(2, 5000), timeout=9_223_372_036.0, at=1.0)
    fabric.run()
    must_be_ok(fabric)


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("difference", ["bound", "seed", "elements", "step"])
def test_another_plan_is_an_error_that_names_both(difference: str, servers: int) -> None:
    fabric = Fabric(3, servers=servers)
    for worker in range(3):
        other = worker == 2
        elements = 5001 if other and difference == "elements" else 5000
        made = plan(
            elements,
            0.2 if other and difference == "bound" else 0.1,
            spend="lost",
            seed=1 if other and difference == "seed" else 0,
        )
        step = 9 if other and difference == "step" else 8
        fabric.start(worker, 0, made, gradients(1, elements)[0], step=step)
    fabric.run(60.0)
    found = errors(fabric)
    assert all(found)
    assert fabric.now < 5.0
    assert any("rank 2" in error and ("plan" in error or "step" in error) for error in found)


@pytest.mark.parametrize("version", [VERSION - 1, 99])
def test_another_protocol_version_is_an_error_that_names_both(version: int) -> None:
    fabric = Fabric(3)
    fabric.all_reduce(0, plan(MEGA), gradients(3, MEGA))
    fabric.inject(2, 0, struct.pack("<BBHI", version, 17, 2, 1) + bytes(8))
    fabric.run(30.0)
    for worker, error in enumerate(errors(fabric)):
        done = fabric.completion(worker, 0)
        assert (done.error_rank, done.error_cause) == (2, "version")
        assert f"version {version}" in error
        assert f"speaks {VERSION}" in error


@pytest.mark.parametrize("version", [VERSION - 1, 99])
def test_a_datagram_of_another_version_is_dropped_once_the_peer_has_been_heard(
    version: int,
) -> None:
    fabric = Fabric(3)
    values = gradients(3, MEGA)
    fabric.all_reduce(0, plan(MEGA), values)
    fabric.run(0.02)
    before = fabric.counters(0)["malformed"]
    for kind in range(21):
        fabric.inject(2, 0, struct.pack("<BBHI", version, kind, 2, 1) + bytes(40))
    fabric.run()
    must_be_ok(fabric)
    assert fabric.counters(0)["malformed"] - before == 21
    assert same_bits(fabric.result(0, 0), rank_order_sum(values))


def test_an_error_is_no_longer_than_a_datagram_before_its_peer_is_met() -> None:
    """Each that hears of it puts a name before the text."""
    fabric = Fabric(3, datagram_bytes=256)
    fabric.all_reduce(0, plan(1000), gradients(3, 1000))
    text = b"x" * 235
    fabric.inject(2, 0, struct.pack("<BBHIiB", VERSION, ERROR, 2, 1, 2, 1) + text)
    fabric.run(1.0)  # the fabric checks each train
    assert all(error and "xxx" in error for error in errors(fabric))


def test_a_goodbye_in_mid_step_is_an_error_at_once() -> None:
    fabric = Fabric(3)
    fabric.all_reduce(0, plan(MEGA), gradients(3, MEGA))
    fabric.run(0.02)
    fabric.close(1)
    fabric.run(30.0)
    found = errors(fabric)
    assert "rank 1" in found[0]
    assert "rank 1" in found[2]
    assert "closed" in found[1]
    assert fabric.now < 3.0


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("loss", [0.0, 0.2])
def test_all_say_goodbye_once_all_is_done(servers: int, loss: float) -> None:
    fabric = Fabric(4, servers=servers, link=Link(loss=loss), seed=4)
    fabric.all_reduce(0, plan(20_000), gradients(4, 20_000))
    fabric.run()
    must_be_ok(fabric)
    done = fabric.now
    for worker in range(4):
        fabric.close(worker)
    fabric.run(done + 2.5, until_done=False)
    for worker in range(4):
        assert fabric.closed(worker)
        assert fabric.failure(worker) == ""
    if servers:
        fabric.close(4)
        fabric.run(done + 5.0, until_done=False)
        assert fabric.closed(4)


def test_closing_early_does_not_rob_the_others_of_results() -> None:
    """The first to finish says goodbye while others still wait for what it aggregated."""
    fabric = Fabric(4, link=Link(loss=0.2), seed=7)
    fabric.set_link(3, "down", Link(rate=2e6, loss=0.2))
    fabric.all_reduce(0, plan(20_000), gradients(4, 20_000))
    closed: set[int] = set()
    while not fabric.run(fabric.now + 1e-3) and fabric.now < 60:
        for worker in range(4):
            if worker not in closed and fabric.completion(worker, 0) is not None:
                closed.add(worker)
                fabric.close(worker, linger=10.0)
    must_be_ok(fabric)


def leave_when_done(fabric: Fabric, linger: float, until: float = 60.0) -> None:
    """Who has its results leaves, and its process ends with the engine."""
    left: set[int] = set()
    while not fabric.run(fabric.now + 1e-2, until_done=False) and fabric.now < until:
        for worker in range(fabric.workers):
            if worker not in left and fabric.completion(worker, 0) is not None:
                left.add(worker)
                fabric.close(worker, linger=linger)
            if worker in left and fabric.closed(worker):
                fabric.kill(worker)
        if len(left) == fabric.workers:
            return


def test_who_takes_results_slowly_gets_them_from_those_that_leave() -> None:
    """Who stay for a tenth of a second without need, but rank 3 needs half of one."""
    elements = 143_200
    fabric = Fabric(4)
    fabric.run(0.5, until_done=False)  # they meet
    fabric.set_link(3, "down", Link(rate=300e3))
    fabric.all_reduce(0, plan(elements), gradients(4, elements))
    leave_when_done(fabric, linger=0.1)
    fabric.run(60.0)
    must_be_ok(fabric)
    assert fabric.finished_at(3, 0) - fabric.finished_at(0, 0) > 0.3


@pytest.mark.parametrize("heard", [True, False])
def test_who_leaves_stays_for_a_peer_that_lives_and_cannot_take_results(heard: bool) -> None:
    """Rank 1 hears nothing for longer than the others would stay without need.

    Where it is not heard either, it counts as living for as long as in mid-step.
    """
    fabric = Fabric(3, link=Link(delay=1e-3), peer_timeout=5.0, ping_interval=0.2, trace=10_000)
    fabric.all_reduce(0, plan(3 * 358), gradients(3, 3 * 358))
    while not any(each.source == 1 and each.kind == "pull" for each in fabric.trace()):
        fabric.run(fabric.now + 1e-4, until_done=False)
    for worker in (0, 2):
        fabric.cut(worker, 1)
    while not all(fabric.completion(worker, 0) for worker in (0, 2)):
        fabric.run(fabric.now + 1e-4, until_done=False)
    for worker in (0, 2):
        fabric.cut(1, worker, not heard)
    leaves = fabric.now
    for worker in (0, 2):
        fabric.close(worker, linger=0.1)
    fabric.run(leaves + 2.0, until_done=False)
    assert not fabric.closed(0)
    assert not fabric.closed(2)
    for worker in (0, 2):
        fabric.cut(worker, 1, False)
        fabric.cut(1, worker, False)
    assert fabric.run(leaves + 4.0)
    must_be_ok(fabric)
    fabric.close(1)
    fabric.run(leaves + 5.0, until_done=False)
    assert all(fabric.closed(worker) for worker in range(3))


def test_who_leaves_ends_the_job_of_nobody_who_stays() -> None:
    """Rank 1 has left as well, unheard by rank 0, which still waits for a word of rank 2."""
    fabric = Fabric(3, peer_timeout=1.0, ping_interval=0.2)
    fabric.all_reduce(0, plan(20_000), gradients(3, 20_000))
    fabric.run(0.5)
    leaves = fabric.now
    fabric.cut(2, 0)
    fabric.close(0, linger=3.0)
    fabric.run(leaves + 0.02, until_done=False)
    fabric.cut(1, 0)
    fabric.close(1, linger=3.0)
    fabric.run(leaves + 0.3, until_done=False)
    fabric.kill(1)
    fabric.run(leaves + 1.5, until_done=False)
    assert [fabric.failure(host) for host in (0, 2)] == ["", ""]
    fabric.cut(2, 0, False)
    fabric.run(leaves + 3.0, until_done=False)
    assert fabric.closed(0)
    assert fabric.failure(2) == ""


def test_a_failure_is_told_until_it_is_heard() -> None:
    """Rank 0 has failed, and its ERRORs are lost; rank 1 hears it again, and cannot be heard."""
    fabric = Fabric(2, peer_timeout=1.0, ping_interval=0.2)
    fabric.all_reduce(0, plan(20_000), gradients(2, 20_000))
    fabric.run(0.5)
    fabric.cut(1, 0)
    cut = fabric.now
    fabric.run(cut + 0.7, until_done=False)
    fabric.cut(0, 1)
    fabric.run(cut + 1.4, until_done=False)
    assert fabric.failure(0)
    assert not fabric.failure(1)
    fabric.cut(0, 1, False)
    fabric.run(cut + 1.7, until_done=False)
    assert "rank 0 reports" in fabric.failure(1)


def test_results_that_went_away_with_a_peer_are_missed_within_the_time() -> None:
    """The goodbyes get through, the results that went before them did not."""
    fabric = Fabric(4, peer_timeout=5.0)
    fabric.run(0.5, until_done=False)
    fabric.set_link(1, "down", Link(loss=0.999))
    fabric.all_reduce(0, plan(3 * 358), gradients(4, 3 * 358))
    others = (0, 2, 3)
    while not all(fabric.completion(worker, 0) for worker in others):
        fabric.run(fabric.now + 1e-4, until_done=False)
    fabric.set_link(1, "down", Link())
    for worker in others:
        fabric.close(worker, linger=5e-4)
    fabric.run(fabric.now + 5e-4, until_done=False)
    for worker in others:
        fabric.kill(worker)
    fabric.run(60.0)
    done = fabric.completion(1, 0)
    assert done is not None, "rank 1 still waits"
    assert done.error_cause == "left"
    assert done.error_rank in others
    assert "step 0 still needs results of it" in done.error


@pytest.mark.parametrize("seed", range(6))
def test_a_pull_in_passes_ends_although_the_aggregators_have_left(seed: int) -> None:
    """They stay until all is there, so their PROBEs need answers."""
    elements = 60_000
    fabric = Fabric(4, link=Link(delay=0.005), seed=seed)
    fabric.set_link(3, "down", Link(delay=0.005, loss=0.5))
    schedule = (("open", "worker", 0, -1.0),)
    passes = {"control": "probe", "pull": "lossy", "pull_bound": 0.05}
    of = plan(elements, 0.2, spend="anything", schedule=schedule, **passes)
    fabric.all_reduce(0, of, gradients(4, elements))
    leave_when_done(fabric, linger=10.0)
    must_be_ok(fabric)


def test_heavy_loss_is_not_death_where_the_time_out_is_short() -> None:
    """Seldom pings, at the ratio to the time-out that a real engine has."""
    for seed in range(4):
        fabric = Fabric(2, peer_timeout=2.0, ping_interval=0.4, seed=seed)
        fabric.all_reduce(0, plan(1_000), gradients(2, 1_000))
        assert fabric.run(10.0)
        for host in range(2):
            for direction in ("up", "down"):
                fabric.set_link(host, direction, Link(loss=0.45))
        fabric.run(fabric.now + 60.0, until_done=False)
        assert [fabric.failure(host) for host in range(2)] == ["", ""], f"seed {seed}"


def byes(fabric: Fabric, source: int) -> int:
    return sum(each.kind == "bye" and each.source == source for each in fabric.trace())


@pytest.mark.parametrize("servers", [0, 1])
def test_a_goodbye_is_repeated_until_it_is_heard(servers: int) -> None:
    """Rank 3 stays, with the server: nobody that has left is dead to them."""
    for seed in range(12):
        link = Link(loss=1 - 0.2**0.5)  # there and back: four out of five
        fabric = Fabric(4, servers=servers, link=link, seed=seed)
        fabric.all_reduce(0, plan(20_000), gradients(4, 20_000))
        fabric.run()
        must_be_ok(fabric)
        for worker in range(3):
            fabric.close(worker)
        while not all(fabric.closed(worker) for worker in range(3)):
            fabric.run(fabric.now + 0.01, until_done=False)
        for worker in range(3):
            fabric.kill(worker)  # its socket is gone
        fabric.run(fabric.now + 60.0, until_done=False)
        assert [fabric.failure(host) for host in range(3, 4 + servers)] == [""] * (1 + servers)


def test_leaving_takes_a_round_trip_and_an_answer_from_each() -> None:
    fabric = Fabric(4, trace=100_000)
    fabric.all_reduce(0, plan(20_000), gradients(4, 20_000))
    fabric.run()
    start = fabric.now
    fabric.close(0)
    fabric.run(start + 200e-6, until_done=False)
    assert fabric.closed(0)
    assert [byes(fabric, host) for host in range(4)] == [3, 1, 1, 1]
    for worker in (1, 2, 3):
        fabric.close(worker)
    fabric.run(start + 400e-6, until_done=False)
    assert all(fabric.closed(worker) for worker in range(4))
    assert sum(byes(fabric, host) for host in range(4)) < 30


def test_goodbyes_that_come_twice_call_forth_no_storm() -> None:
    """One leaves, one stays, and the third is dead, so that the first lingers to the end."""
    fabric = Fabric(3, link=Link(duplicate=0.9), trace=100_000, ping_interval=10.0)
    fabric.all_reduce(0, plan(20_000), gradients(3, 20_000))
    fabric.run()
    fabric.kill(2)
    start = fabric.now
    fabric.close(0, linger=2.0)
    fabric.run(start + 1.99, until_done=False)
    assert not fabric.closed(0)
    fabric.run(start + 2.01, until_done=False)
    assert fabric.closed(0)
    assert byes(fabric, 0) < 2.0 / 0.04 + 10
    assert byes(fabric, 1) < 5


# ---------------------------------------------------------------------------- hostile datagrams


@pytest.mark.parametrize("servers", [0, 1])
def test_garbage_changes_nothing(servers: int) -> None:
    """Cut short, too long, of another session or version, in another's name, or noise."""
    for seed in range(20):
        link = Link(garbage=0.3, loss=0.02)
        fabric = Fabric(3, servers=servers, link=link, seed=seed)
        values = gradients(3, 5000, seed)
        fabric.all_reduce(0, plan(5000), values)
        fabric.run()
        must_be_ok(fabric)
        assert same_bits(fabric.result(0, 0), rank_order_sum(values))
        assert sum(fabric.counters(host)["malformed"] for host in range(3)) > 0


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("values", [0, 1, 100, 360, 362])
def test_chunks_of_another_length_change_nothing(kind: int, values: int) -> None:
    """Pushes and results that are well-formed but for the number of their values."""
    fabric = Fabric(2)
    tensors = gradients(2, 200_000)
    fabric.all_reduce(0, plan(200_000), tensors)
    fabric.run(0.5e-3)
    chunks = range(200, 250) if kind == 1 else range(500, 550)
    for number, chunk in enumerate(chunks, 300):
        header = struct.pack("<BBHIIIIIHH", VERSION, kind, 1, 1, number, 0, 0, chunk, 9, 0)
        fabric.inject(1, 0, header + struct.pack("<f", 7.0) * values)
    fabric.run()
    must_be_ok(fabric)
    assert fabric.counters(0)["malformed"] == len(chunks)


@pytest.mark.parametrize(
    "field",
    [
        {"largest": 2**30},  # never sent
        {"largest": 0, "delay_us": 2**32 - 1},
        {"largest": 0, "queue_us": 2**31},
        {"largest": 0, "share": 1},  # bytes: no packet would ever fit
    ],
)
def test_an_absurd_ack_is_dropped_and_counted(field: dict[str, int]) -> None:
    fabric = Fabric(3, link=Link(delay=5e-3))  # paths so long that shares hold them back
    values = gradients(3, 200_000)
    fabric.all_reduce(0, plan(200_000), values)
    for step in range(20):
        fabric.run(step * 1e-3)
        fabric.inject(1, 0, ack(1, **field))
    fabric.run(3.0)
    must_be_ok(fabric)
    assert fabric.counters(0)["malformed"] == 20
    assert same_bits(fabric.result(0, 0), rank_order_sum(values))


@pytest.mark.parametrize("name", [0, 2, 7])
def test_nobody_speaks_in_another_s_name(name: int) -> None:
    """Well-formed pushes, results and goodbyes from rank 1's address, as if from rank `name`."""
    fabric = Fabric(3)
    values = gradients(3, 200_000)
    fabric.all_reduce(0, plan(200_000), values)
    fabric.run(0.5e-3)
    for chunk in range(150, 550):
        for kind in (1, 2):
            packet = 2 * chunk + kind
            header = struct.pack("<BBHIIIIIHH", VERSION, kind, name, 1, packet, 0, 0, chunk, 9, 0)
            fabric.inject(1, 0, header + struct.pack("<f", 7.0) * 358)
    fabric.inject(1, 0, struct.pack("<BBHI", VERSION, 20, name, 1) + bytes(8))
    fabric.inject(1, 0, struct.pack("<BBHIi", VERSION, 19, name, 1, 0) + b"done for")
    fabric.run()
    must_be_ok(fabric)
    assert fabric.counters(0)["malformed"] == 802
    assert same_bits(fabric.result(0, 0), rank_order_sum(values))


def test_datagrams_of_any_length_and_kind_from_strangers_change_nothing() -> None:
    """The same with every kind of packet, from nothing to the longest, but of another session."""
    fabric = Fabric(2)
    values = gradients(2, 50_000)
    fabric.all_reduce(0, plan(50_000), values)
    noise = random.Random(1)
    for number in range(2000):
        head = struct.pack("<BBHI", VERSION, noise.randrange(256), 1, 77)
        fabric.inject(1, 0, (head + noise.randbytes(noise.randrange(9000)))[: number * 5])
    fabric.run()
    must_be_ok(fabric)
    assert same_bits(fabric.result(0, 0), rank_order_sum(values))


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_flipped_bits_crash_and_hang_nobody(first: int) -> None:
    """As if no checksum were there: whatever comes of it, each op ends and says how."""
    for seed in range(first, first + 50):
        job = random_job(seed)
        job.link = Link(loss=0.01, flip=0.02)
        fabric = job.fabric(peer_timeout=5.0)
        for number, op in enumerate(job.ops):
            fabric.all_reduce(number, job.plan, **op, timeout=20.0)
        assert fabric.run(200.0), f"seed {seed} does not end"


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_forged_packets_crash_and_hang_nobody(first: int) -> None:
    """Right session, right name, every kind, any content: without a key these are believed."""
    for seed in range(first, first + 50):
        noise = random.Random(seed)
        # The least chance of a flipped bit: the fabric then takes no value for wrong.
        link = Link(flip=1e-12)
        fabric = Fabric(3, servers=seed % 2, link=link, peer_timeout=5.0, seed=seed)
        for op in range(2):
            fabric.all_reduce(op, plan(3000, 0.3, spend="lost"), gradients(3, 3000), timeout=20.0)
        hosts = fabric.workers + fabric.servers
        for moment in range(40):
            source, destination = noise.sample(range(hosts), 2)
            kind = noise.choice([1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 18])
            head = struct.pack("<BBHI", VERSION, kind, source, 1)
            small = noise.choice([4, 1 << 16, 1 << 32])
            body = struct.pack("<IIIIHH", noise.randrange(100), 0, noise.randrange(3),
                               noise.randrange(small), noise.randrange(1 << 16), 0)  # fmt: skip
            tail = bytes(noise.choice([0, 1, 255, noise.randrange(256)]) for _ in range(4)) * 400
            fabric.inject(source, destination, (head + body + tail)[: noise.randrange(8, 1472)])
            fabric.run(1e-4 * moment)
        assert fabric.run(200.0), f"seed {seed} does not end"


def after_forged(*datagrams: bytes) -> tuple[float, list[str]]:
    """The seconds that four ops take if rank 0 gets these datagrams of rank 1 meanwhile."""
    fabric = Fabric(2)
    shape, values = plan(300_000), gradients(2, 300_000)
    for op in range(2):
        fabric.all_reduce(op, shape, values, timeout=20.0)
    fabric.run(0.5)
    start = fabric.now
    for op in range(2, 6):
        fabric.all_reduce(op, shape, values, timeout=20.0)
    fabric.run(start + 1e-3, until_done=False)
    for datagram in datagrams:
        fabric.inject(1, 0, datagram)
    fabric.run(30.0)
    must_be_ok(fabric)
    return fabric.now - start, [fabric.completion(0, op).error for op in range(6)]


@pytest.mark.parametrize("op", [1, 2, 6], ids=["finished", "running", "next"])
@pytest.mark.parametrize("number", [2_500, 70_000, 2**31 - 1])
def test_a_single_number_far_ahead_silences_no_path(op: int, number: int) -> None:
    """It makes no genuine number old, and no ACK names it, which the sender would not believe."""
    assert after_forged(packet(PUSH, 1, number, op, 0)) == after_forged()


@pytest.mark.parametrize(
    ("number", "chunk", "payload"),
    [(1, 0, b""), (1_700, 0, b"?"), (2**30, 0, b""), (1_700, 10**6, b"")],
    ids=["again", "length", "far", "chunk"],
)
def test_a_datagram_that_is_not_taken_is_not_measured(
    number: int, chunk: int, payload: bytes
) -> None:
    """Its send time would stand for the shortest delay, and all others for a long queue."""
    datagrams = []
    for sent_us in (1 << 20, 1 << 28, 1 << 31, 3 << 30):
        head = HEADER.pack(VERSION, PUSH, 1, SESSION, number, sent_us, 2 * LANES, chunk, 1, 0)
        datagrams.append(head + payload)
    assert after_forged(*datagrams)[0] < 1.05 * after_forged()[0]


def test_an_ack_that_comes_late_overwrites_nothing() -> None:
    """It tells of heavy loss and of a window of one byte, which later ACKs have replaced."""
    words = struct.pack("<IIIIIIHHII", 1, 0, 1, 0, 0, 1, 1, 60_000, 0, 0)
    late = struct.pack("<BBHI", VERSION, 16, 1, SESSION) + words + struct.pack("<Q", 1)
    assert after_forged(late) == after_forged()


def test_a_bound_that_a_worker_breaks_is_an_error() -> None:
    """FORGIVE beyond the ledger's room: the aggregator refuses it and says who did it."""
    fabric = Fabric(2)
    fabric.all_reduce(0, plan(MEGA, 0.001, spend="lost"), gradients(2, MEGA))
    fabric.run(0.005)
    header = struct.pack("<BBHIIIIIHH", VERSION, 4, 1, 1, 500, 0, 0, 0, 1, 0)
    fabric.inject(1, 0, header + np.arange(1000, 1300, dtype="<u4").tobytes())
    fabric.run(30.0)
    assert any("rank 1" in error and "bound" in error for error in errors(fabric))


def test_what_a_peer_reports_cannot_control_a_terminal() -> None:
    """Neither by the controls of ASCII nor by those beyond it, whole or broken UTF-8."""
    fabric = Fabric(2)
    fabric.run(0.5, until_done=False)
    text = b"a\x1b[31mb\x07\r\n\x7f\xc2\x9bc\xff \xe2\x9c\x93"
    fabric.inject(1, 0, struct.pack("<BBHIiB", VERSION, 19, 1, 1, 1, 0) + text)
    fabric.run(1.0, until_done=False)
    failure = fabric.failure(0)
    assert failure.isprintable()
    assert "rank 1 reports: a[31mbc" in failure
    assert failure.endswith("✓")


def test_a_reported_failure_keeps_its_rank_and_cause() -> None:
    fabric = Fabric(3, peer_timeout=TIMEOUT, ping_interval=0.2)
    fabric.all_reduce(0, plan(MEGA), gradients(3, MEGA))
    fabric.run(0.02)
    fabric.inject(1, 0, struct.pack("<BBHIiB", VERSION, 19, 1, 1, 2, 7) + b"told")
    fabric.run(1.0)
    done = fabric.completion(0, 0)
    assert (done.error_rank, done.error_cause) == (2, "silence")
