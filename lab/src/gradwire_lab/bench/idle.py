"""Idle ports are explained from the timelines of engines: for how long within ops, and why.

A port is idle while all that has come would have left at its rate. A bucket of tokens, as the
kernel's tbf has one, changes nothing: it is full again just then. The clock is one for all engines.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

__all__ = ["REASONS", "Entry", "Found", "PortFound", "explain"]


class Entry(NamedTuple):
    """An entry is a row of a timeline, as `gradwire.transport.transfer.Engine.record` returns it.

    Attributes:
        time: when, in nanoseconds.
        what: what happened, a word of engine/proto/base/timeline.h.
        peer: the endpoint that it is about.
        value: bytes on the wire of "sent" and "signal"; when a "timer" was due, and what was "read"
            arrived; the thread's processor time at "turn" and "sleep"; the op that has "begun" or
            "ended".
    """

    time: int
    what: str
    peer: int | None
    value: int


REASONS = {
    "timer": "a timer was due for a train, and the engine's thread slept on",
    "read": "what allowed a train had arrived, and the engine's thread slept on",
    "preempted": "the engine's thread worked, and had no processor",
    "working": "the engine's thread worked",
    "pace": "the next train had its time",
    "blocked": "the socket took no more",
    "window": "as much was in flight as the window allows",
    "credit": "the receivers allowed no more",
    "peer": "the receivers had not begun the op",
    "sum": "all else had gone, and sums were not ready",
    "done": "all had gone",
    "nothing": "the rank had not begun the op",
    "others": "the senders sent to others, or queued for them",
}
"""Why a port is idle, the first that holds for any of its destinations; "others" is of ways in."""
_ORDER = {reason: number for number, reason in enumerate(REASONS)}
_STOPS = frozenset(REASONS) - {"timer", "read", "preempted", "working", "blocked", "others"}
_ALL = -1
"""All peers."""
_SENT = ("sent", "signal")
_ACTS = (*_SENT, "timer", "read")
"""What happens while the thread works."""


@dataclass
class PortFound:
    """One direction of a port within the ops.

    Attributes:
        rank: whose port it is.
        way: "out" or "in".
        sent: seconds that its bytes take at its rate.
        idle: seconds that it was idle, by reason.
    """

    rank: int
    way: str
    sent: float = 0.0
    idle: dict[str, float] = field(default_factory=dict)

    def add(self, reason: str, nanoseconds: float) -> None:
        """Add idle time."""
        self.idle[reason] = self.idle.get(reason, 0.0) + nanoseconds / 1e9


@dataclass(frozen=True)
class Found:
    """What timelines tell.

    Attributes:
        ops: seconds of each op, from the first rank that began it to the last that ended it.
        seconds: those in which an op was open.
        ports: both directions of every rank's port.
    """

    ops: tuple[float, ...]
    seconds: float
    ports: tuple[PortFound, ...]

    @property
    def median(self) -> float:
        """Return the median op in seconds."""
        return median(self.ops)

    def mean(self, way: str) -> PortFound:
        """Return the mean of all ranks' ports in one direction."""
        ports = [port for port in self.ports if port.way == way]
        idle: dict[str, float] = {}
        for port in ports:
            for reason, seconds in port.idle.items():
                idle[reason] = idle.get(reason, 0.0) + seconds / len(ports)
        return PortFound(-1, way, sum(port.sent for port in ports) / len(ports), idle)


