"""Rendezvous: how the processes of a job find each other through the store that torch has.

Each endpoint (the workers by rank, then the servers) writes an introduction, waits for all the
others' and checks them: protocol version, configuration, reachability. Then it opens its engine
on the agreed datagram size and session tag, and tells its port. Everything that can be wrong
is found by every rank from the same introductions, so all of them raise the same error.

Waiting polls the store instead of blocking in it: a blocked `store.wait` would hold the store's
lock against the process group's own threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from gradwire.addresses import (
    LocalAddress,
    describe_interfaces,
    is_loopback,
    route_mtu,
    scoped,
)
from gradwire.errors import ConfigError, RendezvousError
from gradwire.settings import SMALLEST_DATAGRAM

__all__ = [
    "Introduction",
    "Meeting",
    "Names",
    "Store",
    "agree",
    "agree_datagram",
    "base_store",
    "check_alike",
    "check_introductions",
    "new_session",
    "store_errors",
    "store_host",
]


class Store(Protocol):
    """The part of torch.distributed.Store that gradwire uses."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


@dataclass(frozen=True)
class Introduction:
    """What an endpoint says of itself.

    addresses: that it can be reached at, the preferred one first, at most one of each version of
    IP. port: the fixed UDP port, or 0. datagram: the largest UDP payload in bytes that it was
    configured for, or 0. host: the host's name, for errors; identity: what tells the host from
    others. interfaces: the addresses by which other hosts may reach this one, by interface.
    """

    endpoint: int
    protocol: int
    addresses: tuple[LocalAddress, ...] = ()
    port: int = 0
    datagram: int = 0
    host: str = ""
    identity: str = ""
    interfaces: Mapping[str, list[str]] = field(default_factory=dict)
    configuration: Mapping[str, object] = field(default_factory=dict)
    session: int = 0

    @staticmethod
    def parse(text: str) -> Introduction:
        """Reads an introduction; fields that only another version knows are left out."""
        values = _known(Introduction, json.loads(text))
        values["addresses"] = tuple(
            LocalAddress(**_known(LocalAddress, each)) for each in values.get("addresses", ())
        )
        return Introduction(**values)


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of these values those that are fields of a dataclass."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


@dataclass(frozen=True)
class Names:
    """What errors call the endpoints of a job: the workers by these ranks, the servers counted."""

    ranks: tuple[int, ...]

    def rank_of(self, endpoint: int) -> int:
        """A worker's rank in the job; a server is its endpoint's number."""
        return self.ranks[endpoint] if 0 <= endpoint < len(self.ranks) else endpoint

    def describe(self, endpoints: Iterable[int]) -> str:
        """Names endpoints: "rank 2", "ranks 1, 3", "server 0"."""
        endpoints, workers = list(endpoints), len(self.ranks)
        ranks = [str(self.ranks[e]) for e in endpoints if e < workers]
        servers = [str(e - workers) for e in endpoints if e >= workers]
        words = []
        if ranks:
            words.append(("rank " if len(ranks) == 1 else "ranks ") + ", ".join(ranks))
        if servers:
            words.append(("server " if len(servers) == 1 else "servers ") + ", ".join(servers))
        return " and ".join(words)


