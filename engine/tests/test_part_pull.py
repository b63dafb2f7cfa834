"""Results on their way back, without an endpoint."""

import math
from typing import Any

import numpy as np
import pytest
from _parts import (
    Again,
    Aggregator,
    CommittedPull,
    Finished,
    LossyPull,
    Memory,
    PassSender,
    PullLedger,
    PullReceiver,
    StreamPull,
    make_pull_sender,
    pull_losable,
)
from hypothesis import given
from hypothesis import strategies as st

from part_kit import CHUNK, plan_of


class Back:
    """The results of one aggregator for one worker."""

    def __init__(self, *regions: tuple[int, float], **options: Any) -> None:
        plan, grid = plan_of(*regions, **options)
        self.finished = Finished()
        self.pull = make_pull_sender(plan, grid, 0, self.finished)

    def finish(self, *chunks: int) -> None:
        for chunk in chunks:
            self.finished.append(chunk)

    def send(self, most: int = 1_000) -> list[int]:
        """The results of the next sends; a minus marks one that was sent before."""
        out = []
        while len(out) < most:
            sent = self.pull.next()
            if sent is None:
                break
            out.append(-sent[0] if sent[1] else sent[0])
        return out


# ---------------------------------------------------------------------------- sender

LOSSY_PULL = {"pull": "lossy", "pull_bound": 0.5}


@pytest.mark.parametrize(
    ("options", "strategy", "sent"),
    [
        ({}, StreamPull, [1]),
        ({"control": "probe"}, StreamPull, [1]),
        ({"pull": "committed", "pull_bound": 0.5}, StreamPull, [1]),
        ({"pull": "none"}, StreamPull, []),
        (LOSSY_PULL, LossyPull, [1]),
        ({**LOSSY_PULL, "control": "probe"}, PassSender, [1]),
    ],
)
def test_a_plan_chooses_the_strategy_of_its_pulls(
    options: dict[str, Any], strategy: type, sent: list[int]
) -> None:
    back = Back((6, 0.0), **options)
    back.finish(1)
    assert type(back.pull) is strategy
    assert back.send() == sent
    assert back.pull.settled() == (not sent)


def test_results_go_in_the_order_in_which_they_become_final() -> None:
    back = Back((6, 0.0))
    assert back.send() == []
    back.finish(3, 1)
    assert (back.pull.backlog(), back.pull.peek()) == (2, 3)
    assert back.send() == [3, 1]
    back.finish(5)
    assert back.send() == [5]


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, [-1, 4, 5]),  # the worker needs each result
        ({"pull": "lossy", "pull_bound": 0.5}, [4, 5, -1]),  # it may never need the lost one
    ],
)
def test_a_lost_result_goes_first_where_it_is_needed_for_sure(
    options: dict[str, Any], order: list[int]
) -> None:
    back = Back((6, 0.0), **options)
    back.finish(1, 2, 3, 4, 5)
    assert back.send(3) == [1, 2, 3]
    back.pull.lost(1, Again.lost)
    assert back.pull.peek() == abs(order[0])
    assert back.send() == order


def test_a_result_that_was_sent_twice_is_in_flight_until_it_is_acknowledged() -> None:
    back = Back((3, 0.0))
    back.finish(0, 1, 2)
    back.send()
    assert back.pull.in_flight(1)
    back.pull.lost(1, Again.lost)
    assert not back.pull.in_flight(1)
    assert back.send() == [-1]
    back.pull.acked(1)
    back.pull.acked(1)
    back.pull.lost(1, Again.lost)
    assert back.send() == []
    assert not back.pull.settled()
    back.pull.acked(0)
    back.pull.acked(2)
    assert back.pull.settled()


def test_a_result_that_the_worker_needs_no_more_is_not_sent() -> None:
    back = Back((4, 0.0))
    back.finish(0, 1, 2, 3)
    back.send(2)
    back.pull.lost(0, Again.lost)
    back.pull.acked(1)
    for chunk in (0, 1, 2):
        back.pull.forget(chunk)
    assert back.send() == [3]
    assert not back.pull.settled()
    back.pull.acked(3)
    assert back.pull.settled()


