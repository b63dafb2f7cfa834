"""Token buckets, agendas, messages, fragments and memory, without an endpoint."""

import struct
from random import Random

import pytest
from _parts import NEVER, Agenda, Memory, MessageReceiver, Reassembly, TokenBucket
from hypothesis import given
from hypothesis import strategies as st

from part_kit import MS, SECOND


def test_tokens_come_with_time_up_to_the_depth_and_go_into_debt() -> None:
    bucket = TokenBucket()
    for now, spend, tokens in [
        (0, 0, 0),
        (5 * MS, 0, 5),
        (1 * SECOND, 0, 10),  # no more than the depth
        (1 * SECOND, 25, -15),  # a whole train goes as soon as there is any token
        (1 * SECOND + 20 * MS, 0, 5),
    ]:
        bucket.refill(1000, 10, now)
        bucket.spend(spend)
        assert bucket.tokens() == tokens, now


def test_the_wait_for_tokens_counts_the_debt() -> None:
    bucket = TokenBucket()
    bucket.spend(15)
    assert bucket.wait(5, 1000) == 20 * MS


def test_spending_with_a_floor_makes_no_deeper_debt_and_forgives_none() -> None:
    bucket = TokenBucket()
    for spend, floor, tokens in [(10, -3, -3), (10, -3, -3), (1, -8, -4), (10, -3, -4)]:
        bucket.spend(spend, floor)
        assert bucket.tokens() == tokens
    bucket.clear()
    assert bucket.tokens() == 0


def test_after_a_reset_earlier_time_brings_no_tokens() -> None:
    bucket = TokenBucket()
    bucket.spend(100)
    bucket.reset(1 * SECOND)
    bucket.refill(1000, 10, 1 * SECOND + 2 * MS)
    assert bucket.tokens() == 2


def test_an_agenda_of_one_thing_has_it_and_nothing_after_it() -> None:
    agenda = Agenda(1)
    assert agenda.due(SECOND) == Agenda.NONE
    agenda.set(0, 5)
    assert (agenda.earliest(), agenda.due(4), agenda.due(5)) == (5, Agenda.NONE, 0)
    assert agenda.due(5, 1) == Agenda.NONE


TIMES = st.one_of(st.integers(0, 20), st.just(NEVER))


@given(
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(0, 139), TIMES), min_size=20, max_size=60),
    st.integers(0, 20),
)
def test_an_agenda_finds_what_a_walk_over_all_times_finds(
    size: int, changes: list[tuple[int, int]], now: int
) -> None:
    agenda = Agenda(size)
    times = [NEVER] * size
    for number, due in changes:
        agenda.set(number % size, due)
        times[number % size] = due
        assert agenda.earliest() == min(times)
    for start in range(size + 2):
        due = [index for index, time in enumerate(times) if index >= start and time <= now]
        assert agenda.due(now, start) == (due[0] if due else Agenda.NONE)


# ---------------------------------------------------------------------------- messages

PART = 10  # bytes
MESSAGE = bytes(range(25))  # three parts
Result = MessageReceiver.Result


def part_of(message: bytes, index: int) -> bytes:
    body = message[index * PART : (index + 1) * PART]
    return struct.pack("<I", len(message)) + body


