"""Recovery and Rtt, without an endpoint: packets and ACKs in, lost packets and timers out."""

from collections.abc import Iterable

import pytest
from _parts import (
    NEVER,
    Ack,
    Again,
    Copies,
    FirstRound,
    Kind,
    LossMeter,
    Recovery,
    Rtt,
    SentPackets,
    Twins,
    profile_of,
    repeat_after,
    repeats,
)
from hypothesis import given
from hypothesis import strategies as st

from part_kit import MS, SECOND, US

LONG_AGO = -2 * SECOND  # the time of the last packet of a silent peer
INITIAL = 20 * MS  # the probe time-out before any sample
WIRE = 1_042  # bytes on the wire of a packet of 1,000


def ack_of(numbers: Iterable[int], *, refused: int = 0, delay_us: int = 0) -> Ack:
    """An ACK of exactly these packets, the largest of which arrived last."""
    largest = max(numbers)
    bits = sum(1 << (largest - number) for number in numbers)
    words = [bits >> (64 * i) & (1 << 64) - 1 for i in range(bits.bit_length() // 64 + 1)]
    return Ack(largest & 0xFFFFFFFF, words, refused=refused, delay_us=delay_us)


def sending(count: int, now: int = 0) -> Recovery:
    recovery = Recovery()
    for _ in range(count):
        recovery.send(now)
    return recovery


def lost(*numbers: int) -> list[tuple[int, Again]]:
    return [(number, Again.lost) for number in numbers]


def probed(*numbers: int) -> list[tuple[int, Again]]:
    return [(number, Again.probe) for number in numbers]


# ---------------------------------------------------------------------------- acknowledgements


def test_an_ack_reports_each_packet_once_with_its_bytes() -> None:
    recovery = sending(3)
    assert recovery.on_ack(ack_of([1, 3]), MS) == (True, [3, 1], 2 * WIRE, 2_000, 0)
    assert recovery.on_ack(ack_of([1, 2, 3]), MS) == (True, [2], WIRE, 1_000, 0)
    assert (recovery.in_flight(), recovery.lowest(), recovery.largest_acked()) == (0, 4, 3)


def test_an_ack_of_what_was_never_sent_changes_nothing() -> None:
    recovery = sending(3)
    assert recovery.on_ack(ack_of([1, 4]), MS) == (False, [], 0, 0, 0)
    assert (recovery.in_flight(), recovery.largest_acked()) == (3, 0)


@pytest.mark.parametrize(
    ("after", "latest"),
    [
        (ack_of([1, 2, 3]), True),
        (ack_of([1, 2], delay_us=60), True),  # the same again, later
        (ack_of([1, 2], delay_us=50), True),  # a copy
        (ack_of([1, 2], delay_us=40), False),
        (ack_of([1], delay_us=900), False),
    ],
)
def test_an_ack_that_a_later_one_overtook_is_not_the_latest(after: Ack, latest: bool) -> None:
    recovery = sending(4)
    recovery.on_ack(ack_of([1, 2], delay_us=50), MS)
    recovery.on_ack(after, 2 * MS)
    assert recovery.latest() is latest
    recovery.on_ack(ack_of([4]), 3 * MS)
    assert recovery.latest()


def test_packets_of_one_train_have_fates_of_their_own() -> None:
    recovery = Recovery()
    recovery.send(0, packets=10)
    recovery.send(100 * US, packets=6)
    in_part = ack_of([2, 3, 5, 12])
    assert recovery.on_ack(in_part, MS) == (True, [12, 5, 3, 2], 4 * WIRE, 4_000, 0)
    assert recovery.on_ack(in_part, MS) == (True, [], 0, 0, 0)
    assert recovery.detect_losses(MS) == lost(1, 4, 6, 7, 8, 9)
    assert (recovery.in_flight(), recovery.lowest()) == (6, 10)
    assert recovery.loss_due() == 1_400 * US
    late = ack_of([1, 4, 12, 16])
    assert recovery.on_ack(late, 1_100 * US) == (True, [16, 4, 1], WIRE, 1_000, 2)
    assert recovery.detect_losses(1_499 * US) == []
    assert recovery.detect_losses(1_500 * US) == lost(10)
    assert recovery.detect_losses(1_600 * US) == lost(11, 13, 14, 15)
    assert (recovery.in_flight(), recovery.lowest()) == (0, 17)


def test_packets_of_one_train_that_a_time_out_sends_again_are_acknowledged_with_the_others() -> (
    None
):
    recovery = Recovery()
    recovery.send(0, packets=5)
    assert recovery.on_timeout(LONG_AGO, INITIAL) == (True, probed(1, 2))
    assert recovery.on_ack(ack_of([1, 3]), INITIAL + MS) == (True, [3, 1], 2 * WIRE, 1_000, 1)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2**128 - 1)), min_size=40, max_size=60)
)
def test_each_packet_of_trains_is_acknowledged_once(course: list[tuple[int, int]]) -> None:
    recovery = Recovery()
    flight: set[int] = set()
    given_up: set[int] = set()
    for packets, arrived in course:
        largest = recovery.next() + packets - 1
        flight.update(range(recovery.next(), largest + 1))
        recovery.send(0, packets=packets)
        bits = [number for number in range(largest, 0, -1) if arrived >> (largest - number) & 1]
        new = [number for number in bits if number in flight | given_up]
        assert recovery.on_ack(Ack(largest, [arrived % 2**64, arrived >> 64]), MS)[1] == new
        flight.difference_update(new)
        given_up.difference_update(new)
        for number, _ in recovery.detect_losses(MS):
            flight.remove(number)
            given_up.add(number)
        assert recovery.in_flight() == len(flight)
        assert recovery.lowest() == min(flight, default=recovery.next())


