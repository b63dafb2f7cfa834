"""What ranks of one host share: memory, sums of shards, and a link that no stranger gets into."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys

import numpy as np
import pytest

from gradwire.training.hosts.rows import Rows, has_shard
from gradwire.transport.host_link import Listener, connect, hosts_of


def test_hosts_are_distinguished_by_their_identity() -> None:
    assert hosts_of(["a", "b", "a", "c", "b"]) == ((0, 2), (1, 4), (3,))


@pytest.mark.parametrize("elements", [1, 7, 1 << 14, 100_001])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_all_shards_together_are_the_sum_in_rank_order(ranks: int, elements: int) -> None:
    memory = Rows.make(ranks, elements)
    rows = Rows(memory, ranks, elements)
    os.close(memory)
    values = np.random.default_rng(ranks).standard_normal((ranks, elements)).astype(np.float32)
    for place in range(ranks):
        rows.of(place)[:] = values[place]
    for place in range(ranks):
        rows.add(place, 0.3)
    expected = values[0].copy()
    for row in values[1:]:
        expected += row
    assert np.array_equal(rows.total, expected * np.float32(0.3))
    assert has_shard(elements, ranks, 0)


def test_who_does_not_know_the_token_is_not_let_in() -> None:
    with contextlib.closing(Listener()) as listener:
        name, token = listener.address.split("/")
        stranger = connect(f"{name}/{'00' * (len(token) // 2)}", 1, 5.0)
        friend = connect(listener.address, 1, 30.0)
        link = listener.accept([1], 30.0)
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        ear = Ear(heard)
        link.listen(ear.take, ear.gone)
        stranger.send("mine")
        friend.send("yours")
        assert heard.get(timeout=30.0) == (1, "yours")
        friend.close()
        assert heard.get(timeout=30.0) == 1
        stranger.close()
        link.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_not_let_in_by_the_token() -> None:
    """It travels through the store, which anybody on the host may read."""
    with contextlib.closing(Listener()) as listener:
        name, token = listener.address.split("/")
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):
                connect(listener.address, 1, 5.0)
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(f"\0gradwire-{name}")
        finally:
            os.seteuid(0)
        stranger.sendall(bytes.fromhex(token) + (1).to_bytes(4, "big"))
        friend = connect(listener.address, 2, 30.0)
        link = listener.accept([1, 2], 1.0)
        assert link.places == [2]
        for each in (stranger, friend, link):
            each.close()


def test_a_process_that_sends_nothing_delays_no_other_one() -> None:
    with contextlib.closing(Listener()) as listener:
        silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
        for each in silent:
            each.connect(f"\0gradwire-{listener.address.split('/')[0]}")
        friends = [connect(listener.address, place, 30.0) for place in (1, 2)]
        link = listener.accept([1, 2], 3.0)
        assert link.places == [1, 2]
        assert [each.recv(1) for each in silent] == [b""] * 3  # closed
        for each in (*friends, link, *silent):
            each.close()


def test_an_accept_returns_those_that_came() -> None:
    with contextlib.closing(Listener()) as listener:
        friend = connect(listener.address, 2, 30.0)
        link = listener.accept([1, 2], 0.5)
        assert link.places == [2]
        friend.close()
        link.close()


FORKS = """
import os, sys
from gradwire.transport.host_link import connect
link = connect(sys.argv[1], 1, 5.0)
if os.fork() == 0:
    sys.stdin.read()  # outlives its parent
os._exit(0)
"""


def test_a_forked_child_does_not_hide_that_its_parent_has_ended() -> None:
    with contextlib.closing(Listener()) as listener:
        arguments = [sys.executable, "-c", FORKS, listener.address]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE) as parent:
            link = listener.accept([1], 60.0)
            heard: queue.SimpleQueue[object] = queue.SimpleQueue()
            ear = Ear(heard)
            link.listen(ear.take, ear.gone)
            assert parent.wait() == 0
            assert heard.get(timeout=30.0) == 1
        link.close()


class Unreadable:
    """An object that can be pickled, and whose pickle cannot be read."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def test_a_message_that_cannot_be_read_ends_its_connection() -> None:
    with contextlib.closing(Listener()) as listener:
        sender = connect(listener.address, 1, 30.0)
        link = listener.accept([1], 30.0)
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        ear = Ear(heard)
        link.listen(ear.take, ear.gone)
        sender.send(Unreadable())
        assert heard.get(timeout=30.0) == 1
        sender.close()
        link.close()


class Ear:
    def __init__(self, heard: queue.SimpleQueue[object]) -> None:
        self._heard = heard

    def take(self, place: int, message: object, memory: int | None) -> None:
        self._heard.put((place, message))

    def gone(self, place: int) -> None:
        self._heard.put(place)