class Meeting:
    """One meeting of `workers` workers and `servers` servers in a store, under `name`.

    Joining counts this endpoint's meetings under that name, so that a name may be used again
    once everybody has left, as long as all join equally often; or number says which meeting
    it is, from 1 on. Endpoints exchange texts by topic. ranks: the workers' in the job, which
    errors name; None where they are 0, 1, 2, ….
    Whether all have met on a topic is decided once, for all: who comes late, when another has
    given up already or has told a failure, raises the same error as the others do.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        endpoint: int,
        workers: int,
        servers: int,
        timeout_s: float,
        number: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.workers = workers
        self.servers = servers
        self.timeout_s = timeout_s
        self.names = Names(tuple(range(workers) if ranks is None else ranks))
        self._store = store
        if number is None:
            with store_errors():
                number = store.add(f"gradwire/{name}/joined/{endpoint}", 1)
        self._prefix = f"gradwire/{name}/{number}"

    @property
    def endpoints(self) -> int:
        """Workers and servers together."""
        return self.workers + self.servers

    def introduce(self, introduction: Introduction) -> list[Introduction]:
        """Publishes this endpoint's introduction and returns everybody's, in order."""
        texts = self.exchange("introduction", json.dumps(asdict(introduction)))
        return [Introduction.parse(text) for text in texts]

    def exchange(self, topic: str, text: str, timeout_s: float | None = None) -> list[str]:
        """Publishes `text` and returns every endpoint's text on the topic, in order.

        timeout_s: instead of the meeting's. Raises RendezvousError, on all endpoints alike, naming
        those that did not publish within the time-out or one that told a failure.
        """
        with store_errors():
            self._store.set(self._key(topic, self.endpoint), text)
            return self._collect(topic, self.timeout_s if timeout_s is None else timeout_s)

    def awaits_me(self, topic: str) -> bool:
        """Whether the topic is open and this endpoint, in this or an earlier process, has
        published nothing on it yet."""
        own, decided = self._key(topic, self.endpoint), self._key(topic, "decided")
        with store_errors():
            return not (self._store.check([own]) or self._store.check([decided]))

    def tell_failure(self, topic: str, message: str) -> None:
        """Tells the others that this endpoint will publish nothing on the topic, and why.

        Where that is not possible they will find out; the cause is not hidden by it.
        """
        why = f"{self.describe([self.endpoint])} failed: {message}"
        with contextlib.suppress(Exception):
            self._decide(topic, [self.endpoint], why)

    def check_failures(self, topic: str) -> None:
        """Raises RendezvousError if the topic has failed by now; waits for nobody."""
        with store_errors():
            if self._store.check([self._key(topic, "decided")]):
                self._raise_failure(*self._decision(topic))

    def _collect(self, topic: str, timeout_s: float) -> list[str]:
        keys = [self._key(topic, endpoint) for endpoint in range(self.endpoints)]
        missing = wait_for(self._store, keys, timeout_s, unless=self._key(topic, "decided"))
        absent = [keys.index(key) for key in missing]
        why = ""
        if absent:
            why = (
                f"{self.describe(absent)} did not join within {timeout_s:g} s "
                f"({self.endpoints - len(absent)} of {self.endpoints} were here when "
                f"{self.describe([self.endpoint])} gave up); setting rendezvous_timeout"
            )
        self._raise_failure(*self._decide(topic, absent, why))
        return [self._store.get(key).decode() for key in keys]

    def _raise_failure(self, at_fault: list[int], why: str) -> None:
        if why:
            raise self.error(why, at_fault)

    def _decide(self, topic: str, at_fault: list[int], why: str) -> tuple[list[int], str]:
        """How the topic ended: as this endpoint says, if it is the first to; "" for well."""
        if self._store.add(self._key(topic, "deciding"), 1) == 1:
            decision = [at_fault, why, self.workers, self.servers]
            self._store.set(self._key(topic, "decided"), json.dumps(decision))
            return at_fault, why
        if wait_for(self._store, [self._key(topic, "decided")], DECIDING_S):
            raise RendezvousError(f"another rank died in the rendezvous ({topic})", [])
        return self._decision(topic)

    def _decision(self, topic: str) -> tuple[list[int], str]:
        decided = self._store.get(self._key(topic, "decided")).decode()
        at_fault, why, workers, servers = json.loads(decided)
        if not why and (workers, servers) != (self.workers, self.servers):
            why = (
                f"another rank or server counts {workers} workers and {servers} servers, "
                f"{self.describe([self.endpoint])} counts {self.workers} and {self.servers}: give "
                "all the same numbers"
            )
        return at_fault, why

    def post(self, topic: str, text: str) -> None:
        """Publishes `text` in place of what this endpoint last posted; waits for nobody."""
        with store_errors():
            self._store.set(self._key(topic, self.endpoint), text)

    def posted(self, topic: str) -> list[str | None]:
        """What every endpoint last posted on the topic, in order; None where nothing yet."""
        keys = [self._key(topic, endpoint) for endpoint in range(self.endpoints)]
        with store_errors():
            return [
                self._store.get(key).decode() if self._store.check([key]) else None for key in keys
            ]

    def leave(self) -> None:
        """Notes that this endpoint is done; a store that is gone already is no error."""
        with contextlib.suppress(Exception):
            self._store.set(self._key("left", self.endpoint), "1")

    def all_workers_left(self) -> bool:
        """Whether every worker is done."""
        return self._store.check([self._key("left", rank) for rank in range(self.workers)])

    def error(self, why: str, endpoints: Iterable[int] = ()) -> RendezvousError:
        """An error that names the endpoints at fault."""
        return RendezvousError(why, map(self.names.rank_of, endpoints))

    def describe(self, endpoints: Iterable[int]) -> str:
        """The endpoints' names; see `Names`."""
        return self.names.describe(endpoints)

    def _key(self, topic: str, what: int | str) -> str:
        return f"{self._prefix}/{topic}/{what}"


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """torch's errors, of a store that is gone or does not answer, as ours."""
    try:
        yield
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise RendezvousError(f"the job's store does not answer: {error}", []) from error


