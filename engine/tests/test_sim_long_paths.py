"""Paths of 10 and 40 ms: what is on the way is more than the buffers hold, and word comes late.

The mark: 1.3 times the physical limit and three round trips, for an op on a network whose rate an
earlier one has learned. The limit of a push of S bytes under a plan of bound p is
(1 - p) S / ((1 - L) R) where a share L gets lost on the workers' links of rate R, and not less than
what the server's port takes.
"""

from dataclasses import replace
from math import log2
from statistics import median

import numpy as np
import pytest

from gradwire.sim.fabric import NETWORK_A, NETWORK_B, Fabric, Link
from scenarios import EAGER, gradients, must_be_ok, own_drops, plan

HOSTS = {"host_delay": 10e-6, "host_jitter": 60e-6}
HEADERS = 1514 / 1444  # on the wire, of a full chunk
GIGABIT, SLOW = 125e6, 25e6
TRIAL = 0.35  # seconds that a trial of heavy loss costs on such a path
MEGABYTE = 250_000  # elements


class Pushes:
    """Ops one after the other, from workers to one server (servers=0: sharded, with results)."""

    def __init__(
        self,
        workers: int,
        rate: float,
        round_trip: float,
        *,
        servers: int = 1,
        queue: int = Link().queue,
        seed: int = 1,
    ) -> None:
        self.link = Link(rate=rate, queue=queue, delay=round_trip / 4)
        self.round_trip = round_trip
        self.fabric = Fabric(workers, servers=servers, link=self.link, seed=seed, **HOSTS)
        self.op = 0
        self.fabric.run(0.3, until_done=False)  # everybody has found everybody

    def push(
        self, megabytes: float, bound: float = 0.0, loss: float = 0.0, back: float = 0.0
    ) -> float:
        """Seconds. `loss` on the workers' ways up, `back` on their ways down, for the whole op."""
        fabric = self.fabric
        fabric.run(fabric.now + 0.05, until_done=False)
        for worker in range(fabric.workers):
            fabric.set_link(worker, "up", replace(self.link, loss=loss))
            fabric.set_link(worker, "down", replace(self.link, loss=back))
        elements = int(megabytes * MEGABYTE)
        options = {"pull": "none"} if fabric.servers else {}
        if bound:
            options |= {"spend": "anything", "schedule": EAGER, "order": "shuffled"}
        started = fabric.now
        values = [np.ones(elements, np.float32)] * fabric.workers
        fabric.all_reduce(self.op, plan(elements, bound, **options), values, at=started)
        fabric.run(started + 60)
        self.op += 1
        must_be_ok(fabric, self.op)
        ended = max(fabric.finished_at(w, self.op - 1) for w in range(fabric.workers))
        return ended - started

    def limit(self, megabytes: float, bound: float = 0.0, loss: float = 0.0) -> float:
        workers = self.fabric.workers
        busiest = (
            max(1 / (1 - loss), workers) if self.fabric.servers else 2 * (workers - 1) / workers
        )
        return (1 - bound) * megabytes * 1e6 * HEADERS / self.link.rate * busiest

    def mark(self, megabytes: float, bound: float = 0.0, loss: float = 0.0) -> float:
        return 1.3 * self.limit(megabytes, bound, loss) + 3 * self.round_trip


def packets(fabric: Fabric) -> int:
    """That all endpoints have sent so far."""
    return sum(int(fabric.counters(host)["packets_sent"]) for host in range(fabric.workers))


@pytest.mark.parametrize("round_trip", [10e-3, 40e-3])
@pytest.mark.parametrize("rate", [GIGABIT, SLOW])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_quiet_long_path_reaches_its_rate(workers: int, rate: float, round_trip: float) -> None:
    """Where three fill 162 KB of a queue of 256 KiB, and hear of it a round of 40 ms later, a
    window that is still too long by a tenth overflows it once."""
    job = Pushes(workers, rate, round_trip)
    job.push(4)
    job.push(4)
    before, sent = own_drops(job.fabric), packets(job.fabric)
    assert job.push(4) < job.mark(4)
    most = 0.05 if (workers, rate, round_trip) == (3, GIGABIT, 40e-3) else 0.005
    assert own_drops(job.fabric) - before < most * (packets(job.fabric) - sent)


@pytest.mark.parametrize("rate", [GIGABIT, SLOW])
def test_a_quiet_sharded_all_reduce_reaches_its_rate(rate: float) -> None:
    job = Pushes(4, rate, 10e-3, servers=0)
    job.push(4)
    job.push(4)
    assert job.push(4) < job.mark(4)


