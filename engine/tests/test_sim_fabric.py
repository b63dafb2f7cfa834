"""The simulated network itself: policers, late timers, send calls, clocks, flows that yield."""

from itertools import pairwise

import pytest

from gradwire.sim.fabric import BrokenInvariantError, Fabric, Link, Sent
from scenarios import gradients, must_be_ok, own_drops, plan

RATE = 125e6


def pings(fabric: Fabric, host: int) -> list[Sent]:
    """The timed ones: the first few meet the peer."""
    return [each for each in fabric.trace() if each.source == host and each.kind == "ping"][3:]


def test_a_policer_passes_its_rate_and_its_burst() -> None:
    policed = Link(rate=10 * RATE, queue=4 << 20, police_rate=RATE, police_burst=64 << 10)
    fabric = Fabric(2, link=policed, trace=1_000_000)
    fabric.all_reduce(0, plan(1_000_000), gradients(2, 1_000_000))
    assert fabric.run()
    must_be_ok(fabric)
    for host in range(2):
        assert fabric.link_counters(host, "up")["dropped_policer"] > 0
        sent = [each for each in fabric.trace() if each.source == host]
        passed = sum(each.bytes + 42 for each in sent if each.fate != "queue")
        assert passed <= RATE * fabric.now + (64 << 10)
        assert passed > 0.9 * RATE * fabric.now


def test_a_host_wakes_as_late_for_a_timer_as_for_a_datagram() -> None:
    late = 5e-3
    gaps = []
    for delay in (0.0, late):
        fabric = Fabric(2, host_delay=delay, ping_interval=0.1, trace=10_000)
        fabric.run(3.0, until_done=False)
        times = [each.time_ns * 1e-9 for each in pings(fabric, 0)]
        gaps.append(min(b - a for a, b in pairwise(times) if b - a > 0.01))
    assert gaps[1] >= gaps[0] + 0.9 * late


def test_a_send_call_keeps_its_host_busy() -> None:
    fabric = Fabric(2, send_time=1e-3, trace=100_000)
    fabric.all_reduce(0, plan(20_000), gradients(2, 20_000))
    assert fabric.run()
    must_be_ok(fabric)
    times = sorted({each.time_ns for each in fabric.trace() if each.source == 0})
    assert len(times) > 3
    assert all(b - a >= 1e6 for a, b in pairwise(times))


def test_a_fast_clock_shows_later_times() -> None:
    fabric = Fabric(2, ping_interval=0.1, trace=10_000)
    fabric.set_clock(1, 1000)
    fabric.run(20.0, until_done=False)
    slow, fast = (len(pings(fabric, host)) for host in range(2))
    assert fast == slow  # each is answered, and counts from the last
    last = [pings(fabric, host)[-1].time_ns for host in range(2)]
    assert last[1] < last[0]
    fabric.all_reduce(0, plan(20_000), gradients(2, 20_000), at=fabric.now)
    assert fabric.run()
    must_be_ok(fabric)


@pytest.mark.parametrize("round_trip", [200e-6, 2e-3])
def test_a_flow_that_yields_fills_a_port_and_shares_it(round_trip: float) -> None:
    fabric = Fabric(1, link=Link(rate=RATE, queue=256 << 10))
    first = fabric.tcp_flow(0, round_trip=round_trip)
    fabric.run(10.0, until_done=False)
    alone = fabric.flow(first)["delivered_bytes"]
    assert alone > 0.6 * 10 * RATE
    second = fabric.tcp_flow(0, round_trip=round_trip, start=10.0)
    fabric.run(40.0, until_done=False)
    shares = [fabric.flow(index)["delivered_bytes"] for index in (first, second)]
    both = shares[0] - alone + shares[1]
    assert 0.25 < shares[1] / both < 0.75
    assert 0 < fabric.flow(second)["dropped"] < 0.05 * fabric.flow(second)["packets"]


@pytest.mark.parametrize(
    ("what", "value"),
    [("police_rate", -1.0), ("police_burst", 100), ("rate", 0.0), ("queue", 0)],
)
def test_a_link_that_cannot_be_is_refused(what: str, value: float) -> None:
    with pytest.raises(ValueError, match=what):
        Fabric(2, link=Link(**{what: value}))  # type: ignore[arg-type]


def test_a_clock_that_cannot_be_is_refused() -> None:
    fabric = Fabric(2)
    with pytest.raises(ValueError, match="ppm"):
        fabric.set_clock(0, 2000)
    fabric.run(1.0, until_done=False)
    with pytest.raises(ValueError, match="before the run"):
        fabric.set_clock(0, 10)
    with pytest.raises(ValueError, match="end"):
        fabric.tcp_flow(0, start=2.0, end=1.0)


def test_a_policer_counts_among_own_drops() -> None:
    fabric = Fabric(2, link=Link(rate=10 * RATE, police_rate=RATE / 10, police_burst=4096))
    fabric.all_reduce(0, plan(20_000), gradients(2, 20_000))
    fabric.run()
    assert own_drops(fabric) > 0


def test_time_goes_on_where_nothing_happens_any_more() -> None:
    fabric = Fabric(2)
    for host in range(2):
        fabric.kill(host)
    fabric.run(7.0, until_done=False)
    assert fabric.now == 7.0


def test_more_events_than_allowed_are_a_broken_invariant() -> None:
    fabric = Fabric(2, most_events=100)
    fabric.all_reduce(0, plan(1_000_000), gradients(2, 1_000_000))
    with pytest.raises(BrokenInvariantError, match="100 events"):
        fabric.run()


def test_a_silence_that_the_wire_makes_is_known() -> None:
    fabric = Fabric(3, ping_interval=0.02, link=Link(delay=1e-3))
    fabric.run(1.0, until_done=False)
    fabric.set_link(1, "down", Link(loss=1 - 1e-9))
    fabric.pause(2)  # silent by itself
    fabric.run(3.0, until_done=False)
    assert fabric.unheard(0, 1) == pytest.approx(2.0, abs=0.1)
    assert fabric.unheard(1, 0) == fabric.unheard(2, 0) == 0.0
