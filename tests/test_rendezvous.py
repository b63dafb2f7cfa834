"""Rendezvous in a store, with threads for ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.transport import meeting as meetings
from gradwire.transport import store as job_store
from gradwire.transport.addresses import LocalAddress
from gradwire.transport.introductions import Introduction, agree, check_introductions, introduce
from gradwire.transport.meeting import Meeting, SupersededError
from gradwire.transport.store import identity_of, store_host
from threads import at_once


def meeting(
    store: Any, endpoint: int, *, workers: int = 3, servers: int = 0, timeout_s: float = 5.0
) -> Meeting:
    return Meeting(
        store, "t", endpoint=endpoint, workers=workers, servers=servers, timeout_s=timeout_s
    )


def introduction(endpoint: int, **fields: Any) -> Introduction:
    values: dict[str, Any] = {
        "protocol": 1,
        "addresses": (LocalAddress("127.0.0.1", "lo"),),
        "host": "h",
        "identity": "i",
        "configuration": {"route": "sharded"},
    }
    return Introduction(endpoint, **{**values, **fields})


def meet(
    fields: dict[int, dict[str, Any]] | None = None, workers: int = 3, servers: int = 0
) -> list[Any]:
    """All introduce themselves and check each other."""
    store = dist.HashStore()

    def join(rank: int) -> list[Introduction]:
        here = meeting(store, rank, workers=workers, servers=servers)
        everybody = introduce(here, introduction(rank, **(fields or {}).get(rank, {})))
        check_introductions(here, everybody)
        return everybody

    return at_once(workers + servers, join)


def test_all_see_the_same_introductions() -> None:
    results = meet({0: {"session": 99, "datagram": 1400}})
    assert results[0] == results[1] == results[2]
    assert [each.endpoint for each in results[0]] == [0, 1, 2]
    assert results[2][0].session == 99


def test_a_name_can_be_used_again() -> None:
    store = dist.HashStore()
    for text in ("first", "second"):
        results = at_once(2, lambda r, t=text: meeting(store, r, workers=2).exchange(t))
        assert results == [[text, text]] * 2


def test_missing_peers_are_named() -> None:
    store = dist.HashStore()
    joined = at_once(2, lambda r: meeting(store, r, workers=4, timeout_s=0.3).exchange("here"))
    for error in joined:
        assert isinstance(error, RendezvousError)
        assert error.ranks == (2, 3)
        assert "ranks 2, 3 did not join within 0.3 s" in str(error)
        assert "rendezvous_timeout" in str(error)


def test_a_missing_server_is_named() -> None:
    here = meeting(dist.HashStore(), 0, workers=1, servers=2, timeout_s=0.1)
    with pytest.raises(RendezvousError, match="servers 0, 1 did not join"):
        here.exchange("here")


def test_another_protocol_version_is_named_on_every_rank() -> None:
    for error in meet({2: {"protocol": 7}}):
        assert isinstance(error, RendezvousError)
        assert error.ranks == (2,)
        assert "rank 2 speaks gradwire protocol version 7, rank 0 speaks version 1" in str(error)


def test_a_server_of_another_protocol_version_is_named_on_every_rank() -> None:
    """Encodings, too, belong to the protocol: there is no server that knows only some of them."""
    for error in meet({3: {"protocol": 7}}, servers=1):
        assert isinstance(error, RendezvousError)
        assert error.ranks == (3,)
        assert "server 0 speaks gradwire protocol version 7, rank 0 speaks version 1" in str(error)
        assert "install the same gradwire everywhere" in str(error)


def test_an_introduction_of_a_later_version_can_be_read() -> None:
    for more in ('"smell": "lavender"', '"addresses": ["10.0.0.1"]', '"addresses": 7'):
        text = f'{{"endpoint": 1, "protocol": 9, {more}}}'
        assert Introduction.parse(text).protocol == 9


def test_another_configuration_is_named_with_both_values() -> None:
    for error in meet({1: {"configuration": {"route": "server"}}}):
        assert isinstance(error, RendezvousError)
        assert "rank 1 has route='server', rank 0 has route='sharded'" in str(error)


def test_policies_are_compared_field_by_field() -> None:
    store = dist.HashStore()
    errors = at_once(
        3,
        lambda r: agree(meeting(store, r), {"policy": "mlt", "mlt.p": 0.1 if r == 2 else 0.2}),
    )
    for error in errors:
        assert "rank 2 has mlt.p=0.1, rank 0 has mlt.p=0.2" in str(error)


def test_a_failure_told_is_raised_by_the_others_at_once() -> None:
    store = dist.HashStore()

    def join(rank: int) -> object:
        here = meeting(store, rank)
        if rank == 1:
            return here.tell_failure(ConfigError("cannot open UDP 127.0.0.1 port=7"))
        return here.exchange("1")

    results = at_once(3, join)
    for rank in (0, 2):
        assert "rank 1 failed: cannot open UDP 127.0.0.1 port=7" in str(results[rank])


def test_a_failure_told_is_raised_though_others_are_still_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where somebody never comes: the cause is what is told."""
    monkeypatch.setattr(meetings, "LINGER_S", 0.3)  # rank 0 cannot know that rank 2 never comes
    store = dist.HashStore()

    def join(rank: int) -> object:
        here = meeting(store, rank)
        if rank == 1:
            return here.tell_failure(ConfigError("no such table"))
        return here.exchange("here")

    error = at_once(2, join)[0]
    assert isinstance(error, RendezvousError)
    assert error.ranks == (1,)
    assert "no such table" in str(error)