def test_a_lossy_pull_ends_once_the_worker_has_enough() -> None:
    back = Back((2, 0.5), (2, 0.5), spend="lost", pull="lossy", pull_bound=0.5)
    back.finish(0, 1, 2, 3)
    assert back.send(3) == [0, 1, 2]
    for chunk in (0, 1, 2):
        back.pull.acked(chunk)
    assert not back.pull.settled()
    back.pull.finish()
    assert back.pull.settled()
    assert back.send() == []


def test_a_lossy_pull_in_passes_takes_losses_from_the_bitmap_alone() -> None:
    back = Back((3, 0.0), control="probe", pull="lossy", pull_bound=0.5)
    back.finish(2, 0)
    assert back.send() == [2, 0]
    back.pull.lost(2, Again.lost)
    assert back.send() == []
    assert not back.pull.take_probe()  # more results follow
    back.finish(1)
    assert back.pull.backlog() == 1
    back.pull.seal()
    assert back.send() == [1]
    assert back.pull.take_probe()


EVENTS = st.lists(
    st.tuples(st.sampled_from(["finish", "send", "acked", "lost", "forget"]), st.integers(0, 9)),
    min_size=30,
    max_size=80,
)


@given(EVENTS, st.booleans())
def test_results_are_sent_until_they_are_acknowledged_or_forgotten(
    events: list[tuple[str, int]], lossy: bool
) -> None:
    back = Back((10, 0.0), **({"pull": "lossy", "pull_bound": 0.5} if lossy else {}))
    finished: list[int] = []
    waiting: set[int] = set()
    flight: set[int] = set()
    for what, chunk in events:
        if what == "finish" and chunk not in finished:
            finished.append(chunk)
            back.finish(chunk)
            waiting.add(chunk)
        elif what == "send":
            peeked = back.pull.peek()
            sent = [abs(number) for number in back.send(1)]
            assert sent == ([] if peeked is None else [peeked])
            assert bool(sent) == bool(waiting)
            assert set(sent) <= waiting
            waiting -= set(sent)
            flight |= set(sent)
        elif what == "lost" and chunk in flight:
            back.pull.lost(chunk, Again.lost)
            flight.discard(chunk)
            waiting.add(chunk)
        elif what == "acked" and chunk in flight:
            back.pull.acked(chunk)
            flight.discard(chunk)
        elif what == "forget" and chunk in finished:
            back.pull.forget(chunk)
            flight.discard(chunk)
            waiting.discard(chunk)
        assert {each for each in range(10) if back.pull.in_flight(each)} == flight
        assert back.pull.backlog() >= len(waiting)


# ---------------------------------------------------------------------------- receiver


def receiver_of(*regions: tuple[int, float], own: bool = False, **options: Any) -> PullReceiver:
    plan, grid = plan_of(*regions, **options)
    return PullReceiver(plan, grid, 0, own)


def test_all_of_a_shard_is_missing_until_it_arrives() -> None:
    pull = receiver_of((4, 0.0))
    assert [pull.insert(chunk) for chunk in (1, 3, 1)] == [True, True, False]
    assert (pull.missing(), pull.has(1), pull.has(0)) == (2, True, False)
    pull.insert(0)
    assert not pull.complete()
    pull.insert(2)
    assert pull.complete()  # an exact op has no CLOSE


def test_close_says_what_counted_and_which_results_come() -> None:
    pull = receiver_of((4, 0.5), spend="lost")
    pull.insert(1)
    pull.close(4, [0, 1], [0, 1, 2])
    assert [pull.counted(chunk) for chunk in range(4)] == [True, True, False, False]
    assert [pull.wanted(chunk) for chunk in range(4)] == [True, True, True, False]
    assert pull.missing() == 2
    pull.insert(3)  # not wanted
    assert pull.missing() == 2
    pull.insert(0)
    assert pull.missing() == 1


def test_a_lossy_push_is_complete_here_only_with_its_close() -> None:
    pull = receiver_of((2, 0.5), spend="lost")
    pull.insert(0)
    pull.insert(1)
    assert not pull.complete()
    pull.close(2, [0, 1], [0, 1])
    assert pull.complete()


