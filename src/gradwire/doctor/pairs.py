"""The pairs of hosts of a job measure the path between them.

No host takes part in two measurements at once, since they would disturb each other.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.core.settings import Settings
from gradwire.doctor.findings import Finding
from gradwire.doctor.judge import accept, path_findings
from gradwire.doctor.measure import End, Measurement, joined, measure, open_engine
from gradwire.transport.addresses import UDP_OVERHEAD, LocalAddress, on_first_free, scoped
from gradwire.transport.meeting import Meeting
from gradwire.transport.texts import read_all, read_mapping, read_whole

CONTACT_S = 4.0
"""How long a pair tries to reach each other, in seconds."""
LONGEST_ROUND_S = 30.0
"""How long a round takes at most, in seconds."""


@dataclass(frozen=True)
class Pair:
    """What became of the path between two hosts.

    Attributes:
        heard: Whether anything of the first one arrived at the other.
    """

    prober: int
    responder: int
    found: Measurement
    heard: bool


def rounds(hosts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns all pairs of hosts in as few rounds as can be; a round has each host once at most."""
    circle = [*hosts, *[None] * (len(hosts) % 2)]
    half = len(circle) // 2
    made = []
    for _ in circle[1:]:
        ends = zip(circle[:half], reversed(circle[half:]), strict=True)
        made.append([(min(a, b), max(a, b)) for a, b in ends if a is not None and b is not None])
        circle.insert(1, circle.pop())  # the first one stays, all others move on
    return made


def measure_all(
    meeting: Meeting,
    own: LocalAddress,
    addresses: Mapping[int, LocalAddress],
    datagram: int,
    settings: Settings,
    say: Callable[[str], None],
) -> list[Pair]:
    """Lets each two hosts measure, in rounds of pairs that have no host in common; collective.

    Args:
        addresses: The address of each host by the rank that measures for it.
        say: Gets what the ranks are about to do.
    """
    rank = meeting.endpoint
    headers = UDP_OVERHEAD[own.version]
    # An engine takes the packets of its session alone.
    texts = meeting.exchange(str(secrets.randbits(32)))
    tokens = read_all(meeting, "the session", texts, read_whole)

    def share(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        texts = meeting.exchange(json.dumps(values), LONGEST_ROUND_S)
        return read_all(meeting, "the figures", texts, read_mapping)

    def take_part(prober: int, responder: int) -> list[Mapping[str, Any]]:
        """Measures with the other host of a pair; returns what all ranks have found."""
        session = tokens[prober] ^ responder << 8
        try:
            engine = on_first_free(
                settings.ports,
                lambda port: open_engine(
                    int(rank == responder), session, own.bound, port, datagram, settings
                ),
            )
        except OSError as error:
            meeting.tell_failure(error)
            raise
        try:
            ports = share({"port": engine.address[1]})
            engine.connect(
                [
                    (scoped(addresses[each].address, own.interface), ports[each]["port"])
                    for each in (prober, responder)
                ]
            )
            end = measure(engine, CONTACT_S)
            refusal = engine.refusal()
        finally:
            engine.close()
        return share({"end": asdict(end), "refusal": refusal})

    pairs = []
    planned = rounds(list(addresses))
    for number, pairs_of_round in enumerate(planned, 1):
        say(f"round {number} of {len(planned)}: {len(pairs_of_round)} pairs of hosts measure")
        mine = [pair for pair in pairs_of_round if rank in pair]
        if mine:
            found = take_part(*mine[0])
        else:
            share({})
            found = share({})
        for prober, responder in pairs_of_round:
            ends = [End(**found[each]["end"]) for each in (prober, responder)]
            path = joined(ends[0], ends[1], datagram, headers)
            path.answered = path.answered and ends[1].answered
            path.refusal = found[prober]["refusal"]
            pairs.append(Pair(prober, responder, path, ends[1].heard))
    return sorted(pairs, key=lambda pair: (pair.prober, pair.responder))


def pair_findings(
    pair: Pair, hosts: Mapping[int, str], addresses: Mapping[int, LocalAddress]
) -> list[Finding]:
    here, there = hosts[pair.prober], hosts[pair.responder]
    if pair.found.answered:
        return path_findings(pair.found, here, there)
    ways = []
    if not pair.heard:
        ways.append((here, there, accept(there, addresses[pair.prober].address, None)))
    if not pair.found.heard:
        ways.append((there, here, accept(here, addresses[pair.responder].address, None)))
    if not ways:
        text = f"{here} and {there} hear each other, but answers are lost: the network loses most."
        return [Finding("problem", "UDP", text)]
    findings = []
    for sender, receiver, typed in ways:
        text = (
            f"{sender} → {receiver}: no UDP datagram arrives. A firewall of {receiver}, or one "
            "between, drops it."
        )
        if pair.found.refusal and sender == here:
            text = f"{sender} → {receiver}: the sender's kernel refuses: {pair.found.refusal}."
        findings.append(Finding("problem", "UDP", text, typed))
    return findings
