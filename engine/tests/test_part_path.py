"""The parts of a path, without an endpoint: liveness, farewells, started ops, datagram length and
control frames.
"""

import heapq
import itertools
import random

import pytest
from _parts import (
    NEVER,
    ControlFrames,
    Farewell,
    Liveness,
    Memory,
    PathLimit,
    StartedOps,
    Stash,
    id_of,
)
from hypothesis import given
from hypothesis import strategies as st

from part_kit import MS, SECOND

# ---------------------------------------------------------------------------- liveness

TIMES = (200 * MS, 10 * SECOND)


@pytest.mark.parametrize(
    ("connected", "failed", "silence", "interval"),
    [
        (False, False, 0, 50 * MS),
        (False, False, 5 * SECOND, 200 * MS),  # ever more rarely
        (True, False, 1 * SECOND, 200 * MS),
        (True, False, 1 * SECOND + 1, 4 * MS),  # five intervals: heavy loss takes most pings
        (True, True, 5 * SECOND, 200 * MS),  # a failed endpoint looks for no peer
    ],
)
def test_pings_go_more_often_until_the_first_answer_and_after_a_long_silence(
    connected: bool, failed: bool, silence: int, interval: int
) -> None:
    life = Liveness()
    life.connected = connected
    life.note(3 * SECOND)
    now = 3 * SECOND + silence
    life.last_ping = now - interval
    assert life.next_ping(*TIMES, failed) == now


def test_a_silence_of_half_the_peer_time_out_is_long_whatever_the_interval() -> None:
    life = Liveness()
    life.connected = True
    times = (SECOND, 3 * SECOND)
    life.note(0)
    for interval, now in [(SECOND, 1_500 * MS), (20 * MS, 1_500 * MS + 1)]:
        life.last_ping = now - interval
        assert life.next_ping(*times, False) == now


def test_pings_that_nobody_answers_go_ever_more_rarely_up_to_the_usual_interval() -> None:
    life = Liveness()
    life.note(0)
    times = (SECOND, 10 * SECOND)
    intervals = []
    for _ in range(20):
        due = life.next_ping(*times, False)
        intervals.append(due - life.last_ping)
        life.last_ping = due
    assert intervals[0] == 50 * MS
    assert intervals == sorted(intervals)
    assert intervals[-1] == SECOND


# ---------------------------------------------------------------------------- farewells