@pytest.mark.parametrize("first", ["close", "commit"])
def test_commit_decides_what_is_wanted_whichever_comes_first(first: str) -> None:
    pull = receiver_of((4, 0.0), pull="committed", pull_bound=0.5)
    for chunk in (1, 2):
        pull.insert(chunk)
    if first == "close":
        pull.close(4, [0], [0, 1, 2, 3])
        assert pull.missing() == 2
    pull.commit(4, [1, 2])
    assert (pull.missing(), pull.complete()) == (0, first == "close")
    pull.close(4, [0], [0, 1, 2, 3])
    assert (pull.missing(), pull.complete()) == (0, True)
    assert [pull.counted(chunk) for chunk in (0, 1)] == [True, False]


@pytest.mark.parametrize("own", [False, True])
def test_without_a_pull_only_the_own_results_are_awaited(own: bool) -> None:
    pull = receiver_of((2, 0.0), pull="none", own=own)
    assert (pull.takes_results(), pull.missing()) == (own, 2 if own else 0)
    pull.close(2, [0, 1], [0, 1])
    assert pull.complete() != own
    if own:
        pull.insert(0)
        pull.insert(1)
        assert pull.complete()


@pytest.mark.parametrize("own", [False, True])
def test_of_a_lossy_pull_a_worker_needs_enough_and_of_its_own_results_all(own: bool) -> None:
    pull = receiver_of((4, 0.5), spend="lost", own=own, **LOSSY_PULL)
    pull.insert(0)
    pull.close(4, [0], [0, 1, 2, 3], [2])
    pull.insert(1)
    assert not pull.complete()
    pull.insert(2)
    assert pull.complete() != own
    pull.insert(3)
    assert pull.complete()


# ---------------------------------------------------------------------------- ledger (pull lossy)

LOSSY = {"spend": "lost", "pull": "lossy", "pull_bound": 0.3}


def ledger_of(*regions: tuple[int, float], **options: Any) -> PullLedger:
    plan, grid = plan_of(*regions, **{**LOSSY, **options})
    return PullLedger(plan, grid, 0)


def test_a_region_has_enough_with_all_but_its_bound_of_the_results() -> None:
    ledger = ledger_of((10, 0.5))
    for chunk in range(6):
        ledger.arrived(chunk)
    ledger.close(10, list(range(10)), [])
    assert (ledger.enough(), ledger.missing()) == (False, [6, 7, 8, 9])
    ledger.arrived(9)
    ledger.arrived(9)
    assert ledger.enough()
    assert ledger.missing() == []


def test_nothing_is_enough_before_close() -> None:
    ledger = ledger_of((4, 0.5))
    for chunk in range(4):
        ledger.arrived(chunk)
    assert not ledger.enough()
    ledger.close(4, [0, 1, 2, 3], [])
    assert ledger.enough()


def test_the_bound_is_of_the_results_and_not_of_the_region() -> None:
    ledger = ledger_of((10, 0.5))
    ledger.close(10, [0, 1, 2, 3], [])  # 1.2 chunks of four may be missing
    for chunk, enough in [(0, False), (1, False), (2, True)]:
        ledger.arrived(chunk)
        assert ledger.enough() == enough


def test_a_critical_result_must_arrive() -> None:
    ledger = ledger_of((10, 0.5))
    ledger.close(10, list(range(10)), [9])
    for chunk in range(9):
        ledger.arrived(chunk)
    assert (ledger.enough(), ledger.missing()) == (False, [9])
    ledger.arrived(9)
    assert ledger.enough()


def test_regions_have_enough_one_by_one_and_one_without_results_at_once() -> None:
    ledger = ledger_of((2, 0.5), (2, 0.5), (2, 0.0))
    ledger.close(6, [0, 1, 4, 5], [])
    ledger.arrived(4)
    assert ledger.missing() == [0, 1, 5]
    ledger.arrived(0)
    ledger.arrived(1)
    assert (ledger.enough(), ledger.missing()) == (False, [5])
    ledger.arrived(5)  # bound 0 is critical on the way back too
    assert (ledger.enough(), ledger.missing()) == (True, [])


