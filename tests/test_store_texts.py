"""Texts of the store: whatever stands there, ranks meet or raise RendezvousError alike."""

from __future__ import annotations

import base64
import json
import time
import zlib
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.transport import meeting as meetings
from gradwire.transport.addresses import LocalAddress
from gradwire.transport.communicator import Communicator
from gradwire.transport.introductions import Introduction, agree, agree_datagram
from gradwire.transport.meeting import Meeting
from gradwire.transport.open_engine import Hearing
from gradwire.transport.texts import MOST_TEXT, WRONG, Outcome, read_all, read_opening
from test_introduction_texts import JSON
from threads import at_once


def packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()


GARBAGE = (
    "",
    "x",
    "garbage",
    "Z2FyYmFnZQ==",
    packed("once"),
    packed("[]"),
    packed("5"),
    packed("[" * 100_000),
    packed('["", [], []]'),
    packed('["", [], ["a"]]'),
    packed('["", [0.5], []]'),
    packed('["why", ["x"], []]'),
    packed('[5, [], ["a", "b", "c"]]'),
    packed('["", [], {"a": 1}]'),
    packed(json.dumps(["", [], ["a" * (5 * MOST_TEXT), "b", "c"]])),
    packed(json.dumps(["", [], ["a", "b", "c"]]))[:-8],
)
"""Texts that end no exchange of three."""


class Spoiled:
    """A store in which something else writes when endpoint 0 begins a meeting.

    Args:
        what: The key under the meeting's prefix that is written.
    """

    def __init__(self, what: str, text: bytes) -> None:
        self._store = dist.HashStore()
        self._what = what
        self._text = text

    def set(self, key: str, value: str) -> None:
        if key.endswith("/newest"):
            meeting = value.partition(" ")[0]
            self._store.set(f"{key.removesuffix('newest')}{meeting}/{self._what}", self._text)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def join(store: Any, rank: int, text: str = "here") -> list[str]:
    here = Meeting(store, "t", endpoint=rank, workers=3, servers=0, timeout_s=20.0)
    return here.exchange(text)


def test_an_outcome_reads_as_it_was_written() -> None:
    for outcome in (Outcome(texts=["a", "é", ""]), Outcome("why", [2])):
        assert Outcome.load(outcome.dump(), 3) == outcome


@given(st.text() | st.binary().map(lambda data: base64.b64encode(data).decode()))
@example("garbage")
def test_any_text_is_an_outcome_or_a_failure_that_says_so(text: str) -> None:
    assert "cannot be read" in Outcome.load(text, 3).why


@given(JSON)
def test_any_value_is_an_outcome_or_a_failure_that_says_so(value: object) -> None:
    read = Outcome.load(packed(json.dumps(value)), 3)
    assert all(isinstance(each, str) for each in [read.why, *read.texts])
    assert "cannot be read" in read.why or [read.why, read.at_fault, read.texts] == value


def test_what_unpacks_to_more_than_all_texts_together_is_refused_before_it_is_there() -> None:
    bomb = zlib.compress(b'["' + b" " * (40 << 20), 9)
    assert "longer than" in Outcome.load(base64.b64encode(bomb).decode(), 3).why


@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_a_garbage_outcome_is_the_same_error_on_all(number: int) -> None:
    store = Spoiled("0", GARBAGE[number].encode())
    found = at_once(3, lambda rank: join(store, rank))
    assert all(isinstance(each, RendezvousError) for each in found), found
    assert len({str(each) for each in found}) == 1
    assert "something else write" in str(found[0])


def test_an_outcome_that_is_no_text_is_an_error_on_all() -> None:
    store = Spoiled("0", b"\xff\xfe")
    for found in at_once(3, lambda rank: join(store, rank)):
        assert isinstance(found, RendezvousError)


def test_a_text_that_is_no_text_is_handed_on() -> None:
    store = Spoiled("0/2", b"\xff")
    found = at_once(3, lambda rank: join(store, rank) if rank < 2 else enter(store, rank))
    assert found[:2] == [["here", "here", "\ufffd"]] * 2


def enter(store: Any, rank: int) -> object:
    """Comes to a meeting and publishes nothing itself."""
    here = Meeting(store, "t", endpoint=rank, workers=3, servers=0, timeout_s=20.0)
    here._enter(meetings.Wait(meetings.Patience(20.0)))
    return None


@pytest.mark.parametrize("text", ["x", "a b c d", "abc 3", "abc three 0", "abc 3 0 0", "ab\nc 3 0"])
def test_a_garbage_beginning_is_an_error_at_once(text: str) -> None:
    store, begun = dist.HashStore(), time.monotonic()
    store.set("gradwire/t/newest", text)
    with pytest.raises(RendezvousError, match="something else write"):
        join(store, 1)
    assert time.monotonic() - begun < 5.0
    assert Meeting(store, "t", endpoint=0, workers=3, servers=0, timeout_s=1.0).workers_here() == 0
    again = at_once(3, lambda rank: (time.sleep(0.2 * bool(rank)), join(store, rank))[1])
    assert again == [["here"] * 3] * 3  # which endpoint 0 has written anew