@pytest.mark.parametrize(
    ("workers", "megabytes", "most"), [(4, 8, 0.07), (4, 16, 0.005), (8, 16, 0.005)]
)
def test_far_destinations_are_paced_one_by_one(workers: int, megabytes: float, most: float) -> None:
    """Whose credit is left gets no more than its part: all would send there at once. An op of 8 MB
    is over before its windows have come to rest."""
    job = Pushes(workers, GIGABIT, 40e-3, servers=0)
    for _ in range(2):
        job.push(megabytes)
    drops, sent = own_drops(job.fabric), packets(job.fabric)
    for _ in range(2):
        assert job.push(megabytes) < job.mark(megabytes)
    assert own_drops(job.fabric) - drops < most * (packets(job.fabric) - sent)


def copies(fabric: Fabric) -> int:
    """That all endpoints have sent right beside the same chunk."""
    return sum(int(fabric.counters(host)["copies"]) for host in range(fabric.workers))


def test_one_far_host_does_not_slow_what_the_others_send_to_each_other() -> None:
    """Bytes and round trips allow 1.4 times what the busiest port needs."""
    fabric = Fabric(4, link=Link(), **HOSTS)
    for way in ("up", "down"):
        fabric.set_link(3, way, replace(Link(), delay=5e-3))
    fabric.run(0.3, until_done=False)
    elements = 4 * MEGABYTE
    values = [np.ones(elements, np.float32)] * 4
    ideal = 2 * 3 / 4 * elements * 4 * HEADERS / GIGABIT
    times = []
    for op in range(8):
        started = fabric.now
        fabric.all_reduce(op, plan(elements), values, at=started)
        fabric.run(started + 60)
        times.append(max(fabric.finished_at(worker, op) for worker in range(4)) - started)
    must_be_ok(fabric, 8)
    assert median(times[4:]) <= 2.4 * ideal


@pytest.mark.parametrize(
    ("loss", "ideals", "payload"), [(0.0, 2.1, 1.03), (0.01, 3.2, 1.15), (0.05, 3.9, 1.6)]
)
def test_a_long_path_that_loses_costs_a_round_more_and_not_three(
    loss: float, ideals: float, payload: float
) -> None:
    """Nobody waits twice for the same packet, and first words go at the port's rate at once.
    They took 2.4, 4.3 and 6.1 ideals."""
    job = Pushes(4, GIGABIT, 40e-3, servers=0, queue=4 << 20)
    took = []
    for _ in range(10):
        begun = job.fabric.counters(0)["bytes_sent"], copies(job.fabric)
        took.append(job.push(4, 0, loss, loss))
    sent = job.fabric.counters(0)["bytes_sent"] - begun[0]
    assert median(took[6:]) < ideals * job.limit(4)
    assert sent < payload * 2 * 3 * 1e6
    assert (copies(job.fabric) > begun[1]) == (loss > 0)


@pytest.mark.parametrize("round_trip", [0.2e-3, 4e-3])
def test_nothing_is_copied_on_short_paths(round_trip: float) -> None:
    job = Pushes(4, GIGABIT, round_trip, servers=0)
    for _ in range(3):
        job.push(2, 0, 0.05, 0.05)
    assert copies(job.fabric) == 0


def test_a_push_that_overflows_a_short_queue_is_not_copied() -> None:
    """Losses come with a queue there, and are the job's own."""
    job = Pushes(4, GIGABIT, 40e-3, servers=0, queue=128 << 10)
    for _ in range(8):
        job.push(8)
    assert own_drops(job.fabric) > 0
    assert copies(job.fabric) < 0.01 * packets(job.fabric)


@pytest.mark.parametrize(
    ("rate", "round_trip", "most"),
    [(GIGABIT, 40e-3, 0.01), (SLOW, 40e-3, 0.06), (GIGABIT, 10e-3, 0.01)],
)
def test_the_first_op_ramps_by_doubling(rate: float, round_trip: float, most: float) -> None:
    """From the standing credit to what the path holds; some rounds go beyond it and back. The last
    doubling may come before the queue of the slow port is long enough to tell."""
    job = Pushes(1, rate, round_trip)
    rounds = max(0.0, log2(rate * round_trip / 36e3)) + 5
    assert job.push(4) < job.limit(4) + rounds * round_trip
    sent = job.fabric.counters(0)["packets_sent"]
    assert own_drops(job.fabric) < most * sent