@pytest.mark.parametrize("first", [0, 1])
def test_a_failure_is_told_to_those_who_come_a_little_later(first: int) -> None:
    """The process that fails may host the store: it stays until the other has read why."""
    store = dist.HashStore()

    def join(rank: int) -> object:
        if rank == first:
            meeting(store, rank, workers=2).tell_failure(ConfigError("a wrong option"))
            return "gone"
        time.sleep(0.5)
        return meeting(store, rank, workers=2).exchange("here")

    outcomes = at_once(2, join)
    assert outcomes[first] == "gone"
    assert isinstance(outcomes[1 - first], RendezvousError)
    assert outcomes[1 - first].ranks == (first,)
    assert "a wrong option" in str(outcomes[1 - first])


def test_a_failure_of_another_is_told_to_those_who_come_a_little_later() -> None:
    """Rank 1 fails, rank 0 hears of it, and only then rank 2 comes, whom rank 0 alone answers."""
    store = dist.HashStore()
    came = threading.Event()

    def join(rank: int) -> object:
        here = meeting(store, rank, timeout_s=60.0)
        if rank == 1:
            here.tell_failure(ConfigError("a wrong option"))
            came.set()
            return "gone"
        if rank == 2:
            assert came.wait(10)
            time.sleep(0.5)
        begun = time.monotonic()
        with pytest.raises(RendezvousError, match="a wrong option") as raised:
            here.exchange("here")
        return raised.value.ranks, time.monotonic() - begun < 5.0

    assert at_once(3, join) == [((1,), True), "gone", ((1,), True)]


def test_endpoint_0_does_not_wait_for_those_who_have_not_come_in_time() -> None:
    store, begun = dist.HashStore(), time.monotonic()
    joined = at_once(2, lambda r: meeting(store, r, timeout_s=0.2).exchange("here"))
    assert [error.ranks for error in joined] == [(2,), (2,)]
    assert time.monotonic() - begun < meetings.LINGER_S