@pytest.mark.parametrize("train", [1, 17, 64])
def test_packets_in_flight_have_a_limit_and_none_is_forgotten_below_it(train: int) -> None:
    recovery = Recovery()
    while not recovery.full():
        recovery.send(0, packets=min(train, recovery.room()))
    assert recovery.in_flight() == 131_071
    acked: list[int] = []
    for largest in range(8_192, recovery.next() + 8_192, 8_192):
        largest = min(largest, recovery.next() - 1)
        acked += reversed(recovery.on_ack(Ack(largest, [2**64 - 1] * 128), MS)[1])
    assert acked == list(range(1, 131_072))
    assert (recovery.in_flight(), recovery.full()) == (0, False)


def test_an_ack_leads_to_the_packets_alone_that_it_acknowledges_first() -> None:
    packets = SentPackets()
    late = 4_000
    for number in range(1, 10_001):
        assert packets.push() == number
        if number not in (late, 10_000 - 70):
            packets.settle(number, True)
    open_now = {
        number - bit
        for number in range(10_000, packets.oldest(), -64)
        for bit in range(64)
        if packets.open(number) >> bit & 1
    }
    assert open_now == {late, 10_000 - 70}
    packets.settle(late, False)  # sent again, and its ACK may still arrive
    assert packets.open(late) == 1
    packets.settle(late, True)
    assert packets.open(late) == 0


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 400)), max_size=60))
def test_the_open_packets_are_those_sent_and_not_acknowledged(
    course: list[tuple[int, int]],
) -> None:
    packets = SentPackets()
    unacknowledged: set[int] = set()
    for acked, sent in course:
        for _ in range(sent):
            unacknowledged.add(packets.push())
        for number in sorted(unacknowledged)[acked:]:
            packets.settle(number, True)
            unacknowledged.remove(number)
        for number in {*unacknowledged, 1, 64, 65}:
            bits = packets.open(number)
            for back in range(64):
                if number - back >= packets.oldest():
                    assert bits >> back & 1 == (number - back in unacknowledged)


# ---------------------------------------------------------------------------- loss detection


@pytest.mark.parametrize(("acked", "gone"), [(2, []), (3, []), (4, [1]), (5, [1, 2])])
def test_a_packet_is_lost_three_packets_below_an_acknowledged_one(
    acked: int, gone: list[int]
) -> None:
    recovery = sending(5)
    recovery.on_ack(ack_of([acked]), MS)
    assert recovery.detect_losses(MS) == lost(*gone)