def byes(farewell: Farewell, *, met: bool = True, failed: bool = False) -> list[int]:
    """The times of BYEs until no more are needed, or of ten, in milliseconds from the first."""
    times = []
    while not farewell.over(met, failed) and len(times) < 10:
        times.append(farewell.next // MS)
        farewell.bye_sent(farewell.next)
    return [time - times[0] for time in times]


FIRST_SIX = [0, 10, 20, 30, 50, 90]


@pytest.mark.parametrize(
    ("gone", "reliable", "met", "failed", "times"),
    [
        # A peer that stays is told until it answers.
        (False, False, True, False, [*FIRST_SIX, 130, 170, 210, 250]),
        # One that leaves too may never answer.
        (True, False, True, False, FIRST_SIX),
        (True, True, True, False, [0]),
        # Nor may one that was never here, or any after a failure.
        (False, False, False, False, [0, 10, 20]),
        (False, True, False, False, [0, 10, 20]),
        (True, False, True, True, [0, 10, 20]),
        (True, True, True, True, [0]),
    ],
)
def test_byes_go_at_growing_intervals_as_long_as_the_peer_may_need_one(
    gone: bool, reliable: bool, met: bool, failed: bool, times: list[int]
) -> None:
    farewell = Farewell()
    farewell.gone = gone
    farewell.leave(reliable, 5 * MS)
    assert farewell.next == 5 * MS
    assert byes(farewell, met=met, failed=failed) == times


def test_an_acknowledged_bye_is_the_last() -> None:
    farewell = Farewell()
    farewell.leave(False, 0)
    farewell.bye_sent(0)
    farewell.acknowledged = True
    assert farewell.over(True, False)


def test_an_answer_to_an_earlier_bye_does_not_count_for_a_later_leave() -> None:
    farewell = Farewell()
    farewell.acknowledged = True
    farewell.leave(False, 0)
    assert not farewell.over(True, False)


def test_an_error_is_sent_three_times() -> None:
    farewell = Farewell()
    farewell.fail(7 * MS)
    times = []
    while farewell.errors_left:
        times.append(farewell.next // MS)
        farewell.error_sent(farewell.next)
    assert times == [7, 17, 27]


def test_a_peer_that_left_has_completed_the_ops_of_each_lane_that_it_named() -> None:
    farewell = Farewell()
    assert farewell.told()  # a server names none
    farewell.lanes(3)
    for lane, number in [(2, 0), (0, 5), (0, 4)]:  # the later of two is the older one
        farewell.note(lane, number)
    assert not farewell.told()
    farewell.note(1, 2)
    assert farewell.told()
    assert not farewell.complete(id_of(4, 0))
    farewell.gone = True
    for lane, below in [(0, 5), (1, 2), (2, 0), (3, 0)]:
        complete = [farewell.complete(id_of(number, lane)) for number in range(7)]
        assert complete == [number < below for number in range(7)]


# ---------------------------------------------------------------------------- started ops


def test_started_ops_are_known_lane_by_lane() -> None:
    started = StartedOps()
    for event, news in [(id_of(3, 2), True), (id_of(3, 2), False), (id_of(1, 2), False)]:
        assert started.note_next(event) == news
    assert [started.contains(id_of(number, 2)) for number in (0, 2, 3)] == [True, True, False]
    assert not any(started.contains(id_of(0, lane)) for lane in (0, 1, 3, 4_095))
    assert started.note_next(id_of(1, 4_095))
    assert started.contains(id_of(0, 4_095))
    assert started.next_of(id_of(9, 2)) == id_of(3, 2)


# ---------------------------------------------------------------------------- datagram length

ROUND = 20 * MS


def test_a_reported_length_lowers_the_limit_at_once_and_none_raises_it() -> None:
    limit = PathLimit(1_472)
    assert not limit.reduced()
    for reported, lowers, limit_now in [
        (1_500, False, 1_472),
        (1_472, False, 1_472),
        (1_400, True, 1_400),
        (1_452, False, 1_400),
    ]:
        assert limit.lower(reported) == lowers
        assert limit.bytes() == limit_now
    assert limit.reduced()


def send(limit: PathLimit, count: int, length: int, now: int = 0) -> None:
    for _ in range(count):
        limit.sent(length, now)


def test_a_trial_begins_when_eight_of_the_longest_go_without_an_ack_for_half_a_second() -> None:
    limit = PathLimit(1_472)
    send(limit, 7, 1_472)
    assert limit.next_timer(ROUND) == NEVER
    send(limit, 1, 1_472, 100 * MS)
    limit.acked(1_000)  # of a shorter one: no sign that the longest arrive
    assert limit.next_timer(ROUND) == 500 * MS
    assert not limit.suspect(500 * MS - 1, ROUND)
    assert limit.suspect(500 * MS, ROUND)
    assert limit.on_trial()


@pytest.mark.parametrize(("round_trip", "due"), [(100 * MS, 500 * MS), (200 * MS, 800 * MS)])
def test_on_a_long_path_a_trial_waits_for_four_rounds(round_trip: int, due: int) -> None:
    limit = PathLimit(1_472)
    send(limit, 8, 1_472)
    assert limit.next_timer(round_trip) == due


def test_one_ack_of_the_longest_ends_the_suspicion() -> None:
    limit = PathLimit(1_472)
    send(limit, 20, 1_472)
    limit.acked(1_472)
    assert limit.next_timer(ROUND) == NEVER


def test_what_goes_again_and_again_is_suspected_where_longer_ones_went_only_twice() -> None:
    limit = PathLimit(1_472)
    send(limit, 2, 1_472)
    limit.acked(100)
    send(limit, 9, 100, 100 * MS)  # those arrive
    assert limit.next_timer(ROUND) == NEVER
    send(limit, 7, 281, 400 * MS)  # they may go for the first time
    assert limit.next_timer(ROUND) == NEVER
    send(limit, 6, 281, 600 * MS)
    assert limit.suspect(600 * MS, ROUND)


def test_short_ones_that_arrive_do_not_hide_long_ones_that_never_do() -> None:
    limit = PathLimit(1_472)
    for second in range(8):
        send(limit, 1, 1_472, second * SECOND)
        assert not limit.on_trial()
        send(limit, 1, 300, second * SECOND + 600 * MS)
        limit.acked(300)
    assert limit.suspect(8 * SECOND, ROUND)


def try_path(
    agreed: int, carries: int, loss: float, rng: random.Random, claim: int = 0
) -> tuple[int, float]:
    """A trial on a path; the limit after at most 20 s, and the seconds that it took.

    Answers take up to three rounds and overtake each other.
    """
    limit = PathLimit(agreed)
    if claim:
        limit.claimed(claim, 0)
    else:
        limit.try_out(0, 5 * MS)
    answers: list[tuple[int, int]] = []  # (time, stamp)
    now = stamp = 0
    while limit.on_trial() and now < 20 * SECOND:
        now = max(now + 1, limit.next_ping())
        while answers and answers[0][0] <= now:
            time, answered = heapq.heappop(answers)
            limit.answered(answered, time, ROUND)
        stamp += 1
        length = limit.ping(now, stamp)
        if 0 < length <= carries and rng.random() >= loss:
            heapq.heappush(answers, (now + rng.randrange(ROUND, 3 * ROUND), stamp))
    return limit.bytes(), now / SECOND


@pytest.mark.parametrize(
    ("agreed", "carries", "found"),
    [(1_472, 1_471, 1_464), (1_472, 1_400, 1_392), (1_472, 600, 548), (8_972, 1_500, 1_472)],
)
@pytest.mark.parametrize("loss", [0.0, 0.5])
def test_a_trial_finds_the_longest_usual_length_that_a_path_carries(
    agreed: int, carries: int, found: int, loss: float
) -> None:
    for seed in range(20):
        limit, took = try_path(agreed, carries, loss, random.Random(seed))
        assert limit == found, f"seed {seed}"
        assert 1 <= took < 5, f"seed {seed}"


@pytest.mark.parametrize("loss", [0.0, 0.5, 0.9])
def test_loss_alone_never_lowers_the_limit(loss: float) -> None:
    for seed in range(50):
        limit, took = try_path(1_472, 1_472, loss, random.Random(seed))
        assert limit == 1_472, f"seed {seed}"
        assert took < 20, f"seed {seed}"  # an answer to one of the longest ends the trial


def test_the_longest_must_have_had_time_for_an_answer_before_the_limit_falls() -> None:
    limit = PathLimit(1_472)
    limit.try_out(0, 5 * MS)
    fell = 0
    for stamp in range(10_000):
        now = limit.next_ping()
        length = limit.ping(now, stamp)
        if 0 < length <= 1_400 and limit.answered(stamp, now, SECOND):
            fell = now
            break
    assert 2 * SECOND < fell < 3 * SECOND
    assert limit.bytes() == 1_392


def test_a_peer_that_answers_nothing_never_lowers_the_limit_and_is_asked_more_rarely() -> None:
    limit = PathLimit(1_472)
    limit.try_out(0, 5 * MS)
    intervals = []
    for stamp in range(700):
        now = limit.next_ping()
        assert limit.ping(now, stamp)
        intervals.append(limit.next_ping() - now)
    assert (intervals[0], intervals[-1]) == (5 * MS, 100 * MS)
    assert limit.bytes() == 1_472


def test_an_answer_to_no_ping_of_the_trial_means_nothing() -> None:
    limit = PathLimit(1_472)
    limit.try_out(0, 5 * MS)
    limit.ping(0, 1)
    assert not limit.answered(99, 2 * SECOND, ROUND)
    assert limit.on_trial()


@pytest.mark.parametrize("claim", [256, 1_471])
def test_a_peer_s_claim_is_tried_and_lowers_nothing_that_datagrams_contradict(claim: int) -> None:
    limit = PathLimit(1_472)
    for time, said, tried in [
        (0, claim, True),
        (1, claim, False),  # each of its pings says so
        (2, 0, False),
        (3, claim, True),
        (4, 1_472, False),
        (5, 9_000, False),
    ]:
        limit.claimed(said, time)
        assert limit.on_trial() == tried
        limit.acked(1_472)
        assert (limit.on_trial(), limit.bytes()) == (False, 1_472)


def test_what_a_peer_claims_to_send_counts_until_it_sends_more() -> None:
    limit = PathLimit(1_472)
    limit.claimed(600, 0)
    assert (limit.bytes(), limit.both_ways()) == (1_472, 600)
    limit.arrived(600)
    assert limit.both_ways() == 600
    limit.arrived(601)
    assert limit.both_ways() == 1_472
    limit.claimed(600, 1)
    limit.claimed(0, 2)
    assert limit.both_ways() == 1_472


def test_a_claim_that_is_true_lowers_the_limit_by_a_trial() -> None:
    limit, took = try_path(1_472, 1_400, 0.0, random.Random(1), claim=1_392)
    assert limit == 1_392
    assert took < 3


def test_a_limit_that_has_fallen_is_tried_larger_again_and_ever_more_rarely() -> None:
    limit = PathLimit(1_472)
    assert limit.next_ping() == NEVER
    limit.lower(1_400, SECOND)
    rounds = []
    stamp = 0
    while len(rounds) < 9:
        rounds.append(limit.next_ping() // SECOND)
        lengths = []
        while limit.next_ping() // SECOND == rounds[-1]:
            stamp += 1
            lengths.append(limit.ping(limit.next_ping(), stamp))
        assert lengths == [1_472, 1_464, 1_452, 1_444, 1_432, 1_412, 0]
    waits = [later - earlier for earlier, later in itertools.pairwise([1, *rounds])]
    assert waits == [10, 10, 20, 40, 80, 160, 320, 600, 600]
    assert limit.bytes() == 1_400


@pytest.mark.parametrize("agreed", [1_472, 1_400, 8_972])
def test_the_longest_length_that_is_answered_is_the_new_limit(agreed: int) -> None:
    limit = PathLimit(agreed)
    limit.lower(256, 0)
    sent = {}
    now = limit.next_ping()
    while length := limit.ping(now, now):
        sent[length] = now
        now = limit.next_ping()
    assert max(sent) == agreed
    assert limit.answered(sent[1_024], now, ROUND)
    assert limit.bytes() == 1_024
    assert not limit.answered(sent[548], now, ROUND)
    assert limit.answered(sent[agreed], now, ROUND)
    assert (limit.bytes(), limit.reduced(), limit.next_ping()) == (agreed, False, NEVER)


@pytest.mark.parametrize("tag", [0, 16])
def test_lengths_to_try_go_down_step_by_step_to_256(tag: int) -> None:
    lengths = [8_973]
    while lengths[-1]:
        lengths.append(PathLimit.shorter(lengths[-1], tag))
    assert lengths[1:6] == [each - tag for each in (8_972, 8_192, 4_052, 2_048, 1_472)]
    assert lengths[-2:] == [256, 0]
    assert lengths == sorted(lengths, reverse=True)


# ---------------------------------------------------------------------------- control frames


def test_any_number_of_frames_goes_before_the_first_is_acknowledged() -> None:
    frames = ControlFrames()
    for part in range(65_538):
        frames.push(part)
    taken = []
    while frames.waiting():
        taken.append(frames.take())
    assert [frames.at(handle) for handle in taken] == list(range(65_538))
    frames.release(taken[7])
    assert (frames.open(), frames.live(taken[7])) == (65_537, False)


FRAMES = st.lists(
    st.tuples(st.sampled_from(["push", "take", "lost", "acked"]), st.integers(0, 10_000)),
    min_size=30,
    max_size=100,
)


@given(FRAMES)
def test_frames_go_in_order_again_when_lost_and_never_after_their_ack(
    events: list[tuple[str, int]],
) -> None:
    frames = ControlFrames()
    queue: list[int] = []  # parts in the order in which they go
    flight: list[tuple[int, int]] = []  # (handle, part), also of frames that were acknowledged
    acked: set[int] = set()
    pushed = 0
    for what, which in events:
        handle, part = flight[which % len(flight)] if flight else (None, None)
        if what == "push":
            frames.push(pushed)
            queue.append(pushed)
            pushed += 1
        elif what == "take" and frames.waiting():
            taken = frames.take()
            assert frames.at(taken) == queue[0]
            flight.append((taken, queue.pop(0)))
        elif what == "lost" and handle is not None:
            frames.again(handle)
            queue += [] if part in acked else [part]
        elif what == "acked" and handle is not None and frames.live(handle):
            frames.release(handle)
            acked.add(part)
            queue = [each for each in queue if each != part]
        assert frames.waiting() == bool(queue)
        assert frames.open() == pushed - len(acked)
        for handle, part in flight:
            assert frames.live(handle) == (part not in acked)


# ---------------------------------------------------------------------------- early packets


@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.binary(max_size=8)))))
def test_the_packets_of_each_op_come_out_once_and_in_order(
    course: list[tuple[int, bytes | None]],
) -> None:
    stash = Stash()
    memory = Memory(1 << 20)
    kept: dict[int, list[bytes]] = {}
    for op, datagram in course:
        if datagram is None:
            assert stash.take(op, memory) == kept.pop(op, [])
        else:
            assert stash.add(op, datagram, stash.size(), memory)
            kept.setdefault(op, []).append(datagram)
        assert stash.size() == sum(map(len, kept.values()))