def explain(
    ranks: Sequence[Sequence[Sequence[Entry]]], rate: float, fastest: int | None = None
) -> Found:
    """Explain for how long each port was idle while an op was open.

    Args:
        ranks: for each rank the timeline of each of its engine's threads.
        rate: of each direction of each port, in bytes per second.
        fastest: how many ops count, the fastest ones; None for all.

    Raises:
        ValueError: a timeline is not whole, or no op began and ended on all ranks.
    """
    if any(entry.what == "full" for rank in ranks for engine in rank for entry in engine):
        raise ValueError("a timeline is not whole: there was more than was kept")
    ops = _ops(ranks)
    if not ops:
        raise ValueError("the timelines have no op that began and ended on all ranks")
    ops = sorted(ops, key=lambda op: op[1] - op[0])[:fastest]
    spans = _merged(ops)
    begin = spans[0][0]
    senders = [_Sender(engines, rate, begin) for engines in ranks]
    ports = []
    for rank, sender in enumerate(senders):
        others = [each for each in senders if each is not sender]
        arrivals = list(heapq.merge(*(each.left_for(rank) for each in others)))
        queue = _Queue(rate, begin)
        for at, size in arrivals:
            queue.add(at, size)
        out = PortFound(rank, "out", _within(sender.left, spans) / rate)
        into = PortFound(rank, "in", _within(arrivals, spans) / rate)
        for a, b in sender.queue.idle(spans):
            for reason, lasted in sender.reasons(a, b):
                out.add(reason, lasted)
        for a, b in queue.idle(spans):
            for each in others:
                for reason, lasted in each.reasons(a, b, rank):
                    into.add(reason, lasted / len(others))
        ports += [out, into]
    return Found(
        tuple((b - a) / 1e9 for a, b in ops), sum(b - a for a, b in spans) / 1e9, tuple(ports)
    )


def _ops(ranks: Sequence[Sequence[Sequence[Entry]]]) -> list[tuple[int, int]]:
    """Return when each op began first and ended last, where all threads have both."""
    begun: dict[int, list[int]] = {}
    ended: dict[int, list[int]] = {}
    for entry in (entry for rank in ranks for engine in rank for entry in engine):
        if entry.what in ("begun", "ended"):
            times = begun if entry.what == "begun" else ended
            times.setdefault(entry.value, []).append(entry.time)
    threads = sum(len(rank) for rank in ranks)
    whole = [op for op in begun if len(begun[op]) == len(ended.get(op, ())) == threads]
    return sorted((min(begun[op]), max(ended[op])) for op in whole)


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return intervals in order, those that overlap as one."""
    found: list[tuple[int, int]] = []
    for a, b in sorted(intervals):
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(b, found[-1][1])
        elif b > a:
            found.append((a, b))
    return found


def _within(sizes: Sequence[tuple[float, int]], spans: Sequence[tuple[int, int]]) -> int:
    """Return the bytes at times within the spans."""
    return sum(size for at, size in sizes if _inside(spans, at))


def _inside(intervals: Sequence[tuple[float, float]], at: float) -> bool:
    number = bisect.bisect_right(intervals, (at, math.inf)) - 1
    return number >= 0 and at < intervals[number][1]


class _Queue:
    """A queue follows one direction of a port."""

    def __init__(self, rate: float, begin: int) -> None:
        self._per_byte = 1e9 / rate
        self._free: float = begin  # when all that came has left
        self._gaps: list[tuple[float, float]] = []
        self.busy: list[tuple[float, float]] = []

    def add(self, at: float, size: int) -> float:
        """Take bytes that come at a time; return when they have left."""
        if at > self._free:
            self._gaps.append((self._free, at))
            self._free = at
        begin, self._free = self._free, self._free + size * self._per_byte
        if self.busy and begin <= self.busy[-1][1]:
            begin, _ = self.busy.pop()
        self.busy.append((begin, self._free))
        return self._free

    def idle(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[float, float]]:
        """Yield when nothing waited within the spans."""
        gaps = [*self._gaps, (self._free, math.inf)]
        number = 0
        for a, b in spans:
            while gaps[number][1] <= a:
                number += 1
            for low, high in gaps[number:]:
                if low >= b:
                    break
                yield max(a, low), min(b, high)


class _Thread:
    """A thread of an engine: what it did and why it stopped, at any time."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        # Why nothing goes, by peer; empty while the thread works.
        self._times: list[float] = []
        self._stops: list[dict[int, str]] = []
        late: dict[str, list[tuple[int, int]]] = {"timer": [], "read": []}
        pending: list[Entry] = []  # late, and it is not known whether it mattered
        # From each time on: whether the thread sleeps, and its share of a processor.
        self._turns: list[float] = []
        self._runs: list[tuple[bool, float]] = []
        before: Entry | None = None
        for entry in entries:
            if entry.what in _ACTS:
                self._change(entry.time, {})
                if entry.what not in _SENT:
                    pending.append(entry)
                elif entry.what == "sent":
                    for each in pending:
                        late[each.what].append((each.value, each.time))
                    pending = []
            elif entry.what == "blocked":
                self._change(entry.time, {_ALL: "blocked"})
            elif entry.what in _STOPS:
                pending = []
                stops = {} if not self._stops or _ALL in self._stops[-1] else self._stops[-1]
                self._change(entry.time, {**stops, entry.peer or 0: entry.what})
            elif entry.what in ("turn", "sleep"):
                if before is not None:
                    taken = (entry.value - before.value) / max(entry.time - before.time, 1)
                    self._turns.append(before.time)
                    self._runs.append((before.what == "sleep", min(max(taken, 0.0), 1.0)))
                before = entry
        self._late = {what: _merged(intervals) for what, intervals in late.items()}
        edges = [at for each in self._late.values() for interval in each for at in interval]
        self.edges = sorted({*self._times, *self._turns, *edges})

    def _change(self, at: int, stops: dict[int, str]) -> None:
        if self._times and self._times[-1] == at:
            self._stops[-1] = stops
        else:
            self._times.append(at)
            self._stops.append(stops)

    def why(self, at: float, peer: int | None) -> list[tuple[str, float]]:
        """Return why nothing goes to a peer, or to any: reasons and their shares."""
        number = bisect.bisect_right(self._times, at) - 1
        stops = self._stops[number] if number >= 0 else {_ALL: "nothing"}
        late = next((what for what, every in self._late.items() if _inside(every, at)), None)
        if late is not None or not stops:
            number = bisect.bisect_right(self._turns, at) - 1
            asleep, taken = self._runs[number] if number >= 0 else (bool(stops), 1.0)
            if asleep:
                return [(late or "working", 1.0)]
            return [("working", taken), ("preempted", 1.0 - taken)]
        if _ALL in stops:
            return [(stops[_ALL], 1.0)]
        if peer is not None:
            return [(stops.get(peer, "nothing"), 1.0)]
        return [(min(stops.values(), key=_ORDER.__getitem__), 1.0)]


