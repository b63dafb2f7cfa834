"""How `gradwire probe` finds out who is on the other host, before both open an engine.

The one that measures says HELLO, and the one that listens answers WELCOME with a cookie, which only
a receiver at that address can know. The HELLO that repeats it makes the listener measure. Both
are 32 bytes long, in network byte order:

| bytes | field | meaning |
|---|---|---|
| 0–3 | magic | `gwdr` |
| 4 | version | 2 |
| 5 | kind | 1 for HELLO, 2 for WELCOME |
| 6–7 | zero | |
| 8–15 | token | random number of this measurement |
| 16–23 | cookie | 0 until it is known |
| 24–27 | datagram | the longest datagram that the sender would send to the receiver, in bytes |
| 28–31 | zero | |

Whatever else arrives is dropped. So whoever forges the address of another host makes a listener
send no more bytes there than it received.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.transport.addresses import udp_socket

LAYOUT = struct.Struct("!4sBBxxQQIxxxx")
MAGIC, VERSION = b"gwdr", 2
HELLO, WELCOME = 1, 2
EVERY_S = 0.2
"""How often HELLO is said, in seconds."""
COPIES, COPIES_EVERY_S = 8, 0.03
"""How often the HELLO is said that begins a measurement, so that a lossy path carries one."""
UNHEARD = 4
"""So many HELLOs of a host without the cookie: it does not hear the answers."""
MOST_HOSTS = 64
"""How many hosts without a cookie are remembered."""

SocketAddress = tuple[Any, ...]
"""An address and a port, as a socket takes them."""


@dataclass(frozen=True)
class Greeting:
    """A HELLO or a WELCOME; see the table above for its fields."""

    kind: int
    token: int
    cookie: int = 0
    datagram: int = 0

    def pack(self) -> bytes:
        return LAYOUT.pack(MAGIC, VERSION, self.kind, self.token, self.cookie, self.datagram)


def parse(data: bytes) -> Greeting | None:
    if len(data) != LAYOUT.size:
        return None
    magic, version, *fields = LAYOUT.unpack(data)
    if magic != MAGIC or version != VERSION or fields[0] not in (HELLO, WELCOME):
        return None
    return Greeting(*fields)


@dataclass(frozen=True)
class Greeted:
    """What came of a greeting.

    Attributes:
        answered: Whether the other host answered.
        refusal: Why a kernel refused the HELLO; "" where none did.
        datagram: The longest datagram that both hosts would send, in bytes.
        peer: The other host's address and port.
    """

    answered: bool
    refusal: str
    token: int
    datagram: int
    peer: SocketAddress
    local: SocketAddress


def greet(opened: socket.socket, peer: SocketAddress, datagram: int, contact_s: float) -> Greeted:
    """Says HELLO until there is an answer, and then that the measurement begins.

    Args:
        datagram: The longest datagram that the route there takes, in bytes.
        contact_s: How long to wait, in seconds.
    """
    token, refusal = secrets.randbits(63) | 1, ""
    opened.connect(peer)  # so that the kernel reports a port where nobody listens
    until = time.monotonic() + contact_s
    while (left := until - time.monotonic()) > 0:
        try:
            opened.send(Greeting(HELLO, token, 0, datagram).pack())
            opened.settimeout(min(EVERY_S, left))
            answer = parse(opened.recv(1 << 11))
        except TimeoutError:
            continue
        except OSError as error:
            refusal = str(error.strerror or error)
            time.sleep(min(EVERY_S, left))
            continue
        if answer is None or answer.kind != WELCOME or answer.token != token:
            continue
        agreed = min(datagram, answer.datagram)
        for _ in range(COPIES):
            with contextlib.suppress(OSError):
                opened.send(Greeting(HELLO, token, answer.cookie, agreed).pack())
            time.sleep(COPIES_EVERY_S)
        return Greeted(True, "", token, agreed, peer, opened.getsockname())
    return Greeted(False, refusal, token, datagram, peer, opened.getsockname())


class Listener:
    """Answers those who say HELLO.

    Args:
        limit: Returns the longest datagram that the route from a local address to another one
            takes.
        unheard: Called with the address of a host that does not hear the answers, and the local
            one.

    Attributes:
        hellos: How many HELLOs have arrived.
        deaf: The hosts that did not hear the answers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        limit: Callable[[str, str], int],
        unheard: Callable[[SocketAddress, str], None],
    ) -> None:
        self.hellos = 0
        self.deaf: set[str] = set()
        self._addresses, self._port = addresses, port
        self._limit, self._unheard = limit, unheard
        self._secret = secrets.token_bytes(32)
        self._strangers: dict[str, int] = {}
        self._sockets: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        sockets: list[socket.socket] = []
        with contextlib.ExitStack() as undo:
            for address in self._addresses:
                opened = undo.enter_context(udp_socket(address, self._port))
                opened.setblocking(False)
                sockets.append(opened)
            undo.pop_all()
        self._sockets = sockets

    def close(self) -> None:
        """Closes the port, so that an engine can take it."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    def wait(self, idle_s: float) -> Greeted | None:
        """Waits for one who begins a measurement; None where there is none for so many seconds."""
        until = time.monotonic() + idle_s
        while (left := until - time.monotonic()) > 0:
            for ready in select.select(self._sockets, [], [], min(left, 0.25))[0]:
                with contextlib.suppress(OSError):
                    data, peer = ready.recvfrom(1 << 11)
                    asked = parse(data)
                    if asked is not None and asked.kind == HELLO:
                        greeted = self._answer(ready, peer, asked)
                        if greeted is not None:
                            return greeted
        return None

    def _answer(
        self, opened: socket.socket, peer: SocketAddress, asked: Greeting
    ) -> Greeted | None:
        """Answers a HELLO without the cookie; returns who is there for one with it."""
        text = f"{peer[0]} {peer[1]} {asked.token}".encode()
        digest = hmac.new(self._secret, text, hashlib.sha256).digest()
        cookie = int.from_bytes(digest[:8], "big") | 1
        local = opened.getsockname()
        limit = self._limit(local[0], peer[0])
        if asked.cookie == cookie:
            self._strangers.pop(peer[0], None)
            self.deaf.discard(peer[0])
            return Greeted(True, "", asked.token, min(limit, asked.datagram), peer, local)
        self.hellos += 1
        opened.sendto(Greeting(WELCOME, asked.token, cookie, limit).pack(), peer)
        while len(self._strangers) >= MOST_HOSTS:
            del self._strangers[next(iter(self._strangers))]
        self._strangers[peer[0]] = count = self._strangers.get(peer[0], 0) + 1
        if count == UNHEARD:
            self.deaf.add(peer[0])
            self._unheard(peer, local[0])
        return None