def test_endpoint_0_stays_until_a_failure_of_a_later_exchange_has_been_read() -> None:
    store = dist.HashStore()
    read = threading.Event()

    def join(rank: int) -> object:
        here = meeting(store, rank, workers=2)
        here.exchange("first")
        if rank == 0:
            here.tell_failure(ConfigError("a port in use"))
            return read.is_set()
        time.sleep(0.3)
        read.set()
        with pytest.raises(RendezvousError) as raised:
            here.exchange("second")
        return raised.value.ranks

    assert at_once(2, join) == [True, (0,)]


def test_a_failure_among_some_is_told_to_all_before_anybody_lingers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 2 are to meet, while ranks 1 and 3 wait for what they agree on; 2 is gone."""
    monkeypatch.setattr(meetings, "LINGER_S", 3.0)
    store = dist.HashStore()
    heard: set[int] = set()

    def join(rank: int) -> tuple[object, ...]:
        around = meeting(store, rank, workers=4, timeout_s=60.0)
        around.exchange("first")
        some = Meeting(
            store,
            "some",
            endpoint=rank // 2,
            workers=2,
            servers=0,
            timeout_s=2.0,
            ranks=(0, 2),
            within=around,
        )
        if rank % 2 == 0:
            some.exchange("first")
        if rank == 2:
            return ()
        with pytest.raises(RendezvousError) as raised:
            (some if rank == 0 else around).exchange("second")
        heard.add(rank)
        before, began = sorted(heard), time.monotonic()
        around.tell_failure(raised.value)
        return raised.value.ranks, rank or (before, time.monotonic() - began < 1.5)

    told = at_once(4, join)
    assert told == [((2,), ([0, 1, 3], True)), ((2,), 1), (), ((2,), 3)]


def test_who_comes_when_the_others_have_given_up_hears_why() -> None:
    store = dist.HashStore()
    with pytest.raises(RendezvousError) as early:
        meeting(store, 0, workers=2, timeout_s=0.1).exchange("here")
    assert early.value.ranks == (1,)
    assert "(1 of 2 were here when rank 0 gave up)" in str(early.value)
    with pytest.raises(RendezvousError) as late:
        meeting(store, 1, workers=2, timeout_s=0.2).exchange("here, too")
    assert late.value.ranks == (0,)
    assert str(early.value) in str(late.value)
    again = at_once(2, lambda r: meeting(store, r, workers=2).exchange(str(r)))
    assert again == [["0", "1"]] * 2


def test_all_or_nobody_meet_however_close_to_the_deadline() -> None:
    """The others' texts may all be there when one of them gives up."""
    for attempt in range(30):
        store = dist.HashStore()

        def join(rank: int, store: Any = store, attempt: int = attempt) -> list[str]:
            patience = 0.01 if rank == attempt % 3 else 0.5
            here = meeting(store, rank, workers=3, timeout_s=patience)
            time.sleep(0.0 if rank == attempt % 3 else 0.0004 * attempt)
            return here.exchange(str(rank))

        outcomes = at_once(3, join)
        met = [outcome == ["0", "1", "2"] for outcome in outcomes]
        assert all(met) or not any(met), (attempt, outcomes)


def test_who_gives_up_first_names_all_that_are_absent() -> None:
    """Endpoint 0 knows who was there, and answers the one that gave up."""
    store = dist.HashStore()
    patience = {0: 5.0, 2: 0.3}
    errors = {
        rank: error
        for rank, error in enumerate(
            at_once(
                3,
                lambda r: (
                    meeting(store, r, workers=4, timeout_s=patience[r]).exchange("here")
                    if r in patience
                    else None
                ),
            )
        )
        if error is not None
    }
    for rank in (0, 2):
        assert isinstance(errors[rank], RendezvousError)
        assert errors[rank].ranks == (1, 3)
        assert "gave up" in str(errors[rank])
    assert "rank 2 gave up" in str(errors[0])


# ---------------------------------------------------------------------------- lives of a job


class Died(Exception):
    """A process ends at this point."""