@given(st.text())
def test_any_text_is_a_beginning_or_none(text: str) -> None:
    assert read_opening(text) is None
    assert read_opening("0af3 3 1") == ("0af3", 3, 1)


@pytest.mark.parametrize("text", ["", "x", "5 x/3 0", "5 -1/3 0", "5 \u00b2/3"])
def test_garbage_among_those_who_come_is_passed_over(text: str) -> None:
    store = Spoiled("came/1", text.encode())
    store.set = lambda key, value: (  # type: ignore[method-assign]
        Spoiled.set(store, key, value),
        key.endswith("/newest") and store.add(f"gradwire/t/{value.partition(' ')[0]}/came", 1),
    )
    assert at_once(3, lambda rank: join(store, rank)) == [["here"] * 3] * 3


# ---------------------------------------------------------------------------- by JSON


PLACES = [LocalAddress(f"10.0.0.{rank}", "eth0", 1500) for rank in range(3)]


def routes(rank: int, here: Meeting) -> object:
    hosts = [Introduction(each, 1, (PLACES[each],), identity=f"h{each}") for each in range(3)]
    return agree_datagram(here, hosts, PLACES)


def configuration(rank: int, here: Meeting) -> object:
    agree(here, {"a": 1})
    return "agreed"


READS = {"routes": routes, "configuration": configuration}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "null",
        "{}",
        '{"mtu": 1500}',
        '{"mtu": -1, "unreachable": {}}',
        '{"mtu": 1500, "unreachable": {"7": "no route"}}',
        '{"mtu": 1500, "unreachable": {"x": "no route"}}',
        '{"mtu": 1500, "unreachable": [1]}',
        '{"mtu": 1500, "unreachable": {"0": 5}}',
        "[" * 100_000,
    ],
)
def test_what_a_rank_publishes_is_read_or_an_error_that_names_it(
    what: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.transport.introductions.route_mtu", lambda *_: 1500)
    store = dist.HashStore()

    def meets(rank: int) -> object:
        here = Meeting(store, "t", endpoint=rank, workers=3, servers=0, timeout_s=20.0)
        return here.exchange(text) if rank == 1 else READS[what](rank, here)

    for found in at_once(3, meets)[::2]:
        assert isinstance(found, RendezvousError), found
        assert found.ranks == (1,)


class Saying(Meeting):
    """A meeting in which this endpoint publishes `text` in one exchange, in place of its own."""

    def spoil(self, number: int, text: str) -> None:
        self._left_over, self._instead = number, text

    def exchange(self, text: str, patience: Any = None) -> list[str]:
        number = getattr(self, "_left_over", -1)
        self._left_over = number - 1
        return super().exchange(self._instead if number == 0 else text, patience)


@pytest.mark.parametrize("text", ["garbage", "[[1]]", '{"peers": [9]}', "[70000]", '"x"'])
@pytest.mark.parametrize("number", range(4))
def test_an_engine_is_opened_or_all_name_who_published_what_cannot_be_read(
    number: int, text: str
) -> None:
    """In whichever of its exchanges: use, introduction, ports, what is heard."""
    store, options = dist.HashStore(), {"interface": "lo", "rendezvous_timeout": 20}

    def opens(rank: int) -> object:
        here = Saying(store, "open", endpoint=rank, workers=3, servers=0, timeout_s=20.0)
        if rank == 1:
            here.spoil(number, text)
        return Communicator(store, rank, 3, options, meeting=here)

    found = at_once(3, opens)
    for each in found:
        if isinstance(each, Communicator):
            each.close()
    for each in found[::2]:
        if number == 0 and not isinstance(each, Exception):
            continue  # only what is not this rank's own session counts
        assert isinstance(each, RendezvousError), each
        assert 1 in each.ranks


@given(JSON)
def test_any_value_is_what_is_heard_or_wrong(value: object) -> None:
    try:
        read = Hearing.read(value, 3)
    except WRONG:
        return
    assert asdict(read) == value


def test_who_published_is_named_with_the_cause() -> None:
    here = Meeting(dist.HashStore(), "t", endpoint=0, workers=2, servers=0, timeout_s=1.0)

    def refuse(value: object) -> None:
        raise ConfigError("a\nline")

    with pytest.raises(RendezvousError, match="the thing of rank 1 cannot be read"):
        read_all(here, "the thing", ["1", "x"], lambda value: value)
    with pytest.raises(RendezvousError, match="a line"):
        read_all(here, "the thing", ["1"], refuse)