@pytest.mark.parametrize(
    ("rtt", "window"),
    [
        (1 * MS, 500 * US),  # at least
        (8 * MS, 2 * MS),  # a quarter of the round-trip time
    ],
)
def test_a_missing_packet_is_lost_once_the_reordering_window_has_passed(
    rtt: int, window: int
) -> None:
    recovery = sending(2)
    assert recovery.loss_due() == NEVER
    recovery.on_ack(ack_of([2]), rtt)
    assert recovery.detect_losses(rtt) == []
    assert recovery.loss_due() == rtt + window
    assert recovery.detect_losses(rtt + window - 1) == []
    assert recovery.detect_losses(rtt + window) == lost(1)
    assert recovery.loss_due() == NEVER
    assert recovery.next_timeout(LONG_AGO, rtt) > rtt + window


@pytest.mark.parametrize(
    ("rtt", "earlier", "gone"),
    [
        (1 * MS, 499 * US, []),
        (1 * MS, 500 * US, [1]),  # the least threshold
        (8 * MS, 1_999 * US, []),
        (8 * MS, 2_000 * US, [1]),  # a quarter of the round-trip time
    ],
)
def test_a_packet_is_lost_that_was_sent_long_enough_before_an_acknowledged_one(
    rtt: int, earlier: int, gone: list[int]
) -> None:
    recovery = sending(1)
    recovery.send(earlier)
    recovery.on_ack(ack_of([2]), earlier + rtt)
    assert recovery.detect_losses(earlier + rtt) == lost(*gone)


def overtake(recovery: Recovery, late: int, now: int) -> int:
    """One packet is acknowledged `late` after the one sent behind it; returns when."""
    first = recovery.next()
    recovery.send(now)
    recovery.send(now)
    now += 2 * MS
    recovery.on_ack(ack_of([first + 1]), now)
    recovery.detect_losses(now)
    recovery.on_ack(ack_of([first, first + 1]), now + late)
    return now + late


def time_of_loss(recovery: Recovery, now: int) -> int:
    """How long a packet goes missing, beyond a round of 2 ms, until it counts as lost."""
    missing = recovery.next()
    for _ in range(200):
        recovery.send(now)
    recovery.on_ack(ack_of(range(missing + 1, missing + 200)), now + 2 * MS)
    if not recovery.detect_losses(now + 2 * MS):
        due = recovery.loss_due()
        assert recovery.detect_losses(due - 1) == []
        assert recovery.detect_losses(due) == lost(missing)
        return due - now - 2 * MS
    return 0


def test_after_reordering_packets_are_lost_by_its_time_alone() -> None:
    recovery = Recovery()
    assert time_of_loss(recovery, 0) == 0  # three later packets were enough
    now = overtake(recovery, 1_300 * US, SECOND)
    assert time_of_loss(recovery, now) == 1_300 * US
    now = overtake(recovery, 700 * US, now + SECOND)
    assert time_of_loss(recovery, now) == 1_300 * US
    now = overtake(recovery, 100 * US, now + 11 * SECOND)
    assert time_of_loss(recovery, now) == 500 * US


def test_a_packet_that_was_resent_in_haste_widens_the_reordering_window() -> None:
    recovery = sending(4)
    recovery.on_ack(ack_of([2, 3, 4]), 2 * MS)
    assert recovery.detect_losses(2 * MS) == lost(1)
    assert recovery.on_ack(ack_of([1, 4]), 2_900 * US) == (True, [1], 0, 0, 1)
    assert time_of_loss(recovery, 3 * MS) == 900 * US


def test_packets_that_were_sent_later_and_come_no_sooner_are_no_reordering() -> None:
    recovery = sending(8)
    recovery.on_ack(ack_of([2, 1]), MS)
    recovery.on_ack(ack_of([4, 3]), MS)
    assert time_of_loss(recovery, MS) == 0


def test_reordering_is_forgotten_within_ten_seconds() -> None:
    recovery = Recovery()
    now = overtake(recovery, 900 * US, 0)
    assert time_of_loss(recovery, now + 4 * SECOND) == 900 * US
    assert time_of_loss(recovery, now + 11 * SECOND) == 0


def test_the_reordering_window_is_at_most_a_probe_time_out() -> None:
    recovery = Recovery()
    now = overtake(recovery, 900 * MS, 0)
    for _ in range(50):  # the deviation of the round-trip time has become small again
        recovery.send(now)
        recovery.on_ack(ack_of([recovery.next() - 1]), now + 2 * MS)
        now += 3 * MS
    assert time_of_loss(recovery, now) <= recovery.rtt.probe_timeout() < 5 * MS


