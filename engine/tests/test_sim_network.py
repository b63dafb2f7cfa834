"""Queues, incast and foreign traffic: what the congestion control and the credit are for."""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import pytest

from gradwire.sim.fabric import NETWORK_A, NETWORK_B, Fabric, Link
from scenarios import EAGER, gradients, must_be_ok, own_drops, plan

# A process that wakes up a little late, as real ones do.
HOSTS = {"host_delay": 10e-6, "host_jitter": 60e-6}


def header_ideal(payload: float, link: Link) -> float:
    return payload / link.rate * 1514 / 1432


def rounds(
    fabric: Fabric, elements: int, count: int, link: Link, first: int = 0, **options: Any
) -> list[float]:
    """Times of all-reduces (pushes, for pull="none") one after the other, over the header ideal."""
    made = plan(elements, **options)
    values = gradients(fabric.workers, elements)
    if fabric.servers:
        payload = elements * 4 * fabric.workers / fabric.servers
    else:
        payload = elements * 4 * 2 * (fabric.workers - 1) / fabric.workers
    times = []
    fabric.run(0.05, until_done=False)  # everybody has found everybody
    for op in range(first, first + count):
        started = fabric.now
        fabric.all_reduce(op, made, values, at=started)
        assert fabric.run(started + 60)
        must_be_ok(fabric, op + 1)
        ended = max(fabric.finished_at(worker, op) for worker in range(fabric.workers))
        times.append((ended - started) / header_ideal(payload, link))
    return times


@pytest.mark.parametrize(
    ("network", "whole_trains"), [(NETWORK_A, False), (NETWORK_A, True), (NETWORK_B, False)]
)
@pytest.mark.parametrize("workers", [2, 4, 8, 12])
def test_incast_on_a_quiet_network_loses_nothing(
    workers: int, network: Link, whole_trains: bool
) -> None:
    """Invariant 11, at its hardest: everybody starts at the same instant, towards one server."""
    fabric = Fabric(workers, servers=1, link=network, whole_trains=whole_trains, **HOSTS)
    times = rounds(fabric, 100_000, 3, network, pull="none")
    assert own_drops(fabric) == 0
    assert median(times) < 1.1


@pytest.mark.parametrize(("workers", "network"), [(32, NETWORK_B), (64, NETWORK_A)])
def test_incast_of_many_loses_next_to_nothing(workers: int, network: Link) -> None:
    """Where the first packet of each alone nearly fills the queue."""
    fabric = Fabric(workers, servers=1, link=network, **HOSTS)
    rounds(fabric, 50_000, 3, network, pull="none")
    sent = sum(fabric.counters(worker)["packets_sent"] for worker in range(workers))
    assert own_drops(fabric) < 0.005 * sent


@pytest.mark.parametrize("seed", range(2))
def test_a_server_grants_to_few_senders_where_its_queue_is_shorter_than_their_packets(
    seed: int,
) -> None:
    short = Link(rate=125e6, queue=64 << 10)
    fabric = Fabric(64, servers=1, link=short, seed=seed, **HOSTS)
    rounds(fabric, 125_000, 3, short, pull="none")  # loses what the queue cannot hold
    before = [fabric.counters(host) for host in range(65)]
    times = rounds(fabric, 125_000, 3, short, first=3, pull="none")
    after = [fabric.counters(host) for host in range(65)]
    sent, dropped, acks, received = (
        sum(b[key] - a[key] for a, b in zip(before, after, strict=True))
        for key in ("packets_sent", "dropped_by_ports", "acks_sent", "packets_received")
    )
    assert dropped < 0.02 * sent
    assert max(times) < 1.1
    assert acks < 0.2 * received


@pytest.mark.parametrize("network", [NETWORK_A, NETWORK_B])
@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_all_to_all_on_a_quiet_network_loses_nothing(workers: int, network: Link) -> None:
    fabric = Fabric(workers, link=network, **HOSTS)
    rounds(fabric, 250_000, 4, network)
    assert own_drops(fabric) == 0


@pytest.mark.parametrize("seed", range(2))
def test_small_sums_of_many_ranks_overflow_no_queue(seed: int) -> None:
    """Each pair exchanges few packets, so that most paths are heard once a sum."""
    short = Link(rate=125e6, queue=256 << 10)
    fabric = Fabric(32, link=short, seed=seed, **HOSTS)
    times = rounds(fabric, 100_000, 8, short)
    sent = sum(fabric.counters(host)["packets_sent"] for host in range(32))
    assert median(times) < 1.6
    assert own_drops(fabric) < 0.002 * sent


