"""What endpoints say of themselves when they meet, and the checks that all of them make of it.

Each endpoint (the workers by rank, then the servers) publishes an introduction, waits for those of
all others and checks them: protocol version, configuration, reachability. Every rank finds any
mismatch in the same introductions, so all of them raise the same error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire.core.environment import PORT, ports_of, read_ports
from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.core.plan import SMALLEST_DATAGRAM
from gradwire.transport.addresses import (
    LocalAddress,
    describe_interfaces,
    is_loopback,
    route_mtu,
    scoped,
)
from gradwire.transport.keys import SECRET_BYTES, SESSION_BYTES, Hello
from gradwire.transport.meeting import Meeting
from gradwire.transport.texts import ELSE, read_all, read_mapping, read_text, read_whole


@dataclass(frozen=True)
class Introduction:
    """What an endpoint publishes about itself.

    Attributes:
        endpoint: Its number: workers by rank, then servers.
        protocol: Version of the protocol.
        addresses: Addresses at which it can be reached, the preferred one first, at most one of
            each version of IP.
        port: The fixed UDP port, or a range of them as "low-high"; 0 for any (`Settings.port`).
        datagram: Largest UDP payload in bytes that it was configured for, 0 for none.
        host: Name of its host, for errors.
        identity: Identity of its host (`host_identity`).
        interfaces: The addresses by which other hosts may reach its host, by interface.
        configuration: What has to be the same on all endpoints.
        session: The session tag, from endpoint 0.
        hello: What its keys are made of.
        damaged: The fields that could not be read.
    """

    endpoint: int
    protocol: int
    addresses: tuple[LocalAddress, ...] = ()
    port: PORT = 0
    datagram: int = 0
    host: str = ""
    identity: str = ""
    interfaces: Mapping[str, list[str]] = field(default_factory=dict)
    configuration: Mapping[str, object] = field(default_factory=dict)
    session: int = 0
    hello: Hello = field(default_factory=Hello)
    damaged: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Introduction:
        """Reads an introduction; fields that only another version knows are left out.

        Raises:
            ValueError: The text is no introduction of any version.
        """
        values = json.loads(text)
        if not isinstance(values, Mapping):
            raise ValueError("it is no mapping")
        known = {name: values[name] for name in READERS if name in values}
        damaged = []
        for name, value in list(known.items()):
            try:
                known[name] = READERS[name](value)
            except (AttributeError, KeyError, TypeError, ValueError):
                damaged.append(name)
                del known[name]
        for name in ("endpoint", "protocol"):
            if name not in known:
                raise ValueError(f"its {name} is {values.get(name)!r}")
        return Introduction(**known, damaged=tuple(damaged))


def _address(value: Mapping[str, Any]) -> LocalAddress:
    place = LocalAddress(
        read_text(value["address"]),
        read_text(value.get("interface", "")),
        read_whole(value.get("mtu", 0)),
    )
    if place.version not in (4, 6):
        raise ValueError
    return place


def _hello(value: Mapping[str, Any]) -> Hello:
    sizes = {"salt": SECRET_BYTES, "public": SECRET_BYTES, "session": SESSION_BYTES}
    texts = {name: read_text(value.get(name, "")) for name in sizes}
    for name, size in sizes.items():
        if len(bytes.fromhex(texts[name])) not in (0, size):
            raise ValueError
    return Hello(**texts, aes=bool(value.get("aes", True)))


READERS: Mapping[str, Callable[[Any], Any]] = {
    "endpoint": read_whole,
    "protocol": read_whole,
    "addresses": lambda value: tuple(map(_address, value)),
    "port": read_ports,
    "datagram": read_whole,
    "host": read_text,
    "identity": read_text,
    "interfaces": lambda value: {read_text(k): [read_text(a) for a in v] for k, v in value.items()},
    "configuration": lambda value: {read_text(k): v for k, v in value.items()},
    "session": read_whole,
    "hello": _hello,
}
"""How each field of an introduction is read; what is none raises one of the usual errors."""


def introduce(meeting: Meeting, introduction: Introduction) -> list[Introduction]:
    texts = meeting.exchange(json.dumps(asdict(introduction)))
    everybody = []
    for endpoint, text in enumerate(texts):
        try:
            each = Introduction.parse(text)
            if each.endpoint != endpoint:
                raise ValueError(f"it is that of endpoint {each.endpoint}")
        except (ValueError, RecursionError) as error:
            raise meeting.error(
                f"the introduction of {meeting.describe([endpoint])} cannot be read ({error}): "
                f"{ELSE}",
                [endpoint],
            ) from None
        everybody.append(each)
    return everybody


def check_introductions(meeting: Meeting, everybody: list[Introduction]) -> list[LocalAddress]:
    """Checks that all endpoints can work together, and chooses their addresses.

    The checks: the same protocol version and configuration; a version of IP that all have; no
    endpoint would be looked for on another host than its own; no two want the same port.

    Returns:
        The address that each endpoint is to use, all of one version of IP.

    Raises:
        RendezvousError: A check fails; on all endpoints alike, naming those at fault.
    """
    first = everybody[0]
    for other in everybody[1:]:
        if other.protocol != first.protocol:
            raise meeting.error(
                f"{meeting.describe([other.endpoint])} speaks gradwire protocol version "
                f"{other.protocol}, {meeting.describe([0])} speaks version {first.protocol}: "
                "install the same gradwire everywhere",
                [other.endpoint],
            )
    if damaged := [each for each in everybody if each.damaged]:
        raise meeting.error(
            f"the introduction of {meeting.describe([damaged[0].endpoint])} has no readable "
            f"{', '.join(damaged[0].damaged)}: {ELSE}",
            [damaged[0].endpoint],
        )
    check_alike(meeting, [dict(each.configuration) for each in everybody])
    chosen = _choose_addresses(meeting, everybody)
    _check_hosts(meeting, everybody, chosen)
    _check_ports(meeting, everybody, chosen)
    return chosen


def check_keys(meeting: Meeting, proof: str) -> None:
    """Checks that all endpoints have the same key of the user's; collective where there is one.

    Raises:
        RendezvousError: One has another; on all endpoints alike, naming it.
    """
    if not proof:
        return
    proofs = meeting.exchange(proof)
    others = [endpoint for endpoint, other in enumerate(proofs) if other != proofs[0]]
    if others:
        raise meeting.error(
            f"{meeting.describe(others)} has another key than {meeting.describe([0])}: set the "
            "same GRADWIRE_KEY or GRADWIRE_KEY_FILE on all ranks and servers",
            others,
        )


def _choose_addresses(meeting: Meeting, everybody: list[Introduction]) -> list[LocalAddress]:
    offers = [[place.version for place in each.addresses] for each in everybody]
    lacking = {
        version: [e for e, offer in enumerate(offers) if version not in offer] for version in (4, 6)
    }
    shared = [version for version in (4, 6) if not lacking[version]]
    if not shared:
        version = min((4, 6), key=lambda version: len(lacking[version]))
        having = [e for e in range(len(offers)) if e not in lacking[version]]
        raise meeting.error(
            f"{meeting.describe(lacking[version])} has no IPv{version} address to use (but "
            f"{_addresses_of(everybody, lacking[version])}), and {meeting.describe(having)} "
            f"no other one ({_addresses_of(everybody, having)}): set interface= or "
            "GRADWIRE_INTERFACE to one network that all have",
            lacking[version],
        )
    version = min(shared, key=lambda version: sum(offer.index(version) for offer in offers))
    return [
        next(place for place in each.addresses if place.version == version) for each in everybody
    ]


def _addresses_of(everybody: list[Introduction], endpoints: Iterable[int]) -> str:
    found = [place.address for e in endpoints for place in everybody[e].addresses]
    return ", ".join(dict.fromkeys(found)) or "none at all"


MOST_HOSTS = 4
"""How many hosts at fault an error lists with their interfaces at most."""


def _check_hosts(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> None:
    """Raises RendezvousError naming endpoints that other hosts would look for on themselves."""

    def refuse(at_fault: list[int], why: str) -> RendezvousError:
        """Makes an error that lists the interfaces of the hosts at fault."""
        hosts = list({everybody[e].identity: everybody[e] for e in at_fault}.values())
        words = [
            f"host {each.host!r} has {describe_interfaces(each.interfaces)}"
            for each in hosts[:MOST_HOSTS]
        ]
        known = "; ".join([*words, "…"] if len(hosts) > MOST_HOSTS else words)
        return meeting.error(
            f"{why}: set interface= or GRADWIRE_INTERFACE to the network between the hosts; "
            f"{known}",
            at_fault,
        )

    if len({each.identity for each in everybody}) == 1:
        return
    if local := [e for e, place in enumerate(chosen) if is_loopback(place.address)]:
        addresses = ", ".join(dict.fromkeys(chosen[e].address for e in local))
        raise refuse(
            local,
            f"{meeting.describe(local)} would use the loopback address {addresses}, which other "
            "hosts cannot reach",
        )
    hosts: dict[str, str] = {}
    for endpoint, place in enumerate(chosen):
        identity = hosts.setdefault(place.address, everybody[endpoint].identity)
        if identity != everybody[endpoint].identity:
            alike = [e for e, other in enumerate(chosen) if other.address == place.address]
            raise refuse(
                alike,
                f"{meeting.describe(alike)} are on different hosts and would use the same "
                f"address, {place.address}",
            )
    having: dict[str, dict[str, int]] = {}  # by address and host, one endpoint of that host
    for each in everybody:
        for address in itertools.chain.from_iterable(each.interfaces.values()):
            having.setdefault(address, {}).setdefault(each.identity, each.endpoint)
    for endpoint, place in enumerate(chosen):
        own = everybody[endpoint].identity
        others = (e for host, e in having.get(place.address, {}).items() if host != own)
        if (other := next(others, None)) is not None:
            raise refuse(
                [endpoint],
                f"{meeting.describe([endpoint])} would use the address {place.address}, which "
                f"the host of {meeting.describe([other])} has as well",
            )


def _check_ports(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> None:
    """Raises RendezvousError naming endpoints of one host for which its ports are too few.

    Each takes a port for every one of its engine threads.
    """
    cores = max((int(str(each.configuration.get("cores", 1))) for each in everybody), default=1)
    takers: dict[tuple[object, ...], list[int]] = {}
    for each, place in zip(everybody, chosen, strict=True):
        if each.port:
            takers.setdefault((each.identity, place.address, each.port), []).append(each.endpoint)
    for (_, address, port), endpoints in takers.items():
        low, count = ports_of(port)[0], len(ports_of(port))
        needed = cores * len(endpoints)
        if needed > count:
            raise meeting.error(
                f"{meeting.describe(endpoints)} are on one host and would use port={port!r} of "
                f"{address}, and need {needed} ports: give them a range, for example port="
                f"'{low}-{low + needed - 1}', or 0 for any free one",
                endpoints,
            )


def agree_datagram(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> int:
    """Agrees on the largest datagram that every endpoint can send; collective.

    An endpoint can send what it is configured for, or else what its routes to the others take.

    Raises:
        ConfigError: This endpoint's routes do not take what it is configured for.
        RendezvousError: That is so on another endpoint, there is no route, or the datagrams would
            be too short; the error names the endpoints.
    """
    if len({each.identity for each in everybody}) > 1:
        mtus = _exchange_routes(meeting, everybody, chosen)
    else:
        mtus = [_mtu_here(chosen)] * len(everybody)
    limits = [
        each.datagram or place.datagram(mtu)
        for each, place, mtu in zip(everybody, chosen, mtus, strict=True)
    ]
    short = [endpoint for endpoint, limit in enumerate(limits) if limit < SMALLEST_DATAGRAM]
    if short:
        place, mtu = chosen[short[0]], mtus[short[0]]
        raise meeting.error(
            f"{meeting.describe(short)} can send datagrams of {limits[short[0]]} bytes only (from "
            f"{place.address}, interface {place.interface or 'unknown'}, MTU "
            f"{mtu or place.mtu}); {SMALLEST_DATAGRAM} and more are "
            "needed: raise the MTU, or set interface= or GRADWIRE_INTERFACE to another network",
            short,
        )
    return min(limits)


def _mtu_here(chosen: list[LocalAddress]) -> int:
    """Returns the smallest MTU in bytes between these addresses of this host; 0: not known.

    Every process of the host gets the same answer, so they need not exchange it.
    """
    bound = {place.bound for place in chosen}
    with contextlib.suppress(OSError):
        return min(route_mtu(source, other) for source in bound for other in bound)
    return 0


def _exchange_routes(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> list[int]:
    """Returns the smallest MTU of each endpoint's routes to other hosts in bytes; 0 for none."""
    here, own = everybody[meeting.endpoint], chosen[meeting.endpoint]
    mtus: dict[str, int] = {}
    unreachable: dict[int, str] = {}
    for each, place in zip(everybody, chosen, strict=True):
        if each.identity == here.identity or place.address in mtus:
            continue
        try:
            mtus[place.address] = route_mtu(own.bound, scoped(place.address, own.interface))
        except OSError as error:
            unreachable[each.endpoint] = str(error.strerror or error)
    mtu = min(mtus.values(), default=0)
    if mtu and here.datagram > own.datagram(mtu):
        allowed = f"at most {own.datagram(mtu)}, for the MTU from {own.address} is {mtu}"
        wrong = ConfigError.of("datagram", here.datagram, allowed)
        meeting.tell_failure(wrong)
        raise wrong
    mine = {"mtu": mtu, "unreachable": unreachable}
    texts = meeting.exchange(json.dumps(mine))
    everybodys = read_all(meeting, "the routes", texts, lambda value: _routes(value, len(chosen)))
    for endpoint, (_, lacking) in enumerate(everybodys):
        if lacking:
            lost = list(lacking)
            raise meeting.error(
                f"{meeting.describe([endpoint])} has no route from {chosen[endpoint].address} to "
                f"{meeting.describe(lost)} at {_chosen_of(chosen, lost)} "
                f"({lacking[lost[0]]}): set interface= or "
                "GRADWIRE_INTERFACE to one network that all have",
                sorted({endpoint, *lost}),
            )
    return [mtu for mtu, _ in everybodys]


