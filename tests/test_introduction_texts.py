"""Texts that ranks find in the store: an introduction, or an error that names who published it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import RendezvousError
from gradwire.transport.addresses import LocalAddress
from gradwire.transport.introductions import Introduction, check_introductions, introduce
from gradwire.transport.meeting import Meeting
from threads import at_once

WHOLE = Introduction(
    endpoint=1,
    protocol=1,
    addresses=(LocalAddress("127.0.0.1", "lo", 65_536),),
    port="4000-4010",
    datagram=1472,
    host="a",
    identity="b",
    interfaces={"eth0": ["10.0.0.1"]},
    configuration={"route": "sharded"},
    session=7,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = sorted(asdict(WHOLE).keys() - {"damaged"})


def meet(text: str) -> list[Any]:
    """Rank 1 of three publishes `text`; returns what the others make of it."""
    store = dist.HashStore()

    def join(rank: int) -> object:
        here = Meeting(store, "t", endpoint=rank, workers=3, servers=0, timeout_s=5.0)
        if rank == 1:
            return here.exchange(text)
        everybody = introduce(here, replace(WHOLE, endpoint=rank, port=0))
        return check_introductions(here, everybody)

    return at_once(3, join)


def test_an_introduction_reads_as_it_was_written() -> None:
    assert Introduction.parse(json.dumps(asdict(WHOLE))) == WHOLE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "[" * 100_000,
        '{"protocol": 1}',
        json.dumps(asdict(replace(WHOLE, endpoint=2))),
        json.dumps({**asdict(WHOLE), "port": ["x"]}),
        json.dumps({**asdict(WHOLE), "session": -1}),
        json.dumps({**asdict(WHOLE), "interfaces": {"eth0": 3}}),
        json.dumps({**asdict(WHOLE), "addresses": [{"address": "nowhere"}]}),
        json.dumps({**asdict(WHOLE), "hello": {"salt": "no digits"}}),
        json.dumps({**asdict(WHOLE), "hello": {"public": "00"}}),
    ],
)
def test_a_text_that_is_no_introduction_is_an_error_that_names_its_rank(text: str) -> None:
    for found in (each for rank, each in enumerate(meet(text)) if rank != 1):
        assert isinstance(found, RendezvousError)
        assert found.ranks == (1,)


@given(st.text() | JSON.map(json.dumps))
def test_any_text_is_an_introduction_or_a_value_error(text: str) -> None:
    try:
        Introduction.parse(text)
    except (ValueError, RecursionError):
        return


@given(st.sampled_from(FIELDS), JSON)
def test_a_field_of_any_type_is_read_or_named(name: str, value: object) -> None:
    text = json.dumps({**asdict(WHOLE), name: value})
    try:
        read = Introduction.parse(text)
    except ValueError:
        assert name in ("endpoint", "protocol")
        return
    assert read.damaged in ((), (name,))
    json.dumps(asdict(read))
