"""The responder of a probe: it answers what a prober asks, within limits."""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradwire.core.errors import ConfigError
from gradwire.doctor.bursts import MOST_BYTES, Burst, Tally, is_allowed, send_burst
from gradwire.doctor.datagrams import HEADER_BYTES, Datagram, Kind, data_prefix, parse
from gradwire.doctor.udp import LARGEST_UDP, Message, SocketAddress, UdpSocket, place_text
from gradwire.transport.addresses import ETHERNET_DATAGRAM, local_addresses, route_mtu

__all__ = ["Event", "Responder", "datagram_limit"]

MOST_SESSIONS = 64
"""How many probers, and hosts that only say HELLO, are remembered."""
UNHEARD_HELLOS = 4
"""So many HELLOs of a host without proof that the answers arrive there: it does not hear them."""
POLL_S = 0.25


@dataclass(frozen=True)
class Event:
    """Something that a responder has noticed about a prober.

    Attributes:
        name: "measures" (it hears the answers), "unheard" (it does not), "measured" (it is done).
        peer: The prober's address and port as text.
        local: The address at which its datagrams arrive.
        text: The same as a sentence.
    """

    name: str
    peer: str
    local: str
    text: str


@dataclass
class Session:
    """A prober that has proven its address."""

    token: int
    tally: Tally = field(default_factory=lambda: Tally(b"-"))
    counted: int = 0
    burst: int = 0
    sent: tuple[int, ...] = ()
    bytes_left: int = 2 * MOST_BYTES
    fills_left: int = 2 * MOST_BYTES
    overflows: int = 0


