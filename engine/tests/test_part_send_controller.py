"""SendController, without an endpoint: what is sent and acknowledged in, when trains go out."""

import pytest
from _parts import SendController, TokenBucket

from part_kit import MS, SECOND, US

WIRE = 1_514  # bytes on the wire of a full packet
TARGET = 1_300 * US
RATE = 125e6  # bytes/s
FAR = {"far": 1, "rtprop": 40 * MS, "round": 40 * MS}


def acked(
    sender: SendController, now: int, *, size: int = WIRE, queue: int = 0, path: int = 0
) -> None:
    sender.on_ack(path=path, bytes=size, queue=queue, round=MS + queue, rtprop=MS, now=now)


def after_a_queue() -> tuple[SendController, int]:
    """A sender whose slow start a queue has ended, which is long gone, and the time."""
    sender = SendController(WIRE, TARGET)
    for now in (10 * MS, 15 * MS):
        acked(sender, now, queue=2 * TARGET)
    return sender, 30 * MS


def under_a_queue(queue: int) -> tuple[SendController, int]:
    """A sender that has measured this queueing delay, and the time."""
    sender, now = after_a_queue()
    for step in range(16):
        now += 3 * MS
        acked(sender, now, queue=queue, path=step % 2)
    assert sender.window().queue_delay() == queue
    return sender, now


def paced(sender: SendController, start: int, *, rate: float = RATE, **far: float) -> float:
    """The bytes a second that go in trains as soon as each may, over 100 ms."""
    sender.pace(rate, start, **far)
    sender.train_sent(0)
    total = 0.0
    now = start
    while now < start + 100 * MS:
        sender.pace(rate, now, **far)
        due = sender.wait(now)
        if due:
            assert due > now
            now = due
            continue
        sender.train_sent(sender.quantum() * WIRE)
        total += sender.quantum() * WIRE
        if total > 10 * RATE:
            return float("inf")
    return total * 10


def at_once(sender: SendController, now: int) -> int:
    """The bytes that go at once, when a timer was late."""
    sender.pace(RATE, now)
    total = 0
    while sender.wait(now) == 0:
        sender.train_sent(sender.quantum() * WIRE)
        total += sender.quantum() * WIRE
    return total


def test_a_turn_goes_beyond_the_window_at_its_own_pace() -> None:
    sender, now = after_a_queue()
    sender.on_sent(int(sender.window().bytes()), now)
    sender.pace(RATE, now)
    assert sender.room(now) <= 0
    sender.pace(RATE, now, turn=50 * WIRE, turn_rate=RATE / 4)
    assert sender.room(now) == pytest.approx(50 * WIRE)
    assert paced(sender, now, turn=50 * WIRE, turn_rate=RATE / 4) == pytest.approx(
        RATE / 4, rel=0.05
    )


def throttle(sender: SendController, now: int) -> int:
    """Six seconds in which all of RATE is lost trip the circuit breaker; returns the time."""
    for second in range(7):
        for _ in range(100):
            sender.on_sent(int(RATE / 100), now)
            sender.on_lost()
            sender.on_left(int(RATE / 100))
        now += SECOND
        sender.on_timer(now)
        if sender.throttled():
            assert second == 5
            break
    return now


# ---------------------------------------------------------------------------- pace