class Mortal:
    """A store as a process uses it that ends before its operation number `last`."""

    def __init__(self, store: Any, last: int) -> None:
        self._store = store
        self._left = last

    def __getattr__(self, name: str) -> Any:
        def operate(*arguments: Any) -> Any:
            if self._left == 0:
                raise Died
            self._left -= 1
            return getattr(self._store, name)(*arguments)

        return operate


def live(store: Any, texts: list[str], deaths: dict[int, int], timeout_s: float) -> list[Any]:
    """One life of a job: each rank exchanges twice and leaves, or dies after some operations."""

    def join(rank: int) -> list[list[str]]:
        own = Mortal(store, deaths[rank]) if rank in deaths else store
        here = meeting(own, rank, workers=len(texts), timeout_s=timeout_s)
        first = here.exchange(texts[rank])
        second = here.exchange(texts[rank] * 2)
        here.close()
        return [first, second]

    return at_once(len(texts), join)


@pytest.mark.parametrize("mortal", [0, 1])
def test_a_new_life_meets_whatever_died_before(
    mortal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever rank dies, and wherever: before it came, in the middle, or as it leaves."""
    monkeypatch.setattr(meetings, "LINGER_S", 0.05)
    died = 0
    for last in range(24):
        store = dist.HashStore()
        for life in range(2):
            earlier = live(store, ["old", f"{life}"], {mortal: last}, 0.05)
            died += isinstance(earlier[mortal], Died)
        assert (
            live(store, ["new", "young"], {}, 10.0)
            == [[["new", "young"], ["newnew", "youngyoung"]]] * 2
        ), last
    assert died > 20


def test_a_rank_that_never_came_in_an_earlier_life_is_met_in_the_next() -> None:
    """As where a script fails between init_process_group and attach on one rank."""
    for absent in (0, 1):
        store = dist.HashStore()
        with pytest.raises(RendezvousError) as raised:
            meeting(store, 1 - absent, workers=2, timeout_s=0.1).exchange("old")
        assert raised.value.ranks == (absent,)
        for _ in range(3):  # lives in which all is well
            assert live(store, ["a", "b"], {}, 5.0) == [[["a", "b"], ["aa", "bb"]]] * 2


def test_a_life_of_another_size_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job goes on with more or fewer workers in the same store."""
    monkeypatch.setattr(meetings, "LINGER_S", 0.05)
    store = dist.HashStore()
    for workers in (3, 2, 4):
        live(store, ["old"] * workers, {0: 6}, 0.05)
    new = at_once(2, lambda r: meeting(store, r, workers=2).exchange("new"))
    assert new == [["new", "new"]] * 2


def test_who_counts_the_others_otherwise_is_told_so() -> None:
    for counts in ((2, 3), (3, 2)):
        store = dist.HashStore()

        def join(rank: int, store: Any = store, counts: Any = counts) -> list[str]:
            here = meeting(store, rank, workers=counts[rank], timeout_s=2.0)
            return here.exchange(str(rank))

        errors = at_once(2, join)
        for error in errors:
            assert isinstance(error, RendezvousError), errors
            assert f"rank 0 counts {counts[0]} workers and 0 servers" in str(error)
            assert f"rank 1 counts {counts[1]} and 0" in str(error)


def test_a_server_that_counts_more_workers_tells_all_so() -> None:
    store = dist.HashStore()

    def join(place: int) -> list[str]:
        endpoint, workers = ((0, 2), (1, 2), (3, 3))[place]
        here = meeting(store, endpoint, workers=workers, servers=1, timeout_s=3.0)
        return here.exchange(str(endpoint))

    errors = at_once(3, join)
    for error in errors:
        assert isinstance(error, RendezvousError), errors
        assert "rank 0 counts 2 workers and 1 servers, server 0 counts 3 and 1" in str(error)


def test_a_meeting_whose_first_endpoint_begins_anew_is_over() -> None:
    store = dist.HashStore()

    def join(rank: int) -> object:
        here = meeting(store, rank, workers=2)
        here.exchange("first")
        if rank == 0:  # ends here, and is started again
            with pytest.raises(RendezvousError):
                meeting(store, 0, workers=2, timeout_s=0.3).exchange("again")
            return None
        return here.exchange("second")

    error = at_once(2, join)[1]
    assert isinstance(error, SupersededError)
    assert error.ranks == (0,)


class Held:
    """A store as a rank uses it that is held up where it looks for a newer meeting."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.armed = False
        self.reached, self.released = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        if self.armed and key.endswith("/newest"):
            self.reached.set()
            self.released.wait()
        return self._store.compare_set(key, expected, desired)


def meet_twice(held: Held, store: Any, rank: int) -> list[list[str]]:
    """Rank 0 goes through two exchanges and leaves, while rank 1 is held up in the second one."""
    here = meeting(store, rank, workers=2)
    texts = [here.exchange("first")]
    if rank:
        held.armed = True
    else:
        held.reached.wait()
    texts.append(here.exchange("second"))
    here.close()
    return texts


def test_the_next_meeting_may_begin_before_all_have_read_the_last_outcome() -> None:
    """As when two modules are attached one after the other, and rank 1 is slow in between."""
    store = dist.HashStore()
    held = Held(store)

    def join(rank: int) -> list[list[str]]:
        own: Any = held if rank else store
        texts = meet_twice(held, own, rank)
        if not rank:
            threading.Timer(0.1, held.released.set).start()
        texts.append(meeting(own, rank, workers=2).exchange("third"))
        return texts

    assert at_once(2, join) == [[["first"] * 2, ["second"] * 2, ["third"] * 2]] * 2


class Releasing:
    """A store as endpoint 0 uses it that ends the hold-up of another one as its owner leaves."""

    def __init__(self, store: Any, release: Callable[[], None]) -> None:
        self._store = store
        self._release = release

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        if key.endswith("/left"):
            self._release()
        number: int = self._store.add(key, amount)
        return number


def test_the_next_meeting_may_fail_before_all_have_read_the_last_outcome() -> None:
    """As when rank 0 has no table of the module that it attaches next, and rank 1 is slow."""
    store = dist.HashStore()
    held = Held(store)

    def join(rank: int) -> list[list[str]]:
        own: Any = held if rank else store
        texts = meet_twice(held, own, rank)
        if rank:
            with pytest.raises(RendezvousError, match="no such table"):
                meeting(own, rank, workers=2).exchange("third")
        else:
            failing = meeting(Releasing(store, held.released.set), rank, workers=2)
            failing.tell_failure(ConfigError("no such table"))
        return texts

    assert at_once(2, join) == [[["first"] * 2, ["second"] * 2]] * 2


def test_a_failure_is_told_once() -> None:
    """As when all but rank 0 refuse an attachment, and all attach again at once."""
    store = dist.HashStore()

    def join(rank: int) -> list[str]:
        if rank:
            meeting(store, rank, workers=2).tell_failure(ConfigError("no such table"))
        else:
            with pytest.raises(RendezvousError, match="no such table"):
                meeting(store, rank, workers=2).exchange("first")
        return meeting(store, rank, workers=2).exchange("again")

    assert at_once(2, join) == [["again"] * 2] * 2


def test_those_who_close_leave_one_key() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = store.num_keys() + 1
    for _ in range(3):
        outcomes = live(dist.PrefixStore("p", store), ["a", "b", "c"], {}, 5.0)
        assert outcomes[0] == [["a", "b", "c"], ["aa", "bb", "cc"]]
        assert store.num_keys() == before


class SilentStore:
    """As a TCPStore to whose host the network is gone: operations have no end."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.end.wait(60.0)
        return b""


def test_a_store_that_does_not_answer_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "LEAST_S", 0.2)
    store = SilentStore()
    here = meeting(store, 1, timeout_s=0.1)
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        here.exchange("x")
    here.tell_failure(caught.value)  # waits for nothing more
    here.close()
    store.end.set()
    assert "no answer within 0.2 s" in str(caught.value)
    assert time.monotonic() - began < 30.0