class Responder:
    """Answers probers on some sockets.

    Args:
        sockets: The sockets; the caller closes them.
        notice: Called with each event.
        limit: Returns the largest datagram that the route to the sender of a message takes.
        token: The number of the only measurement that it answers; None for any.

    Attributes:
        hellos: How many HELLOs have arrived.
        finished: How many measurements have come to their end.
        unheard: How many hosts did not hear the answers.
    """

    def __init__(
        self,
        sockets: Sequence[UdpSocket],
        notice: Callable[[Event], None] = lambda event: None,
        limit: Callable[[Message], int] | None = None,
        token: int | None = None,
    ) -> None:
        self.hellos = 0
        self.finished = 0
        self.unheard = 0
        self._sockets = sockets
        self._notice = notice
        self._limit = limit or datagram_limit
        self._token = token
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[SocketAddress, Session] = {}
        self._strangers: dict[SocketAddress, int] = {}

    def serve(
        self,
        idle_s: float,
        *,
        once: bool = False,
        knock: SocketAddress | None = None,
        contact_s: float | None = None,
        longest_s: float = math.inf,
    ) -> None:
        """Answers until no prober with proof has asked anything for some time.

        Args:
            idle_s: That time in seconds.
            once: Whether to return when a measurement has ended.
            knock: A prober that is known to come: it gets a KNOCK now and then until it has been
                heard.
            contact_s: The same as `idle_s` until the first prober has proven its address.
            longest_s: When to end at the latest, in seconds from now on.
        """
        begun = time.monotonic()
        last = begun + longest_s
        quiet_until = begun + (idle_s if contact_s is None else contact_s)
        while (now := time.monotonic()) < min(quiet_until, last):
            if knock is not None and not self._sessions:
                self._sockets[0].send(Datagram(Kind.KNOCK, self._token or 0).pack(), knock, ecn=0)
            wait = min(POLL_S if knock is None else POLL_S / 4, quiet_until - now, last - now)
            ready, _, _ = select.select(self._sockets, [], [], wait)
            for socket in ready:
                message = socket.receive(0.0)
                if message is not None and self.take(socket, message):
                    quiet_until = time.monotonic() + idle_s
            if once and self.finished:
                # The GOODBYE may be lost, so that the prober asks again.
                once, quiet_until = False, time.monotonic() + POLL_S

    def take(self, socket: UdpSocket, message: Message) -> bool:
        """Handles a message; returns whether a prober with proof has sent any of it."""
        session = self._sessions.get(message.source)
        datagrams = []
        proven = False
        head = parse(message.data[: min(message.segment, HEADER_BYTES)])
        if session is not None and head is not None and head.kind is Kind.DATA:
            if self._proves(message.source, head) and head.number > session.counted:
                session.counted = head.number
                session.tally = Tally(data_prefix(head.token, head.cookie, head.number))
                session.overflows = socket.overflows
            before = session.tally.count
            datagrams = session.tally.take(message)
            proven = session.tally.count > before
        else:
            datagrams = list(message.datagrams())
        for data in datagrams:
            datagram = parse(data)
            if datagram is None or self._token not in (None, datagram.token):
                continue
            if datagram.kind is Kind.HELLO:
                self._welcome(socket, message, datagram)
            elif self._proves(message.source, datagram):
                proven = True
                self._answer(socket, message, datagram)
        return proven

    def _cookie(self, place: SocketAddress, token: int) -> int:
        """Returns what only a receiver at this place can know."""
        text = f"{place[0]} {place[1]} {token}".encode()
        digest = hmac.new(self._secret, text, hashlib.sha256).digest()
        return int.from_bytes(digest[:8], "big") | 1

    def _proves(self, place: SocketAddress, datagram: Datagram) -> bool:
        return datagram.cookie == self._cookie(place, datagram.token)

    def _welcome(self, socket: UdpSocket, message: Message, hello: Datagram) -> None:
        self.hellos += 1
        place = message.source
        cookie = self._cookie(place, hello.token)
        limit = self._limit(message)
        answer = Datagram(Kind.WELCOME, hello.token, cookie, hello.number, (limit,))
        socket.send(answer.pack(), place, ecn=0, local=message.local)
        if place in self._sessions:
            return
        _bound(self._strangers)
        self._strangers[place] = self._strangers.get(place, 0) + 1
        if self._strangers[place] == UNHEARD_HELLOS:
            self.unheard += 1
            peer = place_text(place)
            text = (
                f"Datagrams from {peer} arrive here, and no answer arrives there: UDP is blocked "
                "on the way back, by a firewall there or between."
            )
            self._notice(Event("unheard", peer, message.local_address, text))

    def _answer(self, socket: UdpSocket, message: Message, asked: Datagram) -> None:
        place = message.source
        session = self._sessions.get(place)
        if session is None or session.token != asked.token:
            if asked.kind is Kind.BYE:
                return
            _bound(self._sessions)
            self._sessions[place] = session = Session(asked.token)
            if self._strangers.pop(place, 0) >= UNHEARD_HELLOS:
                self.unheard -= 1
            peer = place_text(place)
            self._notice(Event("measures", peer, message.local_address, f"{peer} measures."))

        def send(kind: Kind, *arguments: int, length: int = HEADER_BYTES) -> None:
            answer = Datagram(kind, asked.token, asked.cookie, asked.number, arguments, length)
            socket.send(answer.pack(), place, local=message.local)

        if asked.kind is Kind.PING:
            send(Kind.PONG, time.time_ns() - message.arrived_ns, message.ecn)
        elif asked.kind is Kind.SIZE:
            send(Kind.GOT, asked.length)
        elif asked.kind is Kind.WANT:
            length = min(max(HEADER_BYTES, asked.arguments[0]), LARGEST_UDP)
            session.fills_left -= length
            if session.fills_left >= 0:
                send(Kind.FILL, length=length)
        elif asked.kind is Kind.COUNT:
            tally = session.tally if asked.number == session.counted else Tally(b"-")
            overflows = socket.overflows - session.overflows
            send(Kind.COUNTED, tally.count, tally.rate, overflows, tally.merged)
        elif asked.kind is Kind.BURST:
            self._burst(socket, message, session, asked)
            if asked.number == session.burst:
                send(Kind.SENT, *session.sent)
        elif asked.kind is Kind.BYE:
            send(Kind.GOODBYE)
            del self._sessions[place]
            self.finished += 1
            peer = place_text(place)
            self._notice(
                Event(
                    "measured", peer, message.local_address, f"{peer} is done, and has the results."
                )
            )

    def _burst(
        self, socket: UdpSocket, message: Message, session: Session, asked: Datagram
    ) -> None:
        """Sends a burst that was not sent before."""
        count, size, rate, train = asked.arguments[:4]
        if asked.number <= session.burst or rate == 0:
            return
        burst = Burst(count, size, rate, train)
        if not is_allowed(burst) or count * size > session.bytes_left:
            return
        session.bytes_left -= count * size
        session.burst = asked.number
        prefix = data_prefix(asked.token, asked.cookie, asked.number)
        sent_rate = send_burst(socket, prefix, burst, message.source, message.local)
        session.sent = (count, sent_rate, int(not socket.segments))


def _bound(table: dict[SocketAddress, Session] | dict[SocketAddress, int]) -> None:
    """Makes room for one more place, the oldest of which is forgotten."""
    while len(table) >= MOST_SESSIONS:
        del table[next(iter(table))]


def datagram_limit(message: Message) -> int:
    """Returns the longest datagram that the engine would send to who sent a message, in bytes."""
    try:
        (own,) = local_addresses(message.local_address, None)
        return own.datagram(route_mtu(own.bound, message.source_address))
    except (ConfigError, OSError, ValueError):
        return ETHERNET_DATAGRAM