DECIDING_S = 10.0
"""How long whoever decides takes at most between two words to the store."""


def wait_for(
    store: Store, keys: list[str], timeout_s: float, *, unless: str | None = None
) -> list[str]:
    """Polls until all keys exist, or the key `unless` does; returns those that are missing when
    the time is up, else none."""
    deadline = time.monotonic() + timeout_s
    pause = 0.002
    while True:
        if store.check(keys) or (unless is not None and store.check([unless])):
            return []
        if time.monotonic() >= deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def check_introductions(meeting: Meeting, everybody: list[Introduction]) -> list[LocalAddress]:
    """Returns the address that each endpoint is to use, all of one version of IP.

    Raises RendezvousError, on all endpoints alike, unless they can work together. Checked:
    protocol version, configuration, that they have a version of IP in common, that no endpoint
    would be looked for on another host than its own, and that no two want the same port.
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
    check_alike(meeting, [dict(each.configuration) for each in everybody])
    chosen = _choose_addresses(meeting, everybody)
    _check_hosts(meeting, everybody, chosen)
    _check_ports(meeting, everybody, chosen)
    return chosen


def _choose_addresses(meeting: Meeting, everybody: list[Introduction]) -> list[LocalAddress]:
    """Each endpoint's address of the version of IP that all have and most prefer."""
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
"""Of how many hosts at fault an error lists the interfaces at most."""


