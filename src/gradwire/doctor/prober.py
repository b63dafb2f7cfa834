"""The prober: it measures a path in both directions by asking a responder."""

from __future__ import annotations

import contextlib
import secrets
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from gradwire.doctor.bursts import MOST_BYTES, Burst, Tally, send_burst
from gradwire.doctor.datagrams import HEADER_BYTES, Datagram, Kind, data_prefix, parse
from gradwire.doctor.udp import ECT0, Message, SocketAddress, UdpSocket

__all__ = ["Measurement", "Prober", "RoundTrips", "Way"]

HELLO_EVERY_S = 0.2
PINGS = 60
PINGS_S, FIRST_PONG_S = 1.0, 5.0
"""How long PINGs are sent; how long at most where none has been answered."""
PONG_WAIT_S = 0.1
"""How long the first PONG is waited for until another PING goes; later ones four times the longest
round trip."""
LEAST_PONG_WAIT_S = 0.02
TRIES = 10
COPIES = 4
"""So many datagrams of each length are tried, since some may be lost for another reason."""
LADDER = 8
"""Lengths that are tried together."""
BETWEEN_S = 0.0003
SHORTEST_PATIENCE_S = 0.03

GENTLE = 10_000_000
"""The rate in bits per second at which the bursts begin."""
GENTLE_COUNT, GENTLE_SIZE = 100, 1472
FEWEST = 10
"""With fewer datagrams a burst shows no share of loss."""
TRAIN, TRAINS_COUNT = 8, 48
STEP_S = 0.02
"""How long a burst of each rate lasts, from twice GENTLE on, always doubled."""
CALM_S, SLOW_S, CALM_MOST = 0.1, 0.4, 3000
"""How long the last burst lasts, at half of the rate that was found; how long at most where it has
fewer than GENTLE_COUNT datagrams; and its most datagrams."""
TOLERATED = 0.05
"""The share of a burst that may be lost beyond what gentle bursts lose, before doubling ends."""
ATTEMPTS = 3
"""Bursts in a row that have to fail before doubling ends, since a busy host spoils some."""
KEPT_UP = 0.75
"""The share of a burst's rate that has to arrive, and of the wanted rate that has to be sent."""

Ecn = Literal["kept", "cleared", "marked", "changed", "unknown"]
Trains = Literal["pass", "lost", "refused", "unknown"]
Limit = Literal["network", "sender", "receiver", "bytes", "unknown"]


@dataclass
class Way:
    """One direction of a path.

    Attributes:
        datagram: The longest datagram that passes, in bytes.
        ecn: What becomes of ECT(0): "kept", "cleared", "marked" (some CE), "changed".
        trains: Datagrams sent with UDP_SEGMENT: "pass", "lost" although single ones pass,
            "refused" by the sender's kernel.
        merged: The most datagrams that the receiver's kernel merged (UDP_GRO).
        rate: The highest rate of arrival in bits per second.
        limit: What ended the doubling of the rate: the "network" lost or delayed datagrams, the
            "sender" or the "receiver" (whose buffer ran over) was too slow, or the measurement's
            "bytes" were used up.
        loss: The share of datagrams lost at half of that rate.
        datagrams: The number of datagrams behind `loss`.
        overflows: Datagrams that the receiver's kernel dropped for want of buffer.
    """

    datagram: int = 0
    ecn: Ecn = "unknown"
    trains: Trains = "unknown"
    merged: int = 0
    rate: int = 0
    limit: Limit = "unknown"
    loss: float = 0.0
    datagrams: int = 0
    overflows: int = 0


@dataclass
class RoundTrips:
    """Round-trip times in seconds, without the time that the responder took.

    Attributes:
        least: The shortest.
        median: The median.
        p99: The 99th percentile.
        sent: How many PINGs were sent.
        lost: How many of them had no answer.
    """

    least: float = 0.0
    median: float = 0.0
    p99: float = 0.0
    sent: int = 0
    lost: int = 0