def test_what_is_refused_is_not_lost() -> None:
    recovery = sending(8)
    recovery.on_ack(ack_of([8], refused=3), MS)
    refused = [(number, Again.refused) for number in (1, 2, 3)]
    assert recovery.detect_losses(MS) == [*refused, *lost(4, 5)]


def test_a_refused_number_that_was_never_sent_means_nothing() -> None:
    recovery = sending(4)
    recovery.on_ack(ack_of([4], refused=900), MS)
    assert not recovery.refused(MS)
    assert recovery.detect_losses(MS) == lost(1)


def test_a_peer_counts_as_full_for_one_probe_time_out_after_it_refused_a_packet() -> None:
    recovery = sending(2)
    assert not recovery.refused(MS)
    recovery.on_ack(ack_of([1], refused=2), MS)
    timeout = recovery.rtt.probe_timeout()
    assert recovery.refused(MS + timeout - 1)
    assert not recovery.refused(MS + timeout)


# ---------------------------------------------------------------------------- probe time-outs


def test_nothing_in_flight_has_no_time_out() -> None:
    recovery = Recovery()
    assert not recovery.waiting()
    assert recovery.on_timeout(LONG_AGO, SECOND) == (False, [])


def test_a_time_out_sends_the_two_oldest_packets_again() -> None:
    recovery = sending(5)
    assert recovery.next_timeout(LONG_AGO, 0) == INITIAL
    assert recovery.on_timeout(LONG_AGO, INITIAL - 1) == (False, [])
    assert recovery.on_timeout(LONG_AGO, INITIAL) == (True, probed(1, 2))
    assert (recovery.timeouts(), recovery.probes(), recovery.in_flight()) == (1, 2, 3)


def time_outs(recovery: Recovery, count: int, *, heard: int | None) -> list[float]:
    """The intervals of so many time-outs, as multiples of the probe time-out."""
    now = 0
    intervals = []
    for _ in range(count):
        recovery.send(now)
        due = recovery.next_timeout(now if heard is None else heard, now)
        intervals.append((due - now) / recovery.rtt.probe_timeout())
        assert recovery.on_timeout(due if heard is None else heard, due)[0]
        now = due
    return intervals


def test_a_silent_peer_is_probed_ever_more_rarely() -> None:
    assert time_outs(Recovery(), 6, heard=LONG_AGO) == [1, 2, 4, 8, 16, 16]


def test_a_peer_that_is_heard_is_probed_as_often_as_a_wait_for_an_ack_allows() -> None:
    intervals = time_outs(Recovery(), 80, heard=None)
    assert intervals[:9] == [1] + [2] * 8
    for number in range(9, 80):
        waited = sum(intervals[1:number])  # since the first time-out
        assert intervals[number] == pytest.approx(min(max(2, (1 + waited) / 8), 16))
    assert intervals[-1] == 16


def test_an_ack_ends_the_backoff_and_the_probes() -> None:
    recovery = sending(5)
    recovery.on_timeout(LONG_AGO, INITIAL)
    recovery.on_ack(ack_of([5]), INITIAL + 5 * MS)
    assert (recovery.timeouts(), recovery.probes()) == (0, 0)
    timeout = recovery.rtt.probe_timeout()
    assert recovery.next_timeout(LONG_AGO, 0) == INITIAL + 5 * MS + timeout


def test_the_ack_of_a_probed_packet_counts_although_it_was_sent_again() -> None:
    recovery = sending(1)
    recovery.on_timeout(LONG_AGO, INITIAL)
    assert recovery.on_ack(ack_of([1]), INITIAL + MS) == (True, [1], WIRE, 0, 1)


def test_the_late_ack_of_a_probed_packet_is_known_after_thousands_of_others() -> None:
    recovery = sending(1)
    recovery.on_timeout(LONG_AGO, INITIAL)
    for number in range(2, 8_194):
        recovery.send(INITIAL)
        recovery.on_ack(ack_of([number]), INITIAL)
    last_word = [0] * 127 + [1 << 63]
    assert recovery.on_ack(Ack(8_192, last_word), INITIAL) == (True, [1], WIRE, 0, 1)