@pytest.mark.parametrize(
    ("queue", "gain"),
    [(0, 1.15), (TARGET * 3 // 8, 1.1), (TARGET * 3 // 4, 1.0), (2 * TARGET, 1.0)],
)
def test_the_pace_is_the_known_rate_and_a_little_more_while_the_queue_is_short(
    queue: int, gain: float
) -> None:
    sender, now = under_a_queue(queue)
    assert paced(sender, now) == pytest.approx(gain * RATE, rel=0.02)


def test_heavy_loss_that_leaves_the_port_idle_leaves_the_pace() -> None:
    """It may be that of a policer, which drops the more the more is sent."""
    sender, now = under_a_queue(0)
    for _ in range(60):
        now += MS
        acked(sender, now, size=20 * WIRE)
    assert paced(sender, now) == pytest.approx(1.15 * RATE, rel=0.02)
    for _ in range(60):  # of that a twentieth arrives
        now += MS
        sender.on_ack(path=0, bytes=WIRE, loss=0.9, queue=0, round=MS, rtprop=MS, now=now)
    assert paced(sender, now) < 20 * RATE


@pytest.mark.parametrize(
    ("told", "gain"), [((1.0, 0.5), 1.07), ((1 / 16, 1.0), 1.0), ((0.0, 1.0), 0.99)]
)
def test_the_receiver_whose_port_bears_least_bounds_the_pace(
    told: tuple[float, float], gain: float
) -> None:
    """And what goes at once, when a timer is late."""
    sender, now = under_a_queue(0)
    for path, room in enumerate(told):
        sender.told(path, room)
    assert paced(sender, now) == pytest.approx(gain * RATE, rel=0.004)
    train = sender.quantum() * WIRE
    assert at_once(sender, now + SECOND) <= max(0.0005 * min(told) * RATE, 2 * train) + train


def test_without_a_known_rate_or_with_pacing_off_nothing_is_paced() -> None:
    assert paced(SendController(WIRE, TARGET), MS, rate=0) == float("inf")
    assert paced(SendController(WIRE, TARGET, False), MS) == float("inf")


def test_until_the_first_queue_nothing_is_paced_on_a_short_path() -> None:
    sender = SendController(WIRE, TARGET)
    for step in range(8):
        acked(sender, step * 3 * MS)
    assert paced(sender, 24 * MS) == float("inf")
    assert paced(sender, 24 * MS, **{**FAR, "far": 2}) < float("inf")


def test_what_went_before_a_rate_was_known_is_no_debt() -> None:
    sender = SendController(WIRE, TARGET)
    sender.pace(0, MS)
    sender.probe_sent(40 * WIRE)
    sender.pace(0, 2 * MS)
    sender.pace(1e6, 3 * MS)
    assert sender.wait(3 * MS) == 0


def test_a_late_timer_catches_up_on_half_a_millisecond_at_most() -> None:
    sender, now = under_a_queue(2 * TARGET)
    sender.pace(RATE, now)
    assert at_once(sender, now + SECOND) <= 0.0005 * RATE + sender.quantum() * WIRE


def test_a_probe_goes_whatever_the_pace_and_its_debt_is_bounded() -> None:
    sender, now = under_a_queue(2 * TARGET)
    sender.pace(RATE, now)
    for _ in range(100):
        sender.probe_sent(24 * WIRE)
    wait = sender.wait(now) - now
    assert wait <= (24 + sender.quantum()) * WIRE / RATE * 1e9


def test_a_long_path_alone_is_paced_at_its_receivers_window_in_a_round() -> None:
    sender = SendController(WIRE, TARGET)
    window = 20 * WIRE  # less than the own window
    rate = paced(sender, MS, rate=0, window=window, **FAR)
    assert sender.led_by_receiver()
    assert rate == pytest.approx(1.25 * window / 0.04, rel=0.1)  # more in slow start
    rate = paced(sender, SECOND, rate=0, window=1_000 * WIRE, **FAR)
    assert not sender.led_by_receiver()
    assert rate == pytest.approx(1.25 * 32 * WIRE / 0.04, rel=0.1)


@pytest.mark.parametrize(("window", "grows"), [(20 * WIRE, False), (1_000 * WIRE, True)])
def test_on_a_long_path_alone_the_window_grows_where_it_is_the_limit(
    window: int, grows: bool
) -> None:
    sender = SendController(WIRE, TARGET)
    before = sender.window().bytes()
    for step in range(1, 10):
        sender.pace(0, step * MS, window=window, **FAR)
        sender.on_ack(bytes=WIRE, round=40 * MS, rtprop=40 * MS, now=step * MS)
    assert (sender.window().bytes() > before) == grows


# ---------------------------------------------------------------------------- trains


def test_a_window_goes_in_sixteen_trains_of_four_packets_and_more() -> None:
    sender = SendController(WIRE, TARGET)
    seen = set()
    now = 0
    for _ in range(2_000):
        sender.pace(0, now)
        window = sender.window().bytes() / WIRE
        assert sender.quantum() == max(4, int(window / 16))
        seen.add(sender.quantum())
        now += MS // 4
        sender.limited()
        acked(sender, now, size=200 * WIRE)
    assert min(seen) == 4
    assert max(seen) > 20


@pytest.mark.parametrize(("rate", "packets"), [(RATE, 4), (12 * RATE, 49), (15 * RATE, 61)])
def test_a_train_that_takes_50_us_is_short_enough(rate: float, packets: int) -> None:
    """Though it has more than a sixteenth of the window."""
    sender = SendController(WIRE, TARGET)
    window = 0.0
    now = 0
    while window < 500:
        now += MS // 4
        sender.limited()
        acked(sender, now, size=20 * WIRE)
        window = sender.window().bytes() / WIRE
    sender.pace(rate, now)
    assert 500 / 16 < sender.quantum() <= 2 * window / 16
    assert sender.quantum() == max(packets, int(window / 16))


def test_a_fast_path_lets_no_train_take_more_than_an_eighth_of_the_window() -> None:
    sender = SendController(WIRE, TARGET)
    sender.pace(100 * RATE, SECOND)
    assert sender.quantum() == max(4, int(sender.window().bytes() / WIRE / 8))


@pytest.mark.parametrize(("rate", "packets"), [(1e6, 4), (RATE, 20), (5e8, 82)])
def test_on_a_long_path_a_train_takes_a_quarter_of_a_millisecond(rate: float, packets: int) -> None:
    sender, now = after_a_queue()
    for step in range(2_000):
        sender.limited()
        acked(sender, now + step * MS // 4, size=200 * WIRE)
    sender.pace(rate, SECOND, far=2, rtprop=40 * MS, round=40 * MS, window=1e9)
    assert sender.quantum() == pytest.approx(packets, abs=1)


# ---------------------------------------------------------------------------- window


def test_the_room_is_the_window_less_what_is_in_flight() -> None:
    sender = SendController(WIRE, TARGET)
    for sent, left, room in [(0, 0, 32), (30, 0, 2), (5, 0, -3), (0, 10, 7)]:
        for _ in range(sent):
            sender.on_sent(WIRE, MS)
        sender.on_left(left * WIRE)
        assert sender.room(MS) == room * WIRE


def test_marks_shrink_the_window_once_a_round() -> None:
    sender = SendController(WIRE, TARGET)
    window = sender.window().bytes()
    for sent, now, shrinks in [
        (5 * MS, 10 * MS, True),
        (9 * MS, 12 * MS, False),  # sent under the larger window
        (10 * MS, 13 * MS, False),
        (11 * MS, 14 * MS, True),
    ]:
        assert sender.marked(sent, now) == shrinks
        assert (sender.window().bytes() < window) == shrinks
        window = sender.window().bytes()


def test_the_receivers_windows_are_asked_for_only_under_loss() -> None:
    sender = SendController(WIRE, TARGET)
    for loss, asked in [(0.0, False), (0.5, True), (0.0, True)]:
        report = {"bytes": 10 * WIRE, "loss": loss, "round": MS, "rtprop": MS}
        assert sender.on_ack(**report, now=MS) == asked


@pytest.mark.parametrize(
    ("paths", "rtprop", "queue"),
    [
        (1, MS, TARGET),  # it may be at the receiver, whose credit keeps it short
        (2, MS, 3 * TARGET),
        (1, 40 * MS, 3 * TARGET),
    ],
)
def test_a_queue_before_the_only_receiver_counts_up_to_the_target(
    paths: int, rtprop: int, queue: int
) -> None:
    sender = SendController(WIRE, TARGET)
    now = 0
    for step in range(100):
        now += 3 * MS
        sender.on_ack(
            path=step % paths, bytes=40 * WIRE, queue=3 * TARGET, round=MS, rtprop=rtprop, now=now
        )
    assert sender.window().queue_delay() == queue


# ---------------------------------------------------------------------------- throttling


def test_a_tripped_circuit_breaker_halves_window_and_pace() -> None:
    sender, now = under_a_queue(2 * TARGET)
    window = sender.room(now)
    assert not sender.throttled()
    now = throttle(sender, now)
    assert sender.throttled()
    assert sender.room(now) == pytest.approx(window / 2)
    assert paced(sender, now) == pytest.approx(RATE / 2, rel=0.02)


# ---------------------------------------------------------------------------- holds and copies


@pytest.mark.parametrize("window", [100 * WIRE, 2_000 * WIRE])
def test_a_path_goes_at_its_part_of_the_receivers_window_in_a_round(window: int) -> None:
    sender = SendController(WIRE, TARGET)
    sender.marked(1, 2)  # no slow start
    sender.pace(0, MS)
    tokens = TokenBucket()
    tokens.reset(MS)
    sent = 0
    now = MS
    while now < 401 * MS:
        wait = sender.hold(tokens, window, 40 * MS, now)
        if wait:
            now += wait
            continue
        tokens.spend(sender.quantum() * WIRE)
        sent += sender.quantum() * WIRE
    assert sent == pytest.approx(10 * window, rel=0.05)


def test_copies_come_at_the_rate_that_the_path_carries() -> None:
    sender = SendController(WIRE, TARGET)
    assert sender.copies(RATE, 0, 50 * US) == pytest.approx(RATE / WIRE / 20_000)
    assert sender.copies(0, RATE, 100 * US) == pytest.approx(RATE / WIRE / 10_000)
    sender.on_sent(WIRE, 100 * US)
    assert sender.copies(RATE, 0, 100 * US) == pytest.approx(RATE / WIRE / 10_000 - 1)


@pytest.mark.parametrize(("queue", "queued"), [(TARGET // 2, False), (TARGET * 7 // 8, True)])
def test_a_queue_above_three_quarters_of_the_target_is_not_short(queue: int, queued: bool) -> None:
    assert under_a_queue(queue)[0].queued() == queued