def _check_hosts(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> None:
    """Raises RendezvousError naming endpoints that other hosts would look for on themselves."""

    def refuse(at_fault: list[int], why: str) -> RendezvousError:
        """An error that lists the interfaces of the hosts at fault."""
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
    for endpoint, place in enumerate(chosen):
        for other in everybody:
            here = (address for each in other.interfaces.values() for address in each)
            if other.identity != everybody[endpoint].identity and place.address in here:
                raise refuse(
                    [endpoint],
                    f"{meeting.describe([endpoint])} would use the address {place.address}, which "
                    f"the host of {meeting.describe([other.endpoint])} has as well",
                )


def _check_ports(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> None:
    """Raises RendezvousError naming endpoints of one host that want the same port."""
    takers: dict[tuple[str, str, int], list[int]] = {}
    for each, place in zip(everybody, chosen, strict=True):
        if each.port:
            takers.setdefault((each.identity, place.address, each.port), []).append(each.endpoint)
    for (_, address, port), endpoints in takers.items():
        if len(endpoints) > 1:
            raise meeting.error(
                f"{meeting.describe(endpoints)} are on one host and would all use port={port} of "
                f"{address}: give each its own, for example port={port} + LOCAL_RANK, or 0 for "
                "any free one",
                endpoints,
            )


def agree_datagram(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> int:
    """The largest datagram in bytes that every endpoint is configured for, or else its interface
    and its routes to the others take; collective.

    Raises ConfigError if this endpoint's routes do not take what it is configured for, and
    RendezvousError naming the endpoints where another's do not, where there is no route, or
    where the datagrams would be too short.
    """
    mtus = [0] * len(everybody)
    if len({each.identity for each in everybody}) > 1:
        mtus = _exchange_routes(meeting, everybody, chosen)
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
            f"{min(each for each in (place.mtu, mtu) if each)}); {SMALLEST_DATAGRAM} and more are "
            "needed: raise the MTU, or set interface= or GRADWIRE_INTERFACE to another network",
            short,
        )
    return min(limits)


def _exchange_routes(
    meeting: Meeting, everybody: list[Introduction], chosen: list[LocalAddress]
) -> list[int]:
    """The smallest MTU in bytes of each endpoint's routes to the other hosts; 0: it has none."""
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
        meeting.tell_failure("routes", str(wrong))
        raise wrong
    mine = {"mtu": mtu, "unreachable": unreachable}
    everybodys = [json.loads(text) for text in meeting.exchange("routes", json.dumps(mine))]
    for endpoint, routes in enumerate(everybodys):
        if routes["unreachable"]:
            lost = [int(e) for e in routes["unreachable"]]
            raise meeting.error(
                f"{meeting.describe([endpoint])} has no route from {chosen[endpoint].address} to "
                f"{meeting.describe(lost)} at {_chosen_of(chosen, lost)} "
                f"({next(iter(routes['unreachable'].values()))}): set interface= or "
                "GRADWIRE_INTERFACE to one network that all have",
                sorted({endpoint, *lost}),
            )
    return [routes["mtu"] for routes in everybodys]


def _chosen_of(chosen: list[LocalAddress], endpoints: Iterable[int]) -> str:
    return ", ".join(dict.fromkeys(chosen[e].address for e in endpoints))


def check_alike(meeting: Meeting, configurations: list[dict[str, object]]) -> None:
    """Raises RendezvousError naming the first field in which an endpoint differs from the first."""
    first = configurations[0]
    for endpoint, other in enumerate(configurations):
        # Another policy has other options: its name says why.
        for name in sorted(set(first) | set(other), key=lambda name: (name != "policy", name)):
            ours, theirs = first.get(name, "unset"), other.get(name, "unset")
            if ours != theirs:
                raise meeting.error(
                    f"{meeting.describe([endpoint])} has {name}={theirs!r}, "
                    f"{meeting.describe([0])} has {name}={ours!r}: the plan must be the same on "
                    "all ranks",
                    [endpoint],
                )


def agree(
    meeting: Meeting,
    configuration: Mapping[str, object],
    failure: ConfigError | None = None,
    *,
    topic: str = "configuration",
) -> None:
    """Checks that every endpoint of the meeting passes the same configuration; collective.

    failure: why this endpoint cannot; it is raised here, and the others are told. Raises
    RendezvousError naming an endpoint that failed, or one and the field in which it differs from
    the first.
    """
    if failure is not None:
        meeting.tell_failure(topic, str(failure))
        raise failure
    texts = meeting.exchange(topic, json.dumps(dict(configuration), default=str))
    check_alike(meeting, [json.loads(text) for text in texts])


def base_store(store: Any) -> Any:
    """The store under all prefixes, the one that other process groups and servers share."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def new_session() -> int:
    """A session tag: 31 random bits and an odd last one, so never 0."""
    return secrets.randbits(32) | 1


def store_host(store: object) -> str | None:
    """The host of the job's store: a TCPStore's own, else MASTER_ADDR, else None."""
    host = getattr(base_store(store), "host", None)
    if isinstance(host, str) and host:
        return host
    return os.environ.get("MASTER_ADDR") or None