@pytest.mark.parametrize(
    ("bound", "spend", "losable"),
    [(0.5, "lost", 3 * CHUNK), (0.0, "lost", 0), (0.0, "nothing", 3 * CHUNK)],
)
def test_a_worker_may_go_without_the_bound_of_the_pull(
    bound: float, spend: str, losable: int
) -> None:
    # A second region keeps the plan lossy where the first has bound 0.
    plan, _ = plan_of((10, bound), (10, 0.5), **{**LOSSY, "spend": spend})
    assert pull_losable(plan, 0, 10 * CHUNK) == losable


# ---------------------------------------------------------------------------- committed pull

WORKERS = 3


class Committed:
    """A committed pull of one shard, whose chunks hold the values that are asked for."""

    def __init__(
        self, *regions: tuple[int, float], opened: int = WORKERS, bound: float = 0.5, **options: Any
    ) -> None:
        plan, grid = plan_of(*regions, pull="committed", pull_bound=bound, **options)
        self.sum = Aggregator(plan, grid, 0, WORKERS, Memory(1 << 30))
        for worker in range(opened):
            self.sum.open(worker, [1] if worker == 1 else [], 0)
        self.pull = CommittedPull(plan, grid, 0, self.sum)

    def finish(self, *chunks: int, value: float = 1.0) -> None:
        """Each worker's part of these chunks arrives."""
        payload = np.full(CHUNK, value, np.float32).tobytes()
        for chunk in chunks:
            for worker in range(WORKERS):
                self.sum.add(worker, chunk, payload, False, 0)


def test_lost_results_are_left_out_for_all_while_the_bound_has_room() -> None:
    committed = Committed((6, 0.0), bound=0.4)
    committed.finish(0, 1, 2, 3, 4, 5)
    for chunk, left_out in [
        (0, True),
        (0, True),  # it takes room once
        (1, False),  # critical for one worker
        (4, True),
        (5, False),  # 2.4 chunks of six may be withheld
    ]:
        assert committed.pull.lost(chunk) == left_out, chunk
    assert [chunk for chunk in range(6) if committed.pull.withheld(chunk)] == [0, 4]


@pytest.mark.parametrize(
    ("bounds", "spend", "left_out"),
    [
        ((0.5, 0.5), "lost", [True, True, False]),
        ((0.0, 0.5), "lost", [False, True, False]),  # bound 0 is critical on the way back too
        ((0.0, 0.0), "lost", [True, True, False]),  # an exact push has no critical regions
    ],
)
def test_each_region_has_room_of_its_own(
    bounds: tuple[float, float], spend: str, left_out: list[bool]
) -> None:
    committed = Committed(*((2, bound) for bound in bounds), spend=spend)
    committed.finish(0, 1, 2, 3)
    assert [committed.pull.lost(chunk) for chunk in (0, 2, 3)] == left_out


def test_nothing_is_left_out_before_all_workers_have_said_what_is_critical() -> None:
    committed = Committed((4, 0.0), opened=2)
    committed.finish(0)
    assert not committed.pull.lost(0)
    committed.sum.open(2, [], 0)
    assert committed.pull.lost(0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_result_that_is_not_finite_is_not_left_out(value: float) -> None:
    committed = Committed((4, 0.0))
    committed.finish(0, value=value)
    assert not committed.pull.lost(0)


@pytest.mark.parametrize("lost", [[], [3, 0]])
def test_a_commit_lists_once_what_is_not_withheld_of_a_closed_sum(lost: list[int]) -> None:
    committed = Committed((4, 0.0))
    committed.finish(3, 0, 2)
    assert [committed.pull.lost(chunk) for chunk in lost] == [True] * len(lost)
    assert (committed.pull.settled(), committed.pull.over()) == (None, False)  # more results follow
    committed.finish(1)
    committed.pull.closed()
    assert not committed.pull.over()
    assert committed.pull.settled() == sorted({0, 1, 2, 3} - set(lost))
    assert committed.pull.over()
    assert committed.pull.settled() is None
    assert committed.pull.lost(2) is False  # COMMIT says that all apply it


def test_the_last_results_are_those_at_the_end_of_the_shard() -> None:
    back = Back((10, 0.0))
    back.finish(*range(9))
    last = []
    for _ in range(9):
        assert back.send(1)
        last.append((back.pull.in_last(0.3), back.pull.in_last(0)))
    assert last == [(False, False)] * 6 + [(True, False)] * 3
