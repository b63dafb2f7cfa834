"""Rendezvous in a store, with threads for ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gradwire import rendezvous
from gradwire.addresses import LocalAddress
from gradwire.errors import RendezvousError
from gradwire.rendezvous import Introduction, Meeting


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Calls call(0…count-1) at once; a result that is an exception is returned."""
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = call(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


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
        everybody = here.introduce(introduction(rank, **(fields or {}).get(rank, {})))
        rendezvous.check_introductions(here, everybody)
        return everybody

    return together(workers + servers, join)


def test_all_see_the_same_introductions() -> None:
    results = meet({0: {"session": 99, "datagram": 1400}})
    assert results[0] == results[1] == results[2]
    assert [each.endpoint for each in results[0]] == [0, 1, 2]
    assert results[2][0].session == 99


def test_a_name_can_be_used_again() -> None:
    store = dist.HashStore()
    for text in ("first", "second"):
        results = together(2, lambda r, t=text: meeting(store, r, workers=2).exchange("x", t))
        assert results == [[text, text]] * 2


def test_missing_peers_are_named() -> None:
    store = dist.HashStore()
    joined = together(
        2, lambda r: meeting(store, r, workers=4, timeout_s=0.3).exchange("x", "here")
    )
    for error in joined:
        assert isinstance(error, RendezvousError)
        assert error.ranks == (2, 3)
        assert "ranks 2, 3 did not join within 0.3 s" in str(error)
        assert "rendezvous_timeout" in str(error)


def test_a_missing_server_is_named() -> None:
    here = meeting(dist.HashStore(), 0, workers=1, servers=2, timeout_s=0.1)
    with pytest.raises(RendezvousError, match="servers 0, 1 did not join"):
        here.exchange("x", "here")


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
    text = '{"endpoint": 1, "protocol": 9, "smell": "lavender"}'
    assert Introduction.parse(text).protocol == 9


def test_another_configuration_is_named_with_both_values() -> None:
    for error in meet({1: {"configuration": {"route": "server"}}}):
        assert isinstance(error, RendezvousError)
        assert "rank 1 has route='server', rank 0 has route='sharded'" in str(error)


def test_policies_are_compared_field_by_field() -> None:
    store = dist.HashStore()
    errors = together(
        3,
        lambda r: rendezvous.agree(
            meeting(store, r), {"policy": "mlt", "mlt.p": 0.1 if r == 2 else 0.2}
        ),
    )
    for error in errors:
        assert "rank 2 has mlt.p=0.1, rank 0 has mlt.p=0.2" in str(error)


def test_a_failure_told_is_raised_by_the_others_at_once() -> None:
    store = dist.HashStore()

    def join(rank: int) -> object:
        here = meeting(store, rank)
        if rank == 1:
            return here.tell_failure("port", "cannot open UDP 127.0.0.1 port=7")
        return here.exchange("port", "1")

    results = together(3, join)
    for rank in (0, 2):
        assert "rank 1 failed: cannot open UDP 127.0.0.1 port=7" in str(results[rank])


def test_a_failure_told_is_raised_though_others_are_still_to_come() -> None:
    """Also where somebody never comes: the cause is what is told."""
    store = dist.HashStore()
    meeting(store, 1).tell_failure("x", "no such table")
    here = meeting(store, 0)  # rank 2 does not come
    with pytest.raises(RendezvousError, match=r"^rank 1 failed: no such table$") as raised:
        here.exchange("x", "here")
    assert raised.value.ranks == (1,)


def test_who_comes_late_fails_as_the_others_did_and_all_are_in_step() -> None:
    store = dist.HashStore()
    with pytest.raises(RendezvousError) as early:
        meeting(store, 0, workers=2, timeout_s=0.1).exchange("x", "here")
    started = time.monotonic()
    with pytest.raises(RendezvousError) as late:
        meeting(store, 1, workers=2).exchange("x", "here, too")
    assert time.monotonic() - started < 2
    assert str(early.value) == str(late.value)
    assert "rank 1 did not join within 0.1 s (1 of 2 were here when rank 0 gave up)" in str(
        late.value
    )
    again = together(2, lambda r: meeting(store, r, workers=2).exchange("x", str(r)))
    assert again == [["0", "1"]] * 2


def test_all_or_nobody_meet_however_close_to_the_deadline() -> None:
    """The others' texts may all be there when one of them gives up."""
    for attempt in range(60):
        store = dist.HashStore()

        def join(rank: int, store: Any = store, attempt: int = attempt) -> list[str]:
            here = meeting(store, rank, workers=3, timeout_s=0.01 if rank == 0 else 5.0)
            time.sleep(0.0002 * attempt if rank else 0.0)
            return here.exchange("x", str(rank))

        outcomes = together(3, join)
        met = [outcome == ["0", "1", "2"] for outcome in outcomes]
        assert all(met) or not any(met), (attempt, outcomes)
        if not any(met):
            assert len({str(outcome) for outcome in outcomes}) == 1


def test_a_rank_that_dies_while_it_decides_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "DECIDING_S", 0.1)
    store = dist.HashStore()
    here = meeting(store, 0, workers=1)
    store.add(here._key("x", "deciding"), 1)
    with pytest.raises(RendezvousError, match="another rank died in the rendezvous"):
        here.exchange("x", "here")


def test_who_counts_the_others_otherwise_is_told_so() -> None:
    store = dist.HashStore()

    def join(rank: int) -> object:
        workers = 2 if rank == 0 else 3
        return meeting(store, rank, workers=workers, timeout_s=0.5).exchange("x", str(rank))

    started = time.monotonic()
    few, many = together(2, join)
    assert time.monotonic() - started < 5
    assert few == ["0", "1"] or "counts 3 workers" in str(few)
    assert isinstance(many, RendezvousError)
    assert "counts 2 workers and 0 servers, rank 1 counts 3 and 0: give all the same" in str(
        many
    ) or "rank 2 did not join" in str(many)


class GoneStore:
    """As a TCPStore whose host has died."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone_is_named() -> None:
    with pytest.raises(RendezvousError, match=r"the job's store does not answer: Broken pipe"):
        meeting(GoneStore(), 0)
    here = meeting(dist.HashStore(), 0)
    here._store = GoneStore()  # type: ignore[assignment]
    here.tell_failure("x", "something else")  # the cause is not hidden by it


def test_a_failure_may_be_looked_for_without_waiting() -> None:
    store = dist.HashStore()
    here = meeting(store, 0, workers=2)
    here.check_failures("x")
    meeting(store, 1, workers=2).tell_failure("x", "no route")
    with pytest.raises(RendezvousError, match="rank 1 failed: no route"):
        here.check_failures("x")


def test_leaving_is_seen() -> None:
    store = dist.HashStore()
    workers = [meeting(store, rank, workers=2, servers=1) for rank in range(2)]
    server = meeting(store, 2, workers=2, servers=1)
    workers[0].leave()
    assert not server.all_workers_left()
    workers[1].leave()
    assert server.all_workers_left()


def test_the_stores_host_is_found_under_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore()))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert rendezvous.store_host(store) is None
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert rendezvous.store_host(store) == "10.0.0.1"
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert rendezvous.store_host(dist.PrefixStore("a", tcp)) == "127.0.0.1"
