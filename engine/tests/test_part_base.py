"""TokenBucket and Agenda, without an endpoint."""

from _parts import NEVER, Agenda, TokenBucket
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