@pytest.mark.parametrize(
    ("heard", "probes"),
    [
        (30 * MS, 2),  # the answer to the last time-out is not due by then
        (50 * MS, 24),
    ],
)
def test_a_peer_that_sends_but_acknowledges_nothing_gets_a_rounds_first_window(
    heard: int, probes: int
) -> None:
    recovery = sending(40)
    assert recovery.on_timeout(heard, INITIAL)[0]
    assert recovery.probes() == 2
    due, again = recovery.on_timeout(heard, 3 * INITIAL)
    assert (due, len(again), recovery.probes()) == (True, probes, probes)


def test_all_time_outs_but_the_first_send_that_many_while_the_peer_is_heard() -> None:
    recovery = Recovery()
    now = 0
    loud = []
    for number in range(1, 33):
        for _ in range(30):
            recovery.send(now)
        now = recovery.next_timeout(now, now) + MS  # heard after the answer was due
        recovery.on_timeout(now, now)
        if recovery.probes() == 24:
            loud.append(number)
    assert loud == list(range(2, 33))


@pytest.mark.parametrize(("rtt", "probes"), [(5 * MS, 2), (6 * MS, 24)])
def test_on_a_long_path_the_first_time_out_sends_that_many(rtt: int, probes: int) -> None:
    recovery = sending(40)
    recovery.on_ack(ack_of([1]), rtt)
    due = recovery.next_timeout(LONG_AGO, rtt)
    assert len(recovery.on_timeout(LONG_AGO, due)[1]) == probes


def test_a_peer_without_room_gets_two_probes_though_it_is_heard() -> None:
    recovery = sending(40)
    recovery.on_ack(ack_of([1], refused=40), 10 * MS)
    for _ in range(3):
        due = recovery.next_timeout(LONG_AGO, 10 * MS)
        assert len(recovery.on_timeout(due, due)[1]) == 2


@pytest.mark.parametrize(("more", "again"), [(True, probed(1, 2)), (False, probed(*range(1, 6)))])
def test_packets_that_need_no_recovery_make_way_for_new_ones(
    more: bool, again: list[tuple[int, Again]]
) -> None:
    recovery = Recovery()
    for _ in range(5):
        recovery.send(0, recovers=False)
    assert recovery.on_timeout(LONG_AGO, INITIAL, more=more) == (True, again)


def test_data_uses_up_the_probes_and_control_frames_do_not() -> None:
    recovery = sending(2)
    recovery.on_timeout(LONG_AGO, INITIAL)
    for kind, left in [(Kind.close, 2), (Kind.push, 1), (Kind.pull, 0), (Kind.push, 0)]:
        recovery.send(INITIAL, kind)
        assert recovery.probes() == left


def test_waiting_for_credit_has_a_time_out_too() -> None:
    recovery = Recovery()
    recovery.starve(5 * MS)
    assert recovery.waiting()
    assert recovery.next_timeout(LONG_AGO, 5 * MS) == 5 * MS + INITIAL
    assert recovery.on_timeout(LONG_AGO, 5 * MS + INITIAL) == (True, [])
    assert recovery.probes() == 2
    recovery.feed()
    assert not recovery.waiting()
    recovery.starve(SECOND)
    recovery.send(SECOND)  # there was credit
    recovery.on_ack(ack_of([1]), SECOND + MS)
    assert not recovery.waiting()


# ---------------------------------------------------------------------------- repetition


@pytest.mark.parametrize(
    ("loss", "lost", "last"),
    [
        (0.0, 0, 0),
        (0.0005, 0, 0),  # hardly any packet is lost twice
        (0.02, 1, 1),
        (0.0975, 2, 1),
        (0.24, 2, 1),
        (0.25, 0, 0),  # repeats do it
    ],
)
def test_so_many_twins_go_that_hardly_ever_all_are_lost(loss: float, lost: int, last: int) -> None:
    twins = Twins()
    twins.arrived(100)
    assert (twins.of_lost(loss), twins.of_last(loss)) == (lost, last)


