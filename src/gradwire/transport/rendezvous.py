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
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NoReturn, Protocol

from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.core.plan import SMALLEST_DATAGRAM
from gradwire.transport.addresses import (
    LocalAddress,
    describe_interfaces,
    is_loopback,
    route_mtu,
    scoped,
)
from gradwire.transport.bounded_store import BoundedStore

__all__ = [
    "Introduction",
    "Meeting",
    "Names",
    "Store",
    "SupersededError",
    "agree",
    "agree_datagram",
    "base_store",
    "check_alike",
    "check_introductions",
    "identity_of",
    "new_session",
    "store_errors",
    "store_host",
]

log = logging.getLogger("gradwire")


class Store(Protocol):
    """The part of torch.distributed.Store that gradwire uses."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


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
        """Reads an introduction; what only another version knows or understands is left out."""
        values = _known(Introduction, json.loads(text))
        try:
            values["addresses"] = tuple(
                LocalAddress(**_known(LocalAddress, each)) for each in values["addresses"]
            )
        except (AttributeError, KeyError, TypeError):
            values["addresses"] = ()
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


@dataclass
class Outcome:
    """How an exchange ended.

    why: the failure; "" where all is well. texts: everybody's, in order; after a failure of the
    first exchange None stands for an endpoint that was not there. gave_up: which endpoint waited
    too long in the first exchange, and for how many seconds; only endpoint 0 knows who was there,
    and completes such an outcome.
    """

    why: str = ""
    at_fault: list[int] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    gave_up: tuple[int, float] | None = None

    def dump(self) -> str:
        """The outcome as the store holds it, with texts that are alike only once."""
        distinct = list(dict.fromkeys(self.texts))
        place = {text: index for index, text in enumerate(distinct)}
        places = [place[text] for text in self.texts]
        return json.dumps([self.why, self.at_fault, distinct, places, self.gave_up])

    @staticmethod
    def load(text: str) -> Outcome:
        """The outcome that `dump` wrote."""
        why, at_fault, distinct, places, gave_up = json.loads(text)
        return Outcome(why, at_fault, [distinct[place] for place in places], gave_up)


class SupersededError(RendezvousError):
    """Endpoint 0 has begun another meeting of the same name, so this one never ends."""


class Meeting:
    """One meeting of `workers` workers and `servers` servers in a store, under `name`.

    A store may outlive the processes of a job and hold what an earlier life of the job left.
    Therefore each meeting has a random id, which endpoint 0 publishes when it comes, and all other
    keys are under that id. In the first exchange every endpoint publishes a random number of its
    own. It trusts the id once endpoint 0 has repeated that number, since no process of an earlier
    life can have done so. Until then it follows the newest id, so that newcomers always meet.

    The endpoints exchange texts, all in the same order. Endpoint 0 collects the texts of an
    exchange and publishes them together, so that an exchange costs an endpoint a handful of store
    operations. How an exchange ended is decided once, for all, by whoever writes its outcome first.

    An endpoint leaves by `close`, or when a failure is raised. The last one to close removes the
    keys. After a failure endpoint 0 stays until the others have read it, at most LINGER_S, because
    its process often hosts the store.

    timeout_s: how long an exchange may take. ranks: the workers' in the job, which errors name;
    None where they are 0, 1, 2, ….
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
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.workers = workers
        self.servers = servers
        self.timeout_s = timeout_s
        self.names = Names(tuple(range(workers) if ranks is None else ranks))
        self._store = BoundedStore(store, timeout_s)
        self._root = f"gradwire/{name}"
        self._newest = f"{self._root}/newest"
        self._number = secrets.token_hex(8)
        self._id = ""  # not trusted yet
        self._next = 0  # exchange
        self._left = False

    @property
    def endpoints(self) -> int:
        """Workers and servers together."""
        return self.workers + self.servers

    @property
    def prefix(self) -> str:
        """Of keys that belong to this meeting alone; the same on all endpoints once it is open."""
        return f"{self._root}/{self._id}"

    # ------------------------------------------------------------------ exchanges

    def exchange(self, text: str, timeout_s: float | None = None) -> list[str]:
        """Publishes `text` and returns every endpoint's text, in order.

        timeout_s: instead of the meeting's. Raises RendezvousError, on all endpoints alike, naming
        those that did not publish within the time-out, or one that failed.
        """
        if self.endpoints == 1:
            return [text]
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        with store_errors():
            if self._next == 0:
                self._gather(timeout_s)
            return self._exchange(text, timeout_s)

    def introduce(self, introduction: Introduction) -> list[Introduction]:
        """Publishes this endpoint's introduction and returns everybody's, in order."""
        texts = self.exchange(json.dumps(asdict(introduction)))
        return [Introduction.parse(text) for text in texts]

    def tell_failure(self, error: BaseException) -> None:
        """Publishes, in place of a text in the next exchange, that this endpoint has failed.

        Those that have not come yet are waited for, at most LINGER_S, unless somebody wants this
        process to end. A store that does not answer raises nothing here, since that error would
        hide the cause.
        """
        if self.endpoints == 1 or self._left:
            return
        why = str(error) or type(error).__name__
        outcome = Outcome(f"{self.describe([self.endpoint])} failed: {why}", [self.endpoint])
        linger_s = LINGER_S if isinstance(error, Exception) else 0.0
        with contextlib.suppress(Exception):
            if self._next == 0 and self.endpoint != 0:
                self._follow(Wait(linger_s), outcome)
            else:
                if self._next == 0:
                    self._open()
                self._decide(outcome)
            self._leave(linger_s, everybody=True)

    def check_failures(self) -> None:
        """Raises RendezvousError if the next exchange has failed by now; waits for nobody."""
        if self.endpoints > 1:
            with store_errors():
                outcome = self._outcome()
                if outcome is not None and outcome.why:
                    self._raise(outcome)

    def hurry(self) -> None:
        """Asks the others to publish in the next exchange now, whatever they still wait for."""
        with store_errors():
            self._store.set(self._key(HURRY), "1")

    def hurried(self) -> bool:
        """Whether somebody has asked for that."""
        with store_errors():
            return self._peek(self._key(HURRY)) is not None

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leaves the meeting; the last endpoint to do so removes its keys.

        Idempotent. A store that is gone raises nothing.
        """
        if self._left or not self._id:
            return
        self._left = True
        with contextlib.suppress(Exception):
            if self._store.add(self._key(LEFT), 1) == self.endpoints:
                for what in (*range(self._next), HURRY, FINISHED, LEFT):
                    self._store.delete_key(self._key(what))
                if self._peek(self._newest) == self._opening():
                    self._store.delete_key(self._newest)

    def finish(self) -> None:
        """Publishes that this worker needs the servers no more, and leaves.

        A store that is gone raises nothing.
        """
        with contextlib.suppress(Exception):
            self._store.add(self._key(FINISHED), 1)
        self.close()

    def all_finished(self) -> bool:
        """Whether no worker needs the servers any more."""
        return self._store.add(self._key(FINISHED), 0) >= self.workers

    def error(self, why: str, endpoints: Iterable[int] = ()) -> RendezvousError:
        """An error that names the endpoints at fault."""
        return RendezvousError(why, map(self.names.rank_of, endpoints))

    def describe(self, endpoints: Iterable[int]) -> str:
        """The endpoints' names; see `Names`."""
        return self.names.describe(endpoints)

    # ------------------------------------------------------------------ how they find each other

    def _gather(self, timeout_s: float) -> None:
        """The first exchange: all others are there, and the id is trusted."""
        if self.endpoint == 0:
            self._open()
            self._exchange(self._number, timeout_s)
            return
        outcome = self._follow(Wait(timeout_s, self._awaiting_first))
        if outcome.why:
            self._raise(outcome)
        self._next = 1

    def _open(self) -> None:
        """Publishes a new id, and removes what is left of an earlier meeting."""
        before = self._peek(self._newest)
        self._id = secrets.token_hex(8)
        self._store.set(self._key(0, 0), self._number)
        self._store.set(self._newest, self._opening())
        if before is not None:
            earlier, workers, servers = before.split()
            self._remove(earlier, int(workers) + int(servers))

    def _opening(self) -> str:
        return f"{self._id} {self.workers} {self.servers}"

    def _follow(self, wait: Wait, refusal: Outcome | None = None) -> Outcome:
        """Publishes this endpoint's number under the newest id, until endpoint 0 repeats it.

        refusal: the failure that this endpoint publishes before its number. Returns the outcome of
        the first exchange; raises RendezvousError where endpoint 0 does not come in time.
        """
        seen = earlier = unlike = ""
        while True:
            newest = self._peek(self._newest)
            if newest is not None and newest != seen:
                if seen:  # it was of an earlier life, whose keys are removed
                    self._store.delete_key(self._key(0, self.endpoint))
                    self._store.delete_key(self._key(0))
                seen = newest
                self._id, workers, servers = seen.split()
                unlike = self._unlike(int(workers), int(servers))
                objection = Outcome(unlike, [self.endpoint]) if unlike else refusal
                if objection is not None:
                    self._decide(objection)
                self._store.set(self._key(0, self.endpoint), self._number)
            outcome = self._outcome() if seen else None
            if outcome is not None:
                if self._number in outcome.texts:
                    return outcome
                earlier = outcome.why or earlier
            if wait.over():
                if refusal is None and seen and not unlike and not wait.extended:
                    self._decide(Outcome(gave_up=(self.endpoint, wait.timeout_s)))
                    wait.extend(ANSWER_S)  # endpoint 0 may be there, and know who is not
                    continue
                self._id = ""
                raise self.error(unlike or self._without_first(wait.timeout_s, earlier), [0])
            wait.pause()

    def _unlike(self, workers: int, servers: int) -> str:
        """What is wrong with the numbers that endpoint 0 counts; "" if they are this endpoint's."""
        if (workers, servers) == (self.workers, self.servers):
            return ""
        return (
            f"{self.describe([0])} counts {workers} workers and {servers} servers, "
            f"{self.describe([self.endpoint])} counts {self.workers} and {self.servers}: give all "
            "the same numbers"
        )

    def _without_first(self, timeout_s: float, earlier: str) -> str:
        who = self.describe([self.endpoint])
        if self.endpoint >= self.workers:
            return (
                f"{who}: no workers came within {timeout_s:g} s; they come when they attach; "
                "setting rendezvous_timeout"
            )
        before = f"; an earlier attempt had failed: {earlier}" if earlier else ""
        return (
            f"{self.describe([0])} did not join within {timeout_s:g} s (when {who} gave up); "
            f"setting rendezvous_timeout{before}"
        )

    # ------------------------------------------------------------------ one exchange

    def _exchange(self, text: str, timeout_s: float) -> list[str]:
        self._store.set(self._key(self._next, self.endpoint), text)
        wait = Wait(timeout_s, self._awaiting)
        outcome = self._lead(wait) if self.endpoint == 0 else self._await(wait)
        if outcome.why:
            self._raise(outcome)
        self._next += 1
        return [text or "" for text in outcome.texts]

    def _lead(self, wait: Wait) -> Outcome:
        """Endpoint 0's part: publishes all texts, once they are there."""
        keys = self._keys()
        while (outcome := self._outcome()) is None:
            if self._store.check(keys):
                texts: list[str | None] = [self._store.get(key).decode() for key in keys]
                outcome = self._decide(Outcome(texts=texts))
                break
            if wait.over():
                outcome = self._decide(self._incomplete(self.endpoint, wait.timeout_s))
                break
            if self._next == 0 and self._peek(self._newest) is None:
                # The last of an earlier meeting has just removed it with its own keys.
                self._store.set(self._newest, self._opening())
            wait.pause()
        if outcome.why or outcome.gave_up:
            return self._complete(outcome) if self._next == 0 else outcome
        for key in keys:
            self._store.delete_key(key)
        return outcome

    def _await(self, wait: Wait) -> Outcome:
        """The others' part."""
        while (outcome := self._outcome()) is None:
            newest = self._peek(self._newest)
            if newest not in (None, self._opening()) and self._outcome() is None:
                self._leave()
                raise SupersededError(
                    f"{self.describe([0])} has begun to meet anew: it was started again, or failed",
                    [self.names.rank_of(0)],
                )
            if wait.over():
                return self._decide(self._incomplete(self.endpoint, wait.timeout_s))
            wait.pause()
        return outcome

    def _incomplete(self, endpoint: int, timeout_s: float) -> Outcome:
        """The outcome of an exchange that this endpoint waited for in vain."""
        absent = self._absent() or [0]
        return Outcome(
            f"{self.describe(absent)} did not join within {timeout_s:g} s "
            f"({self.endpoints - len(absent)} of {self.endpoints} were here when "
            f"{self.describe([endpoint])} gave up); setting rendezvous_timeout",
            absent,
        )

    def _complete(self, outcome: Outcome) -> Outcome:
        """Endpoint 0 repeats, in a failed first exchange, the numbers of those that are there."""
        if outcome.gave_up is not None and not outcome.why:
            endpoint, timeout_s = outcome.gave_up
            outcome = self._incomplete(endpoint, timeout_s)
        outcome.texts = [self._peek(key) for key in self._keys()]
        self._store.set(self._key(self._next), outcome.dump())
        return outcome

    def _raise(self, outcome: Outcome) -> NoReturn:
        self._leave()
        why = "".join(sign if sign.isprintable() else " " for sign in outcome.why)
        raise self.error(why, outcome.at_fault)

    def _leave(self, linger_s: float | None = None, *, everybody: bool = False) -> None:
        """Leaves a meeting that failed.

        Endpoint 0 waits until the others have left, at most for linger_s (None: LINGER_S).
        everybody: it waits for those that have not come, too.
        """
        if self._left or not self._id:
            return
        self._left = True
        left = self._store.add(self._key(LEFT), 1)
        wait = Wait(LINGER_S if linger_s is None else linger_s)
        outcome = self._outcome()
        while self.endpoint == 0 and outcome is not None and not wait.over():
            expected = self.endpoints
            if self._next == 0:
                here = self.endpoints - len(self._absent())
                if here != len(outcome.texts) - outcome.texts.count(None):
                    outcome = self._complete(outcome)
                expected = self.endpoints if everybody else here
            if left >= expected:
                break
            wait.pause()
            left = self._store.add(self._key(LEFT), 0)

    # ------------------------------------------------------------------ the store

    def _key(self, *what: int | str) -> str:
        return "/".join(map(str, (self.prefix, *what)))

    def _keys(self) -> list[str]:
        return [self._key(self._next, endpoint) for endpoint in range(self.endpoints)]

    def _absent(self) -> list[int]:
        """The endpoints that have published nothing in the next exchange."""
        return [e for e, key in enumerate(self._keys()) if not self._store.check([key])]

    def _peek(self, key: str) -> str | None:
        """The value of a key that may be missing, or be removed meanwhile; waits for nothing."""
        value = self._store.compare_set(key, MISSING, MISSING).decode()
        return None if value == MISSING else value

    def _outcome(self) -> Outcome | None:
        text = self._peek(self._key(self._next))
        return None if text is None else Outcome.load(text)

    def _decide(self, outcome: Outcome) -> Outcome:
        """How the next exchange ended: as given, unless somebody else was faster."""
        key = self._key(self._next)
        return Outcome.load(self._store.compare_set(key, "", outcome.dump()).decode())

    def _remove(self, earlier: str, endpoints: int) -> None:
        """Removes the keys of a meeting that not all have left by `close`."""
        prefix = f"{self._root}/{earlier}"
        for number in itertools.count():
            for endpoint in range(endpoints):
                self._store.delete_key(f"{prefix}/{number}/{endpoint}")
            if self._peek(f"{prefix}/{number}") is not None:
                self._store.delete_key(f"{prefix}/{number}")
            elif number:  # that of number 0 is also removed by those who had followed this id
                break
        for what in (HURRY, FINISHED, LEFT):
            self._store.delete_key(f"{prefix}/{what}")

    def _awaiting(self) -> str:
        return f"{self.describe([self.endpoint])} waits for {self.describe(self._absent() or [0])}"

    def _awaiting_first(self) -> str:
        return f"{self.describe([self.endpoint])} waits for {self.describe([0])}"