@given(st.integers(1, 45), st.randoms())
def test_a_message_is_complete_once_with_its_last_part_in_whatever_order(
    size: int, random: Random
) -> None:
    message = bytes(range(size))
    order = list(range(-(-size // PART)))
    random.shuffle(order)
    receiver = MessageReceiver()
    for number, index in enumerate(order):
        assert receiver.part(index, part_of(message, index), PART) == (
            Result.complete if number == len(order) - 1 else Result.incomplete
        )
        assert bytes(receiver.beginning()) == (
            message if receiver.done() else message[:PART] if 0 in order[: number + 1] else b""
        )
    assert receiver.take() == message
    assert receiver.part(0, part_of(message, 0), PART) == Result.incomplete  # a repeated one


@pytest.mark.parametrize(
    ("index", "payload"),
    [
        (0, b""),
        (0, struct.pack("<I", 25)[:3]),  # without its length
        (0, part_of(b"", 0)),  # of nothing
        (0, part_of(bytes(31), 0)),  # longer than allowed
        (0, part_of(bytes(26), 0)),  # of another length than before
        (0, part_of(MESSAGE, 0)[:-1]),
        (0, part_of(MESSAGE, 0) + b"!"),
        (2, part_of(MESSAGE, 2) + b"!"),
        (3, struct.pack("<I", 25)),  # beyond the end
        (2**32 - 1, part_of(MESSAGE, 0)),
    ],
)
def test_a_part_that_does_not_fit_changes_nothing(index: int, payload: bytes) -> None:
    receiver = MessageReceiver()
    receiver.part(1, part_of(MESSAGE, 1), PART, 30)
    held = receiver.held()
    assert receiver.part(index, payload, PART, 30) == Result.malformed
    assert receiver.held() == held
    receiver.part(0, part_of(MESSAGE, 0), PART, 30)
    assert receiver.part(2, part_of(MESSAGE, 2), PART, 30) == Result.complete
    assert receiver.take() == MESSAGE


def test_a_message_holds_memory_for_what_has_arrived_whatever_length_it_claims() -> None:
    receiver = MessageReceiver()
    claims = struct.pack("<I", MessageReceiver.MOST) + bytes(PART)
    for index, parts in [(7, 1), (7, 1), (3, 2)]:
        assert receiver.part(index, claims, PART) == Result.incomplete
        assert receiver.held() == parts * MessageReceiver.cost(PART)
    receiver = MessageReceiver()
    receiver.part(0, part_of(b"short", 0), PART)
    assert receiver.held() == MessageReceiver.cost(5)
    receiver.take()
    assert receiver.held() == 0


# ---------------------------------------------------------------------------- fragments

WHOLE = bytes(range(100, 130))


def fragment(index: int, count: int, whole: bytes = WHOLE) -> tuple[int, int, int, bytes]:
    """The datagram's length, the fragment's number, how many there are, and its bytes."""
    each = -(-len(whole) // count)
    return len(whole), index, count, whole[index * each : (index + 1) * each]


@pytest.mark.parametrize(
    ("count", "order"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        (3, [2, 0, 1]),
        (4, [0, 3, 2, 1]),  # the last one is shorter
        (3, [0, 0, 2, 2, 1]),  # repeated
    ],
)
def test_a_datagram_is_whole_once_with_its_last_fragment(count: int, order: list[int]) -> None:
    reassembly = Reassembly()
    for at, index in enumerate(order):
        whole = reassembly.add(7, *fragment(index, count), 30)
        assert whole == (WHOLE if at == len(order) - 1 else b"")
    assert reassembly.add(7, *fragment(0, 3), 30) == b""  # it begins again


def test_fragments_of_another_division_are_no_part_of_a_datagram() -> None:
    reassembly = Reassembly()
    for index, count in [(0, 3), (1, 2), (1, 3), (2, 3)]:
        assert reassembly.add(7, *fragment(index, count), 30) == b""


@given(st.integers(2, 400), st.integers(1, 255), st.randoms(use_true_random=False))
def test_fragments_in_any_order_and_again_are_one_datagram(
    total: int, count: int, random: Random
) -> None:
    whole = random.randbytes(total)
    parts = [index for index in range(count) if fragment(index, count, whole)[3]]
    coming = parts + random.choices(parts, k=3)
    random.shuffle(coming)
    reassembly = Reassembly()
    reassembly.add(3, *fragment(0, 2), 400)  # of another datagram in the same place
    seen: set[int] = set()
    for index in coming:
        seen.add(index)
        done = len(seen) == len(parts)
        assert reassembly.add(67, *fragment(index, count, whole), 400) == (whole if done else b"")
        if done:
            seen.clear()  # what comes now belongs to a repeat


def test_a_datagram_that_goes_again_is_whole_by_fragments_of_both_times() -> None:
    reassembly = Reassembly()
    assert reassembly.add(7, *fragment(0, 3, b"a" + WHOLE[1:]), 30) == b""
    assert reassembly.add(7, *fragment(2, 3), 30) == b""
    again = b"b" + WHOLE[1:]
    assert reassembly.add(7, *fragment(0, 3, again), 30) == b""  # its header is the latest
    assert reassembly.add(7, *fragment(1, 3), 30) == again


@pytest.mark.parametrize(
    ("index", "part", "most"),
    [
        (1, WHOLE[10:20], 29),  # longer than allowed
        (1, b"", 30),
        (1, WHOLE[10:19], 30),
        (1, WHOLE[10:21], 30),
        (3, WHOLE[:10], 30),  # beyond the end
        (255, WHOLE[:10], 30),
    ],
)
def test_a_fragment_that_does_not_fit_is_ignored(index: int, part: bytes, most: int) -> None:
    reassembly = Reassembly()
    reassembly.add(7, *fragment(0, 3), 30)
    assert reassembly.add(7, 30, index, 3, part, most) == b""
    assert reassembly.add(7, *fragment(1, 3), 30) == b""
    assert reassembly.add(7, *fragment(2, 3), 30) == WHOLE


@pytest.mark.parametrize(("number", "kept"), [(7 + 63, True), (7 + 64, False)])
def test_a_newer_datagram_takes_the_place_of_the_sixty_fourth_before_it(
    number: int, kept: bool
) -> None:
    reassembly = Reassembly()
    reassembly.add(7, *fragment(0, 2), 30)
    reassembly.add(number, *fragment(0, 2), 30)
    assert reassembly.add(7, *fragment(1, 2), 30) == (WHOLE if kept else b"")


def test_bytes_of_another_length_under_the_same_number_are_no_part_of_a_datagram() -> None:
    reassembly = Reassembly()
    reassembly.add(7, *fragment(0, 2, WHOLE[:29]), 30)
    assert reassembly.add(7, *fragment(1, 2), 30) == b""


# ---------------------------------------------------------------------------- memory


def memory_with(*, ops: int = 0, waiting: int = 0, early: int = 0) -> Memory:
    """A limit of 80: 10 for what is early, 70 for ops, 30 for several ops of a lane."""
    memory = Memory(80)
    memory.ops, memory.waiting, memory.early = ops, waiting, early
    return memory


@pytest.mark.parametrize(
    ("held", "first", "own", "most"),
    [
        ({}, True, 0, 70),
        ({}, False, 0, 30),  # the rest is kept for the first ops of other lanes
        ({"ops": 20}, True, 0, 50),
        ({"ops": 20}, False, 0, 10),
        ({"ops": 20, "waiting": 20}, True, 0, 30),
        ({"ops": 10, "waiting": 45}, False, 0, 15),
        ({"early": 30}, True, 0, 50),
        ({"early": 30}, True, 25, 70),  # its own messages become a part of it
        ({"ops": 70}, True, 0, 0),
    ],
)
def test_an_op_is_admitted_within_what_ops_and_their_lane_may_take(
    held: dict[str, int], first: bool, own: int, most: int
) -> None:
    memory = memory_with(**held)
    assert memory.has_op(most, first=first, own=own)
    assert not memory.has_op(most + 1, first=first, own=own)


@pytest.mark.parametrize(
    ("held", "early", "waiting"),
    [
        ({}, 10, 30),
        ({"early": 4}, 6, 30),
        ({"waiting": 20}, 10, 10),
        ({"ops": 50}, 10, 20),
        ({"ops": 50, "waiting": 15}, 10, 5),
        ({"ops": 70, "early": 10}, 0, 0),
    ],
)
def test_early_packets_and_contributions_ahead_of_their_turn_have_shares_of_their_own(
    held: dict[str, int], early: int, waiting: int
) -> None:
    memory = memory_with(**held)
    assert memory.has_early(early)
    assert not memory.has_early(early + 1)
    assert memory.has_waiting(waiting)
    assert not memory.has_waiting(waiting + 1)


@given(st.integers(1, 10_000))
def test_the_least_limit_admits_an_op_alone_and_has_a_byte_too_many_at_most(need: int) -> None:
    least = Memory.least_limit(need)
    assert Memory(least).has_op(need, first=True)
    assert not Memory(least - 2).has_op(need, first=True)
