"""A worker's push and the close rule, without an endpoint: ACKs, losses and arrivals in, what goes
next and what closes out.
"""

from typing import Any

import numpy as np
import pytest
from _parts import (
    NEVER,
    Added,
    Again,
    Aggregator,
    ChunkSender,
    Grid,
    Memory,
    PassReceiver,
    PassSender,
    SparePush,
    StreamPush,
    make_push_sender,
)
from hypothesis import given
from hypothesis import strategies as st

from gradwire._engine import Plan
from part_kit import CHUNK, DATAGRAM, MS, plan_of

# The schedule of an eager close: from the start on, one minus the bound is enough.
EAGER = [("open", "all", 0, -1.0)]


def push_of(*regions: tuple[int, float], critical: Any = (), **options: Any) -> StreamPush:
    plan, grid = plan_of(*regions, **options)
    return StreamPush(plan, grid, 0, list(critical))


def send(push: ChunkSender, most: int = 1_000) -> list[int]:
    """The chunks of the next sends; a minus marks one that was sent before (not of chunk 0)."""
    out = []
    while len(out) < most:
        peeked = push.peek()
        sent = push.next()
        assert peeked == (sent and sent[0])
        if sent is None:
            break
        out.append(-sent[0] if sent[1] else sent[0])
    return out


