"""Acknowledger, without an endpoint: arrivals in, the times and contents of ACKs out."""

import pytest
from _parts import NEVER, Acknowledger
from hypothesis import given
from hypothesis import strategies as st

from part_kit import MS, US

SHORT, LONG = 100 * US, 40 * MS  # round-trip times of paths


def arrive(
    acks: Acknowledger,
    number: int,
    now: int,
    *,
    refused: bool = False,
    queue: int = 0,
    size: int = 500,
) -> None:
    acks.arrived(queue, size, now)
    acks.record(number, refused, now)


def members(largest: int, bitmap: list[int]) -> set[int]:
    bits = sum(word << (64 * i) for i, word in enumerate(bitmap))
    return {largest - back for back in range(largest) if bits >> back & 1}


# ---------------------------------------------------------------------------- when


def test_a_packet_is_acknowledged_within_800_microseconds() -> None:
    acks = Acknowledger()
    assert acks.next_timer() == NEVER
    arrive(acks, 1, 0)
    arrive(acks, 2, 300 * US)  # the first one decides
    assert acks.next_timer() == 800 * US
    assert not acks.due(SHORT, 800 * US - 1)
    assert acks.due(SHORT, 800 * US)
    acks.sent(800 * US)
    assert acks.next_timer() == NEVER
    assert not acks.due(SHORT, 1_000 * MS)
    arrive(acks, 3, 1_000 * MS)
    assert acks.next_timer() == 1_000 * MS + 800 * US


def test_a_gap_is_acknowledged_at_once() -> None:
    acks = Acknowledger()
    for number, due in [(1, False), (2, False), (4, True), (3, True)]:
        arrive(acks, number, 0)
        assert acks.due(SHORT, 0) == due, number
    acks.sent(0)
    arrive(acks, 5, 0)
    assert not acks.due(SHORT, 0)


@pytest.mark.parametrize(
    ("wanted", "count"),
    [(0, 1), (1, 1), (2, 2), (64, 64)],
)
def test_an_ack_goes_after_so_many_packets(wanted: int, count: int) -> None:
    acks = Acknowledger()
    for number in range(1, 100):
        arrive(acks, number, 0)
        acks.after(wanted)
        if acks.due(SHORT, 0):
            assert number == count
            return
    raise AssertionError("no ACK is due")


def test_the_caller_can_bring_an_ack_forward() -> None:
    acks = Acknowledger()
    arrive(acks, 1, 0)
    assert acks.next_timer() == 800 * US
    acks.hurry()
    assert acks.due(SHORT, 0)


def test_an_ack_that_may_be_lost_goes_again_for_two_rounds() -> None:
    acks = Acknowledger()
    arrive(acks, 1, 0)
    for now in (0, 3 * MS, 6 * MS):
        acks.sent(now)
        acks.repeat(3 * MS, 4 * MS, now)
        assert acks.next_timer() == now + 3 * MS
    acks.sent(9 * MS)
    acks.repeat(3 * MS, 4 * MS, 9 * MS)
    assert acks.next_timer() == NEVER


@pytest.mark.parametrize(
    ("rtprop", "spacing"),
    [(SHORT, 0), (5 * MS, 0), (16 * MS, 800 * US), (LONG, 800 * US)],
)
def test_acks_of_gaps_are_spaced_on_long_paths_alone(rtprop: int, spacing: int) -> None:
    acks = Acknowledger()
    acks.sent(10 * MS)
    arrive(acks, 2, 10 * MS)
    if spacing:
        assert not acks.due(rtprop, 10 * MS + spacing - 1)
        assert acks.next_timer() == 10 * MS + spacing
    assert acks.due(rtprop, 10 * MS + spacing)


# ---------------------------------------------------------------------------- whose


@pytest.mark.parametrize(
    ("numbers", "doubtful"),
    [
        ([1], [False]),
        ([356], [False]),  # 256 beyond the credit of 100
        ([357], [True]),
        ([9_000, 9_001, 9_002], [True, False, False]),  # all before them were lost
        ([9_000, 8_900], [True, False]),  # in another order
        ([9_000, 9_000], [True, True]),  # the same datagram again
        ([9_000, 2**31, 9_000 + 257], [True, True, True]),
    ],
)
def test_a_single_number_far_ahead_is_no_packet_of_the_peer(
    numbers: list[int], doubtful: list[bool]
) -> None:
    acks = Acknowledger()
    found = []
    for number in numbers:
        found.append(acks.doubtful(number, 100))
        if not found[-1]:
            arrive(acks, number, 0)
    assert found == doubtful
    assert not acks.doubtful(acks.largest() + 256, 100)


