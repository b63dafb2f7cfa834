"""One who reads and writes what travels between two engines of a job, for tests and by hand.

    python engine/tests/hostile.py [--datagrams N] [--auth headers|whole|secret]

Sums exactly, over and over, while datagrams are replayed, changed, cut, lengthened and made up from
the peer's address, until N of them have gone (ten million take some ten minutes). Each sum has to
be right to the bit, nothing may be read as malformed, and memory has to stay where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine_kit import connected, engine, sum_exactly
from gradwire import _engine

MODES = ("headers", "whole", "secret")
ELEMENTS = 60_000
MOST_GROWTH = 32 << 20
"""Bytes by which a process may grow after its first sums."""

More = Callable[[int, bytes], list[bytes]]
"""What goes to an engine beside a datagram for it."""


def secrets(endpoint: int, endpoints: int) -> list[tuple[bytes, bytes] | None]:
    def secret(one: int, other: int) -> bytes:
        return bytes([one, other]) * 16

    return [
        None if peer == endpoint else (secret(endpoint, peer), secret(peer, endpoint))
        for peer in range(endpoints)
    ]


def authentic(endpoint: int, endpoints: int, **options: Any) -> _engine.Engine:
    given = {"datagram_bytes": 1456, "secrets": secrets(endpoint, endpoints), **options}
    return engine(endpoint, endpoints, **given)


class Wire:
    """Two sockets between two engines: what one sends arrives, and what else `more` makes of it,
    which comes `before` the true one or behind it."""

    def __init__(self, addresses: list[tuple[str, int]], more: More, before: bool = False) -> None:
        self.ends = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in addresses]
        self.targets = addresses
        self.more = more
        self.before = before
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
                    made = self.more(key.data, datagram)
                    for each in (*made, datagram) if self.before else (datagram, *made):
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
def pair(
    more: More = nothing, *, before: bool = False, **options: Any
) -> Iterator[list[_engine.Engine]]:
    engines = [authentic(i, 2, **options) for i in range(2)]
    wire = Wire([each.address for each in engines], more, before)
    wire.thread.start()
    try:
        with connected(engines, [wire.places(index) for index in range(2)]):
            yield engines
    finally:
        wire.close()


class Hostile:
    """Replays, mutates, truncates, lengthens and makes up datagrams, from the peer's address."""

    def __init__(self, auth: str) -> None:
        self.chance = random.Random(3)
        self.kept: list[tuple[int, bytes]] = []
        # Where headers alone are authenticated, bytes of a chunk's packet that are left alone.
        self.keep = range(_engine.TAG_BYTES + 28, 9000 if auth == "headers" else 0)
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


def resident() -> int:
    """Bytes of memory that this process has."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--datagrams", type=int, default=10_000_000)
    parser.add_argument("--auth", choices=MODES, default="whole")
    asked = parser.parse_args()
    hostile = Hostile(asked.auth)
    begun = said = time.monotonic()
    with pair(hostile, auth=asked.auth) as engines:
        for op in range(20):
            sum_exactly(engines, op, ELEMENTS)
        op, before = 20, resident()
        while hostile.sent < asked.datagrams:
            sum_exactly(engines, op, ELEMENTS)
            op += 1
            if time.monotonic() - said > 10.0:
                said = time.monotonic()
                print(f"{op} sums, {hostile.sent} hostile datagrams", flush=True)
        grown = resident() - before
        counters = [each.counters() for each in engines]
    found = {key: int(sum(each[key] for each in counters))
             for key in ("forged", "replayed", "malformed")}  # fmt: skip
    seconds = time.monotonic() - begun
    print(f"{op} sums to the bit in {seconds:.0f} s beside {hostile.sent} hostile datagrams: "
          f"{found}; memory grew by {grown / 2**20:.1f} MiB")  # fmt: skip
    return int(found["malformed"] > 0 or grown > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