def test_the_identity_of_a_store_that_does_not_answer_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_store, "LEAST_S", 0.2)
    store = SilentStore()
    with pytest.raises(RendezvousError, match=r"no answer within 0\.2 s"):
        identity_of(store, 0.1)
    store.end.set()


class FreezingStore:
    """A store that is silent once an endpoint leaves, as when the network to it goes."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.end = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def add(self, key: str, amount: int) -> int:
        if not key.endswith("/left"):
            return self.store.add(key, amount)
        self.end.wait(60.0)
        return 0


def test_who_leaves_does_not_wait_for_a_store_that_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_store, "LEAST_S", 0.2)
    store = FreezingStore()

    def join(rank: int) -> float:
        here = meeting(store, rank, workers=2, timeout_s=60.0)
        here.exchange("here")
        began = time.monotonic()
        here.close()
        return time.monotonic() - began

    assert max(at_once(2, join)) < 30.0
    store.end.set()


class GoneStore:
    """As a TCPStore whose host has died."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone_is_named_and_hides_no_cause() -> None:
    here = meeting(GoneStore(), 0)
    here.tell_failure(ConfigError("something else"))
    with pytest.raises(RendezvousError, match=r"the job's store does not answer: Broken pipe"):
        here.exchange("x")


def test_a_failure_may_be_looked_for_without_waiting() -> None:
    store = dist.HashStore()

    def join(rank: int) -> object:
        here = meeting(store, rank, workers=2)
        here.exchange("first")
        if rank == 1:
            return here.tell_failure(ConfigError("no route"))
        here.check_failures()  # there is none yet, or there is
        while True:
            here.check_failures()

    error = at_once(2, join)[0]
    assert isinstance(error, RendezvousError)
    assert error.ranks == (1,)