class _Sender:
    """A sender is a rank: its threads, and what they send through its port."""

    def __init__(self, engines: Sequence[Sequence[Entry]], rate: float, begin: int) -> None:
        self._threads = [_Thread(entries) for entries in engines]
        self.queue = _Queue(rate, begin)
        self._left: list[tuple[float, int | None, int]] = []
        for entry in heapq.merge(*engines, key=lambda each: each.time):
            if entry.what in _SENT:
                self._left.append(
                    (self.queue.add(entry.time, entry.value), entry.peer, entry.value)
                )
        self._busy = [at for interval in self.queue.busy for at in interval]

    @property
    def left(self) -> list[tuple[float, int]]:
        """Return when bytes left the port, and how many."""
        return [(at, size) for at, _, size in self._left]

    def left_for(self, rank: int) -> list[tuple[float, int]]:
        """Return those for one rank."""
        return [(at, size) for at, peer, size in self._left if peer == rank]

    def reasons(self, a: float, b: float, peer: int | None = None) -> Iterator[tuple[str, float]]:
        """Yield why nothing went in an interval, to a peer or to any, and how long for each."""
        edges = {a, b}
        for every in (self._busy, *(thread.edges for thread in self._threads)):
            edges.update(every[bisect.bisect_right(every, a) : bisect.bisect_left(every, b)])
        cuts = sorted(edges)
        for low, high in itertools.pairwise(cuts):
            for reason, share in self._why((low + high) / 2, peer):
                yield reason, share * (high - low)

    def _why(self, at: float, peer: int | None) -> list[tuple[str, float]]:
        if peer is not None and _inside(self.queue.busy, at):
            return [("others", 1.0)]
        found = [thread.why(at, peer) for thread in self._threads]
        return min(found, key=lambda reasons: _ORDER[reasons[0][0]])
