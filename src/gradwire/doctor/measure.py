"""Two hosts measure the path between them by sums over the engine, as a job sends them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from gradwire.core.settings import Settings
from gradwire.transport.native import load_engine

if TYPE_CHECKING:
    from gradwire import _engine

MEASURE_S = 1.0
"""How long two hosts sum, in seconds."""
MOST_BYTES = 256 << 20
"""The most bytes that a measurement sums."""
FIRST_ELEMENTS, LARGEST_ELEMENTS = 1 << 14, 1 << 22
LONG_SUM_S = 0.05
"""Sums grow until one takes so long, in seconds."""
SUM_S = 4.0
"""The time-out of a sum in seconds."""
PEER_S = 5.0
"""How long the other engine may be silent, in seconds."""
LEAST_PACKETS = 20
"""So many packets an end sends for a sum that does not end, as far as the other one knows."""
IN_FLIGHT = 10
"""So many packets may be under way as the two ends count them."""
STATISTICS = 4
"""How many numbers a sum adds up beside its elements."""


@dataclass
class End:
    """What one end of a path has seen.

    Attributes:
        heard: Whether anything arrived from the other end.
        answered: Whether the other end has answered datagrams of full length.
        sums: How many sums came to their end.
        complete: Whether the measurement did.
        stuck: Whether the first sum did not, although the other end was heard all the time.
        carried: The longest datagram that the path carries, in bytes; 0: not known.
        fragmented: Packets sent in parts, since the path carries shorter datagrams.
        sent: Packets and ACKs sent in the second half of the measurement.
        received: Those received there.
        arrived: Those received in all.
        rate: The rate at which packets were delivered to the other end, in bits per second.
        rtprop_s: The smallest round-trip time in seconds.
        marks: Whether this end sends ECT(0).
        ecn_failed: Whether the path does not carry it.
        overflows: Packets that this host's kernel dropped for want of buffer.
        segments: Whether the kernel takes trains.
    """

    heard: bool = False
    answered: bool = False
    sums: int = 0
    complete: bool = False
    stuck: bool = False
    carried: int = 0
    fragmented: int = 0
    sent: int = 0
    received: int = 0
    arrived: int = 0
    rate: int = 0
    rtprop_s: float = 0.0
    marks: bool = True
    ecn_failed: bool = False
    overflows: int = 0
    segments: bool = True


@dataclass
class Way:
    """One direction of a path.

    Attributes:
        datagram: The longest datagram that passes, in bytes; 0: not known.
        ecn: What becomes of ECT(0): "kept", or "cleared"; "unknown" where nothing shows it.
        trains: Datagrams sent with UDP_SEGMENT: "pass", "lost" although single ones pass, "refused"
            by the sender's kernel; "unknown" where nothing shows it.
        rate: The rate in bits per second.
        loss: The share of packets lost.
        packets: The number of packets behind `loss`.
        overflows: Packets that the receiver's kernel dropped for want of buffer.
    """

    datagram: int = 0
    ecn: Literal["kept", "cleared", "unknown"] = "unknown"
    trains: Literal["pass", "lost", "refused", "unknown"] = "unknown"
    rate: int = 0
    loss: float = 0.0
    packets: int = 0
    overflows: int = 0


@dataclass
class Measurement:
    """What two hosts have measured.

    Attributes:
        answered: Whether datagrams pass both ways.
        heard: Whether anything arrived at the first host.
        complete: Whether the measurement came to its end.
        refusal: Why the first host's kernel refused a datagram; "" where it did not.
        limit: The longest datagram that both hosts' interfaces and routes take, in bytes.
        headers: The bytes of the IP and UDP headers of each.
        rtt_s: The smallest round-trip time in seconds.
        there: From the first host to the second.
        back: From the second host to the first.
    """

    answered: bool = False
    heard: bool = False
    complete: bool = False
    refusal: str = ""
    limit: int = 0
    headers: int = 28
    rtt_s: float = 0.0
    there: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)


def open_engine(
    endpoint: int, session: int, address: str, port: int, datagram: int, settings: Settings
) -> _engine.Engine:
    """Opens the engine of one of two ends.

    Args:
        session: Any number of 32 bits, the same on both ends.
        port: The UDP port; 0 for any free one.
    """
    engine: _engine.Engine = load_engine().Engine(
        endpoint=endpoint,
        workers=2,
        servers=0,
        session=session & 0xFFFFFFFF | 1,
        address=address,
        port=port,
        datagram_bytes=datagram,
        peer_timeout_ns=int(PEER_S * 1e9),
        dscp=settings.dscp,
        ecn=settings.ecn,
    )
    return engine


def measure(engine: _engine.Engine, contact_s: float) -> End:
    """Sums with the other end for a second, and returns what this end has seen.

    Args:
        contact_s: How long to wait until datagrams pass both ways, in seconds.
    """
    found = End()
    engine.wait_connected(int(contact_s * 1e9))
    (peer,) = engine.peers()
    found.heard, found.answered = peer.heard, peer.answered
    if not found.answered:
        return found
    before: dict[str, float] = {}
    begun, took_s, moved, elements = time.monotonic(), 0.0, 0, FIRST_ELEMENTS
    while not found.complete:
        passed = max((time.monotonic() - begun) / MEASURE_S, moved / MOST_BYTES)
        # The other end may still wait for contact as the first sum begins.
        wait_s = SUM_S if found.sums else SUM_S + contact_s
        done = _sum(engine, found.sums, elements, (*(0.0,) * STATISTICS, passed, took_s), wait_s)
        if done is None:
            found.stuck = found.sums == 0 and engine.peers()[0].silence_ns < SUM_S * 0.5e9
            break
        found.sums += 1
        took_s, moved = done.total_ns / 1e9, moved + 4 * elements
        passed, last_s = done.stats_max[:2]  # the same at both ends
        if last_s < LONG_SUM_S:
            elements = min(2 * elements, LARGEST_ELEMENTS)
        found.complete = bool(before) and passed >= 1.0
        if not before and passed >= 0.5:  # until then the engine learns the path
            before = _count(engine, found)
    after = _count(engine, found) if found.complete else engine.counters()
    counted = {name: int(after[name] - before.get(name, 0)) for name in after}
    found.sent = counted["packets_sent"] + counted["acks_sent"]
    found.received = counted["packets_received"]
    found.arrived = int(after["packets_received"])
    found.carried, found.fragmented = int(after["path_limit"]), int(after["fragmented"])
    found.rate, found.rtprop_s = int(8 * after["btlbw"]), after["rtprop_ns"] / 1e9
    found.overflows = int(after["receive_overflows"])
    features = engine.features()
    found.marks, found.ecn_failed = bool(features["ecn"]), bool(after["ecn_failed"])
    found.segments = bool(features["udp_segment"])
    return found


def _count(engine: _engine.Engine, found: End) -> dict[str, float]:
    """Returns the counters while nothing but two tiny sums is under way between the ends."""
    _sum(engine, found.sums, 1, ())
    counters = engine.counters()
    _sum(engine, found.sums + 1, 1, ())
    found.sums += 2
    return counters


def exchange(engine: _engine.Engine, own: End) -> End | None:
    """Tells the other end what this one has seen, and returns what that has; None if it is gone."""
    values = [float(value) for value in astuple(own)]
    theirs: list[float] = []
    for at in range(0, len(values), STATISTICS):
        part = (values[at : at + STATISTICS] + [0.0] * STATISTICS)[:STATISTICS]
        done = _sum(engine, own.sums + at // STATISTICS, 1, part)
        if done is None:
            return None
        theirs += [total - mine for total, mine in zip(done.stats_sum, part, strict=True)]
    kinds = [type(value) for value in astuple(End())]
    return End(*(kind(round(value, 9)) for kind, value in zip(kinds, theirs, strict=False)))


def _sum(
    engine: _engine.Engine,
    number: int,
    elements: int,
    stats: Sequence[float],
    timeout_s: float = SUM_S,
) -> _engine.Completion | None:
    """Sums with the other end, exactly; None where that fails."""
    plan = load_engine().Plan(elements=elements, regions=[(0, elements, 0.0)])
    try:
        engine.all_reduce(
            op=number,
            step=number,
            plan=plan,
            data=np.zeros(elements, np.float32),
            stats=stats,
            timeout_ns=int(timeout_s * 1e9),
        )
    except RuntimeError:  # the engine has failed: the other end is gone
        return None
    until = time.monotonic() + 2 * timeout_s
    while time.monotonic() < until:
        done = engine.next_completion(100_000_000)
        if done is not None:
            return done if done.ok else None
    return None


def joined(own: End, other: End | None, limit: int, headers: int) -> Measurement:
    """Makes a measurement of what the two ends have seen.

    Args:
        other: What the second end has; None where the first did not hear of it.
        limit: The size of datagrams for which they met, in bytes.
    """
    found = Measurement(
        answered=own.answered,
        heard=own.heard,
        complete=own.complete and other is not None and other.complete,
        limit=limit,
        headers=headers,
        rtt_s=own.rtprop_s,
    )
    if own.answered:
        theirs = other or End(answered=True, sent=LEAST_PACKETS)
        back = own.stuck and own.arrived < theirs.sent / 2
        there = own.stuck and (theirs.arrived < own.sent / 2 if other else not back)
        found.there = _way(own, theirs, limit, lost=there)
        found.back = _way(theirs, own, limit, lost=back)
    return found


def _way(sender: End, receiver: End, limit: int, *, lost: bool) -> Way:
    missing = sender.sent - receiver.received if receiver.sums else 0
    lost_packets = missing if missing > IN_FLIGHT else 0
    short = 0 < sender.carried < limit and (sender.fragmented > 0 or not receiver.fragmented)
    return Way(
        datagram=sender.carried if short else limit if sender.answered else 0,
        ecn="cleared"
        if sender.ecn_failed
        else "kept"
        if sender.marks and sender.sums
        else "unknown",
        trains="lost" if lost else "pass" if sender.segments else "refused",
        rate=sender.rate,
        loss=lost_packets / sender.sent if sender.sent else 0.0,
        packets=sender.sent if receiver.sums else 0,
        overflows=receiver.overflows,
    )