# ---------------------------------------------------------------------------- what


def test_an_ack_says_what_has_arrived_when_and_after_which_queue() -> None:
    acks = Acknowledger()
    for number in (1, 2, 4):
        arrive(acks, number, 0, queue=10 * US)
    arrive(acks, 5, 3 * MS, queue=40 * US, size=750)
    ack = acks.fill(0, 128, 3 * MS + 250 * US)
    assert (ack.largest, members(5, ack.bitmap)) == (5, {1, 2, 4, 5})
    assert (ack.delay_us, ack.queue_us) == (250, 20)
    acks.sent(4 * MS)
    assert acks.fill(0, 128, 4 * MS).queue_us == 0


def test_the_delay_is_that_of_the_largest_packet() -> None:
    acks = Acknowledger()
    arrive(acks, 2, 1 * MS)
    arrive(acks, 1, 2 * MS)
    assert acks.fill(0, 128, 3 * MS).delay_us == 2_000


def test_a_refused_packet_is_reported_and_new_when_it_comes_again() -> None:
    acks = Acknowledger()
    arrive(acks, 1, 0)
    arrive(acks, 2, 0, refused=True)
    arrive(acks, 3, 0)
    assert not acks.due(SHORT, 0)  # no gap
    ack = acks.fill(0, 128, 0)
    assert (ack.refused, members(3, ack.bitmap)) == (2, {1, 3})
    assert not acks.seen(2)
    arrive(acks, 2, MS)
    assert acks.seen(2)


@pytest.mark.parametrize(
    ("new", "span", "most", "words"),
    [
        (1, 0, 128, 2),
        (1, 640, 128, 20),  # the last packets of a window are reported twice
        (3_200, 640, 128, 100),  # a batch longer than that is reported whole
        (3_200, 640, 22, 22),  # what the datagram carries
        (100_000, 0, 128, 128),
    ],
)
def test_the_bitmap_covers_the_span_twice_or_what_is_new(
    new: int, span: int, most: int, words: int
) -> None:
    acks = Acknowledger()
    arrive(acks, 1, 0)
    acks.sent(0)
    arrive(acks, 1 + new, 0)
    assert len(acks.fill(span, most, 0).bitmap) == words


def test_arrivals_of_a_window_ago_are_not_taken_for_new_ones() -> None:
    acks = Acknowledger()
    for number in (5, 60_000, 65_545):
        arrive(acks, number, 0)
    assert not acks.seen(5 + 65_536)
    arrive(acks, 10 + 2 * 65_536, 0)  # a jump of a whole window
    assert not acks.seen(9 + 2 * 65_536)


def test_numbers_older_than_the_window_count_as_seen() -> None:
    acks = Acknowledger()
    arrive(acks, 70_000, 0)
    assert [acks.seen(70_000 - back) for back in (0, 1, 65_535, 65_536)] == [
        True,
        False,
        False,
        True,
    ]


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=20, max_size=200))
def test_exactly_what_has_arrived_is_seen_and_acknowledged(
    arrivals: list[tuple[int, bool]],
) -> None:
    acks = Acknowledger()
    arrived: set[int] = set()
    for number, refused in arrivals:
        assert acks.seen(number) == (number in arrived)
        if acks.seen(number):
            continue
        arrive(acks, number, 0, refused=refused)
        if not refused:
            arrived.add(number)
    ack = acks.fill(0, 128, 0)
    largest = max(number for number, _ in arrivals)
    assert ack.largest == acks.largest() == largest
    assert members(largest, ack.bitmap) == arrived
    assert ack.refused <= largest


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150), st.booleans()), min_size=1),
)
def test_a_run_of_packets_is_recorded_as_each_of_them_alone(
    runs: list[tuple[int, int, bool]],
) -> None:
    together, alone = Acknowledger(), Acknowledger()
    first = 1
    for now, (missing, packets, refused) in enumerate(runs):
        first += missing
        together.arrived(7, 500 * packets, now, packets)
        gap = together.record(first, refused, now, packets)
        gaps = []
        for number in range(first, first + packets):
            alone.arrived(7, 500, now)
            gaps.append(alone.record(number, refused, now))
        assert gap == any(gaps) == (missing > 0)
        assert together.next_timer() == alone.next_timer()
        first += packets
    ours, each = together.fill(0, 128, 0), alone.fill(0, 128, 0)
    assert (ours.largest, ours.refused, ours.queue_us) == (
        each.largest,
        each.refused,
        each.queue_us,
    )
    assert list(ours.bitmap) == list(each.bitmap)
