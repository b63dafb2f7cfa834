"""ECN: marks are heeded, and paths that do not carry them are found out."""

from dataclasses import replace
from statistics import median

import pytest

from gradwire.sim.fabric import NETWORK_A, NETWORK_B, Fabric, Link
from scenarios import gradients, must_be_ok, own_drops, plan, random_job
from test_sim_network import HOSTS, rounds

QUARTER_A = replace(NETWORK_A, ecn=NETWORK_A.queue // 4)


def total(fabric: Fabric, name: str) -> float:
    return sum(fabric.counters(host)[name] for host in range(fabric.workers + fabric.servers))


def links(fabric: Fabric, name: str) -> list[int]:
    return [
        fabric.link_counters(host, direction)[name]  # type: ignore[arg-type]
        for host in range(fabric.workers + fabric.servers)
        for direction in ("up", "down")
    ]


def test_where_nothing_marks_ect_changes_nothing() -> None:
    quiet, off = Fabric(4, **HOSTS), Fabric(4, ecn=False, **HOSTS)
    assert rounds(quiet, 500_000, 4, NETWORK_A) == rounds(off, 500_000, 4, NETWORK_A)
    assert sum(links(quiet, "ect")) > 0
    assert sum(links(off, "ect")) == 0
    for fabric in (quiet, off):
        assert total(fabric, "marked") == total(fabric, "mark_cuts") == 0
        assert total(fabric, "ecn_failed") == 0


def test_only_what_is_acknowledged_goes_as_ect() -> None:
    fabric = Fabric(2, **HOSTS)
    rounds(fabric, 100_000, 1, NETWORK_A)
    sent = total(fabric, "packets_sent")  # of packets with numbers of their own
    up = [fabric.link_counters(host, "up") for host in range(2)]
    assert sum(each["ect"] for each in up) == sent < sum(each["packets"] for each in up)


@pytest.mark.parametrize("whole_trains", [False, True])
@pytest.mark.parametrize(("servers", "slower"), [(0, 1.35), (1, 1.05)])
def test_marks_keep_queues_short(servers: int, slower: float, whole_trains: bool) -> None:
    """All-to-all and incast, below the queue that delay alone would hold."""
    longest, options = [], {"pull": "none"} if servers else {}
    for link in (NETWORK_A, QUARTER_A):
        fabric = Fabric(8, servers=servers, link=link, whole_trains=whole_trains, **HOSTS)
        times = rounds(fabric, 250_000, 4, link, **options)
        longest.append(max(links(fabric, "max_queue_bytes")))
    assert sum(links(fabric, "marked")) >= total(fabric, "marked") > 0
    assert total(fabric, "mark_cuts") > 0
    assert total(fabric, "ecn_failed") == 0
    assert own_drops(fabric) == 0
    assert median(times) < slower
    if not whole_trains:  # each marks as a whole, and is as long as a quarter of the threshold
        above = 1.6 if servers else 2.2  # seven late hosts at a time fill a port, or one
        assert longest[1] < min(longest[0], above * QUARTER_A.ecn)


def test_a_queue_too_short_for_the_delay_target_overflows_no_more() -> None:
    """1.3 ms of queue is 162 KB here."""
    short = replace(NETWORK_A, queue=64 << 10)
    drops = []
    for link in (short, replace(short, ecn=16 << 10)):
        fabric = Fabric(6, link=link, **HOSTS)
        rounds(fabric, 400_000, 6, link)
        drops.append(own_drops(fabric))
    assert drops[0] > 100
    assert drops[1] < drops[0] / 10


def test_a_window_shrinks_once_per_round() -> None:
    """A long path whose every packet is marked."""
    link = Link(rate=25e6, delay=5e-3, queue=256 << 10)
    fabric = Fabric(1, servers=1, link=link, **HOSTS)
    rounds(fabric, 1_000_000, 3, link, pull="none")
    begun = fabric.now
    assert total(fabric, "mark_cuts") == 0
    before = [fabric.counters(0)["send_window"], fabric.counters(1)["receive_window"]]
    fabric.set_link(0, "up", replace(link, ecn=1))
    values = gradients(1, 1_000_000)
    fabric.all_reduce(3, plan(1_000_000, pull="none"), values, at=fabric.now)
    assert fabric.run(60)
    must_be_ok(fabric, 4)
    rounds_taken = (fabric.now - begun) / 20e-3
    cuts = total(fabric, "mark_cuts")
    assert 4 <= cuts <= 2 * (rounds_taken + 1)  # of the sender and of the receiver
    assert total(fabric, "marked") > 10 * cuts
    after = [fabric.counters(0)["send_window"], fabric.counters(1)["receive_window"]]
    assert all(0 < new < 0.7 * old for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("broken", [{"bleach": True}, {"drop_ect": True}], ids=str)
@pytest.mark.parametrize("where", ["up", "down"])
def test_a_path_that_does_not_carry_ect_is_found_out(broken: dict[str, bool], where: str) -> None:
    fabric = Fabric(4, **HOSTS)
    fabric.set_link(1, where, replace(QUARTER_A, **broken))  # type: ignore[arg-type]
    times = rounds(fabric, 500_000, 4, NETWORK_A)
    # The three paths from host 1, or those to it; all others go on.
    assert total(fabric, "ecn_failed") == 3
    ends = [fabric.link_counters(1, where)["ect"]]
    fabric.all_reduce(4, plan(500_000), gradients(4, 500_000), at=fabric.now)
    assert fabric.run(fabric.now + 60)
    ends.append(fabric.link_counters(1, where)["ect"])
    assert ends[0] == ends[1] < 200
    assert fabric.link_counters(2, "up")["ect"] > 1000
    assert max(times[1:]) < 1.2


@pytest.mark.parametrize(
    "link",
    [
        Link(loss=0.05, reorder=0.3, reorder_delay=300e-6, duplicate=0.1, ecn=32 << 10),
        Link(loss=0.5, delay=10e-3, ecn=32 << 10),
        Link(rate=25e6, loss=0.2, loss_burst=8, duplicate=0.3, ecn=8 << 10),
    ],
    ids=["reordered", "long and lossy", "in runs"],
)
def test_loss_and_disorder_are_not_taken_for_a_path_that_bleaches(link: Link) -> None:
    fabric = Fabric(3, link=link, seed=5, **HOSTS)
    for op in range(4):
        fabric.all_reduce(op, plan(150_000), gradients(3, 150_000), at=fabric.now)
        assert fabric.run(fabric.now + 100)
    must_be_ok(fabric, 4)
    assert total(fabric, "ecn_failed") == 0
    assert sum(links(fabric, "ect")) > 1000


def test_marks_come_to_rest_beside_traffic_that_does_not_heed_them() -> None:
    fabric = Fabric(4, link=QUARTER_A, **HOSTS)
    fabric.cross_traffic(1, rate=60e6, length=0.1, start=0.06)
    times = rounds(fabric, 500_000, 16, QUARTER_A)
    assert total(fabric, "marked") > 0
    assert own_drops(fabric) == 0
    assert max(times) < 4  # half of one port is another's, whose queue is never short
    # Marks begin at 0.5 ms of queue, delay tells of it from 1.3 ms on: windows that marks have cut
    # grow back for some rounds.
    assert median(times[-3:]) < 1.6


@pytest.mark.parametrize("seed", range(12))
def test_random_jobs_on_networks_that_mark_keep_every_invariant(seed: int) -> None:
    job = random_job(7000 + seed)
    threshold = job.link.queue // (2 + seed % 7)
    job.link = replace(job.link, ecn=threshold, bleach=seed % 4 == 3)
    assert job.run().trace_hash == job.run().trace_hash


def test_a_network_b_with_marks_at_a_quarter() -> None:
    link = replace(NETWORK_B, ecn=NETWORK_B.queue // 4)
    fabric = Fabric(4, link=link, **HOSTS)
    assert median(rounds(fabric, 150_000, 5, link)) < 1.2
    assert total(fabric, "marked") > 0


def test_a_peer_that_stalls_is_not_taken_for_a_path_that_drops_ect() -> None:
    """Before anything that was ECT is acknowledged: host 1 hears everything 200 ms late."""
    fabric = Fabric(3, **HOSTS)
    fabric.run(0.2, until_done=False)
    fabric.set_link(1, "down", replace(QUARTER_A, delay=0.2))
    fabric.all_reduce(0, plan(50_000), gradients(3, 50_000), at=fabric.now)
    fabric.run(fabric.now + 0.19, until_done=False)
    assert total(fabric, "probes") >= 6  # of the two paths to host 1
    assert fabric.run(fabric.now + 60)
    fabric.set_link(1, "down", QUARTER_A)
    before = fabric.link_counters(1, "down")["ect"]
    fabric.all_reduce(1, plan(50_000), gradients(3, 50_000), at=fabric.now)
    assert fabric.run(fabric.now + 60)
    must_be_ok(fabric, 2)
    assert total(fabric, "ecn_failed") == 0
    assert fabric.link_counters(1, "down")["ect"] > before + 100


def test_any_number_of_packets_may_come_between_two_acks_that_arrive() -> None:
    """A path that holds 67,000 of them, whose way back loses everything for most of a round."""
    link = Link(rate=500e6, delay=10e-3, queue=1 << 24)
    options = {"datagram_bytes": 256, "receive_buffer": 1 << 25, **HOSTS}
    fabric = Fabric(1, servers=1, link=link, **options)
    elements = 57 * 100_000
    of, values = plan(elements, pull="none"), gradients(1, elements)
    fabric.all_reduce(0, of, values)
    assert fabric.run()
    before = fabric.counters(1)["packets_received"]
    fabric.set_link(0, "down", replace(link, loss=1 - 1e-9))
    fabric.all_reduce(1, of, values, at=fabric.now)
    fabric.run(fabric.now + 0.05)
    assert fabric.counters(1)["packets_received"] - before > 40_000
    fabric.set_link(0, "down", link)
    assert fabric.run()
    must_be_ok(fabric, 2)
    assert total(fabric, "ecn_failed") == 0