MISSING = "?"
"""What compare_set returns in place of a value that is missing; no value of ours is this."""
HURRY, FINISHED, LEFT = "hurry", "finished", "left"
LINGER_S = 5.0
"""How long who failed stays for those that have not heard of it."""
ANSWER_S = 1.0
"""How long endpoint 0 takes at most to complete the outcome of who gave up."""
FIRST_WARNING_S, NEXT_WARNING_S = 30.0, 60.0


class Wait:
    """A wait that polls: ever more rarely, until its time is over.

    what: what is waited for; the log has it as a warning after FIRST_WARNING_S, and again every
    NEXT_WARNING_S.
    """

    def __init__(self, timeout_s: float, what: Callable[[], str] | None = None) -> None:
        self.timeout_s = timeout_s
        self.extended = False
        self._what = what
        self._begun = time.monotonic()
        self._deadline = self._begun + timeout_s
        self._warn_at = self._begun + FIRST_WARNING_S
        self._pause_s = 0.002

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._deadline

    def extend(self, seconds: float) -> None:
        """Waits for that much longer, from now on."""
        self.extended = True
        self._deadline = time.monotonic() + seconds

    def pause(self) -> None:
        """Sleeps until it is worth looking again."""
        now = time.monotonic()
        if self._what is not None and now >= self._warn_at:
            self._warn_at = now + NEXT_WARNING_S
            log.warning(
                "%s since %.0f s (rendezvous_timeout=%g)",
                self._what(),
                now - self._begun,
                self.timeout_s,
            )
        time.sleep(self._pause_s)
        self._pause_s = min(0.1, self._pause_s * 1.5)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """torch's errors, of a store that is gone or does not answer, as ours."""
    try:
        yield
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise RendezvousError(
            f"the job's store does not answer: {error}; the process that hosts it (rank 0, under "
            "most launchers) may have ended, and then its own output has the cause",
            [],
        ) from error


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
        meeting.tell_failure(wrong)
        raise wrong
    mine = {"mtu": mtu, "unreachable": unreachable}
    everybodys = [json.loads(text) for text in meeting.exchange(json.dumps(mine))]
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
) -> None:
    """Checks that every endpoint of the meeting passes the same configuration; collective.

    failure: why this endpoint cannot; it is raised here, and the others are told. Raises
    RendezvousError naming an endpoint that failed, or one and the field in which it differs from
    the first.
    """
    if failure is not None:
        meeting.tell_failure(failure)
        raise failure
    texts = meeting.exchange(json.dumps(dict(configuration), default=str))
    check_alike(meeting, [json.loads(text) for text in texts])


def base_store(store: Any) -> Any:
    """The store under all prefixes, the one that other process groups and servers share."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def identity_of(store: Any) -> str:
    """What tells the store under all prefixes from any other; the same for all its users."""
    with store_errors():
        made: bytes = base_store(store).compare_set("gradwire/identity", "", secrets.token_hex(8))
    return made.decode()


def new_session() -> int:
    """A session tag: 31 random bits and an odd last one, so never 0."""
    return secrets.randbits(32) | 1


def store_host(store: object) -> str | None:
    """The host of the job's store: a TCPStore's own, else MASTER_ADDR, else None."""
    host = getattr(base_store(store), "host", None)
    if isinstance(host, str) and host:
        return host
    return os.environ.get("MASTER_ADDR") or None
