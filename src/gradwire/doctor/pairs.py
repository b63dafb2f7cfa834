"""The pairs of hosts of a job measure the path between them.

No host takes part in two measurements at once, since they would disturb each other.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from gradwire.core.settings import Settings
from gradwire.doctor.findings import Finding
from gradwire.doctor.judge import accept, path_findings
from gradwire.doctor.prober import Measurement, Prober, RoundTrips, Way
from gradwire.doctor.responder import Responder
from gradwire.doctor.udp import UdpSocket
from gradwire.transport.addresses import LocalAddress, on_first_free, scoped
from gradwire.transport.meeting import Meeting

__all__ = ["Pair", "measure_all", "pair_findings", "rounds"]

CONTACT_S = 2.0
"""How long a pair tries to reach each other, in seconds."""
PAIR_S = 30.0
"""How long a pair takes at most, in seconds."""
QUIET_S = 5.0
"""A responder goes on when its prober asks nothing for so long, in seconds."""
LONGEST_ROUND_S = PAIR_S + QUIET_S


@dataclass(frozen=True)
class Pair:
    """What became of the path between two hosts.

    Attributes:
        prober: The rank that measured.
        responder: The rank that answered.
        found: What it measured.
        heard: Datagrams of the prober that the responder received.
    """

    prober: int
    responder: int
    found: Measurement
    heard: int


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
    say: Callable[[str], None] = lambda text: None,
) -> list[Pair]:
    """Lets each two hosts measure, in rounds of pairs that have no host in common; collective.

    Args:
        addresses: The address of each host by the rank that measures for it.
        datagram: The agreed size of datagrams in bytes.
        say: Gets what the ranks are about to do.
    """
    rank = meeting.endpoint
    opened: UdpSocket | None = None
    port = 0
    try:
        if rank in addresses:
            try:
                opened = on_first_free(
                    settings.ports, lambda port: UdpSocket(own.bound, port, settings.dscp)
                )
            except OSError as error:
                meeting.tell_failure(error)
                raise
            port = opened.place[1]
        # A token for each measurement: the responder has to know it before the first datagram.
        token = secrets.randbits(48)
        texts = meeting.exchange(json.dumps({"port": port, "token": token}))
        ends = [json.loads(text) for text in texts]

        def measure(prober: int, responder: int) -> dict[str, Any]:
            assert opened is not None
            other = responder if rank == prober else prober
            there = scoped(addresses[other].address, own.interface)
            peer = socket.getaddrinfo(there, ends[other]["port"], type=socket.SOCK_DGRAM)[0][4]
            token = ends[prober]["token"] ^ responder
            if rank == prober:
                return asdict(Prober(opened, peer, datagram, PAIR_S, token).measure(CONTACT_S))
            answers = Responder([opened], limit=lambda message: datagram, token=token)
            answers.serve(
                QUIET_S, once=True, knock=peer, contact_s=CONTACT_S, longest_s=LONGEST_ROUND_S
            )
            return {"heard": answers.hellos}

        pairs = []
        planned = rounds(list(addresses))
        for number, pairs_of_round in enumerate(planned, 1):
            say(f"round {number} of {len(planned)}: {len(pairs_of_round)} pairs of hosts measure")
            mine = [measure(*pair) for pair in pairs_of_round if rank in pair]
            # A pair may take its whole time before it comes here.
            text = json.dumps(mine[0] if mine else {})
            found = list(
                map(json.loads, meeting.exchange(text, LONGEST_ROUND_S + meeting.timeout_s))
            )
            pairs += [
                Pair(a, b, _measurement(found[a]), int(found[b]["heard"]))
                for a, b in pairs_of_round
            ]
    finally:
        if opened is not None:
            opened.close()
    return sorted(pairs, key=lambda pair: (pair.prober, pair.responder))


def _measurement(values: dict[str, Any]) -> Measurement:
    known = {each.name for each in fields(Measurement)}
    plain = {name: value for name, value in values.items() if name in known}
    plain["rtt"] = RoundTrips(**plain.get("rtt", {}))
    plain["there"] = Way(**plain.get("there", {}))
    plain["back"] = Way(**plain.get("back", {}))
    return Measurement(**plain)


def pair_findings(
    pair: Pair, hosts: Mapping[int, str], addresses: Mapping[int, LocalAddress]
) -> list[Finding]:
    """Returns what is found of a path between two hosts, by their names and addresses."""
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