@given(st.lists(st.integers(0, 50), max_size=60))
def test_twins_take_half_of_what_has_arrived_at_most(arrivals: list[int]) -> None:
    twins, arrived, taken = Twins(), 0, 0
    assert twins.of_lost(0.1) == 0
    for packets in arrivals:
        twins.arrived(packets)
        arrived += packets
        for _ in range(twins.of_lost(0.1)):
            twins.take()
            taken += 1
        assert taken <= arrived / 2


def test_no_twins_go_for_a_round_after_a_queue() -> None:
    twins = Twins()
    assert twins.apt(40 * MS, 0)
    twins.queued(SECOND)
    assert not twins.apt(40 * MS, SECOND + 40 * MS)
    assert twins.apt(40 * MS, SECOND + 41 * MS)


@pytest.mark.parametrize(
    ("loss", "others", "share"), [(0.0, 3, 0.0), (0.02, 3, 0.06), (0.02, 63, 1.0)]
)
def test_the_last_chunks_are_as_many_as_come_late(loss: float, others: int, share: float) -> None:
    assert Twins.last(loss, others) == pytest.approx(share)


def test_control_frames_go_again_after_a_time_and_data_does_not() -> None:
    recovery, copies = Recovery(), Copies()
    recovery.send(0, Kind.close)
    recovery.send(0, Kind.push)
    recovery.send(MS, Kind.close)
    assert recovery.repeat(5 * MS, NEVER, copies, 5 * MS - 1) == (5 * MS, [])
    assert recovery.repeat(5 * MS, NEVER, copies, 5 * MS) == (6 * MS, [(1, Again.repeat)])
    recovery.on_ack(ack_of([3]), 5 * MS)
    assert recovery.repeat(5 * MS, NEVER, copies, SECOND) == (NEVER, [])