def test_a_slice_has_fresh_chunks_of_one_length_up_to_the_tail_and_holes_one_by_one() -> None:
    push = push_of((250, 0.0))
    assert push.slice(10) == ([*range(10)], False, False)
    for chunk in (3, 4):
        push.lost(chunk, Again.lost)
    push.forget(12)
    assert push.slice(10) == ([3], True, False)
    assert push.slice(10) == ([4], True, False)
    assert push.slice(10) == ([10, 11], False, False)
    assert push.slice(1_000) == ([*range(13, 247)], False, False)
    assert push.slice(1_000) == ([247, 248, 249], False, True)  # the last hundredth
    assert push.slice(1_000) == ([], False, False)

    plan = Plan(elements=5 * CHUNK // 2, regions=[(0, 5 * CHUNK // 2, 0.0)])
    grid = Grid(plan, DATAGRAM, 1)
    short = StreamPush(plan, grid, 0, [])
    assert [short.slice(9)[0] for _ in range(3)] == [[0, 1], [2], []]


@pytest.mark.parametrize(
    ("options", "may_differ", "strategy"),
    [
        ({}, True, StreamPush),
        ({"spend": "anything", "schedule": EAGER}, False, StreamPush),
        ({"spend": "anything", "schedule": EAGER}, True, SparePush),
        ({"spend": "anything", "schedule": EAGER, "control": "probe"}, True, PassSender),
        ({"control": "probe"}, True, PassSender),
    ],
)
def test_a_plan_chooses_the_strategy_of_its_pushes(
    options: dict[str, Any], may_differ: bool, strategy: type
) -> None:
    plan, grid = plan_of((10, 0.3), **options)
    assert type(make_push_sender(plan, grid, 0, may_differ)) is strategy


# ---------------------------------------------------------------------------- what goes next


def test_each_chunk_goes_once_in_order_and_the_critical_ones_first() -> None:
    push = push_of((6, 0.5), spend="lost", critical=[4, 2])
    assert push.backlog() == 6
    assert send(push) == [2, 4, 0, 1, 3, 5]
    assert push.backlog() == 0
    assert not push.settled()
    for chunk in range(6):
        push.acked(chunk)
    assert push.settled()


def test_the_tail_is_the_last_hundredth_of_the_list() -> None:
    push = push_of((200, 0.0))
    tails = []
    for _ in range(200):
        push.next()
        tails.append(push.in_last(0.01))
    assert tails.index(True) == 197


@pytest.mark.parametrize(
    ("spend", "order"),
    [
        ("nothing", [-1, 3, 4, 5]),  # a gap delays the sum
        ("late", [3, 4, 5, -1]),  # the gap may still be forgiven
    ],
)
def test_a_lost_chunk_goes_before_fresh_ones_where_nothing_may_be_given_up(
    spend: str, order: list[int]
) -> None:
    push = push_of((6, 0.0 if spend == "nothing" else 0.5), spend=spend)
    send(push, 3)
    push.lost(1, Again.lost)
    assert send(push) == order


def test_without_fresh_chunks_only_those_go_that_were_sent_before() -> None:
    push = push_of((6, 0.0))
    send(push, 2)
    assert push.backlog(False) == 0
    assert push.next(False) is None
    push.lost(0, Again.probe)
    assert push.backlog(False) == 1
    assert push.next(False) == (0, True)


def test_a_chunk_that_is_acknowledged_or_decided_never_goes_again() -> None:
    push = push_of((3, 0.0))
    send(push)
    push.acked(0)
    push.lost(0, Again.lost)
    push.lost(1, Again.lost)
    push.forget(1)
    assert send(push) == []
    push.acked(2)
    assert push.settled()


def test_a_region_that_the_aggregator_has_closed_is_not_sent_on() -> None:
    push = push_of((3, 0.5), (3, 0.5), spend="anything", schedule=[("open", "all", MS, 0.5)])
    send(push, 2)
    push.lost(0, Again.lost)
    assert push.stop_region(0)
    assert send(push) == [3, 4, 5]


@pytest.mark.parametrize(
    ("spend", "region", "plausible"),
    [("late", 0, True), ("late", 1, False), ("late", 2, False), ("nothing", 0, False)],
)
def test_only_a_region_that_may_lose_something_can_close(
    spend: str, region: int, plausible: bool
) -> None:
    push = push_of((3, 0.5), (3, 0.0), spend=spend)
    assert push.stop_region(region) == plausible
    assert push.backlog() == 6  # what is decided still leaves the list one by one
    assert send(push) == ([3, 4, 5] if plausible else list(range(6)))


# ---------------------------------------------------------------------------- spend lost


@pytest.mark.parametrize(
    ("why", "forgiven"),
    [(Again.lost, True), (Again.refused, False), (Again.probe, False), (Again.repeat, False)],
)
def test_only_what_was_declared_lost_is_forgiven(why: Again, forgiven: bool) -> None:
    push = push_of((10, 0.3), spend="lost")
    send(push)
    for chunk in range(9):
        push.acked(chunk)
    push.lost(9, why)
    assert push.take_forgiven() == ([9] if forgiven else [])
    assert send(push) == ([] if forgiven else [-9])
    assert push.settled() == forgiven


def test_a_critical_chunk_is_never_forgiven() -> None:
    push = push_of((10, 0.9), spend="lost", critical=[9])
    send(push)
    for chunk in range(9):
        push.acked(chunk)
    push.lost(9, Again.lost)
    assert push.take_forgiven() == []
    assert send(push) == [-9]


def test_a_lost_chunk_waits_until_the_ledger_has_room_for_it() -> None:
    push = push_of((10, 0.3), spend="lost")
    send(push)
    push.lost(0, Again.lost)
    given_up = []
    for chunk in range(1, 4):  # F + l <= 0.3 (R + F + l) from R = 3 chunks on
        assert push.backlog() == 1
        push.acked(chunk)
        given_up.append(push.take_forgiven())
    assert given_up == [[], [], [0]]
    assert push.backlog() == 0


def test_the_ledger_counts_what_was_forgiven_before() -> None:
    push = push_of((10, 0.3), spend="lost")
    send(push)
    for chunk in range(3):
        push.acked(chunk)
    push.lost(8, Again.lost)
    push.lost(9, Again.lost)
    assert push.take_forgiven() == [8]
    push.acked(3)
    assert push.take_forgiven() == []  # two of six would be a third
    push.acked(4)
    assert push.take_forgiven() == [9]


COURSE = st.lists(
    st.tuples(st.sampled_from(["send", "acked", "lost", "probe"]), st.integers(0, 19)),
    min_size=30,
    max_size=80,
)


@given(st.integers(0, 20), COURSE, st.sampled_from([0.0, 0.1, 0.3, 0.5]))
def test_a_ledger_forgives_its_bound_at_most_and_no_chunk_gets_out_of_sight(
    first: int, events: list[tuple[str, int]], bound: float
) -> None:
    push = push_of((12, bound), (8, 0.25), spend="lost", critical=[0, 13])
    bounds = [(0, 12, bound), (12, 20, 0.25)]
    acked: set[int] = set()
    forgiven: set[int] = set()
    flight = set(send(push, first))
    for what, which in events:
        if what == "send":
            for chunk in map(abs, send(push, 1)):
                assert chunk not in acked | forgiven | flight
                flight.add(chunk)
        elif flight:
            chunk = sorted(flight)[which % len(flight)]
            flight.remove(chunk)
            if what == "acked":
                push.acked(chunk)
                acked.add(chunk)
            else:
                push.lost(chunk, Again.lost if what == "lost" else Again.probe)
        forgiven |= set(push.take_forgiven())
        assert not forgiven & {0, 13}
        for begin, end, most in bounds:
            given_up = sum(begin <= each < end for each in forgiven)
            arrived = sum(begin <= each < end for each in acked)
            assert given_up <= most * (arrived + given_up) + 1e-9
        assert push.backlog() == 20 - len(acked) - len(forgiven) - len(flight)
        assert push.settled() == (len(acked) + len(forgiven) == 20)


# ---------------------------------------------------------------------------- eager close


@pytest.mark.parametrize("seed", [1, 2])
def test_an_eager_push_sends_one_minus_the_bound_of_each_region_and_the_critical_chunks(
    seed: int,
) -> None:
    push = push_of(
        (10, 0.3), (10, 0.0), (10, 0.55),
        critical=[0, 1, 2], spend="anything", schedule=EAGER, order="shuffled", seed=seed,
    )  # fmt: skip
    sent = send(push)
    assert set(sent[:3]) == {0, 1, 2}
    counts = [sum(chunk // 10 == region for chunk in sent) for region in range(3)]
    assert counts == [7, 10, 5]  # 4.5 chunks are whole ones
    for chunk in sent:
        push.acked(chunk)
    assert push.settled()


def test_critical_chunks_are_sent_even_if_fewer_would_do() -> None:
    push = push_of((10, 0.5), critical=range(9), spend="anything", schedule=EAGER)
    assert send(push) == list(range(9))


def spare_push() -> SparePush:
    plan, grid = plan_of((10, 0.3), spend="anything", schedule=EAGER)
    return SparePush(plan, grid, 0)


def test_spares_go_in_place_of_doubted_chunks_once_something_was_declared_lost() -> None:
    push = spare_push()
    assert send(push) == [0, 1, 2, 3, 4, 5, 6]
    push.lost(1, Again.repeat)
    assert send(push) == [-1]  # nothing was declared lost
    push.lost(5, Again.lost)
    assert send(push) == [-5]  # what is known to be lost goes itself
    push.lost(2, Again.repeat)
    push.lost(3, Again.repeat)
    assert send(push) == [7, 8]  # never sent before
    push.acked(2)  # the doubted chunk had arrived after all
    push.lost(7, Again.repeat)
    assert send(push) == []  # with it, 70 % are acknowledged or under way


def test_doubted_chunks_go_again_in_turn_once_all_spares_are_sent() -> None:
    push = spare_push()
    send(push)
    push.lost(0, Again.lost)
    for chunk in (1, 2, 3, 4):
        push.lost(chunk, Again.repeat)
    assert send(push) == [0, 7, 8, 9, -1]
    push.stop_region(0)
    assert push.settled()


def test_a_push_without_spares_sends_nothing_beyond_its_list() -> None:
    push = push_of((10, 0.3), spend="anything", schedule=EAGER)
    send(push)
    push.lost(1, Again.lost)
    push.lost(2, Again.repeat)
    assert send(push) == [-1, -2]


# ---------------------------------------------------------------------------- passes


def bitmap(*missing: int, chunks: int = 4) -> bytes:
    """The one part of a BITMAP: its length, then a bit for each missing chunk."""
    size = (chunks + 7) // 8
    bits = sum(1 << chunk for chunk in missing)
    return size.to_bytes(4, "little") + bits.to_bytes(size, "little")


def passes_of(chunks: int = 4, begin: int = 0) -> PassSender:
    return PassSender(begin, begin + chunks, list(range(begin, begin + chunks)))


def take_all(sender: PassSender) -> list[tuple[int, bool]]:
    out = []
    while (sent := sender.next()) is not None:
        out.append(sent)
    return out


def test_in_passes_the_fate_of_packets_does_not_matter() -> None:
    sender = passes_of()
    take_all(sender)
    sender.acked(0)
    sender.lost(1, Again.lost)
    assert (sender.backlog(), sender.settled(), sender.next()) == (0, False, None)
    assert not sender.stop_region(0)


def test_a_pass_is_sent_whole_then_asked_about_once() -> None:
    sender = passes_of()
    assert sender.next() == (0, False)
    assert not sender.take_probe()
    assert take_all(sender) == [(1, False), (2, False), (3, False)]
    assert [sender.take_probe(), sender.take_probe()] == [True, False]
    assert (sender.backlog(), sender.settled()) == (0, False)


def test_the_next_pass_is_what_was_missing_in_the_order_of_the_first() -> None:
    sender = passes_of(begin=20)
    take_all(sender)
    sender.take_probe()
    assert sender.bitmap_part(1, 0, bitmap(3, 1), 100)
    assert (sender.number(), sender.backlog()) == (2, 2)
    sender.forget(23)  # its result came meanwhile
    assert take_all(sender) == [(21, True)]
    assert sender.take_probe()
    assert sender.stop(2)
    assert sender.settled()


def test_after_a_pass_of_which_nothing_arrived_the_next_waits_for_the_fate_of_its_chunks() -> None:
    """Else its short PROBE, and the answer, take what a policer lets pass."""
    sender = passes_of()
    take_all(sender)
    assert sender.take_probe()
    sender.lost(0, Again.lost)
    for chunk in range(1, 4):
        sender.acked(chunk)  # too late for the answer
    assert sender.bitmap_part(1, 0, bitmap(0, 1, 2, 3), 100)
    take_all(sender)
    assert not sender.take_probe()
    for chunk in range(3):
        sender.lost(chunk, Again.probe)
    assert not sender.take_probe()
    sender.acked(3)
    assert sender.take_probe()
    assert sender.bitmap_part(2, 0, bitmap(0, 1), 100)  # some have arrived
    take_all(sender)
    assert sender.take_probe()


@pytest.mark.parametrize("number", [1, 2])
def test_a_stop_ends_the_passes_in_mid_pass_too(number: int) -> None:
    sender = passes_of()
    sender.next()
    assert sender.stop(number)
    assert sender.next() is None
    assert (sender.settled(), sender.backlog(), sender.take_probe()) == (True, 0, False)


@pytest.mark.parametrize(
    ("number", "part", "plausible"),
    [
        (0, bitmap(1), False),
        (2, bitmap(1), False),  # of a pass that has not begun
        (1, bitmap(), False),  # who misses nothing sends STOP
        (1, bitmap(1, chunks=9), False),  # too long
        (1, b"\1\0\0", False),  # no length
        (1, bitmap(1), True),
    ],
)
def test_a_bitmap_that_no_receiver_would_send_is_rejected(
    number: int, part: bytes, plausible: bool
) -> None:
    sender = passes_of()
    take_all(sender)
    assert not sender.bitmap_part(1, 0, bitmap(1), 100)  # before it was asked for
    sender.take_probe()
    assert sender.bitmap_part(number, 0, part, 100) == plausible
    assert sender.number() == (2 if plausible else 1)


def test_a_late_bitmap_of_an_earlier_pass_changes_nothing() -> None:
    sender = passes_of()
    take_all(sender)
    sender.take_probe()
    sender.bitmap_part(1, 0, bitmap(1, 2), 100)
    assert sender.bitmap_part(1, 0, bitmap(0), 100)
    assert take_all(sender) == [(1, True), (2, True)]


@pytest.mark.parametrize(("number", "plausible"), [(0, False), (1, True), (2, True), (3, False)])
def test_a_stop_is_of_this_pass_or_of_the_next(number: int, plausible: bool) -> None:
    sender = passes_of()
    assert sender.stop(number) == plausible
    assert sender.settled() == plausible


def test_a_bitmap_asks_for_no_chunk_that_was_never_sent() -> None:
    sender = PassSender(0, 4, [1])
    take_all(sender)
    sender.take_probe()
    assert not sender.bitmap_part(1, 0, bitmap(2), 100)
    assert sender.bitmap_part(1, 0, bitmap(1), 100)


def test_a_receiver_answers_each_probe_once_and_passes_come_in_order() -> None:
    receiver = PassReceiver()
    assert not receiver.waiting()
    assert [receiver.probe(number) for number in (0, 2, 1)] == [False, False, True]
    assert receiver.waiting()
    assert receiver.answer() == 1
    assert receiver.probe(1)  # repeated
    assert not receiver.waiting()
    assert receiver.probe(2)
    assert receiver.stop() == 2
    assert receiver.stopped()


def test_an_unasked_stop_names_the_pass_under_way() -> None:
    receiver = PassReceiver()
    assert receiver.stop() == 1


# ---------------------------------------------------------------------------- close rule

PAYLOAD = bytes(4 * CHUNK)


class Sums:
    """An aggregator of one region of ten chunks, without a worker of its own."""

    def __init__(self, workers: int = 1, bound: float = 0.3, **options: Any) -> None:
        self.memory = Memory(1 << 20)
        plan, grid = plan_of((10, bound), **options)
        self.sums = Aggregator(plan, grid, 0, workers, self.memory)
        self.workers = workers

    def open(self, now: int = 0, *, worker: int = 0, critical: Any = ()) -> None:
        self.sums.open(worker, list(critical), now)

    def add(self, *chunks: int, now: int = 0, worker: int = 0, tail: bool = False) -> None:
        for chunk in chunks:
            assert self.sums.add(worker, chunk, PAYLOAD, tail, now) == Added.counted

    def closed(self, now: int) -> list[int]:
        """The workers whose region closes by now with chunks missing."""
        self.sums.on_timer(now)
        return [worker for worker, _ in self.sums.take_stops()]


def test_an_eager_region_closes_with_one_minus_its_bound() -> None:
    sums = Sums(spend="anything", schedule=EAGER)
    sums.open()
    sums.add(*range(6))
    assert sums.closed(MS) == []
    sums.add(6)
    assert sums.closed(MS) == [0]
    assert sums.sums.all_final()
    assert sums.sums.undecided(0) == 0
    # What comes later counts no more, and what nobody sent has no result.
    assert sums.sums.add(0, 7, PAYLOAD, False, MS) == Added.ignored
    assert sorted(sums.sums.finished()) == list(range(7))


def test_a_region_waits_for_its_worker_to_open_and_for_its_critical_chunks() -> None:
    sums = Sums(spend="anything", schedule=EAGER)
    sums.add(*range(8))
    assert sums.closed(MS) == []
    sums.open(2 * MS, critical=[9])
    assert sums.closed(2 * MS) == []
    sums.add(9, now=3 * MS)
    assert sums.closed(3 * MS) == [0]


def test_before_its_worker_opens_no_region_closes_whatever_the_clock() -> None:
    sums = Sums(spend="late", schedule=[("first_arrival", "worker", 0, 0.7)])
    sums.add(*range(8))
    assert sums.closed(MS) == []
    sums.open(2 * MS)
    assert sums.closed(2 * MS) == [0]


def test_the_last_worker_to_start_a_clock_of_all_closes_the_regions_of_the_others() -> None:
    sums = Sums(workers=2, spend="late", schedule=[("first_arrival", "all", 0, 0.7)])
    for worker in (0, 1):
        sums.open(worker=worker)
    sums.add(*range(8), worker=0)
    assert sums.sums.take_stops() == []
    sums.add(0, worker=1)
    assert sums.sums.take_stops() == [(0, 0)]


def test_a_region_with_bound_zero_never_closes_early() -> None:
    sums = Sums(bound=0.0, spend="anything", schedule=[("open", "all", 0, 0.5)])
    sums.open()
    sums.add(*range(9))
    assert sums.closed(1_000 * MS) == []
    sums.add(9)
    assert sums.sums.all_final()


def test_a_step_of_the_schedule_closes_regions_once_its_time_has_come() -> None:
    schedule = [("open", "worker", 5 * MS, 0.9), ("open", "worker", 20 * MS, 0.7)]
    sums = Sums(spend="late", schedule=schedule)
    sums.open(MS)
    assert sums.sums.next_timer() == NEVER  # nothing could close yet
    sums.add(*range(8), now=2 * MS)
    assert sums.sums.next_timer() == 6 * MS
    assert sums.closed(6 * MS) == []  # 80 % of 90
    assert sums.sums.next_timer() == 21 * MS
    assert sums.closed(21 * MS - 1) == []
    assert sums.closed(21 * MS) == [0]


@pytest.mark.parametrize(
    ("clock", "scope", "due"),
    [
        ("open", "worker", [10, 13]),
        ("open", "all", [13, 13]),
        ("first_arrival", "worker", [14, 15]),
        ("first_arrival", "all", [15, 15]),
        ("tail", "worker", [16, 19]),
        ("tail", "all", [19, 19]),
    ],
)
def test_time_runs_from_the_clock_of_the_schedule(clock: str, scope: str, due: list[int]) -> None:
    sums = Sums(workers=2, spend="late", schedule=[(clock, scope, 10 * MS, 0.7)])
    sums.open(0, worker=0)
    sums.open(3 * MS, worker=1)
    sums.add(0, now=4 * MS, worker=0)
    sums.add(0, now=5 * MS, worker=1)
    sums.add(*range(1, 8), now=6 * MS, worker=0, tail=True)
    sums.add(*range(1, 8), now=9 * MS, worker=1, tail=True)
    closed = {}
    for now in range(9, 30):
        closed |= dict.fromkeys(sums.closed(now * MS), now)
    assert [closed[0], closed[1]] == due


def test_an_aggregator_knows_for_whom_it_waits() -> None:
    sums = Sums(workers=2, spend="anything", schedule=EAGER)
    sums.open(0, worker=0)
    sums.open(0, worker=1)
    sums.add(*range(7), worker=1)
    assert sums.sums.waiting_for() == [0]
    assert not sums.sums.all_final()


def test_a_worker_that_gives_up_more_than_its_bound_is_found_out() -> None:
    sums = Sums(spend="lost")
    sums.open()
    sums.add(*range(7))
    assert [sums.sums.forgive(0, chunk) for chunk in (7, 8, 9)] == [True] * 3
    assert sums.sums.all_final()
    other = Sums(spend="lost", bound=0.25)
    other.open()
    other.add(*range(7))
    assert [other.sums.forgive(0, chunk) for chunk in (7, 8, 9)] == [True, True, False]


def test_exact_sums_are_in_rank_order_and_a_chunk_in_its_turn_is_never_refused() -> None:
    plan, grid = plan_of((1, 0.0))
    memory = Memory(2_000)  # no room for a second contribution ahead of its turn
    sums = Aggregator(plan, grid, 0, 3, memory)
    payloads = [b"\0\0\x80\x3f" * CHUNK, b"\0\0\0\x40" * CHUNK, b"\0\0\x80\x40" * CHUNK]  # 1, 2, 4
    assert sums.add(2, 0, payloads[2], False, 0) == Added.counted
    assert memory.waiting > 0
    assert sums.add(1, 0, payloads[1], False, 0) == Added.no_memory
    assert sums.add(0, 0, payloads[0], False, 0) == Added.counted
    assert sums.add(1, 0, payloads[1], False, 0) == Added.counted
    assert (sums.all_final(), memory.waiting) == (True, 0)
    assert sums.result(0) == [7.0] * CHUNK


@pytest.mark.parametrize("options", [{}, {"encoding": "half"}])
def test_an_exact_sum_reads_the_own_values_of_rank_0_when_those_of_rank_1_come(
    options: dict[str, Any],
) -> None:
    plan, grid = plan_of((10, 0.0), **options)
    own = np.full(10 * CHUNK, 9.0, np.float32)
    sums = Aggregator(plan, grid, 0, 2, Memory(1 << 20), here=0, own=own)
    sums.open(0, [], 0)  # takes no pass over memory
    own[:] = 1.0
    sums.open(1, [], 0)
    for chunk in range(grid.chunks()):
        two = np.full(grid.length(chunk), 2.0, np.float16 if options else np.float32).tobytes()
        assert sums.add(1, chunk, two, False, 0) == Added.counted
    assert sums.all_final()
    for chunk in range(grid.chunks()):
        assert sums.result(chunk) == [3.0] * grid.length(chunk)


@pytest.mark.parametrize(
    ("ranks", "here"), [(2, 0), (3, 0), (3, 1), (3, 2), (4, 1), (5, 4), (9, 3)]
)
@pytest.mark.parametrize("back", [False, True])
def test_exact_results_replace_the_own_values_in_one_pass(
    ranks: int, here: int, back: bool
) -> None:
    plan, grid = plan_of((1, 0.0), scale=0.3)
    values = np.random.default_rng(1).standard_normal((ranks, CHUNK)).astype(np.float32)
    own = values[here].copy()
    sums = Aggregator(plan, grid, 0, ranks, Memory(1 << 20), here=here, own=own)
    sums.open(here, [], 0)
    for rank in sorted(set(range(ranks)) - {here}, reverse=back):
        assert np.array_equal(own, values[here])  # until the last one comes
        assert sums.add(rank, 0, values[rank].tobytes(), False, 0) == Added.counted
    assert sums.all_final()
    total = values[0]
    for each in values[1:]:
        total = total + each
    total *= np.float32(0.3)
    assert own.tobytes() == total.tobytes()
    assert sums.result(0) == total.tolist()


def test_the_sum_of_one_worker_is_its_own_values() -> None:
    plan, grid = plan_of((10, 0.0))
    own = np.arange(10 * CHUNK, dtype=np.float32)
    sums = Aggregator(plan, grid, 0, 1, Memory(1 << 20), here=0, own=own)
    sums.open(0, [], 0)
    assert sums.all_final()
    assert sums.result(3) == own[3 * CHUNK : 4 * CHUNK].tolist()


@pytest.mark.parametrize(("chunk", "payload"), [(10, PAYLOAD), (0, PAYLOAD[:-4]), (0, b"")])
def test_a_chunk_of_another_shard_or_length_is_malformed(chunk: int, payload: bytes) -> None:
    assert Sums(spend="lost").sums.add(0, chunk, payload, False, 0) == Added.malformed


@pytest.mark.parametrize(("begin", "end"), [(0, 9), (1, 5), (3, 3), (4, 9)])
def test_the_part_of_a_region_in_a_shard_has_its_chunks_there(begin: int, end: int) -> None:
    _, grid = plan_of((2, 0.1), (4, 0.0), (3, 0.2))
    for region, chunks in enumerate((range(2), range(2, 6), range(6, 9))):
        first, last = grid.part(begin, end, region)
        assert list(range(first, last)) == [c for c in range(begin, end) if c in chunks]
