"""Authenticated engines on real sockets, and one who reads and writes what travels between them."""

import contextlib
import random
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gradwire import _engine
from scenarios import gradients, plan, rank_order_sum, same_bits

SECOND = 1_000_000_000
MODES = ("headers", "whole", "secret")


def secrets(endpoint: int, endpoints: int) -> list[tuple[bytes, bytes] | None]:
    def secret(one: int, other: int) -> bytes:
        return bytes([one, other]) * 16

    return [
        None if peer == endpoint else (secret(endpoint, peer), secret(peer, endpoint))
        for peer in range(endpoints)
    ]


def engine(endpoint: int, endpoints: int, **options: Any) -> _engine.Engine:
    given = {"datagram_bytes": 1456, "secrets": secrets(endpoint, endpoints), **options}
    return _engine.Engine(
        endpoint=endpoint, workers=endpoints, servers=0, session=99, address="127.0.0.1", **given
    )


class Wire:
    """Two sockets between two engines: what one sends arrives, and what else `more` makes of it."""

    def __init__(self, pair: list[_engine.Engine], more: Any) -> None:
        self.ends = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in pair]
        self.targets = [tuple(each.address) for each in pair]
        self.more = more
        self.over = threading.Event()
        for end in self.ends:
            end.bind(("127.0.0.1", 0))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.thread = threading.Thread(target=self.run)

    def places(self, own: int) -> list[Any]:
        """The addresses for one engine: its own, and for the other the end that stands for it."""
        places: list[Any] = [end.getsockname() for end in self.ends]
        places[own] = self.targets[own]
        return places

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, end in enumerate(self.ends):
                selector.register(end, selectors.EVENT_READ, index)
            while not self.over.is_set():
                for key, _ in selector.select(0.05):
                    datagram = self.ends[key.data].recv(65_536)
                    # What is for engine i arrives at end i, and leaves from the other's.
                    for each in (datagram, *self.more(key.data, datagram)):
                        with contextlib.suppress(OSError):
                            self.ends[1 - key.data].sendto(each, self.targets[key.data])

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        for end in self.ends:
            end.close()


def nothing(to: int, datagram: bytes) -> list[bytes]:
    return []


@contextlib.contextmanager
def pair(more: Any = nothing, **options: Any) -> Iterator[list[_engine.Engine]]:
    engines = [engine(i, 2, **options) for i in range(2)]
    wire = Wire(engines, more)
    wire.thread.start()
    try:
        for index, each in enumerate(engines):
            each.connect(wire.places(index))
        for each in engines:
            assert each.wait_connected(30 * SECOND) == []
        yield engines
    finally:
        threads = [threading.Thread(target=each.close) for each in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wire.close()


def steps(engines: list[_engine.Engine], count: int, elements: int = 60_000) -> None:
    """Exact sums, each to the bit."""
    for op in range(count):
        values = gradients(2, elements, op)
        buffers = [value.copy() for value in values]
        for each, buffer in zip(engines, buffers, strict=True):
            each.all_reduce(op=op, step=op, plan=plan(elements), data=buffer)
        for each in engines:
            done = each.next_completion(60 * SECOND)
            assert done is not None
            assert done.ok, done.error
        for buffer in buffers:
            assert same_bits(buffer, rank_order_sum(values))


@pytest.mark.parametrize("cipher", ["aes-128-gcm", "chacha20-poly1305"])
@pytest.mark.parametrize("auth", MODES)
def test_authenticated_engines_sum_to_the_bit(auth: str, cipher: str) -> None:
    with pair(auth=auth, cipher=cipher) as engines:
        steps(engines, 3)
        for each in engines:
            assert each.counters()["forged"] == 0
            assert each.counters()["malformed"] == 0


def test_a_train_is_as_long_as_the_kernel_takes() -> None:
    """Of datagrams whose tags make the most of it: 64 of them leave no room."""
    elements = 200_000
    engines = [engine(i, 2, auth="whole", datagram_bytes=1016) for i in range(2)]
    try:
        for each in engines:
            each.connect([one.address for one in engines])
        for each in engines:
            assert each.wait_connected(30 * SECOND) == []
        steps(engines, 2, elements)
        for each in engines:
            assert each.counters()["send_too_long"] == 0
            assert each.features()["udp_segment"]
    finally:
        for each in engines:
            each.fail("over")
            each.close()


class Hostile:
    """Replays, mutates, truncates, lengthens and makes up datagrams, from the peer's address."""

    def __init__(self, keep: range) -> None:
        self.chance = random.Random(3)
        self.kept: list[tuple[int, bytes]] = []
        self.keep = keep  # bytes of a chunk's packet that are left as they are
        self.sent = 0

    def __call__(self, to: int, datagram: bytes) -> list[bytes]:
        self.kept.append((to, datagram))
        del self.kept[:-500]
        made = []
        for _ in range(3):
            aim, old = self.chance.choice(self.kept)
            if aim != to:
                continue
            how = self.chance.randrange(5)
            new = bytearray(old)
            if how == 0:  # once more
                pass
            elif how == 1:
                at = self.chance.randrange(len(new))
                if at in self.keep and new[_engine.TAG_BYTES + 1] in (1, 2):
                    at = 4
                new[at] ^= 1 << self.chance.randrange(8)
            elif how == 2:
                del new[self.chance.randrange(len(new)) :]
            elif how == 3:
                new += bytes(self.chance.randrange(1, 40))
            else:
                new = bytearray(self.chance.randbytes(self.chance.randrange(1, 1500)))
            made.append(bytes(new))
        self.sent += len(made)
        return made


@pytest.mark.parametrize("auth", MODES)
def test_who_reads_and_writes_the_wire_changes_no_bit(auth: str) -> None:
    """Where headers alone are authenticated, but for the values of chunks."""
    hostile = Hostile(range(_engine.TAG_BYTES + 28, 9000) if auth == "headers" else range(0))
    with pair(hostile, auth=auth) as engines:
        steps(engines, 6, 30_000)
        counters = [each.counters() for each in engines]
    assert hostile.sent > 500
    assert sum(each["forged"] for each in counters) > 100
    assert sum(each["replayed"] for each in counters) > 100
    assert sum(each["malformed"] for each in counters) == 0


def test_engines_of_other_secrets_do_not_hear_each_other() -> None:
    engines = [
        engine(0, 2, auth="whole"),
        engine(1, 2, auth="whole", secrets=[(bytes(32), bytes(32)), None]),
    ]
    for each in engines:
        each.connect([one.address for one in engines])
    assert engines[0].wait_connected(SECOND // 2) == [1]
    assert not any(peer.heard for each in engines for peer in each.peers())
    assert all(each.counters()["forged"] > 0 for each in engines)
    for each in engines:
        each.fail("over")
        each.close()


def test_an_engine_refuses_secrets_that_are_missing_or_short() -> None:
    for wrong in ([None, None], [None], [None, (b"", b"")]):
        with pytest.raises(ValueError, match="secret"):
            engine(0, 2, auth="whole", secrets=wrong)