def test_data_goes_again_after_a_time_the_oldest_first_as_long_as_copies_last() -> None:
    recovery = Recovery()
    for now in (0, MS, 2 * MS):
        recovery.send(now)
    copies = Copies()
    copies.refill(1_000, 10 * MS)
    due, again = recovery.repeat(5 * MS, 5 * MS, copies, 6 * MS)
    assert (due, again) == (7 * MS, [(1, Again.repeat), (2, Again.repeat)])
    assert (copies.left(), copies.lacking(), recovery.probes()) == (8, False, 2)
    # Half a copy is left at 1,000 a second: the next comes in half a millisecond.
    copies = Copies()
    copies.refill(1_000, MS // 2)
    due, again = recovery.repeat(5 * MS, 5 * MS, copies, 8 * MS)
    assert (due, again, copies.left(), copies.lacking()) == (8_500_001, [], 0.5, True)


def test_a_peer_without_room_gets_no_copies() -> None:
    recovery, copies = Recovery(), Copies()
    copies.refill(1_000, 10 * MS)
    recovery.send(0, Kind.close)
    recovery.send(0)
    recovery.on_ack(Ack(1, [0], refused=1), 10 * MS)
    assert recovery.repeat(MS, MS, copies, 10 * MS) == (NEVER, [])


@pytest.mark.parametrize(
    ("to", "back", "queued", "after"),
    [
        (0.2, 0.2, False, NEVER),  # not heavy
        # Three over the logarithm of what arrives: as many copies a round as e^-3 takes.
        (0.9, 0.0, False, 40 * MS * 0.10536 / 3),
        (0.5, 0.0, False, 40 * MS * 0.69315 / 3),
        (0.5, 0.9, False, 40 * MS * 0.10536 / 3),
        # The packet is most likely there: its ACKs are lost.
        (0.0, 0.5, False, 2 * 40 * MS * 0.69315 / 3),
    ],
)
def test_the_higher_the_loss_the_sooner_a_packet_goes_again(
    to: float, back: float, queued: bool, after: float
) -> None:
    assert repeat_after(to, back, 40 * MS, queued) == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize(
    ("to", "back", "queued", "after"),
    [
        (0.9, 0.0, True, 500 * US),
        (0.9, 0.0, False, 500 * US * 0.10536),
        (0.3, 0.0, False, 500 * US),
        (0.0, 0.75, False, 2_000 * US),
    ],
)
def test_on_a_short_path_copies_are_half_a_millisecond_apart_or_less_without_a_queue(
    to: float, back: float, queued: bool, after: float
) -> None:
    assert repeat_after(to, back, 200 * US, queued) == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize(
    ("to", "more", "blocked", "control", "data"),
    [
        (0.2, False, False, NEVER, NEVER),
        (0.2, True, True, NEVER, NEVER),
        (0.9, False, False, 500 * US, 70_240),
        (0.9, True, False, 500 * US, NEVER),
        (0.9, True, True, 500 * US, 3 * MS),
    ],
)
def test_with_more_to_send_data_goes_again_only_where_that_is_blocked(
    to: float, more: bool, blocked: bool, control: int, data: int
) -> None:
    assert repeats(to, 2 * MS, more, blocked) == (control, pytest.approx(data, rel=1e-4))


def test_sixteen_packets_go_again_at_once_and_each_packet_sent_takes_from_them() -> None:
    copies = Copies()
    copies.refill(1_000, 10 * MS)
    assert copies.left() == pytest.approx(10)
    copies.refill(1_000, SECOND)
    assert copies.left() == 16
    for _ in range(40):
        copies.sent()
    copies.refill(1_000, SECOND)
    assert copies.left() == -16
    copies.refill(1_000, SECOND + 20 * MS)
    assert copies.left() == pytest.approx(4)


@pytest.mark.parametrize(
    ("paths", "rate"),
    [
        ([], 32e6),  # a window in a millisecond
        ([(0, 0)], 32e6),
        ([(10 * MS, 0), (4 * MS, 0)], 3.2e6),
        ([(10 * MS, 4_000), (0, 6_000)], 1e6),
        ([(10 * MS, 40_000), (0, 60_000)], 3.2e6),
    ],
)
def test_an_unproven_rate_is_the_smaller_of_own_and_receivers_windows_in_the_longest_round(
    paths: list[tuple[int, float]], rate: float
) -> None:
    first = FirstRound()
    for path in paths:
        first.add(*path)
    assert first.rate(32_000) == pytest.approx(rate)


def test_packets_longer_than_a_path_carries_are_given_up() -> None:
    recovery = Recovery()
    for size in (1_400, 500, 501):
        recovery.send(0, Kind.push, size)
    assert recovery.give_up_longer(500) == probed(1, 3)
    assert recovery.in_flight() == 1


# ---------------------------------------------------------------------------- any course of events


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(1, 30)),
        st.tuples(st.just("ack"), st.frozensets(st.integers(0, 40), min_size=1)),
        st.tuples(st.just("wait"), st.integers(0, 60)),
        st.tuples(st.just("time-out"), st.integers(0, 60)),
        st.tuples(st.just("repeat"), st.integers(0, 20)),
    ),
    min_size=15,
    max_size=40,
)


@given(EVENTS)
def test_each_packet_leaves_flight_once_in_time_and_is_acknowledged_once(
    events: list[tuple[str, int | frozenset[int]]],
) -> None:
    recovery = Recovery()
    now = 0
    flight: set[int] = set()
    acked: set[int] = set()

    def leave(numbers: list[tuple[int, Again]]) -> None:
        for number, _ in numbers:
            flight.remove(number)

    for what, value in events:
        now += MS
        if what == "send":
            for _ in range(value):
                flight.add(recovery.next())
                recovery.send(now)
        elif what == "ack":
            numbers = {recovery.next() - 1 - back for back in value}
            numbers = {number for number in numbers if number > 0}
            if not numbers:
                continue
            valid, packets, _, in_flight, _ = recovery.on_ack(ack_of(numbers), now)
            assert valid
            assert set(packets) == numbers - acked
            assert in_flight == 1_000 * len(flight & numbers)
            acked |= numbers
            flight -= numbers
            leave(recovery.detect_losses(now))
        elif what == "wait":
            now += value * MS
            if recovery.loss_due() <= now:
                leave(recovery.detect_losses(now))
                assert recovery.loss_due() > now
        elif what == "time-out":
            now += value * MS
            leave(recovery.on_timeout(LONG_AGO, now)[1])
        else:
            copies = Copies()
            copies.refill(1_000, 5 * MS)
            leave(recovery.repeat(value * MS, value * MS, copies, now)[1])
        assert recovery.in_flight() == len(flight)
        missing = {number for number in flight if number < recovery.largest_acked()}
        if missing and what in ("ack", "wait"):
            # A later packet is there, so no probe time-out is waited for on top of this one.
            assert recovery.loss_due() <= now + recovery.rtt.probe_timeout()
        assert recovery.lowest() == min(flight, default=recovery.next())