@dataclass
class Measurement:
    """What a prober has measured.

    Attributes:
        answered: Whether the responder answers at all.
        heard: Whether anything arrived from the responder, an answer or a KNOCK.
        complete: Whether the measurement came to its end.
        refusal: Why the local kernel refused a datagram; "" where it did not.
        limit: The longest datagram that both hosts' interfaces and routes take, in bytes.
        headers: The bytes of the IP and UDP headers of each.
        rtt: Round-trip times.
        there: From the prober to the responder.
        back: From the responder to the prober.
    """

    answered: bool = False
    heard: bool = False
    complete: bool = False
    refusal: str = ""
    limit: int = 0
    headers: int = 28
    rtt: RoundTrips = field(default_factory=RoundTrips)
    there: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)


@dataclass(frozen=True)
class BurstResult:
    """What became of a burst: sent and arrived, both as numbers and as rates."""

    sent: int
    arrived: int
    sent_rate: int
    rate: int
    overflows: int
    merged: int
    refused: bool

    @property
    def lost(self) -> int:
        return max(0, self.sent - self.arrived)

    @property
    def loss(self) -> float:
        return self.lost / self.sent


class UnansweredError(Exception):
    """A question had no answer in time."""


class Prober:
    """Measures the path to a responder.

    Args:
        socket: The socket; the caller closes it.
        limit: The longest datagram that the route to it takes, in bytes.
        token: The measurement's number; None for a random one.
    """

    def __init__(
        self,
        socket: UdpSocket,
        peer: SocketAddress,
        limit: int,
        seconds: float,
        token: int | None = None,
    ) -> None:
        self._socket = socket
        self._peer = peer
        self._token = secrets.randbits(64) if token is None else token
        self._deadline = time.monotonic() + seconds
        self._cookie = 0
        self._number = 0
        self._patience = SHORTEST_PATIENCE_S
        self._tally = Tally(b"-")
        self._found = Measurement(limit=limit, headers=48 if socket.v6 else 28)

    def measure(self, contact_s: float) -> Measurement:
        """Measures everything; what had no answer in time is missing from the result.

        Args:
            contact_s: How long to wait for the first answer, in seconds.
        """
        found = self._found
        try:
            self._contact(contact_s)
            self._round_trips()
            self._sizes()
            self._way(found.there, self._burst_there)
            self._way(found.back, self._burst_back)
            found.complete = True
        except UnansweredError:
            pass
        if found.answered:
            with contextlib.suppress(UnansweredError):
                tries = TRIES if found.complete else TRIES // 3
                self._ask(Kind.BYE, Kind.GOODBYE, int(found.complete), tries=tries)
        found.refusal = self._socket.refusal
        return found

    # ------------------------------------------------------------------ questions and answers

    def _send(self, kind: Kind, number: int, *arguments: int, length: int = HEADER_BYTES) -> None:
        datagram = Datagram(kind, self._token, self._cookie, number, arguments, length)
        ecn = 0 if kind is Kind.HELLO else ECT0
        self._socket.send(datagram.pack(), self._peer, ecn=ecn)

    def _ask(
        self, kind: Kind, answer: Kind, *arguments: int, number: int = 0, tries: int = TRIES
    ) -> tuple[Datagram, Message]:
        """Asks until there is an answer; raises UnansweredError where there is none in time."""
        number = number or self._next()
        for attempt in range(tries):
            self._send(kind, number, *arguments)
            wait = self._patience * 2 ** min(attempt, 4)
            for datagram, message in self._answers(wait):
                if datagram.kind is answer and datagram.number == number:
                    return datagram, message
            if time.monotonic() >= self._deadline:
                break
        raise UnansweredError(kind.name)

    def _answers(self, seconds: float) -> Iterable[tuple[Datagram, Message]]:
        """Yields what arrives of this measurement for so long; DATA is counted instead."""
        until = min(time.monotonic() + seconds, self._deadline)
        while (message := self._socket.receive(until)) is not None:
            theirs = message.source[:2] == self._peer[:2]
            for data in self._tally.take(message) if theirs else ():
                datagram = parse(data)
                if datagram is None or datagram.token != self._token:
                    continue
                self._found.heard = True
                if datagram.kind is Kind.WELCOME or datagram.cookie == self._cookie:
                    yield datagram, message
            if time.monotonic() >= until:
                return

    def _next(self) -> int:
        self._number += 1
        return self._number

    # ------------------------------------------------------------------ the parts of a measurement

    def _contact(self, contact_s: float) -> None:
        until = min(time.monotonic() + contact_s, self._deadline)
        while time.monotonic() < until:
            self._send(Kind.HELLO, self._next())
            for datagram, _ in self._answers(min(HELLO_EVERY_S, until - time.monotonic())):
                if datagram.kind is Kind.WELCOME:
                    self._cookie = datagram.cookie
                    self._found.answered = True
                    self._found.limit = min(self._found.limit, datagram.arguments[0])
                    return
        raise UnansweredError(Kind.HELLO.name)

    def _round_trips(self) -> None:
        times: list[float] = []
        there: set[int] = set()
        back: set[int] = set()
        sent_ns: dict[int, int] = {}
        found = self._found
        begun = time.monotonic()
        while len(sent_ns) < PINGS:
            passed = time.monotonic() - begun
            if passed > (PINGS_S if times else FIRST_PONG_S):
                break
            number = self._next()
            sent_ns[number] = time.time_ns()
            self._send(Kind.PING, number)
            wait = max(4 * max(times), LEAST_PONG_WAIT_S) if times else PONG_WAIT_S
            for datagram, message in self._answers(wait):
                begun_ns = sent_ns.get(datagram.number)
                if datagram.kind is not Kind.PONG or begun_ns is None:
                    continue
                took_ns = message.arrived_ns - begun_ns - datagram.arguments[0]
                times.append(max(0, took_ns) / 1e9)
                there.add(datagram.arguments[1])
                back.add(message.ecn)
                if datagram.number == number:
                    break
        found.rtt.sent = len(sent_ns)
        found.rtt.lost = max(0, found.rtt.sent - len(times))
        if not times:
            raise UnansweredError(Kind.PING.name)
        times.sort()
        found.rtt.least = times[0]
        found.rtt.median = statistics.median(times)
        found.rtt.p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
        self._patience = max(SHORTEST_PATIENCE_S, 3 * found.rtt.p99)
        found.there.ecn, found.back.ecn = _ecn(there), _ecn(back)

    def _sizes(self) -> None:
        found = self._found
        found.there.datagram = self._longest(Kind.SIZE, Kind.GOT)
        found.back.datagram = self._longest(Kind.WANT, Kind.FILL)

    def _longest(self, question: Kind, answer: Kind) -> int:
        """Returns the length of the longest datagram that passes, by trying several at once."""
        limit = self._found.limit
        if self._passing(question, answer, [limit]):
            return limit
        low, high = HEADER_BYTES, limit
        while time.monotonic() < self._deadline:
            if high - low <= 1:
                # Chance may have taken all copies of a length: a longer one shows it.
                if high == limit or not self._passing(question, answer, [high]):
                    return low
                low, high = high, limit
                continue
            steps = sorted({low + (high - low) * step // LADDER for step in range(1, LADDER)})
            steps = [step for step in steps if step > low] or [low + 1]
            low = max(self._passing(question, answer, steps), default=low)
            high = min((step for step in steps if step > low), default=high)
        raise UnansweredError(question.name)

    def _passing(self, question: Kind, answer: Kind, lengths: list[int]) -> set[int]:
        """Returns those of the lengths of which a datagram passes."""
        numbers = {self._next(): length for length in lengths}
        passing: set[int] = set()
        for copy in range(COPIES):
            for number, length in numbers.items():
                if question is Kind.SIZE:
                    self._send(question, number, length=length)
                else:
                    self._send(question, number, length)
                time.sleep(BETWEEN_S)
            last = copy == COPIES - 1 or len(lengths) == 1
            wait = self._patience if last else BETWEEN_S
            for datagram, _ in self._answers(wait):
                if datagram.kind is answer and datagram.number in numbers:
                    passing.add(numbers[datagram.number])
                    if len(passing) == len(lengths):
                        return passing
        return passing

    # ------------------------------------------------------------------ rate and loss

    def _way(self, way: Way, send: Callable[[Burst], BurstResult]) -> None:
        """Measures rate and loss of one direction, by bursts of ever higher rates."""
        small = min(way.datagram, GENTLE_SIZE)
        gentle = send(Burst(GENTLE_COUNT, small, GENTLE, 1))
        way.loss, way.datagrams, way.rate = gentle.loss, gentle.sent, gentle.rate
        if gentle.arrived == 0:
            return
        trains = send(Burst(TRAINS_COUNT, small, 2 * GENTLE, TRAIN))
        way.merged = trains.merged
        way.trains = "refused" if trains.refused else "pass" if trains.arrived else "lost"
        one_by_one = 0 if way.trains == "pass" else 1
        self._double(way, send, gentle.loss, one_by_one)
        rate = max(way.rate // 2, 1)
        in_s = rate / 8 / way.datagram
        most = min(CALM_MOST, MOST_BYTES // 8 // way.datagram)
        count = min(max(int(CALM_S * in_s), min(int(SLOW_S * in_s), GENTLE_COUNT)), most)
        if count >= FEWEST:
            calm = send(Burst(count, way.datagram, rate, one_by_one))
            way.loss, way.datagrams = calm.loss, calm.sent
            way.overflows += calm.overflows

    def _double(
        self, way: Way, send: Callable[[Burst], BurstResult], usual: float, train: int
    ) -> None:
        size, left, rate = way.datagram, MOST_BYTES * 3 // 4, 2 * GENTLE
        failed = 0
        while failed < ATTEMPTS:
            count = int(rate * STEP_S / 8 / size) + 1
            left -= count * size
            if left < 0:
                way.limit = "bytes"
                return
            step = send(Burst(count, size, rate, train))
            way.rate = max(way.rate, step.rate)
            way.merged = max(way.merged, step.merged)
            way.overflows += step.overflows
            arrives = step.rate >= KEPT_UP * (1 - usual) * step.sent_rate
            if step.lost > (usual + TOLERATED) * count + 3 or not arrives:
                way.limit = "receiver" if step.overflows > step.lost / 2 else "network"
                failed += 1
                continue
            way.limit = "sender"
            failed = failed + 1 if step.sent_rate < KEPT_UP * rate else 0
            rate *= 2

    def _burst_there(self, burst: Burst) -> BurstResult:
        number = self._next()
        prefix = data_prefix(self._token, self._cookie, number)
        sent_rate = send_burst(self._socket, prefix, burst, self._peer)
        # What is late is behind a queue, which the question has to pass as well.
        answer, _ = self._ask(Kind.COUNT, Kind.COUNTED, number=number)
        arrived, rate, overflows, merged = answer.arguments[:4]
        refused = not self._socket.segments
        arrived = min(arrived, burst.count)
        return BurstResult(burst.count, arrived, sent_rate, rate, overflows, merged, refused)

    def _burst_back(self, burst: Burst) -> BurstResult:
        number = self._next()
        prefix = data_prefix(self._token, self._cookie, number)
        self._tally = tally = Tally(prefix)
        before = self._socket.overflows
        patience = self._patience
        self._patience += burst.seconds
        try:
            arguments = (burst.count, burst.size, burst.rate, burst.train)
            answer, _ = self._ask(Kind.BURST, Kind.SENT, *arguments, number=number)
        finally:
            self._patience = patience
            self._tally = Tally(b"-")
        _, sent_rate, refused = answer.arguments[:3]
        overflows = self._socket.overflows - before
        arrived = min(tally.count, burst.count)
        return BurstResult(
            burst.count, arrived, sent_rate, tally.rate, overflows, tally.merged, bool(refused)
        )


def _ecn(seen: set[int]) -> Ecn:
    """Returns what became of ECT(0) by the ECN fields that arrived."""
    if seen == {ECT0}:
        return "kept"
    if seen == {0}:
        return "cleared"
    return "marked" if seen <= {ECT0, 3} else "changed"