@pytest.mark.parametrize(("network", "megabytes"), [(NETWORK_A, 10), (NETWORK_B, 2)])
def test_a_quiet_exact_all_reduce_is_near_the_header_ideal(network: Link, megabytes: int) -> None:
    times = rounds(Fabric(4, link=network, **HOSTS), megabytes * 250_000, 5, network)
    assert median(times) < 1.15


def test_a_server_serves_a_push_and_a_pull_at_once() -> None:
    """Eight push into a port from which ACKs of results go, too: with 162 KB of its 256 KiB in use
    a few packets are too many."""
    fabric = Fabric(8, servers=1, **HOSTS)
    assert median(rounds(fabric, 500_000, 4, NETWORK_A)) < 1.35
    sent = sum(fabric.counters(host)["packets_sent"] for host in range(9))
    assert own_drops(fabric) < 0.001 * sent


@pytest.mark.parametrize("spend", ["lost", "anything"])
@pytest.mark.parametrize(
    ("network", "megabytes", "bound", "burst"),
    [
        (NETWORK_A, 10, 0.1, {"rate": 500e6, "length": 0.01, "period": 0.2}),
        (NETWORK_B, 2, 0.4, {"rate": 100e6, "length": 0.04, "period": 0.4}),
    ],
)
def test_bursts_into_one_port_cost_little_beyond_their_own_time(
    network: Link, megabytes: int, bound: float, burst: dict[str, float], spend: str
) -> None:
    fabric = Fabric(4, link=network, **HOSTS)
    fabric.cross_traffic(1, start=0.03, **burst)
    schedule = EAGER if spend == "anything" else [("open", "all", 0, 1.0)]
    options = {"spend": spend, "schedule": schedule, "order": "shuffled"}
    times = rounds(fabric, megabytes * 250_000, 12, network, bound=bound, **options)
    assert fabric.link_counters(1, "down")["cross_dropped"] > 0, "the queue never overflowed"
    assert median(times) < 1.35
    assert max(times) < 1.8


def after_a_burst(fabric: Fabric) -> float:
    fabric.cross_traffic(1, rate=500e6, length=0.02, start=0.05)
    return rounds(fabric, 1_000_000, 4, NETWORK_A)[-1]