def test_those_that_wait_are_counted() -> None:
    store = dist.HashStore()
    watcher = meeting(store, 2, workers=2, servers=1)
    assert watcher.workers_here() == 0
    come = threading.Event()

    def join(endpoint: int) -> object:
        here = meeting(store, endpoint, workers=2, servers=1)
        if endpoint == 1:
            come.wait(5)
        if endpoint == 2:
            while watcher.workers_here() != 1:  # worker 0, which opens the meeting
                time.sleep(0.01)
            come.set()
        here.exchange("here")
        waiting = watcher.workers_here()
        here.exchange("and gone")
        here.close()
        return waiting

    assert at_once(3, join) == [0, 0, 0]  # nobody waits any more
    assert store.num_keys() == 1  # of the newest meeting's id


def test_a_long_wait_is_logged_with_who_is_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "FIRST_WARNING_S", 0.05)
    monkeypatch.setattr(meetings, "NEXT_WARNING_S", 0.1)
    with pytest.raises(RendezvousError):
        meeting(dist.HashStore(), 0, workers=3, timeout_s=0.4).exchange("here")
    messages = [r.getMessage() for r in caplog.records if r.name == "gradwire"]
    assert len(messages) > 1
    assert all("rank 0 waits for ranks 1, 2" in message for message in messages)


def test_a_server_waits_for_the_workers_that_are_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "FIRST_WARNING_S", 0.1)
    store = dist.HashStore()
    present = (0, 2)  # of workers 0 and 1, and server 0
    here = [meeting(store, each, workers=2, servers=1, timeout_s=0.5) for each in present]
    at_once(2, lambda place: here[place].exchange("here"))
    messages = [r.getMessage() for r in caplog.records if r.name == "gradwire"]
    assert any("server 0 waits for rank 1" in message for message in messages)


def test_the_stores_host_is_found_under_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore()))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert store_host(store) is None
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert store_host(store) == "10.0.0.1"
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store_host(dist.PrefixStore("a", tcp)) == "127.0.0.1"
