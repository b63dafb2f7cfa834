"""Opening an engine: the endpoints meet in the store, then reach each other over UDP."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gradwire.core.errors import ConfigError, EngineMissingError, RendezvousError
from gradwire.core.leaving import inside
from gradwire.core.settings import Settings
from gradwire.transport.addresses import (
    LocalAddress,
    host_identity,
    local_addresses,
    reachable_interfaces,
    scoped,
    with_port,
)
from gradwire.transport.introductions import (
    Introduction,
    agree_datagram,
    check_introductions,
    check_keys,
    introduce,
    new_session,
)
from gradwire.transport.keys import KeyMaker, libcrypto_errors
from gradwire.transport.meeting import Meeting
from gradwire.transport.native import load_engine
from gradwire.transport.store import Store, base_store, store_host
from gradwire.transport.texts import ELSE, read_all, read_mapping, read_text, read_wholes

if TYPE_CHECKING:
    from gradwire import _engine

log = logging.getLogger("gradwire")

HURRIED_S = 5.0
"""Seconds that endpoints in a hurry wait for each other: each notices it within a moment."""

CONNECT_NS = 200_000_000
"""Nanoseconds between two looks into the store while peers answer."""

MOST_NAMED = 16
"""How many endpoints a line of the log, or a part of an error, names at most."""


@dataclass(frozen=True)
class Place:
    """Where an endpoint can be reached: its address, and a port for each of its engine threads."""

    address: str
    ports: tuple[int, ...]

    def __str__(self) -> str:
        return with_port(self.address, *self.ports)


class OpenEngine:
    def __init__(
        self, engine: _engine.Engine, session: int, datagram: int, meeting: Meeting, tag: int
    ) -> None:
        self.engine = engine
        self.session = session
        self.datagram = datagram
        self.meeting = meeting
        self.tag = tag


def meet_servers(
    store: Store,
    group: str,
    settings: Settings,
    *,
    endpoint: int,
    workers: int,
    ranks: Sequence[int] | None = None,
) -> Meeting:
    """Makes the meeting of workers and servers, for either of them.

    It is in the store under all prefixes, because servers know no process group.

    Args:
        endpoint: This endpoint's number: workers by rank, then servers.
        ranks: The workers' ranks in the job, which errors name; None for 0, 1, 2, ….
    """
    return Meeting(
        base_store(store),
        group,
        endpoint=endpoint,
        workers=workers,
        servers=settings.server_count,
        timeout_s=settings.rendezvous_timeout,
        ranks=ranks,
    )


def check_cores(cores: int) -> None:
    """Checks that this process may use as many cores; raises ConfigError."""
    usable = len(os.sched_getaffinity(0))
    if cores > usable:
        raise ConfigError.of(
            "cores", cores, f"at most {usable}, the cores that this process may use"
        )


def open_engine(store: Store, meeting: Meeting, settings: Settings) -> OpenEngine:
    """Meets the other endpoints, opens the engine and connects it; collective.

    Raises:
        ConfigError: An address or port cannot be used.
        RendezvousError: Endpoints are absent, differ or do not answer; the error names them.
    """
    native = load_engine()
    endpoint, workers, servers = meeting.endpoint, meeting.workers, meeting.servers
    try:
        check_cores(settings.cores)
        offered = local_addresses(settings.interface, store_host(store))
        keys = KeyMaker(endpoint, settings)
    except (ConfigError, EngineMissingError) as error:
        meeting.tell_failure(error)
        raise
    everybody = introduce(
        meeting,
        Introduction(
            endpoint=endpoint,
            protocol=int(native.PROTOCOL_VERSION),
            addresses=offered,
            port=settings.port,
            datagram=settings.datagram,
            host=socket.gethostname(),
            identity=host_identity(),
            interfaces=reachable_interfaces(),
            configuration={
                "route": settings.route,
                "servers": servers,
                "workers": workers,
                "auth": keys.auth,
                "cores": settings.cores,
            },
            session=new_session() if endpoint == 0 else 0,
            hello=keys.hello,
        ),
    )
    chosen = check_introductions(meeting, everybody)
    if keys.auth == "none" and endpoint == 0:
        log.warning(
            'auth="none": datagrams are not authenticated, so whoever reaches the network can '
            "disturb the job"
        )
    hellos = [each.hello for each in everybody]
    check_keys(meeting, keys.proof(hellos))
    datagram = agree_datagram(meeting, everybody, chosen)
    own = chosen[endpoint]
    session = everybody[0].session
    try:
        options = keys.engine_options(hellos, settings.cores)
    except ValueError as error:
        wrong = meeting.error(
            f"{meeting.describe([endpoint])} can make no keys of what the others have published "
            f"({error}): {ELSE}",
            [endpoint],
        )
        meeting.tell_failure(wrong)
        raise wrong from error
    try:
        with libcrypto_errors(), inside():
            engine = native.Engine(
                endpoint=endpoint,
                workers=workers,
                servers=servers,
                session=session,
                address=own.bound,
                ports=settings.ports,
                engines=settings.cores,
                datagram_bytes=keys.without_tag(datagram),
                peer_timeout_ns=int(settings.peer_timeout * 1e9),
                memory_limit=settings.memory_limit,
                dscp=settings.dscp,
                ecn=settings.ecn,
                ranks=meeting.names.ranks,
                **options,
            )
    except EngineMissingError as error:
        meeting.tell_failure(error)
        raise
    except (OSError, ValueError) as error:
        who = meeting.describe([endpoint])
        what = f"cannot open UDP {own.bound} port={settings.port}: {error}"
        meeting.tell_failure(ConfigError(what))
        if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
            allowed = "choose another port= or range of ports, or 0 for any free one"
            raise ConfigError(
                f"{who} {what}; {allowed}", setting="port", value=settings.port, allowed=allowed
            ) from error
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{who} {what}", setting="interface", value=own.bound) from error
        raise ConfigError(f"{who} {what}") from error
    try:
        texts = meeting.exchange(json.dumps([port for _, port in engine.addresses]))
        places = [
            Place(scoped(place.address, own.interface), ports)
            for place, ports in zip(chosen, _ports(meeting, texts, settings.cores), strict=True)
        ]
        engine.connect(
            *([(each.address, each.ports[n]) for each in places] for n in range(settings.cores))
        )
        setup = _setup(engine, meeting, own, places, datagram)
        _connect(engine, meeting, everybody, places, datagram, settings.rendezvous_timeout, setup)
    except BaseException as error:
        with inside():
            engine.close()
        meeting.tell_failure(error)
        raise
    return OpenEngine(engine, session, keys.without_tag(datagram), meeting, keys.tag_bytes)


def _connect(
    engine: _engine.Engine,
    meeting: Meeting,
    everybody: list[Introduction],
    places: list[Place],
    datagram: int,
    timeout_s: float,
    setup: str,
) -> None:
    """Waits until all endpoints have answered each other over UDP.

    The first endpoint that waits too long makes all publish which peers they hear. So all raise
    the same RendezvousError, which names the directions in which nothing arrives. `setup` is this
    endpoint's line for the log, in which endpoint 0 writes the lines of all.
    """
    deadline = time.monotonic() + timeout_s
    while _waits(engine) and engine.failure() is None:
        meeting.check_failures()
        if time.monotonic() >= deadline:
            meeting.hurry()
        if meeting.hurried():
            break
    # Endpoints that are connected wait here for the others, so they need a longer time-out. In a
    # hurry they do not, and whoever does not come then has died.
    patience_s = 1.5 * timeout_s + 1.0
    if meeting.hurried():
        patience_s = min(patience_s, HURRIED_S)
    own = json.dumps(asdict(_hearing(engine, setup)))
    texts = meeting.exchange(own, patience_s)
    hearings = read_all(
        meeting, "what is heard", texts, lambda value: Hearing.read(value, meeting.endpoints)
    )
    if any(each.answered != each.peers for each in hearings):
        raise _unconnected(meeting, everybody, places, hearings, datagram, timeout_s)
    log.info("reached all peers: %s", setup)
    if meeting.endpoint == 0:
        setups = [each.setup for each in hearings]
        log.info("%d endpoints have met:\n%s", len(setups), "\n".join(setups))


def _waits(engine: _engine.Engine) -> bool:
    """Waits for a moment until all peers have answered; returns whether some have not."""
    with inside():  # engines are opened anew on a daemon thread, too
        return bool(engine.wait_connected(CONNECT_NS))


def _ports(meeting: Meeting, texts: list[str], cores: int) -> list[tuple[int, ...]]:
    """Reads the ports that endpoints have opened, one for each engine thread."""

    def read(value: object) -> tuple[int, ...]:
        ports = tuple(read_wholes(value))
        if len(ports) != cores or not all(0 < port < 1 << 16 for port in ports):
            raise ValueError(f"{cores} ports are needed")
        return ports

    return read_all(meeting, "the ports", texts, read)


def _setup(
    engine: _engine.Engine,
    meeting: Meeting,
    own: LocalAddress,
    places: list[Place],
    datagram: int,
) -> str:
    features = engine.features()
    peers = [
        f"{meeting.describe([peer.endpoint])} at {places[peer.endpoint]}" for peer in engine.peers()
    ]
    switches = (("GSO", "udp_segment"), ("GRO", "udp_gro"), ("ECN", "ecn"))
    words = [f"{name} {'on' if features[key] else 'off'}" for name, key in switches]
    more = f" and {len(peers) - MOST_NAMED} more" if len(peers) > MOST_NAMED else ""
    return (
        f"{meeting.describe([meeting.endpoint])}: UDP {places[meeting.endpoint]}, "
        f"interface {own.interface or 'unknown'} (MTU {own.mtu or 'unknown'}), datagrams of "
        f"{datagram} bytes, receive buffer {features['rcvbuf']} bytes (asked for "
        f"{features['rcvbuf_asked']}), send buffer {features['sndbuf']} (asked for "
        f"{features['sndbuf_asked']}), {', '.join(words)}; peers: "
        f"{', '.join(peers[:MOST_NAMED])}{more}"
    )


@dataclass
class Hearing:
    """The peers that an endpoint reached over UDP, when it had reached all or gave up.

    Attributes:
        peers: The endpoints that it has to reach.
        answered: Those that answered it.
        heard: Those of which any packet arrived.
        refusal: Why the kernel refused its datagrams; "" where it did not.
        failure: Why its engine failed; "" where it has not.
    """

    peers: list[int]
    answered: list[int]
    heard: list[int]
    refusal: str
    failure: str
    setup: str

    @staticmethod
    def read(value: object, endpoints: int) -> Hearing:
        """Reads what an endpoint has published; raises one of `texts.WRONG`."""
        found = read_mapping(value)
        lists = (read_wholes(found[name]) for name in ("peers", "answered", "heard"))
        peers, answered, heard = lists
        if any(each >= endpoints for each in (*peers, *answered, *heard)):
            raise ValueError("there is no such endpoint")
        words = (read_text(found[name]) for name in ("refusal", "failure", "setup"))
        refusal, failure, setup = words
        return Hearing(peers, answered, heard, refusal, failure, setup)


def _hearing(engine: _engine.Engine, setup: str) -> Hearing:
    peers = engine.peers()
    failure = engine.failure()
    return Hearing(
        [peer.endpoint for peer in peers],
        [peer.endpoint for peer in peers if peer.answered],
        [peer.endpoint for peer in peers if peer.heard],
        engine.refusal(),
        "" if failure is None else failure.text,
        setup,
    )


def _unconnected(
    meeting: Meeting,
    everybody: list[Introduction],
    places: list[Place],
    hearings: list[Hearing],
    datagram: int,
    timeout_s: float,
) -> RendezvousError:
    """Makes the error of endpoints that do not all reach each other, the same on all of them."""
    known = []
    refused, deaf, mute = [], [], []
    for endpoint, hearing in enumerate(hearings):
        who = meeting.describe([endpoint])
        heard_by = [e for e in hearing.peers if endpoint in hearings[e].heard]
        unheard = [e for e in hearing.peers if e not in hearing.heard]
        if hearing.failure:
            known.append(f"{who} failed: {hearing.failure}")
        if hearing.refusal:
            refused.append(endpoint)
            known.append(f"the kernel of {who}'s host refused datagrams: {hearing.refusal}")
        if unheard and hearing.heard:
            known.append(f"{who} does not hear {meeting.describe(unheard[:MOST_NAMED])}")
        elif unheard:
            hear = "hears" if len(heard_by) == 1 else "hear"
            though = f", though {meeting.describe(heard_by[:MOST_NAMED])} {hear} it"
            known.append(f"{who} hears nobody{though if heard_by else ''}")
        if not hearing.heard and heard_by:
            deaf.append(endpoint)
        if hearing.heard and not heard_by:
            mute.append(endpoint)
    missing = [e for e, hearing in enumerate(hearings) if hearing.answered != hearing.peers]
    at_fault = refused or deaf or mute or missing
    advice = (
        "a firewall, the wrong network, or a path that carries no datagrams; set interface= or "
        "GRADWIRE_INTERFACE, or port= for a fixed port that a firewall can let pass"
    )
    if not known:  # what is short gets through
        for endpoint in missing:
            hearing = hearings[endpoint]
            silent = [e for e in hearing.peers if e not in hearing.answered]
            known.append(
                f"{meeting.describe([endpoint])} hears {meeting.describe(silent[:MOST_NAMED])}, "
                f"but gets no answer to datagrams of {datagram} bytes"
            )
        advice = (
            "a path that carries shorter datagrams only, or loses most; set datagram= or "
            "GRADWIRE_DATAGRAM to the length that it carries, or raise its MTU"
        )
    where = ", ".join(
        f"{meeting.describe([e])} at {places[e]} on {everybody[e].host!r}"
        for e in at_fault[:MOST_NAMED]
    )
    return meeting.error(
        f"not all reach each other over UDP after {timeout_s:g} s: "
        f"{'; '.join(known[:MOST_NAMED])} ({where}): {advice}",
        at_fault,
    )
