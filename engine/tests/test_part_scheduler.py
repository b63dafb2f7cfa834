"""Scheduler, without an endpoint: what waits for each destination in, whose turn it is out."""

import pytest
from _parts import Scheduler, id_of
from hypothesis import given
from hypothesis import strategies as st

NO_OP, NOWHERE = Scheduler.NO_OP, Scheduler.NOWHERE


def trains(scheduler: Scheduler, count: int) -> list[int]:
    """The destinations of so many trains."""
    out = []
    for _ in range(count):
        out.append(scheduler.choose().to)
        scheduler.went(out[-1])
    return out


def lanes(scheduler: Scheduler, count: int, *, room: bool = True) -> list[int]:
    return [scheduler.next_lane(0, room) for _ in range(count)]


# ---------------------------------------------------------------------------- destinations


@pytest.mark.parametrize("peers", [4, 64])
def test_equal_backlogs_take_turns(peers: int) -> None:
    scheduler = Scheduler(peers)
    for to in range(peers):
        scheduler.set_destination(to, 10, 1)
    assert trains(scheduler, 2 * peers) == 2 * list(range(peers))
    scheduler.went(1)
    assert trains(scheduler, 2) == [2, 3]


@pytest.mark.parametrize("peers", [4, 64])
def test_the_largest_backlog_goes_first_and_so_all_end_together(peers: int) -> None:
    scheduler = Scheduler(peers)
    left = [5 + to % 3 for to in range(peers)]
    for to in range(peers):
        scheduler.set_destination(to, left[to], 1)
    while any(left):
        to = scheduler.choose().to
        assert left[to] == max(left)
        left[to] -= 1
        scheduler.set_destination(to, left[to], 1)
        scheduler.went(to)
    assert scheduler.choose().to == NOWHERE


def test_a_destination_after_a_probe_time_out_goes_first() -> None:
    scheduler = Scheduler(4)
    for to in range(4):
        scheduler.set_destination(to, 10 * (4 - to), 1)
    scheduler.set_destination(3, 1, 0, probes=2)  # without credit
    choice = scheduler.choose(open=False)  # and although the window is full
    assert (choice.to, choice.probe) == (3, True)


@pytest.mark.parametrize(
    ("open_window", "held", "to"),
    [
        (True, [], 0),
        (True, [True], 1),
        (True, [True, True], NOWHERE),
        (False, [], NOWHERE),
    ],
)
def test_window_and_own_pace_hold_a_destination_back(
    open_window: bool, held: list[bool], to: int
) -> None:
    scheduler = Scheduler(5)
    scheduler.set_destination(0, 20, 1)
    scheduler.set_destination(1, 10, 1)
    scheduler.set_destination(2, 30, 0)  # no credit
    scheduler.set_destination(3, 40, 1, closed=True)
    choice = scheduler.choose(open_window, held)
    assert (choice.to, choice.probe) == (to, False)
    assert choice.stalled == 1


DESTINATIONS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 1), st.booleans()),
    min_size=1,
    max_size=9,
)


@given(DESTINATIONS, st.integers(0, 8), st.booleans(), st.lists(st.booleans(), max_size=9))
def test_the_choice_is_that_of_a_search_by_the_rules(
    table: list[tuple[int, int, int, bool]], first: int, open_window: bool, held: list[bool]
) -> None:
    scheduler = Scheduler(len(table))
    for to, (backlog, credit, probes, closed) in enumerate(table):
        scheduler.set_destination(to, backlog, credit, probes, closed)
    scheduler.went((first - 1) % len(table))
    order = [(first + i) % len(table) for i in range(len(table))]
    wanting = [to for to in order if table[to][0] and not table[to][3]]
    probing = [to for to in wanting if table[to][2]]
    able = [to for to in wanting if table[to][1] and open_window and not (held + [False] * 9)[to]]
    choice = scheduler.choose(open_window, held)
    if probing:
        assert (choice.to, choice.probe) == (probing[0], True)
        return
    most = max((table[to][0] for to in able), default=0)
    assert choice.to == next((to for to in able if table[to][0] == most), NOWHERE)
    assert choice.stalled == sum(table[to][1] == 0 for to in wanting)


# ---------------------------------------------------------------------------- lanes and ops


def test_lanes_take_turns_train_by_train() -> None:
    scheduler = Scheduler(1)
    for lane in (0, 5, 4_095):
        scheduler.set_waiting(0, id_of(7, lane), 100)
    assert lanes(scheduler, 5) == [5, 4_095, 0, 5, 4_095]
    scheduler.set_waiting(0, id_of(7, 0), 0)
    assert lanes(scheduler, 3) == [5, 4_095, 5]


def test_each_probe_time_out_begins_with_another_lane() -> None:
    scheduler = Scheduler(1)
    for lane in (1, 2, 3):
        scheduler.set_waiting(0, id_of(7, lane), 100)
    first = []
    for _ in range(6):
        scheduler.timed_out(0)
        first.append(lanes(scheduler, 3)[0])  # as many trains as lanes: turns alone repeat
    assert first == [1, 2, 3, 1, 2, 3]


def test_chunks_that_a_peer_cannot_take_yet_delay_no_other_lane() -> None:
    scheduler = Scheduler(1)
    scheduler.set_waiting(0, id_of(0, 1), 0, early=50)
    scheduler.set_waiting(0, id_of(0, 2), 10)
    assert lanes(scheduler, 4, room=False) == [2] * 4
    assert scheduler.backlog(0, False) == 10
    assert lanes(scheduler, 4, room=True) == [1, 2, 1, 2]
    assert scheduler.backlog(0, True) == 60


def test_the_ops_of_a_lane_go_in_order() -> None:
    scheduler = Scheduler(1)
    for number in (9, 3, 5):
        scheduler.set_waiting(0, id_of(number, 1), 1)
    scheduler.set_waiting(0, id_of(4, 2), 1)
    found = [scheduler.next_op(0, id_of(number, 1)) for number in (0, 3, 4, 6, 10)]
    assert found == [id_of(3, 1), id_of(3, 1), id_of(5, 1), id_of(9, 1), NO_OP]


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 4),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=20,
    max_size=40,
)


@given(CHANGES, st.booleans())
def test_counts_lanes_and_ops_are_those_of_a_list_of_all_ops(
    changes: list[tuple[int, int, int, int, int]], room: bool
) -> None:
    scheduler = Scheduler(2)
    ops: list[dict[tuple[int, int], tuple[int, int]]] = [{}, {}]  # (lane, number): (ready, early)
    last = [0, 0]
    for to, number, lane, ready, early in changes:
        scheduler.set_waiting(to, id_of(number, lane), ready, early)
        ops[to][lane, number] = (ready, early)
        may_go = {key: r + (e if room else 0) for key, (r, e) in ops[to].items()}
        assert scheduler.backlog(to, room) == sum(may_go.values())
        for start in range(6):
            waits = [n for (a, n) in ops[to] if a == lane and n >= start and any(ops[to][a, n])]
            found = scheduler.next_op(to, id_of(start, lane))
            assert found == (id_of(min(waits), lane) if waits else NO_OP)
        waiting = {a for (a, _), count in may_go.items() if count}
        if not waiting:
            continue  # no train goes
        turns = [*range(last[to] + 1, 4), *range(last[to] + 1)]
        last[to] = next(each for each in turns if each in waiting)
        assert scheduler.next_lane(to, room) == last[to]