# ---------------------------------------------------------------------------- round-trip time


def test_the_round_trip_time_follows_rfc_9002() -> None:
    rtt = Rtt()
    for sample, smoothed, round_trip, timeout in [
        (None, 20 * MS, 20 * MS, 20 * MS),
        # The reported delay brings no sample below the minimum.
        ((10 * MS, 2 * MS), 10 * MS, 10 * MS, 31 * MS),
        # 16 ms after the delay: the deviation is 5.25 ms, and 0.5 ms of delay is remembered.
        ((20 * MS, 4 * MS), 10_750 * US, 11_250 * US, 32_750 * US),
    ]:
        if sample:
            rtt.sample(*sample, 0)
        assert (rtt.smoothed(), rtt.round(), rtt.probe_timeout()) == (smoothed, round_trip, timeout)
    assert rtt.minimum() == 10 * MS


def test_the_smallest_round_trip_time_is_forgotten_after_five_to_ten_seconds() -> None:
    rtt = Rtt()
    rtt.sample(5 * MS, 0, 0)
    smallest = {}
    for tenth in range(1, 106):
        rtt.sample(9 * MS, 0, tenth * SECOND // 10)
        smallest[tenth] = rtt.minimum()
    assert all(smallest[tenth] == 5 * MS for tenth in range(1, 51))
    assert smallest[105] == 9 * MS


def test_a_host_that_was_suspended_makes_no_time_out_of_minutes() -> None:
    rtt = Rtt()
    rtt.sample(MS, 0, 0)
    rtt.sample(600 * SECOND, 0, 600 * SECOND)
    assert rtt.probe_timeout() < 5 * SECOND


def test_a_path_is_long_above_five_milliseconds() -> None:
    assert [profile_of(rtprop).spreads for rtprop in (5 * MS, 5 * MS + 1)] == [False, True]
    rtt = Rtt()
    rtt.sample(40 * MS, 0, 0)
    assert rtt.profile().unasked == 1
    rtt.sample(MS, 0, MS)
    assert rtt.profile().unasked == 0


def test_an_ack_samples_the_round_trip_time_of_its_largest_packet_alone() -> None:
    recovery = sending(1)
    recovery.send(10 * MS)
    recovery.on_ack(ack_of([1, 2], delay_us=1_000), 12 * MS)
    assert recovery.rtt.minimum() == 2 * MS
    # The largest is refused, and nothing is known of the others' arrival.
    recovery.send(12 * MS)
    recovery.send(12 * MS)
    assert recovery.on_ack(Ack(4, [0b10], refused=4), 13 * MS)[1] == [3]
    assert recovery.rtt.minimum() == 2 * MS


# ---------------------------------------------------------------------------- measured loss


def test_the_share_of_lost_packets_needs_some_packets_and_is_forgotten() -> None:
    loss = LossMeter()
    loss.add(1, 1, MS)
    assert loss.share(MS) == 0
    loss.add(49, 49, 2 * MS)
    assert loss.share(2 * MS) == pytest.approx(0.5)
    assert loss.share(2 * MS + 2 * SECOND) == 0


def test_a_packet_that_arrives_late_is_taken_out_of_the_loss() -> None:
    loss = LossMeter()
    loss.add(2, 14, MS)
    loss.late()
    assert loss.share(MS) == pytest.approx(1 / 16)


def test_the_loss_stays_below_one() -> None:
    loss = LossMeter()
    loss.add(1_000, 0, MS)
    assert 0.9 < loss.share(MS) < 1


@pytest.mark.parametrize("per_second", [0.0, 1e-300, 1e-3])
def test_copies_at_hardly_any_rate_are_looked_at_again_after_a_second(per_second: float) -> None:
    copies = Copies()
    copies.refill(per_second, SECOND)
    due = copies.next(SECOND)
    assert SECOND + MS < due <= 2 * SECOND + 1
