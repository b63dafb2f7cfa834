"""How the processes of a job meet in torch's store: they exchange texts, in the same order.

Waiting polls the store, because a blocking `store.wait` would hold the store's lock against the
process group's own threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from gradwire.core.errors import RendezvousError
from gradwire.transport.store import BoundedStore, Store, store_errors

__all__ = ["Meeting", "Names", "Outcome", "Patience", "SupersededError"]

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Names:
    """The names of the endpoints in errors: workers by their rank in the job, servers by index.

    Attributes:
        ranks: The workers' ranks in the job.
    """

    ranks: tuple[int, ...]

    def rank_of(self, endpoint: int) -> int:
        """Returns a worker's rank in the job, or a server's endpoint number."""
        return self.ranks[endpoint] if 0 <= endpoint < len(self.ranks) else endpoint

    def describe(self, endpoints: Iterable[int]) -> str:
        """Names endpoints as text: "rank 2", "ranks 1, 3", "server 0"."""
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
    """The end of an exchange.

    Attributes:
        why: The failure; "" where there is none.
        at_fault: The endpoints at fault.
        texts: The texts of all endpoints, in order. After a failure of the first exchange None
            stands for an endpoint that was absent.
        gave_up: The endpoint that waited too long in the first exchange, its time-out in seconds,
            and what sets that. Only endpoint 0 knows who was present, and completes such an
            outcome.
    """

    why: str = ""
    at_fault: list[int] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    gave_up: tuple[int, float, str] | None = None

    def dump(self) -> str:
        """Returns the outcome as the store holds it, in which equal texts are held once."""
        distinct = list(dict.fromkeys(self.texts))
        place = {text: index for index, text in enumerate(distinct)}
        places = [place[text] for text in self.texts]
        return json.dumps([self.why, self.at_fault, distinct, places, self.gave_up])

    @staticmethod
    def load(text: str) -> Outcome:
        """Reads what `dump` returned."""
        why, at_fault, distinct, places, gave_up = json.loads(text)
        return Outcome(why, at_fault, [distinct[place] for place in places], gave_up)


def nothing() -> None:
    """Is called between two looks into the store where nothing else can end the wait."""


@dataclass(frozen=True)
class Patience:
    """How long an endpoint waits in an exchange, and what else ends the wait.

    Attributes:
        seconds: The time-out in seconds.
        origin: What sets it, for errors.
        check: Is called between two looks into the store; what it raises ends the exchange.
    """

    seconds: float
    origin: str = "setting rendezvous_timeout"
    check: Callable[[], None] = nothing


class SupersededError(RendezvousError):
    """Endpoint 0 has begun another meeting of the same name, so this one never ends."""


class Meeting:
    """One meeting of workers and servers in a store.

    The endpoints exchange texts, all in the same order. Endpoint 0 collects the texts of an
    exchange and publishes them together, so that an exchange costs an endpoint a handful of store
    operations. The end of an exchange is decided once for all, by the endpoint that writes its
    outcome first.

    A store may outlive the processes of a job and hold what an earlier life of the job left.
    Therefore each meeting has a random id, which endpoint 0 publishes when it comes, and all other
    keys are under that id. In the first exchange every endpoint publishes a random number of its
    own. It trusts the id once endpoint 0 has repeated that number, since no process of an earlier
    life can have done so. Until then it follows the newest id, so that new processes always meet.

    An endpoint leaves by `close`, or when a failure is raised. The last one to close removes the
    keys. After a failure endpoint 0 stays until the others have read it, at most LINGER_S, because
    its process often hosts the store.

    Args:
        store: The store.
        name: Name of the meeting, the same on all endpoints.
        endpoint: This endpoint's number: workers by rank, then servers.
        workers: Number of workers.
        servers: Number of servers.
        timeout_s: Longest duration of an exchange in seconds.
        ranks: The workers' ranks in the job, which errors name; None for 0, 1, 2, ….

    Attributes:
        endpoint: This endpoint's number.
        workers: Number of workers.
        servers: Number of servers.
        timeout_s: Longest duration of an exchange in seconds.
        names: The endpoints' names.
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
        self._id = ""  # empty until it is trusted
        self._next = 0  # number of the next exchange
        self._left = False

    @property
    def endpoints(self) -> int:
        """The number of workers and servers together."""
        return self.workers + self.servers

    @property
    def prefix(self) -> str:
        """The prefix of this meeting's keys, the same on all endpoints once it has begun."""
        return f"{self._root}/{self._id}"

    # ------------------------------------------------------------------ exchanges

    def exchange(self, text: str, patience: Patience | float | None = None) -> list[str]:
        """Publishes a text and returns every endpoint's text, in order.

        Args:
            text: This endpoint's text.
            patience: How long to wait, or only the seconds; None for the meeting's time-out.

        Returns:
            The texts of all endpoints.

        Raises:
            RendezvousError: Endpoints did not publish in time, or one failed; on all endpoints
                alike, naming those at fault.
        """
        if self.endpoints == 1:
            return [text]
        if not isinstance(patience, Patience):
            patience = Patience(self.timeout_s if patience is None else patience)
        with store_errors():
            if self._next == 0:
                self._gather(patience)
            return self._exchange(text, patience)

    def tell_failure(self, error: BaseException, seconds: float = math.inf) -> None:
        """Publishes, in place of a text in the next exchange, that this endpoint has failed.

        It waits at most LINGER_S for endpoints that have not come yet, and not at all where the
        error ends the process (KeyboardInterrupt). Errors of the store are dropped, since they
        would hide the cause.

        Args:
            error: The failure.
            seconds: How long to wait at most, if that is less than LINGER_S.
        """
        if self.endpoints == 1 or self._left:
            return
        why = str(error) or type(error).__name__
        outcome = Outcome(f"{self.describe([self.endpoint])} failed: {why}", [self.endpoint])
        linger_s = min(LINGER_S, seconds) if isinstance(error, Exception) else 0.0
        with contextlib.suppress(Exception):
            earlier = None
            if self._next == 0 and self.endpoint != 0:
                self._follow(Wait(Patience(linger_s)), outcome)
            else:
                if self._next == 0:
                    earlier = self._open()
                self._decide(outcome)
            self._leave(linger_s, everybody=True)
            # Not before: an endpoint that is not here may still read the last outcome there.
            self._remove(earlier)

    def check_failures(self) -> None:
        """Raises RendezvousError if the next exchange has failed by now; waits for nobody."""
        if self.endpoints > 1:
            with store_errors():
                outcome = self._outcome()
                if outcome is not None and outcome.why:
                    self._raise(outcome)

    def workers_here(self) -> int:
        """Returns how many workers wait in the newest meeting of this name; waits for none."""
        with store_errors():
            newest = self._peek(self._newest)
            if newest is None:
                return 0
            meeting, workers, _ = newest.split()
            first = f"{self._root}/{meeting}/0"
            if self._peek(first) is not None:  # that meeting has begun, or failed
                return 0
            return sum(self._store.check([f"{first}/{rank}"]) for rank in range(int(workers)))

    def hurry(self) -> None:
        """Asks the others to publish in the next exchange now, whatever they still wait for."""
        with store_errors():
            self._store.set(self._key(HURRY), str(self._next))

    def hurried(self) -> bool:
        """Returns whether some endpoint has called `hurry` in this exchange."""
        with store_errors():
            return self._peek(self._key(HURRY)) == str(self._next)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leaves the meeting; the last endpoint to do so removes its keys.

        Idempotent. Errors of the store are dropped, and one that does not answer is not waited for
        as long as in an exchange: what leaves has no other use for it.
        """
        if self._left or not self._id:
            return
        self._left = True
        self._store.shorten()
        with contextlib.suppress(Exception):
            if self._store.add(self._key(LEFT), 1) == self.endpoints:
                for what in (*range(self._next), HURRY, LEFT):
                    self._store.delete_key(self._key(what))
                if self._peek(self._newest) == self._opening():
                    self._store.delete_key(self._newest)

    def error(self, why: str, endpoints: Iterable[int] = ()) -> RendezvousError:
        """Makes an error that names the endpoints at fault."""
        return RendezvousError(why, map(self.names.rank_of, endpoints))

    def describe(self, endpoints: Iterable[int]) -> str:
        """Names endpoints as text; see `Names`."""
        return self.names.describe(endpoints)

    # ------------------------------------------------------------------ how they find each other

    def _gather(self, patience: Patience) -> None:
        """Runs the first exchange, after which all endpoints are present and the id is trusted."""
        if self.endpoint == 0:
            earlier = self._open()
            try:
                self._exchange(self._number, patience)
            finally:
                # Not before: an endpoint that is not here may still read the last outcome there.
                with contextlib.suppress(RuntimeError):  # the store's would hide why this failed
                    self._remove(earlier)
            return
        outcome = self._follow(Wait(patience, self._awaiting))
        if outcome.why:
            self._raise(outcome)
        self._next = 1

    def _open(self) -> str | None:
        """Publishes a new id, and returns what was published of a meeting that not all have left.

        None stands for no such meeting.
        """
        earlier = self._peek(self._newest)
        self._id = secrets.token_hex(8)
        self._store.set(self._key(0, 0), self._number)
        self._store.set(self._newest, self._opening())
        return earlier

    def _opening(self) -> str:
        return f"{self._id} {self.workers} {self.servers}"

    def _follow(self, wait: Wait, refusal: Outcome | None = None) -> Outcome:
        """Publishes this endpoint's number under the newest id, until endpoint 0 repeats it.

        Args:
            wait: The wait for endpoint 0.
            refusal: A failure of this endpoint, which it publishes before its number.

        Returns:
            The outcome of the first exchange.

        Raises:
            RendezvousError: Endpoint 0 does not come in time.
        """
        seen = earlier = unlike = ""
        while True:
            newest = self._peek(self._newest)
            # After that: endpoint 0 ends a meeting before it begins another.
            outcome = self._outcome() if seen else None
            if outcome is not None and self._number in outcome.texts:
                return outcome
            if newest is not None and newest != seen:
                if seen:  # that id was of an earlier life, whose keys are removed
                    self._store.delete_key(self._key(0, self.endpoint))
                    self._store.delete_key(self._key(0, REFUSED, self.endpoint))
                    self._store.delete_key(self._key(0))
                seen = newest
                self._id, workers, servers = seen.split()
                unlike = self._unlike(int(workers), int(servers))
                objection = Outcome(unlike, [self.endpoint]) if unlike else refusal
                if objection is not None:
                    # Endpoint 0 may read the outcome before the number, but never before this.
                    self._store.set(self._key(0, REFUSED, self.endpoint), self._number)
                    self._decide(objection)
                self._store.set(self._key(0, self.endpoint), self._number)
            elif outcome is not None:
                earlier = outcome.why or earlier
            if wait.over():
                if refusal is None and seen and not unlike and not wait.extended:
                    self._decide(Outcome(gave_up=(self.endpoint, *wait.limit)))
                    wait.extend(ANSWER_S)  # endpoint 0 may be present, and know who is absent
                    continue
                self._id = ""
                raise self.error(unlike or self._without_first(*wait.limit, earlier), [0])
            wait.pause()

    def _unlike(self, workers: int, servers: int) -> str:
        """Returns how endpoint 0's numbers of endpoints differ from this one's, "" if not."""
        if (workers, servers) == (self.workers, self.servers):
            return ""
        return (
            f"{self.describe([0])} counts {workers} workers and {servers} servers, "
            f"{self.describe([self.endpoint])} counts {self.workers} and {self.servers}: give all "
            "the same numbers"
        )

    def _without_first(self, timeout_s: float, origin: str, earlier: str) -> str:
        who = self.describe([self.endpoint])
        if self.endpoint >= self.workers:
            return (
                f"{who}: no workers came within {timeout_s:g} s; they come when they attach; "
                f"{origin}"
            )
        before = f"; an earlier attempt had failed: {earlier}" if earlier else ""
        return (
            f"{self.describe([0])} did not join within {timeout_s:g} s (when {who} gave up); "
            f"{origin}{before}"
        )

    # ------------------------------------------------------------------ one exchange

    def _exchange(self, text: str, patience: Patience) -> list[str]:
        self._store.set(self._key(self._next, self.endpoint), text)
        wait = Wait(patience, self._awaiting)
        outcome = self._lead(wait) if self.endpoint == 0 else self._await(wait)
        if outcome.why:
            self._raise(outcome)
        self._next += 1
        return [text or "" for text in outcome.texts]

    def _lead(self, wait: Wait) -> Outcome:
        """Publishes all texts once they are there; the part of endpoint 0."""
        keys = self._keys()
        while (outcome := self._outcome()) is None:
            if self._store.check(keys):
                texts: list[str | None] = [self._store.get(key).decode() for key in keys]
                outcome = self._decide(Outcome(texts=texts))
                break
            if wait.over():
                outcome = self._decide(self._incomplete(self.endpoint, *wait.limit))
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
        """Waits for the outcome; the part of the other endpoints."""
        while (outcome := self._outcome()) is None:
            newest = self._peek(self._newest)
            if newest not in (None, self._opening()) and self._outcome() is None:
                self._leave()
                raise SupersededError(
                    f"{self.describe([0])} has begun another meeting: it was restarted, or failed",
                    [self.names.rank_of(0)],
                )
            if wait.over():
                return self._decide(self._incomplete(self.endpoint, *wait.limit))
            wait.pause()
        return outcome

    def _incomplete(self, endpoint: int, timeout_s: float, origin: str) -> Outcome:
        """Makes the outcome of an exchange for which this endpoint waited too long."""
        absent = self._absent() or [0]
        return Outcome(
            f"{self.describe(absent)} did not join within {timeout_s:g} s "
            f"({self.endpoints - len(absent)} of {self.endpoints} were here when "
            f"{self.describe([endpoint])} gave up); {origin}",
            absent,
        )

    def _complete(self, outcome: Outcome) -> Outcome:
        """Repeats, in a failed first exchange, the numbers of the endpoints that are present."""
        if outcome.gave_up is not None and not outcome.why:
            outcome = self._incomplete(*outcome.gave_up)
        outcome.texts = self._numbers(outcome)
        self._store.set(self._key(self._next), outcome.dump())
        return outcome

    def _numbers(self, outcome: Outcome) -> list[str | None]:
        """Returns the numbers of the first exchange; None for an endpoint that is absent.

        Those in the outcome stay: an endpoint that has left may be back for the next meeting, and
        publish the number of that one here.
        """
        numbers = outcome.texts or [None] * self.endpoints
        return [
            known or self._peek(key) or self._peek(self._key(0, REFUSED, endpoint))
            for endpoint, (known, key) in enumerate(zip(numbers, self._keys(), strict=True))
        ]

    def _raise(self, outcome: Outcome) -> NoReturn:
        self._leave()
        why = "".join(sign if sign.isprintable() else " " for sign in outcome.why)
        raise self.error(why, outcome.at_fault)

    def _leave(self, linger_s: float | None = None, *, everybody: bool = False) -> None:
        """Leaves a meeting that failed.

        Args:
            linger_s: Seconds for which endpoint 0 waits at most until the others have left; None
                for LINGER_S.
            everybody: Whether it also waits for endpoints that have not come.
        """
        if self._left or not self._id:
            return
        self._left = True
        left = self._store.add(self._key(LEFT), 1)
        wait = Wait(Patience(LINGER_S if linger_s is None else linger_s))
        outcome = self._outcome()
        while self.endpoint == 0 and outcome is not None and not wait.over():
            expected = self.endpoints
            if self._next == 0:
                if self._numbers(outcome) != outcome.texts:
                    outcome = self._complete(outcome)
                here = self.endpoints - outcome.texts.count(None)
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
        """Returns the endpoints that have published nothing in the next exchange."""
        return [e for e, key in enumerate(self._keys()) if not self._store.check([key])]

    def _peek(self, key: str) -> str | None:
        """Returns the value of a key, None where it is missing; waits for nothing."""
        value = self._store.compare_set(key, MISSING, MISSING).decode()
        return None if value == MISSING else value

    def _outcome(self) -> Outcome | None:
        text = self._peek(self._key(self._next))
        return None if text is None else Outcome.load(text)

    def _decide(self, outcome: Outcome) -> Outcome:
        """Ends the next exchange with this outcome, unless another one came first; returns it."""
        key = self._key(self._next)
        return Outcome.load(self._store.compare_set(key, "", outcome.dump()).decode())

    def _remove(self, earlier: str | None) -> None:
        """Removes the keys of a meeting that not all have left by `close`; None for no meeting."""
        if earlier is None:
            return
        meeting, workers, servers = earlier.split()
        prefix = f"{self._root}/{meeting}"
        for number in itertools.count():
            for endpoint in range(int(workers) + int(servers)):
                self._store.delete_key(f"{prefix}/{number}/{endpoint}")
                if not number:
                    self._store.delete_key(f"{prefix}/0/{REFUSED}/{endpoint}")
            if self._peek(f"{prefix}/{number}") is not None:
                self._store.delete_key(f"{prefix}/{number}")
            elif number:  # that of number 0 is also removed by those who had followed this id
                break
        for what in (HURRY, LEFT):
            self._store.delete_key(f"{prefix}/{what}")

    def _awaiting(self) -> str:
        absent = self._absent() if self._id else []  # no id: nobody has seen endpoint 0 yet
        return f"{self.describe([self.endpoint])} waits for {self.describe(absent or [0])}"


MISSING = "?"
"""Stands for a missing value in compare_set; no value of a meeting equals it."""
HURRY, LEFT, REFUSED = "hurry", "left", "refused"
LINGER_S = 5.0
"""Seconds for which a failed endpoint stays at most, until the others have read of it."""
ANSWER_S = 1.0
"""Seconds that endpoint 0 takes at most to complete the outcome of an endpoint that gave up."""
FIRST_WARNING_S, NEXT_WARNING_S = 30.0, 60.0


class Wait:
    """A wait that polls, ever more rarely, until its time is over.

    Args:
        patience: How long to wait.
        what: Describes what is waited for; it is logged as a warning after FIRST_WARNING_S, and
            again every NEXT_WARNING_S.

    Attributes:
        extended: Whether `extend` was called.
    """

    def __init__(self, patience: Patience, what: Callable[[], str] | None = None) -> None:
        self.extended = False
        self._patience = patience
        self._what = what
        self._begun = time.monotonic()
        self._deadline = self._begun + patience.seconds
        self._warn_at = self._begun + FIRST_WARNING_S
        self._pause_s = 0.002

    @property
    def limit(self) -> tuple[float, str]:
        """The time-out in seconds, and what sets it."""
        return self._patience.seconds, self._patience.origin

    def over(self) -> bool:
        """Returns whether the time is up."""
        return time.monotonic() >= self._deadline

    def extend(self, seconds: float) -> None:
        """Waits for so many seconds more, from now on."""
        self.extended = True
        self._deadline = time.monotonic() + seconds

    def pause(self) -> None:
        """Sleeps until the next poll."""
        self._patience.check()
        now = time.monotonic()
        if self._what is not None and now >= self._warn_at:
            self._warn_at = now + NEXT_WARNING_S
            log.warning(
                "%s; %.0f s have passed (of %g s, %s)",
                self._what(),
                now - self._begun,
                *self.limit,
            )
        time.sleep(self._pause_s)
        self._pause_s = min(0.1, self._pause_s * 1.5)