def after_a_slow_phase(fabric: Fabric) -> float:
    fabric.cross_traffic(1, rate=115e6, length=0.3, start=0.05)
    return rounds(fabric, 1_000_000, 14, NETWORK_A)[-1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("disturb", [after_a_burst, after_a_slow_phase])
def test_the_rate_comes_back_after(disturb: Callable[[Fabric], float], seed: int) -> None:
    assert disturb(Fabric(4, seed=seed, **HOSTS)) < 1.2, f"seed {seed}"


def test_the_rate_is_learned_from_short_bursts() -> None:
    """Ops of 12 ms with pauses, the first beside a burst: no interval of 20 ms is ever whole."""
    fabric = Fabric(4, **HOSTS)
    fabric.run(0.05, until_done=False)
    fabric.cross_traffic(1, rate=75e6, length=0.02, start=0.05)
    made, values = plan(250_000), gradients(4, 250_000)
    times = []
    for op in range(20):
        started = fabric.now
        fabric.all_reduce(op, made, values, at=started)
        assert fabric.run(started + 60)
        must_be_ok(fabric, op + 1)
        ended = max(fabric.finished_at(worker, op) for worker in range(4))
        times.append((ended - started) / header_ideal(1.5e6, NETWORK_A))
        fabric.run(fabric.now + 5e-3, until_done=False)
    assert times[0] > 1.5, "the burst did not matter"
    assert max(times[-5:]) < 1.2


def test_busy_hosts_find_the_rate_of_a_fast_network_at_once() -> None:
    """Rounds are milliseconds of waiting for a processor, so windows bound what a rate measures."""
    link = Link(rate=4e9, delay=2e-6, queue=16 << 20)
    busy = {"host_delay": 0.2e-3, "host_jitter": 1e-3, "receive_buffer": 10 << 20}
    times = rounds(Fabric(4, link=link, whole_trains=True, **busy), 1 << 18, 40, link)
    assert times[2] < 1.5 * median(times[30:])


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_inelastic_traffic_leaves_the_rest_to_us(share: float) -> None:
    """No collapse beside a flow that does not yield: what is left is used."""
    fabric = Fabric(4, **HOSTS)
    fabric.cross_traffic(2, rate=share * 125e6, length=1e6)
    times = rounds(fabric, 1_000_000, 4, NETWORK_A)
    assert median(times) < 1.25 / (1 - share)


def test_an_overloaded_port_still_gets_through() -> None:
    """A flow that takes more than the port has: exact transfers are slow, and do end."""
    fabric = Fabric(4, link=NETWORK_B, **HOSTS)
    fabric.cross_traffic(2, rate=1.2 * 25e6, length=1e6)
    assert rounds(fabric, 50_000, 2, NETWORK_B)


@pytest.mark.parametrize("delay", [1e-6, 1e-3, 20e-3])
@pytest.mark.parametrize("rate", [2e6, 125e6, 1.25e9])
def test_rates_and_delays_from_site_to_rack(rate: float, delay: float) -> None:
    # A queue of 2 ms, twice what congestion control aims at.
    link = Link(rate=rate, delay=delay, queue=max(64 << 10, int(rate * 2e-3)))
    fabric = Fabric(3, link=link, **HOSTS)
    elements = min(int(rate * 0.2 / 4), 2_000_000)
    rounds(fabric, elements, 2, link)
    assert own_drops(fabric) == 0


@pytest.mark.parametrize(
    ("ranks", "up", "down"),
    [
        (2, Link(rate=1.25e9), Link(queue=16 << 10)),
        (4, Link(rate=1.25e9), Link(queue=32 << 10)),
        (2, Link(rate=1.25e9, police_rate=125e6, police_burst=64 << 10), Link(rate=1.25e9)),
        (4, Link(rate=1.25e9, police_rate=125e6, police_burst=64 << 10), Link(rate=1.25e9)),
        (2, Link(rate=1.25e9), Link(rate=1.25e9, police_rate=125e6, police_burst=64 << 10)),
        (2, Link(police_rate=12.5e6, police_burst=64 << 10), Link()),
        (2, Link(rate=1.25e9, police_rate=12.5e6, police_burst=64 << 10), Link(rate=1.25e9)),
        (
            2,
            Link(delay=2.5e-3, police_rate=12.5e6, police_burst=64 << 10),
            Link(delay=2.5e-3),
        ),
    ],
    ids=[
        "short queue",
        "short queue, 4 ranks",
        "policer",
        "policer, 4 ranks",
        "policer before",
        "slow policer",
        "slow policer, fast hosts",
        "slow policer, long path",
    ],
)
def test_what_bears_less_than_the_wanted_queue_is_not_overflowed_for_long(
    ranks: int, up: Link, down: Link
) -> None:
    """Hosts are ten times as fast as what limits them."""
    fabric = Fabric(ranks, link=down, send_time=2e-6, **HOSTS)
    for rank in range(ranks):
        fabric.set_link(rank, "up", up)
    dropped, sent = [], []
    elements = 100_000 if 12.5e6 in (up.police_rate, down.police_rate) else 1_000_000
    for count in (40, 20):
        rounds(fabric, elements, count, Link(), first=len(sent) * 40)
        dropped.append(own_drops(fabric))
        sent.append(sum(fabric.counters(rank)["packets_sent"] for rank in range(ranks)))
    assert dropped[1] - dropped[0] < 0.08 * (sent[1] - sent[0])


def test_a_slow_policer_on_a_long_path_stays_known() -> None:
    """Its bucket fills in each pause for ACKs, and no queue says that a window is too large."""
    dropped = sent = 0
    for seed in range(3):
        fabric = Fabric(2, link=Link(delay=2.5e-3), send_time=2e-6, seed=seed, **HOSTS)
        for rank in range(2):
            policed = Link(delay=2.5e-3, police_rate=12.5e6, police_burst=64 << 10)
            fabric.set_link(rank, "up", policed)
        for first, count, sign in ((0, 10, -1), (10, 40, 1)):
            rounds(fabric, 400_000, count, Link(), first=first)
            dropped += sign * own_drops(fabric)
            sent += sign * sum(fabric.counters(rank)["packets_sent"] for rank in range(2))
    assert dropped < 0.12 * sent


def test_a_policer_that_comes_with_time_is_not_flooded_for_long() -> None:
    """The rate is known to be ten times as high, and a receiver measures no more loss than 95 %."""
    ranks, link = 3, Link(delay=2.5e-3)
    fabric = Fabric(ranks, link=link, seed=1, **HOSTS)
    rounds(fabric, 250_000, 6, link)
    for rank in range(ranks):
        policed = replace(link, police_rate=12.5e6, police_burst=64 << 10)
        fabric.set_link(rank, "up", policed)
    came, first, counts = fabric.now, 6, []
    while fabric.now < came + 20:
        rounds(fabric, 250_000, 4, link, first=first)
        first += 4
        sent = sum(fabric.counters(rank)["packets_sent"] for rank in range(ranks))
        counts.append((fabric.now - came, own_drops(fabric), sent))
    late = [count for count in counts if count[0] > 12]
    dropped, sent = (late[-1][i] - late[0][i] for i in (1, 2))
    assert dropped < 0.2 * sent


def test_losses_that_come_in_runs() -> None:
    link = Link(loss=0.02, loss_burst=20.0)
    times = [
        time
        for seed in range(8)
        for time in rounds(Fabric(4, link=link, seed=seed, **HOSTS), 500_000, 5, link)
    ]
    assert median(times) < 2.0  # each host tries out once whether they are its own


@pytest.mark.parametrize(("loss", "run"), [(0.9, 9.0), (0.9, 40.0), (0.3, 2.0)])
def test_a_link_loses_the_share_and_the_runs_asked_for(loss: float, run: float) -> None:
    lost, runs, before = 0, 0, False
    fabric = Fabric(2, trace=400_000)
    fabric.set_link(0, "up", Link(loss=loss, loss_burst=run))
    fabric.all_reduce(0, plan(6_000_000), gradients(2, 6_000_000))
    assert fabric.run(600.0)
    sent = [packet.fate == "loss" for packet in fabric.trace() if packet.source == 0]
    for bad in sent:
        lost += bad
        runs += bad and not before
        before = bad
    assert lost / len(sent) == pytest.approx(loss, rel=0.06)
    assert lost / runs == pytest.approx(run, rel=0.12)


@pytest.mark.parametrize("loss", [0.7, 0.9])
def test_runs_too_short_for_their_share_are_refused(loss: float) -> None:
    message = rf"loss_burst is 2\.0.* with loss {loss}"
    with pytest.raises(ValueError, match=message):
        Fabric(2, link=Link(loss=loss, loss_burst=2.0))
    fabric = Fabric(2)
    with pytest.raises(ValueError, match=message):
        fabric.set_link(0, "up", Link(loss=loss, loss_burst=2.0))


def test_reordering_is_not_loss() -> None:
    """A third of all packets up to 200 us late: next to nothing may be sent twice for that."""
    link = Link(reorder=0.3, reorder_delay=200e-6)
    fabric = Fabric(4, link=link, **HOSTS)
    rounds(fabric, 500_000, 4, link)
    sent = sum(fabric.counters(worker)["packets_sent"] for worker in range(4))
    again = sum(fabric.counters(worker)["retransmissions"] for worker in range(4))
    assert again < 0.02 * sent


@pytest.mark.parametrize(("share", "late"), [(0.1, 2e-3), (0.3, 1e-3), (0.05, 0.3e-3)])
def test_losses_are_found_in_a_round_where_packets_are_reordered(share: float, late: float) -> None:
    """One packet in a hundred is lost besides, and each host tries out once whether that is its own
    doing. What waited for a time-out took longer still."""
    times, twice, sent = [], 0, 0
    for loss in (0.0, 0.01):
        link = Link(reorder=share, reorder_delay=late, loss=loss)
        fabric = Fabric(4, link=link, **HOSTS)
        times.append(fmean(rounds(fabric, 1_000_000, 8, link)[4:]))
        twice += sum(fabric.counters(rank)["spurious_retransmissions"] for rank in range(4))
        sent += sum(fabric.counters(rank)["packets_sent"] for rank in range(4))
    assert times[1] < 1.5 * times[0]
    assert twice < 0.02 * sent


def test_a_small_socket_buffer_is_respected() -> None:
    fabric = Fabric(8, servers=1, receive_buffer=64 << 10, host_delay=200e-6, host_jitter=300e-6)
    rounds(fabric, 100_000, 2, NETWORK_A)
    assert sum(fabric.counters(host)["dropped_by_socket"] for host in range(9)) == 0