def _routes(value: object, endpoints: int) -> tuple[int, dict[int, str]]:
    """Reads an endpoint's MTU, and the endpoints that it has no route to, with the causes."""
    routes = read_mapping(value)
    lacking = {int(e): read_text(why) for e, why in read_mapping(routes["unreachable"]).items()}
    if not all(0 <= e < endpoints for e in lacking):
        raise ValueError("there is no such endpoint")
    return read_whole(routes["mtu"]), lacking


def _chosen_of(chosen: list[LocalAddress], endpoints: Iterable[int]) -> str:
    return ", ".join(dict.fromkeys(chosen[e].address for e in endpoints))


def check_alike(meeting: Meeting, configurations: list[dict[str, object]]) -> None:
    """Raises RendezvousError naming the first field in which an endpoint differs from the first."""
    first = configurations[0]
    for endpoint, other in enumerate(configurations):
        # These go first, for they explain why other options differ.
        head = ("policy", "wrapper")
        for name in (*head, *sorted((set(first) | set(other)) - set(head))):
            ours, theirs = first.get(name, "unset"), other.get(name, "unset")
            if ours != theirs:
                raise meeting.error(
                    f"{meeting.describe([endpoint])} has {name}={theirs!r}, "
                    f"{meeting.describe([0])} has {name}={ours!r}: {name} must be the same on all "
                    "ranks",
                    [endpoint],
                )


def agree(
    meeting: Meeting,
    configuration: Mapping[str, object],
    failure: ConfigError | None = None,
) -> None:
    """Checks that every endpoint of the meeting passes the same configuration; collective.

    Args:
        failure: Why this endpoint cannot take part. It is raised here, and the others are notified.

    Raises:
        ConfigError: `failure`.
        RendezvousError: An endpoint failed, or its configuration differs from the first one's; the
            error names the endpoint and the field.
    """
    if failure is not None:
        meeting.tell_failure(failure)
        raise failure
    texts = meeting.exchange(json.dumps(dict(configuration), default=str))
    found = read_all(meeting, "the configuration", texts, read_mapping)
    check_alike(meeting, [dict(each) for each in found])


def new_session() -> int:
    """Returns a session tag of 31 random bits and a last bit of 1, so that it is never 0."""
    return secrets.randbits(32) | 1
