"""The parts of congestion control, without an endpoint: deliveries, delays, losses and marks in,
windows and rates out.
"""

from collections.abc import Callable
from random import Random

import pytest
from _parts import (
    CircuitBreaker,
    Competition,
    DelayWindow,
    EcnPath,
    EcnSeen,
    LossCount,
    LossLaw,
    PortDelay,
    QueueDelay,
    RateMeter,
    Stretch,
)

from part_kit import MS, SECOND, US

WIRE = 1_514  # bytes on the wire of a packet
TARGET = 1_300 * US
NO_QUEUE = 0

# ---------------------------------------------------------------------------- queueing delay


@pytest.mark.parametrize("offset_us", [0, 12_345, 2**31 + 7, 2**32 - 1_000])
def test_a_queue_is_the_delay_above_the_smallest_whatever_the_clocks(offset_us: int) -> None:
    delay = QueueDelay()
    for sent_us, on_the_way_us, queue in [
        (0, 700, 0),
        (1_000, 900, 200 * US),
        (2_000, 500, 0),  # the smallest so far
        (3_000, 900, 400 * US),
    ]:
        now = (sent_us + on_the_way_us) * US
        assert delay.sample((sent_us + offset_us) % 2**32, now, NO_QUEUE, now) == queue


@pytest.mark.parametrize(("pause", "queue"), [(9 * SECOND, 3 * MS), (11 * SECOND, 0)])
def test_after_a_long_pause_the_smallest_delay_is_learnt_anew(pause: int, queue: int) -> None:
    delay = QueueDelay()
    delay.sample(0, 500 * US, NO_QUEUE, 500 * US)
    now = pause + 500 * US + 3 * MS  # 3 ms by which the clocks may have drifted apart
    assert delay.sample(pause // US, now, NO_QUEUE, now) == queue


def test_one_damaged_stamp_is_no_queue() -> None:
    delay = QueueDelay()
    for step, stamp_us in enumerate([0, 1_000, 2_000 + 2**31, 3_000, 4_000 - 3_000_000, 5_000]):
        now = (step * 1_000 + 500) * US
        assert delay.sample(stamp_us % 2**32, now, NO_QUEUE, now) == 0


def test_a_clock_that_jumps_is_no_queue() -> None:
    delay = QueueDelay()
    delay.sample(0, 500 * US, NO_QUEUE, 500 * US)
    for step in range(1, 5):  # the sender's clock has lost ten minutes
        now = (step * 1_000 + 500) * US
        assert delay.sample((step * 1_000 - 600_000_000) % 2**32, now, NO_QUEUE, now) == 0
    now = 5_900 * US
    assert delay.sample((5_000 - 600_000_000) % 2**32, now, NO_QUEUE, now) == 400 * US


@pytest.mark.parametrize("drift", [-600, -50, 50, 600])
def test_clocks_that_run_apart_are_no_queue(drift: int) -> None:
    random = Random(drift)
    delay = QueueDelay()
    for step in range(1, 200_000):  # twenty seconds
        now = step * 100 * US
        # The queues of both ways are empty five times a second.
        there, back = (
            0 if step % 2_000 == 0 else random.randrange(300 * US, 900 * US) for _ in "ab"
        )
        sent_us = (now - 40 * US - back - now * drift // 1_000_000) // US
        queue = delay.sample(sent_us % 2**32, now, there + back, now)
        if step > 60_000:
            assert abs(queue - back) <= 0.25 * TARGET, (step, queue, back)


def test_a_port_has_the_smallest_delay_of_the_paths_in_use() -> None:
    port = PortDelay(3)
    assert port.add(0, 900 * US, WIRE, 10 * MS) == (1, 900 * US)
    assert port.add(1, 400 * US, WIRE, 11 * MS) == (2, 400 * US)
    assert port.add(0, 900 * US, WIRE, 15 * MS) == (2, 400 * US)
    assert port.add(0, 900 * US, WIRE, 17 * MS) == (1, 900 * US)  # path 1 is silent


def test_a_path_heard_before_many_others_hides_no_queue() -> None:
    port = PortDelay(17)
    assert port.add(0, 0, WIRE, 10 * MS) == (1, 0)
    for path in range(1, 16):
        assert port.add(path, 900 * US, WIRE, 10 * MS + path) == (path + 1, 0)
    assert port.add(16, 900 * US, WIRE, 11 * MS) == (16, 900 * US)


def test_the_delay_of_a_path_moves_towards_new_samples() -> None:
    port = PortDelay(1)
    port.add(0, 0, WIRE, 10 * MS)
    delays = [port.add(0, MS, WIRE, 10 * MS + step)[1] for step in range(100)]
    assert delays == sorted(delays)
    assert delays[0] < 200 * US
    assert delays[-1] > 900 * US


@pytest.mark.parametrize("paths", [1, 2, 5, 64, 100])
def test_a_port_is_what_a_look_at_all_its_paths_gives(paths: int) -> None:
    random = Random(paths)
    port = PortDelay(paths)
    means: dict[int, tuple[float, int]] = {}  # by path: its delay, and when it was sampled
    now = 10 * MS
    for _ in range(2_000):
        now += random.choice([0, 20 * US, 300 * US, 2 * MS])
        path, delay = random.randrange(paths), random.randrange(3 * MS)
        newest = sorted(means, key=lambda p: (-means[p][1], -p))[:16]
        fresh = {p for p in newest if now - means[p][1] <= 5 * MS}
        if len(fresh) == 16 and path not in fresh:
            fresh.remove(newest[-1])
        mean, last = means.get(path, (0.0, -SECOND))
        full = now - last > 5 * MS
        weight = 1.0 if full else min(1.0, WIRE * max(1, len(fresh)) / (16 * 1514.0))
        means[path] = (mean + (delay - mean) * weight, now)
        fresh.add(path)
        least = min(means[p][0] for p in fresh)
        assert port.add(path, delay, WIRE, now) == (len(fresh), int(least))


# ---------------------------------------------------------------------------- ECN


def ecn_path(sent: int, acked: int) -> EcnPath:
    path = EcnPath()
    for _ in range(sent):
        path.sent()
    for _ in range(acked):
        path.acked(True)
    return path


@pytest.mark.parametrize(
    ("acked", "ect0", "ce", "failed", "marks"),
    [
        (10, 10, 0, False, False),
        (10, 7, 3, False, True),
        (10, 0, 10, False, True),
        (10, 0, 0, True, False),  # the path clears the codepoint
        (10, 9, 0, True, False),
        (5, 9, 0, False, False),  # counts may be ahead of what the ACKs report
        (10, 21, 0, True, False),  # more than were ever sent
    ],
)
def test_the_counts_of_an_ack_validate_a_path(
    acked: int, ect0: int, ce: int, failed: bool, marks: bool
) -> None:
    path = ecn_path(20, acked)
    assert path.told(ect0, ce) == marks
    assert (path.failed(), path.capable()) == (failed, not failed)


def test_marks_are_reported_once_and_a_reordered_ack_takes_nothing_back() -> None:
    path = ecn_path(20, 5)
    marks = [path.told(*counts) for counts in [(4, 1), (4, 1), (3, 0), (5, 1), (6, 2)]]
    assert marks == [True, False, False, False, True]
    assert not path.failed()


def test_packets_go_without_ect_after_three_time_outs_without_an_answer() -> None:
    path = ecn_path(5, 0)
    for number, capable in [(1, True), (2, True), (3, False)]:
        path.timed_out(number)
        assert path.capable() == capable


@pytest.mark.parametrize(("ect", "capable"), [(True, True), (False, False)])
def test_the_first_ack_after_these_shows_whether_the_path_drops_ect(
    ect: bool, capable: bool
) -> None:
    path = ecn_path(5, 0)
    path.timed_out(3)
    path.acked(ect)
    path.told(5, 0)
    assert (path.capable(), path.failed()) == (capable, not capable)


@pytest.mark.parametrize("arrived", [False, True])
def test_packets_that_go_again_before_any_time_out_show_that_ect_is_dropped(arrived: bool) -> None:
    path = ecn_path(100, int(arrived))
    for _ in range(64):
        assert path.capable()
        path.given_up()
    assert path.capable() == arrived


def test_time_outs_after_an_acknowledged_ect_packet_say_nothing_about_ecn() -> None:
    path = ecn_path(5, 1)
    path.timed_out(9)
    assert path.capable()


def test_arrivals_are_counted_and_a_change_of_marking_is_news() -> None:
    seen = EcnSeen()
    news = [seen.add(codepoint) for codepoint in (2, 2, 3, 3, 2, 0)]
    assert news == [False, False, True, False, True, False]
    assert (seen.ect0, seen.ce) == (3, 2)


# ---------------------------------------------------------------------------- circuit breaker


class Breaker:
    """A circuit breaker over seconds in which 100 packets go, or half of them where it tries that.

    carried: packets a second that arrive at the most.
    """

    def __init__(self, carried: float = 100) -> None:
        self.breaker = CircuitBreaker()
        self.carried = carried
        self.now = 1
        self.breaker.tick(self.now)

    def second(self, loss: float, *, told: float | None = None, lost: int = 0) -> bool:
        packets = int(100 * self.breaker.factor())
        for _ in range(packets):
            self.breaker.sent(1_000, loss if told is None else told)
        for _ in range(lost):
            self.breaker.lost()
        self.breaker.arrived(int(1_000 * min(self.carried, packets * (1 - loss))))
        self.now += SECOND
        return self.breaker.tick(self.now)

    def factors(self, *losses: float) -> list[float]:
        return [(self.second(loss), self.breaker.factor())[1] for loss in losses]


def test_five_seconds_of_heavy_loss_in_a_row_halve_the_rate_for_one() -> None:
    breaker = Breaker()
    assert breaker.factors(*[0.9] * 4, 0.5, *[0.9] * 4) == [1.0] * 9  # a pause starts it anew
    assert breaker.factors(0.9, 0.9) == [0.5, 1.0]


@pytest.mark.parametrize(("loss", "told"), [(0.9, 0.9), (0.999, 0.95), (0.6, 0.6)])
def test_who_floods_is_told_so_however_much_is_lost(loss: float, told: float) -> None:
    """The highest shares of loss are not measured."""
    breaker = Breaker(carried=100 * (1 - loss))
    assert not any(breaker.second(loss, told=told) for _ in range(5))
    assert breaker.breaker.most() == pytest.approx(50_000)
    assert breaker.second(max(0.0, 2 * loss - 1), told=told)
    assert breaker.breaker.factor() == 1


@pytest.mark.parametrize("after", [0.9, 0.86])
def test_an_attempt_that_hardly_helps_shows_nothing_and_the_next_comes_after_twice_the_time(
    after: float,
) -> None:
    breaker = Breaker()
    tries = []
    for second in range(200):
        assert not breaker.second(0.9 if breaker.breaker.factor() == 1 else after)
        if breaker.breaker.factor() < 1:
            tries.append(second)
    assert tries == [4, 11, 25, 53, 109]


@pytest.mark.parametrize("loss", [0.7, 1.0])
def test_loss_that_ends_in_an_attempt_was_no_flood(loss: float) -> None:
    breaker = Breaker()
    assert breaker.factors(*[loss] * 5)[-1] == 0.5
    assert not breaker.second(0.0)
    assert breaker.factors(*[loss] * 5) == [1, 1, 1, 1, 0.5]


def test_an_attempt_is_judged_even_if_little_is_lost_in_it() -> None:
    breaker = Breaker(carried=48)
    assert breaker.factors(*[0.52] * 5)[-1] == 0.5
    assert breaker.second(0.04)


def test_declared_losses_count_like_reported_ones_and_few_packets_do_not() -> None:
    breaker = CircuitBreaker()
    breaker.tick(1)
    for second in range(1, 11):
        for _ in range(7):
            breaker.sent(1_000, 0.9)
            breaker.lost()
        breaker.tick(1 + second * SECOND)
        assert breaker.factor() == 1
    breaker = Breaker()
    for _ in range(4):
        breaker.second(0.0, lost=60)
        assert breaker.breaker.factor() == 1
    breaker.second(0.0, lost=60)
    assert breaker.breaker.factor() == 0.5


# ---------------------------------------------------------------------------- rate


def deliver(meter: RateMeter, rate: float, start: int, time: int, *, lossy: bool = False) -> int:
    """Adds what arrives at `rate` in steps of half a millisecond; returns the end."""
    for now in range(start, start + time, MS // 2):
        meter.add(int(rate / 2_000), now, lossy)
    return start + time


def test_a_steady_rate_is_known_soon() -> None:
    meter = RateMeter()
    deliver(meter, 125e6, MS, 50 * MS)
    assert meter.bytes_per_second() == pytest.approx(125e6, rel=0.03)
    assert meter.proven()


def test_pauses_between_bursts_lower_no_rate() -> None:
    meter = RateMeter()
    now = MS
    for _ in range(40):
        now = deliver(meter, 125e6, now, 12 * MS) + 500 * MS
    assert meter.bytes_per_second() == pytest.approx(125e6, rel=0.03)


def test_the_largest_rate_of_the_last_seconds_counts() -> None:
    meter = RateMeter()
    now = deliver(meter, 100e6, MS, SECOND)
    now = deliver(meter, 50e6, now, 3 * SECOND)
    assert meter.bytes_per_second() == pytest.approx(100e6, rel=0.03)
    deliver(meter, 50e6, now, 9 * SECOND)
    assert meter.bytes_per_second() == pytest.approx(50e6, rel=0.03)


def test_what_arrives_under_heavy_loss_ages_no_rate_and_proves_none() -> None:
    meter = RateMeter()
    now = deliver(meter, 20e6, MS, 100 * MS, lossy=True)
    assert not meter.proven()
    now = deliver(meter, 100e6, now, 100 * MS)
    assert meter.proven()
    deliver(meter, 20e6, now, 15 * SECOND, lossy=True)
    assert meter.bytes_per_second() == pytest.approx(100e6, rel=0.03)


def acknowledge(meter: RateMeter, rate: float, now: int, time: int, pace: float) -> int:
    """Adds what is acknowledged at this rate and was sent over `pace` times as long."""
    for moment in range(now, now + time, 100 * US):
        sent = SECOND + int(pace * moment)
        meter.add(int(rate / 10_000), moment, sent=sent if pace else 0)
    return now + time


@pytest.mark.parametrize(("pace", "rate"), [(0.5, 125e6), (1.0, 125e6), (2.0, 62.5e6), (0, 125e6)])
def test_acknowledgements_of_several_receivers_show_no_rate_above_that_of_sending(
    pace: float, rate: float
) -> None:
    meter = RateMeter()
    acknowledge(meter, 125e6, MS, 200 * MS, pace)
    assert meter.bytes_per_second() == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize(("sent", "seconds"), [(1.0, 1), (0.5, 10)])
def test_a_rate_that_is_tried_and_not_reached_is_soon_forgotten(sent: float, seconds: int) -> None:
    meter = RateMeter()
    now = deliver(meter, 100e6, MS, SECOND)
    for moment in range(now, now + (seconds + 1) * SECOND, MS // 2):
        if moment < now + seconds * SECOND // 2 - 50 * MS:
            assert meter.bytes_per_second() == pytest.approx(100e6, rel=0.03)
        meter.sent(int(sent * 100e6 / 2_000))
        meter.add(int(40e6 / 2_000), moment)
    assert meter.bytes_per_second() == pytest.approx(40e6, rel=0.03)


def test_bursts_are_put_together_and_what_opens_one_does_not_count() -> None:
    """Ops of 3 ms with pauses, each opened by a clump that has waited."""
    meter = RateMeter()
    now = MS
    for _ in range(30):
        meter.add(1_000_000, now)
        now = deliver(meter, 125e6, now + MS // 2, 3 * MS) + 100 * MS
    assert meter.bytes_per_second() == pytest.approx(125e6, rel=0.05)


def test_an_interval_has_bytes_of_one_kind() -> None:
    meter = RateMeter()
    for moment in range(MS, 200 * MS, 200 * US):
        meter.add(25_000, moment, sent=moment)
        meter.add(25_000, moment + 100 * US)
    assert meter.bytes_per_second() == 0


# ---------------------------------------------------------------------------- whose queue


class Port:
    """Competition in epochs of a millisecond, under a queue of twice the target if not of none."""

    def __init__(self) -> None:
        self.competition = Competition()
        self.now = 0

    def epochs(self, count: int, rate: float, *, queue: bool = True) -> list[tuple[int, float]]:
        """The epochs that change the window, counted from 1, with the factors."""
        changes = []
        for number in range(1, count + 1):
            self.now += MS
            delay = 2 * TARGET if queue else 0
            factor = self.competition.observe(rate / 1e3, MS, delay, TARGET, False, self.now)
            if factor != 1:
                changes.append((number, factor))
        return changes

    def until(self, factor: float, rate: float) -> int:
        """The epochs at this rate until the window changes, which is by this factor."""
        for number in range(1, 5_000):
            if changes := self.epochs(1, rate):
                assert changes == [(1, factor)]
                return number
        raise AssertionError("it does not change")

    def compete(self) -> None:
        """Other flows give way in a first trial, and no further in a second one."""
        assert self.epochs(50, 10e6) == [(50, 2)]
        assert self.epochs(50, 20e6) == [(50, 2)]
        assert self.epochs(50, 20e6) == [(50, 0.5)]
        assert self.competition.competes()


def test_a_short_queue_begins_no_trial() -> None:
    port = Port()
    for _ in range(5):
        assert port.epochs(45, 10e6) == []
        assert port.epochs(45, 10e6, queue=False) == []


def test_flows_that_give_way_to_a_larger_window_are_competed_with() -> None:
    Port().compete()


def test_flows_that_do_not_react_are_given_way_to_and_tried_again_rarely() -> None:
    port = Port()
    factors = port.epochs(10_000, 10e6)
    assert not port.competition.competes()
    begun = [number for number, factor in factors if factor == 2]
    ended = [number for number, factor in factors if factor == 0.5]
    assert [end - begin for begin, end in zip(begun, ended, strict=False)] == [50] * len(ended)
    pauses = [later - end for end, later in zip(ended, begun[1:], strict=False)]
    assert min(pauses) >= 2_000


def test_a_competition_lasts_as_long_as_others_take_what_half_a_window_leaves() -> None:
    port = Port()
    port.compete()
    for _ in range(7):
        assert port.until(0.5, 10e6) > 1_900
        assert port.epochs(50, 5e6) == [(50, 2)]
        assert port.competition.competes()


@pytest.mark.parametrize(("rate", "competes"), [(10e6, False), (8e6, False), (7e6, True)])
def test_a_competition_ends_after_two_checks_in_which_nobody_took_much(
    rate: float, competes: bool
) -> None:
    port = Port()
    port.compete()
    port.until(0.5, 10e6)
    port.epochs(50, rate)
    assert port.competition.competes()
    port.until(0.5, 10e6)
    port.epochs(50, rate)
    assert port.competition.competes() == competes


def test_a_competition_ends_when_the_queue_is_gone() -> None:
    port = Port()
    port.compete()
    port.epochs(60, 20e6, queue=False)
    assert not port.competition.competes()


# ---------------------------------------------------------------------------- delay window


class Queue:
    """A port of this rate with its queue, filled by one DelayWindow."""

    def __init__(self, rate: float, rtprop: int, initial: float = 32 * WIRE) -> None:
        self.rate = rate
        self.rtprop = rtprop
        self.window = DelayWindow(initial, 4 * WIRE, 64e6, TARGET)
        self.now = MS

    def round(self, *, limited: bool = True, lossy: bool = False, lost: bool = False) -> int:
        """One round of a full window; returns its queueing delay."""
        queue = max(0, int(self.window.bytes() / self.rate * 1e9) - self.rtprop)
        round_trip = self.rtprop + queue
        delivered = min(self.window.bytes(), self.rate * round_trip / 1e9)
        steps = max(4, round_trip // MS)
        for _ in range(steps):
            self.now += round_trip // steps
            if limited:
                self.window.limited()
            if lost:
                self.window.lost()
            size = int(delivered / steps)
            self.window.sample(size, queue, round_trip, self.rtprop, lossy, self.now)
        return queue

    def rounds(self, time: int, **options: bool) -> list[int]:
        end = self.now + time
        queues = []
        while self.now < end:
            queues.append(self.round(**options))
        return queues


@pytest.mark.parametrize("rate", [12.5e6, 125e6, 1.25e9])
@pytest.mark.parametrize("rtprop", [100 * US, MS, 10 * MS])
@pytest.mark.parametrize("initial", [32, 2_000])
def test_a_window_finds_the_rate_and_keeps_a_queue_of_about_the_target(
    rate: float, rtprop: int, initial: int
) -> None:
    port = Queue(rate, rtprop, initial * WIRE)
    port.rounds(4 * SECOND)
    queues = port.rounds(SECOND)
    target = port.window.target()
    assert TARGET <= target <= 3 * MS
    assert 0.2 * target < sum(queues) / len(queues) < 1.1 * target
    assert max(queues) < 2 * target
    assert port.window.rate() == pytest.approx(rate, rel=0.1)


def test_a_window_that_does_not_limit_transmission_does_not_grow() -> None:
    port = Queue(125e6, MS)
    port.rounds(SECOND, limited=False)
    assert port.window.bytes() == 32 * WIRE


def test_loss_without_a_queue_shrinks_no_window() -> None:
    port = Queue(125e6, MS)
    before = port.window.bytes()
    port.window.sample(WIRE, 0, MS, MS, False, port.now)
    for _ in range(50):
        port.round(limited=False, lost=True)
        assert port.window.bytes() >= before


def test_a_queue_beyond_the_target_shrinks_the_window_down_to_its_minimum() -> None:
    window = DelayWindow(1_000 * WIRE, 4 * WIRE, 64e6, TARGET)
    sizes = []
    for round_number in range(1, 200):
        window.sample(10 * WIRE, 5 * TARGET, MS, MS, False, round_number * 10 * MS)
        sizes.append(window.bytes())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < 0.6 * 1_000 * WIRE
    assert sizes[-1] == 4 * WIRE


def test_a_mark_shrinks_the_window_by_a_fifth_and_ends_slow_start() -> None:
    window = DelayWindow(100 * WIRE, 4 * WIRE, 64e6, TARGET)
    assert window.ramps()
    window.marked()
    assert window.bytes() == pytest.approx(80 * WIRE)
    assert not window.ramps()
    for _ in range(50):
        window.marked()
    assert window.bytes() == 4 * WIRE


def test_a_window_stretches_under_heavy_loss_where_little_arrives_and_never_beyond_the_loss() -> (
    None
):
    port = Queue(125e6, MS)
    port.rounds(300 * MS)
    assert port.window.stretch(0.5) == 1
    for _ in range(200):  # a fifth of the rate arrives, without a queue
        port.now += MS
        port.window.sample(25_000, 0, MS, MS, True, port.now)
    for loss, stretch in [(0.0, 1), (0.5, 2), (0.75, 4)]:
        assert port.window.stretch(loss) == pytest.approx(stretch)
    for _ in range(200):  # the full rate again
        port.now += MS
        port.window.sample(125_000, 0, MS, MS, True, port.now)
    assert port.window.stretch(0.5) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("loss", "told", "stretch"),
    [
        (0.5, 10.0, 2.0),  # as much as the loss takes
        (0.5, 1.5, 1.5),  # no receiver asks for more
        (0.5, 0.5, 1.0),
        (0.2, 10.0, 1.0),  # no heavy loss
    ],
)
def test_a_senders_window_stretches_to_those_of_its_receivers(
    loss: float, told: float, stretch: float
) -> None:
    port = Queue(125e6, MS)
    port.rounds(300 * MS)
    for _ in range(200):  # a fifth of the rate arrives, without a queue
        port.now += MS
        port.window.loss(loss, told * port.window.bytes())
        port.window.limited()
        port.window.sample(25_000, 0, MS, MS, True, port.now)
    assert port.window.stretch(loss) == pytest.approx(stretch, rel=0.05)


# ---------------------------------------------------------------------------- a sender's stretch

NO_QUEUE, LONG_QUEUE = 0, 2 * TARGET
FULL, FIFTH = 0.95, 0.2  # shares of BtlBw


def epochs_of(stretch: Stretch, *epochs: tuple[float, float, float, int, bool]) -> list[float]:
    """The factor after each epoch of (loss, receivers' windows, use, delay, limited)."""
    factors = []
    for loss, told, use, delay, limited in epochs:
        stretch.loss(loss, told)
        stretch.epoch(window=100.0, use=use, delay=delay, target=TARGET, limited=limited)
        factors.append(stretch.factor(0.95))
    return factors


@pytest.mark.parametrize(
    ("epoch", "factor"),
    [
        ((0.75, 1e9, FIFTH, NO_QUEUE, True), 2),
        ((0.95, 1e9, FIFTH, NO_QUEUE, True), 2),  # by steps of two
        ((0.75, 150, FIFTH, NO_QUEUE, True), 1.5),
        ((0.75, 50, FIFTH, NO_QUEUE, True), 1),
        ((0.75, 1e9, FIFTH, NO_QUEUE, False), 1),  # something else limits it
        ((0.25, 1e9, FIFTH, NO_QUEUE, True), 1),  # no heavy loss
        ((0.75, 1e9, FULL, NO_QUEUE, True), 1),
        ((0.75, 1e9, FIFTH, LONG_QUEUE, True), 1),
    ],
)
def test_a_sender_stretches_where_heavy_loss_and_nothing_else_limits_it(
    epoch: tuple[float, float, float, int, bool], factor: float
) -> None:
    assert epochs_of(Stretch(), epoch) == [factor]


@pytest.mark.parametrize(
    ("epoch", "factor"),
    [
        ((0.75, 1e9, FULL, NO_QUEUE, True), 3.2),
        ((0.75, 1e9, FIFTH, TARGET, True), 3.2),  # by a fifth at the most
        ((0.75, 1e9, FIFTH, LONG_QUEUE, True), 3.2),
        ((0.75, 1e9, FIFTH, 78 * TARGET // 100, False), 4 * 0.75 / 0.78),
        ((0.75, 1e9, FIFTH, 74 * TARGET // 100, False), 4),
        ((0.5, 1e9, FIFTH, NO_QUEUE, True), 2),
        ((0.75, 300, FIFTH, NO_QUEUE, True), 3),
    ],
)
def test_a_stretch_gives_way_to_a_queue_the_full_rate_and_smaller_windows(
    epoch: tuple[float, float, float, int, bool], factor: float
) -> None:
    stretch = Stretch()
    epochs_of(stretch, *[(0.75, 1e9, FIFTH, NO_QUEUE, True)] * 2)
    assert epochs_of(stretch, epoch) == [pytest.approx(factor)]


def test_a_stretch_that_led_to_a_queue_is_approached_slowly_until_the_loss_ends() -> None:
    grows = (0.75, 1e9, FIFTH, NO_QUEUE, True)
    stretch = Stretch()
    fills = (0.75, 1e9, 0.9, LONG_QUEUE, True)
    assert epochs_of(stretch, grows, grows, fills) == [2, 4, pytest.approx(3.2)]
    # 0.9 of BtlBw came through, which is 3.6 times the quarter that arrives.
    assert epochs_of(stretch, grows, grows) == [pytest.approx(3.6), pytest.approx(3.6 * 1.02)]
    assert epochs_of(stretch, (0.2, 1e9, FIFTH, NO_QUEUE, True), grows) == [1.25, 2.5]


@pytest.mark.parametrize(
    ("delays", "factor"), [([TARGET // 2] * 3, 4), ([TARGET // 2, TARGET // 8], 8), ([], 8)]
)
def test_a_stretch_grows_no_more_beside_a_queue_that_stands(
    delays: list[int], factor: float
) -> None:
    """However short it is: a short buffer that overflows has no longer one."""
    grows = (0.9, 1e9, FIFTH, NO_QUEUE, True)
    stretch = Stretch()
    epochs_of(stretch, grows, grows)
    for delay in delays:
        stretch.queued(delay)
    assert epochs_of(stretch, grows) == [factor]


def test_a_mark_takes_a_fifth_of_a_stretch() -> None:
    stretch = Stretch()
    epochs_of(stretch, *[(0.75, 1e9, FIFTH, NO_QUEUE, True)] * 2)
    for factor in (3.2, 2.56):
        stretch.marked()
        assert stretch.factor(0.95) == pytest.approx(factor)
    for _ in range(10):
        stretch.marked()
    assert not stretch.any()


# ---------------------------------------------------------------------------- losses


class Lossy:
    """A network whose loss follows from what is sent; 1,000 packets a judgement unless told."""

    def __init__(self, loss: Callable[[LossLaw], float], queue: int = 0, least: int = 0) -> None:
        self.law = LossLaw(32)
        self.loss = loss
        self.queue = queue
        self.least = least
        self.packets = 1_000
        self.now = MS
        self._judge(0.0)

    def _judge(self, share: float) -> None:
        self.law.judge(MS, TARGET, share > 0.25, self.now, use=1 - share)

    def judge(self, times: int = 1) -> list[float]:
        """The share lost in each of so many judgements, one in 20 ms."""
        shares = []
        for _ in range(times):
            share = self.loss(self.law)
            self.now += 20 * MS
            self.law.count(self.packets * share, self.packets * (1 - share), self.queue)
            for delay in (self.queue, self.least):
                self.law.queued(delay)
            self._judge(share)
            shares.append(share)
        return shares


def short_buffer(law: LossLaw) -> float:
    """A buffer of a fifth of the target: the more is aimed at, the more is lost."""
    return max(0.0, 0.25 * (law.room() - 0.2))


def policed(law: LossLaw, carried: float = 1.0) -> float:
    """The loss of what is sent beyond a rate, at a pace that follows room and trial."""
    return max(0.0, 1.0 - carried / (law.pace() * (0.95 if law.pressed() else 1 + law.room() / 5)))


@pytest.mark.parametrize("loss", [short_buffer, policed])
def test_what_is_lost_of_too_much_is_sent_no_more(loss: Callable[[LossLaw], float]) -> None:
    network = Lossy(loss)
    network.judge(40)
    shares = network.judge(1_000)
    assert sum(shares) / len(shares) < 0.02
    assert network.law.room() < 0.3
    assert network.law.of_path() == 0


def test_a_flood_found_out_otherwise_counts_as_a_trial_that_showed_own_losses() -> None:
    network = Lossy(lambda _: 0.9)
    network.judge(2)
    network.law.floods(0.95, 0.07, network.now)
    assert network.law.left() == 0.07
    assert network.law.left() == 1
    assert network.law.pressed()
    assert network.law.room() == 1 / 16


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2])
def test_losses_that_stay_in_a_trial_are_the_paths(share: float) -> None:
    network = Lossy(lambda _: share)
    network.judge(20)
    assert network.law.room() == 1
    assert network.law.of_path() == pytest.approx(share)
    assert not network.law.pressed()
    cut = 0
    for _ in range(2_000):
        cut += network.law.room() < 1
        network.judge()
    assert cut < 0.02 * 2_000  # trials become rare
    network.loss = lambda _: 0.0
    network.judge(100)
    assert network.law.of_path() == 0


def test_losses_that_begin_to_follow_the_room_are_found_out() -> None:
    """A path that loses by itself gets a policer."""
    network = Lossy(lambda _: 0.05)
    network.judge(10)
    network.loss = policed
    network.judge(100)
    assert sum(network.judge(200)) / 200 < 0.02


def test_losses_that_less_room_does_not_change_give_it_back() -> None:
    """The room was at its least for another reason."""
    network = Lossy(short_buffer)
    for _ in range(50):
        network.law.marked()
    network.loss = lambda _: 0.05
    network.judge(500)
    assert network.law.of_path() == pytest.approx(0.05)
    assert network.law.room() == 1


def test_the_paths_loss_that_has_halved_is_tried_out_anew() -> None:
    """Heavy loss waits ten seconds for another trial; what comes after it is another loss."""
    network = Lossy(lambda _: 0.8)
    network.judge(60)
    assert network.law.of_path() == pytest.approx(0.8)
    network.loss = lambda law: 0.1 if law.room() == 1 else 0.0
    network.judge(40)
    assert network.law.of_path() == 0
    assert network.law.room() < 1


@pytest.mark.parametrize(("packets", "of_path"), [(200, 0), (1_000, pytest.approx(0.02))])
def test_a_trial_of_few_packets_shows_nothing(packets: int, of_path: float) -> None:
    network = Lossy(lambda _: 0.02)
    network.packets = packets
    network.judge(20)
    assert network.law.of_path() == of_path
    assert network.law.room() == 1


def test_losses_beside_a_queue_longer_than_the_target_are_others() -> None:
    network = Lossy(lambda _: 0.2, queue=2 * TARGET)
    network.judge(50)
    assert network.law.room() == 1
    assert network.law.of_path() == 0


@pytest.mark.parametrize(("least", "room"), [(TARGET // 2, 1 / 16), (TARGET // 8, 1)])
def test_losses_beside_a_queue_that_stands_are_own(least: int, room: float) -> None:
    """Other jobs on the port fill what this one leaves, so that a trial would not show it."""
    network = Lossy(lambda _: 0.1, queue=TARGET // 2, least=least)
    network.judge(50)
    assert network.law.room() == room
    assert network.law.of_path() == (0 if least == TARGET // 2 else pytest.approx(0.1))


@pytest.mark.parametrize(("least", "own"), [(TARGET // 2, True), (0, False)])
def test_heavy_loss_beside_a_queue_that_stands_is_own_at_once(least: int, own: bool) -> None:
    network = Lossy(lambda _: 0.35, queue=TARGET // 2, least=least)
    network.judge(3)
    assert (network.law.room() < 1) is own
    assert not network.law.of_path()


def test_a_burst_begins_no_trial() -> None:
    network = Lossy(lambda _: 0.6)
    for _ in range(45):
        network.judge()
        assert network.law.room() == 1
        assert not network.law.pressed()


def test_a_burst_ends_a_trial() -> None:
    network = Lossy(lambda law: 0.05 if law.room() == 1 else 0.6)
    network.judge(1)
    assert network.law.pressed()
    network.judge(1)
    assert not network.law.pressed()
    assert network.law.room() == 1


@pytest.mark.parametrize("carried", [0.1, 0.4])
def test_what_a_port_carries_no_more_is_found_out_by_sending_what_arrives(carried: float) -> None:
    network = Lossy(lambda law: policed(law, carried))
    left = 1.0
    for _ in range(150):
        network.judge()
        left = min(left, network.law.left())
    assert left == pytest.approx(carried / 1.2, rel=0.1)


@pytest.mark.parametrize(("queue", "room"), [(800, 4 / 13), (0, 1 / 16)])
def test_a_trial_aims_at_half_of_the_queue_at_the_losses(queue: int, room: float) -> None:
    network = Lossy(lambda _: 0.05, queue * 1_000)
    while not network.law.pressed():
        network.judge()
    assert network.law.room() == pytest.approx(room)
    assert network.law.pace() == pytest.approx(0.95)


def test_own_losses_soon_leave_a_shorter_queue_than_they_met() -> None:
    network = Lossy(lambda law: 0.1 if law.room() > 0.2 else 0.0, queue=TARGET // 5)
    network.judge(3)  # of which the second and third are a trial
    assert network.law.room() == pytest.approx(0.8)
    rooms = []
    for _ in range(7):
        network.judge()
        rooms.append(network.law.room())
    assert min(rooms) == pytest.approx(0.75 * 0.2)
    assert rooms[-1] < 0.2


def test_a_bucket_is_not_taken_for_the_rate_where_packets_are_lost() -> None:
    """64 KiB at once after each pause, then 12.5 MB/s."""
    rates = []
    for losing in (0, MS):
        meter, now = RateMeter(), SECOND
        for _ in range(4):
            for step in range(200):
                now += MS
                meter.add(12_500 + (65_536 // 5 if step < 5 else 0), now, losing=losing)
            now += 100 * MS
        rates.append(meter.bytes_per_second())
    assert rates[1] < 1.08 * 12.5e6 < 1.2 * 12.5e6 < rates[0]


def test_the_room_comes_back_in_seconds() -> None:
    network = Lossy(lambda law: 0.2 if law.room() > 0.95 else 0.0)
    network.judge(3)
    cut = network.law.room()
    assert cut == pytest.approx(0.6)
    network.judge(2)
    assert cut < network.law.room() < 0.95


@pytest.mark.parametrize("share", [0.0, 0.009])
def test_few_losses_take_no_room(share: float) -> None:
    network = Lossy(lambda _: share)
    network.judge(50)
    assert network.law.room() == 1
    assert not network.law.pressed()


def test_a_mark_takes_room() -> None:
    law = LossLaw(32)
    law.marked()
    assert law.room() == pytest.approx(0.9)
    for _ in range(50):
        law.marked()
    assert law.room() == pytest.approx(1 / 16)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_the_room_keeps_its_bounds_and_comes_back(seed: int) -> None:
    chance = Random(seed)
    network = Lossy(lambda _: chance.choice([0.0, 0.02, 0.1, 0.3, 0.9, 1.0]) * chance.random())
    for _ in range(500):
        network.queue = chance.choice([0, TARGET // 2, 3 * TARGET])
        network.judge()
        assert 1 / 16 <= network.law.room() <= 1, f"seed {seed}"
        assert 0 < network.law.pace() <= 1, f"seed {seed}"
        assert 0 <= network.law.of_path() < 1, f"seed {seed}"
    network.loss = lambda _: 0.0
    network.judge(200)
    assert network.law.room() == 1, f"seed {seed}"
    assert not network.law.pressed(), f"seed {seed}"


def counted(numbers: list[int]) -> tuple[float, float]:
    """Packets lost and arrived, of those with these numbers, one in 100 us; all queue for 10 us."""
    count, largest, now, lost, arrived = LossCount(), 0, MS, 0.0, 0.0
    for number in numbers:
        now += 100 * US
        if count.add(number, largest, 10 * US, now):
            lost, arrived = lost + count.ended()[0], arrived + count.ended()[1]
        largest = max(largest, number)
    return lost, arrived


def test_of_a_run_of_missing_packets_three_count() -> None:
    lost, arrived = counted([n for n in range(1, 5_000) if n % 100 < 80])
    assert lost == pytest.approx(3 * arrived / 80, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_packets_that_come_late_are_not_lost(seed: int) -> None:
    chance = Random(seed)
    order = sorted(range(1, 5_000), key=lambda n: n + chance.randint(0, 20))
    lost, arrived = counted(order)
    assert arrived > 4_000
    assert lost < 0.01 * arrived, f"seed {seed}"