@pytest.mark.parametrize("loss", [0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("bound", [0.408, 0.008])
def test_heavy_loss_on_the_workers_link(bound: float, loss: float) -> None:
    """Once in ten seconds it is tried out whether the loss is the job's own, as a policer's."""
    job = Pushes(1, GIGABIT, 10e-3)
    for _ in range(4):
        job.push(4)
    assert job.push(21, bound, loss) < job.mark(21, bound, loss) + TRIAL


@pytest.mark.parametrize("loss", [0.4, 0.6])
def test_heavy_loss_that_ends_leaves_nothing_behind(loss: float) -> None:
    """Not even where it was tried out."""
    job = Pushes(1, GIGABIT, 10e-3)
    for _ in range(4):
        job.push(8)
    before = job.push(8)
    lost = 0.0
    while lost < 1.0:
        lost += job.push(4, loss=loss)
    for _ in range(40):
        job.push(8)
    assert job.push(8) < 1.02 * before


@pytest.mark.parametrize("loss", [0.7, 0.9])
def test_heavy_loss_where_a_window_is_as_long_as_the_op(loss: float) -> None:
    """What is missing goes again before word of it can come."""
    job = Pushes(1, SLOW, 40e-3)
    for _ in range(6):
        job.push(4, 0.408)
    assert job.push(4, 0.408, loss) < job.mark(4, 0.408, loss)


@pytest.mark.parametrize("loss", [0.6, 0.9])
@pytest.mark.parametrize(("workers", "round_trip"), [(1, 10e-3), (1, 40e-3), (3, 40e-3)])
def test_heavy_loss_of_an_op_that_the_path_holds(
    workers: int, round_trip: float, loss: float
) -> None:
    """Spares go in place of what is in doubt: nobody waits for the last copy of a certain chunk."""
    job = Pushes(workers, GIGABIT, round_trip)
    for _ in range(6):
        job.push(4, 0.408)
    assert job.push(4, 0.408, loss) < job.mark(4, 0.408, loss)


@pytest.mark.parametrize(("loss", "back"), [(0.6, 0.0), (0.9, 0.0), (0.6, 0.6), (0.8, 0.8)])
def test_heavy_loss_after_seconds_of_quiet(loss: float, back: float) -> None:
    """The receiver's window has led the sender's, which has only ever given way meanwhile."""
    job = Pushes(3, SLOW, 40e-3, queue=NETWORK_B.queue)
    job.push(50)
    assert job.push(10, 0.408, loss, back) < job.mark(10, 0.408, loss)


def test_heavy_loss_after_seconds_of_quiet_of_an_op_that_is_out_before_it_shows() -> None:
    """Nothing is led any more when word of the loss comes: it takes what it takes in any case."""
    tired, fresh = (Pushes(3, SLOW, 40e-3, queue=NETWORK_B.queue) for _ in range(2))
    tired.push(50)
    for _ in range(4):
        fresh.push(4)
    assert tired.push(1, 0.408, 0.6) < 1.5 * fresh.push(1, 0.408, 0.6)


def test_heavy_loss_for_seconds() -> None:
    """Packets are missing in every round: no sign that the window overflows a port."""
    took = []
    for seed in range(3):
        job = Pushes(3, SLOW, 40e-3, queue=NETWORK_B.queue, seed=seed)
        for _ in range(4):
            job.push(4)
        took.append(job.push(80, 0.408, 0.7, 0.7))
    assert median(took) < job.mark(80, 0.408, 0.7), took


@pytest.mark.parametrize("loss", [0.6, 0.9])
def test_heavy_loss_on_a_short_path(loss: float) -> None:
    """A window whose packets are all lost must not wait for a time-out."""
    job = Pushes(1, SLOW, 50e-6)
    job.push(4)
    assert job.push(4, 0.408, loss) < job.mark(4, 0.408, loss)


def test_heavy_loss_both_ways() -> None:
    """ACKs get lost as well, and the few messages that an op cannot do without."""
    job = Pushes(1, SLOW, 10e-3)
    for _ in range(4):
        job.push(4)
    job.fabric.set_link(0, "down", Link(rate=SLOW, delay=2.5e-3, loss=0.9))
    assert job.push(4, 0.408, 0.9) < 1.5 * job.mark(4, 0.408, 0.9)


@pytest.mark.parametrize("seed", [1, 2])
def test_many_short_datagrams_survive_rounds_of_heavy_loss(seed: int) -> None:
    """What may go again at once is more than one train holds: 256 bytes a datagram."""
    fabric = Fabric(4, link=NETWORK_A, seed=seed, datagram_bytes=256)
    elements = 31_000
    made = plan(elements, 0.4, spend="lost", order="shuffled")
    values = gradients(4, elements)
    for op in range(60):
        loss = (0.6, 0.7, 0.8, 0.9)[op // 3 % 4] if op % 3 == 2 else 0.0
        for worker in range(4):
            fabric.set_link(worker, "up", replace(NETWORK_A, loss=loss))
        fabric.run(fabric.now + 0.01, until_done=False)
        fabric.all_reduce(op, made, values)
        fabric.run()
    must_be_ok(fabric)
