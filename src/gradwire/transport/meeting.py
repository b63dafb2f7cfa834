"""How the processes of a job meet in torch's store: they exchange texts, in the same order.

Waiting polls the store, because a blocking `store.wait` would hold the store's lock against the
process group's own threads.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gradwire.core.errors import RendezvousError
from gradwire.core.names import Names
from gradwire.transport.store import BoundedStore, Store, store_errors
from gradwire.transport.texts import ELSE, Outcome, read_opening

log = logging.getLogger("gradwire")

MISSING = "?"
"""Stands for a missing value in compare_set; no value of a meeting equals it."""
ENDED = "-"
"""The newest meeting's id once all have left it."""
CAME, HURRY, LEFT = "came", "hurry", "left"
MOST_CAME = 1 << 16
"""How many askings endpoint 0 looks for at most, whatever their counter says."""
LINGER_S = 5.0
"""Seconds for which a failed endpoint stays at most, until the others have read of it."""
FIRST_WARNING_S, NEXT_WARNING_S = 30.0, 60.0


def nothing() -> None:
    """Is called between two looks into the store where nothing else can end the wait."""


@dataclass(frozen=True)
class Patience:
    """How long an endpoint waits in an exchange, and what else ends the wait.

    Attributes:
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

    A store may outlive the processes of a job, as torchrun's does, and hold what an earlier life of
    the job left. So endpoint 0 begins each meeting under a random id of its own, and the others
    take part in the newest one as soon as endpoint 0 has answered them:

        endpoint 0                                   another endpoint
        newest = id
                                                     id/came/n = number, a random one
        id/number = ""
        id/0/0 = text                                id/0/endpoint = text
        id/0 = outcome, with all texts

    No process of an earlier life can answer the number of a new process. Until there is an answer
    an endpoint follows the newest id, so that new processes always meet. The end of an exchange is
    decided once for all by the endpoint that writes its outcome first: endpoint 0, which collects
    the texts, or one that has failed or waited too long.

    An endpoint leaves by `close`, or when a failure is raised. The last one to close removes the
    keys. After a failure endpoint 0 stays until the others have read it, at most LINGER_S, because
    its process often hosts the store, and because it alone answers those that come late.

    Args:
        name: Name of the meeting, the same on all endpoints.
        endpoint: This endpoint's number: workers by rank, then servers.
        timeout_s: Longest duration of an exchange in seconds.
        ranks: The workers' ranks in the job, which errors name; None for 0, 1, 2, ….
        within: A meeting of more ranks, which this endpoint has left for this one; it fails with
            this one at once.
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
        within: Meeting | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.workers = workers
        self.servers = servers
        self.timeout_s = timeout_s
        self.names = Names(tuple(range(workers) if ranks is None else ranks))
        self._within = within
        self._failed_at = math.inf  # when the failure of this meeting was told
        self._store = BoundedStore(store, timeout_s)
        self._root = f"gradwire/{name}"
        self._newest = f"{self._root}/newest"
        self._opening = ""  # the value of that key in this meeting; empty until this takes part
        self._next = 0  # number of the next exchange
        self._left = False
        self._tickets: list[int] = []  # of endpoints that endpoint 0 has not answered yet
        self._came = 0  # how many tickets there are
        self._here: set[str] = set()  # those that endpoint 0 has answered

    @property
    def endpoints(self) -> int:
        return self.workers + self.servers

    @property
    def prefix(self) -> str:
        """The prefix of this meeting's keys, the same on all endpoints once it has begun."""
        return f"{self._root}/{self._opening.partition(' ')[0]}"

    # ------------------------------------------------------------------ exchanges

    def exchange(self, text: str, patience: Patience | float | None = None) -> list[str]:
        """Publishes a text and returns every endpoint's text, in order.

        Args:
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
            wait = Wait(patience, self._awaiting)
            self._enter(wait)
            self._store.set(self._key(self._next, self.endpoint), text)
            outcome = self._await(wait)
            if not outcome.why and len(outcome.texts) != self.endpoints:
                outcome = Outcome(f"an exchange ended with {len(outcome.texts)} texts: {ELSE}")
            if outcome.why:
                self._raise(outcome)
            self._next += 1
            return outcome.texts

    def tell_failure(self, error: BaseException, seconds: float | None = None) -> None:
        """Publishes, in place of a text in the next exchange, that this endpoint has failed.

        It waits for endpoints that have not come yet, but not where the error ends the process
        (KeyboardInterrupt). Errors of the store are dropped, since they would hide the cause.

        Args:
            seconds: How long to wait at most; None for LINGER_S.
        """
        if self.endpoints == 1 or self._left:
            return
        why = str(error) or type(error).__name__
        linger_s = LINGER_S if seconds is None else seconds
        if not isinstance(error, Exception):
            linger_s = 0.0
        with contextlib.suppress(Exception):
            self._enter(Wait(Patience(linger_s)))
            outcome = Outcome(f"{self.describe([self.endpoint])} failed: {why}", [self.endpoint])
            self._spread(self._decide(outcome))
            self._leave(linger_s)

    def check_failures(self) -> None:
        """Raises RendezvousError if the next exchange has failed by now; waits for nobody."""
        if self._opening:
            with store_errors():
                outcome = self._outcome()
                if outcome is not None and outcome.why:
                    self._raise(outcome)

    def workers_here(self) -> int:
        """Returns how many workers wait in the newest meeting of this name; waits for none."""
        with store_errors():
            newest = self._peek(self._newest)
            if newest in (None, ENDED):
                return 0
            meeting, workers, _ = read_opening(newest) or ("", 0, 0)
            first = f"{self._root}/{meeting}/0"
            if self._peek(first) is not None:  # that meeting has begun, or failed
                return 0
            return sum(self._store.check([f"{first}/{rank}"]) for rank in range(workers))

    def hurry(self) -> None:
        """Asks the others to publish in the next exchange now, whatever they still wait for."""
        with store_errors():
            self._store.set(self._key(HURRY), str(self._next))

    def hurried(self) -> bool:
        with store_errors():
            return self._peek(self._key(HURRY)) == str(self._next)

    def close(self) -> None:
        """Leaves the meeting; the last endpoint to do so removes its keys.

        Idempotent. Errors of the store are dropped, and one that does not answer is not waited for
        as long as in an exchange: what leaves has no other use for it.
        """
        if self._left or not self._opening:
            return
        self._left = True
        self._store.shorten()
        with contextlib.suppress(Exception):
            if self._store.add(self._key(LEFT), 1) == self.endpoints:
                self._store.compare_set(self._newest, self._opening, ENDED)
                for what in (*range(self._next), CAME, HURRY, LEFT):
                    self._store.delete_key(self._key(what))

    def error(self, why: str, endpoints: Iterable[int] = ()) -> RendezvousError:
        return RendezvousError(why, map(self.names.rank_of, endpoints))

    def describe(self, endpoints: Iterable[int]) -> str:
        return self.names.describe(endpoints)

    # ------------------------------------------------------------------ how they find each other

    def _enter(self, wait: Wait) -> None:
        """Begins the meeting on endpoint 0; on another, waits until endpoint 0 answers it."""
        if self._opening:
            return
        counts = f"{self.workers} {self.servers}"
        if self.endpoint == 0:
            opening = f"{secrets.token_hex(8)} {counts}"
            self._store.set(self._newest, opening)
            self._opening = opening
            return
        number = secrets.token_hex(8)
        asked, prefix, ticket = "", "", ""
        while True:
            newest = self._peek(self._newest)
            if newest not in (None, ENDED, asked):
                if read_opening(newest) is None:
                    raise self.error(f"what a meeting begins with cannot be read: {ELSE}")
                if asked:  # that meeting is over, and its keys may be removed by now
                    self._store.delete_key(ticket)
                    self._store.delete_key(f"{prefix}/{CAME}")
                asked, prefix = newest, f"{self._root}/{newest.partition(' ')[0]}"
                ticket = f"{prefix}/{CAME}/{self._store.add(f'{prefix}/{CAME}', 1)}"
                self._store.set(ticket, f"{number} {self.endpoint}/{counts}")
            if asked and self._store.check([f"{prefix}/{number}"]):
                self._store.delete_key(f"{prefix}/{number}")
                break
            if wait.over():
                self._store.delete_key(ticket)
                earlier = self._peek(f"{prefix}/0") if asked else None
                why = self._unlike(asked) or self._without_first(*wait.limit, earlier)
                raise self.error(why, [0])
            wait.pause()
        self._opening = asked
        if unlike := self._unlike(asked):
            objection = Outcome(unlike, [self.endpoint])
            self._decide(objection)
            self._raise(objection)

    def _greet(self) -> None:
        """Answers, on endpoint 0, those that have come; each but once.

        One that has left may be back for the next meeting, and ask here before that begins.
        """
        came = min(self._store.add(self._key(CAME), 0), MOST_CAME)
        self._tickets += range(self._came + 1, came + 1)
        self._came = came
        for ticket in list(self._tickets):
            asked = self._peek(self._key(CAME, ticket))
            if asked is None:
                continue
            self._tickets.remove(ticket)
            number, _, who = asked.partition(" ")
            if not who.partition("/")[0].isdecimal():
                continue  # an endpoint did not write it
            if who not in self._here:
                self._here.add(who)
                self._store.set(self._key(number), "")
                self._store.delete_key(self._key(CAME, ticket))

    def _unlike(self, opening: str) -> str:
        counts = self.workers, self.servers
        workers, servers = (read_opening(opening) or ("", *counts))[1:]
        if (workers, servers) == counts:
            return ""
        return (
            f"{self.describe([0])} counts {workers} workers and {servers} servers, "
            f"{self.describe([self.endpoint])} counts {self.workers} and {self.servers}: give all "
            "the same numbers"
        )

    def _without_first(self, timeout_s: float, origin: str, earlier: str | None) -> str:
        who = self.describe([self.endpoint])
        if self.endpoint >= self.workers:
            return (
                f"{who}: no workers came within {timeout_s:g} s; they come when they attach; "
                f"{origin}"
            )
        why = Outcome.load(earlier, self.endpoints).why if earlier else ""
        return (
            f"{self.describe([0])} did not join within {timeout_s:g} s (when {who} gave up); "
            f"{origin}{f'; an earlier attempt had failed: {why}' if why else ''}"
        )

    # ------------------------------------------------------------------ one exchange

    def _await(self, wait: Wait) -> Outcome:
        """Waits for the outcome of the next exchange; endpoint 0 makes it of the texts."""
        keys = self._keys()
        while (outcome := self._outcome()) is None:
            if self.endpoint == 0:
                if self._next == 0:
                    self._greet()
                if self._store.check(keys):
                    texts = [self._store.get(key).decode(errors="replace") for key in keys]
                    outcome = self._decide(Outcome(texts=texts))
                    for key in () if outcome.why else keys:
                        self._store.delete_key(key)
                    return outcome
            # After that: endpoint 0 ends a meeting before it begins another.
            elif self._peek(self._newest) != self._opening and self._outcome() is None:
                self._leave()
                raise SupersededError(
                    f"{self.describe([0])} has begun another meeting: it was restarted, or failed",
                    [self.names.rank_of(0)],
                )
            if wait.over():
                return self._decide(self._incomplete(*wait.limit))
            wait.pause()
        return outcome

    def _incomplete(self, timeout_s: float, origin: str) -> Outcome:
        absent = self._absent() or [0]
        return Outcome(
            f"{self.describe(absent)} did not join within {timeout_s:g} s "
            f"({self.endpoints - len(absent)} of {self.endpoints} were here when "
            f"{self.describe([self.endpoint])} gave up); {origin}",
            absent,
        )

    def _spread(self, outcome: Outcome) -> None:
        """Tells a failure in the meeting around this one, before anything waits here."""
        around, self._failed_at = self._within, min(self._failed_at, time.monotonic())
        if around is None or around._left or not around._opening:
            return
        ranks = {rank: endpoint for endpoint, rank in enumerate(around.names.ranks)}
        known = (self.names.rank_of(each) for each in outcome.at_fault if each < self.endpoints)
        at_fault = [ranks[rank] for rank in known if rank in ranks]
        with contextlib.suppress(Exception):
            around._spread(around._decide(Outcome(outcome.why, at_fault)))

    def _raise(self, outcome: Outcome) -> NoReturn:
        self._spread(outcome)
        self._leave(unawaited=outcome.at_fault)
        why = "".join(sign if sign.isprintable() else " " for sign in outcome.why)
        raise self.error(why, [each for each in outcome.at_fault if each < self.endpoints])

    def _leave(self, linger_s: float | None = None, unawaited: Iterable[int] = ()) -> None:
        """Leaves a meeting that failed.

        Endpoint 0 waits for those that have not come, too, since nobody else answers them: where
        it left before, they would wait out their time-out and never hear what has failed.

        Args:
            linger_s: Seconds for which endpoint 0 waits at most until the others have left; None
                for LINGER_S.
            unawaited: Endpoints for which it does not wait unless they have come.
        """
        if self._left or not self._opening:
            return
        self._left = True
        left = self._store.add(self._key(LEFT), 1)
        linger_s = LINGER_S if linger_s is None else linger_s
        wait = Wait(Patience(linger_s), begun=min(self._failed_at, time.monotonic()))
        while self.endpoint == 0:
            if self._next == 0:
                self._greet()
            here = {int(who.partition("/")[0]) for who in self._here}
            gone = set() if self._next else {*unawaited} - here - {0}
            if left >= self.endpoints - len(gone):
                break
            if wait.over():
                break
            wait.pause()
            left = self._store.add(self._key(LEFT), 0)

    # ------------------------------------------------------------------ the store

    def _key(self, *what: int | str) -> str:
        return "/".join(map(str, (self.prefix, *what)))

    def _keys(self) -> list[str]:
        return [self._key(self._next, endpoint) for endpoint in range(self.endpoints)]

    def _absent(self) -> list[int]:
        return [e for e, key in enumerate(self._keys()) if not self._store.check([key])]

    def _peek(self, key: str) -> str | None:
        """Returns the value of a key, None where it is missing; waits for nothing."""
        value = self._store.compare_set(key, MISSING, MISSING).decode(errors="replace")
        return None if value == MISSING else value

    def _outcome(self) -> Outcome | None:
        text = self._peek(self._key(self._next))
        return None if text is None else Outcome.load(text, self.endpoints)

    def _decide(self, outcome: Outcome) -> Outcome:
        """Ends the next exchange with this outcome, unless another one came first; returns it."""
        key = self._key(self._next)
        text = self._store.compare_set(key, "", outcome.dump()).decode(errors="replace")
        return Outcome.load(text, self.endpoints)

    def _awaiting(self) -> str:
        absent = self._absent() if self._opening else []  # nobody has seen endpoint 0 yet
        return f"{self.describe([self.endpoint])} waits for {self.describe(absent or [0])}"


class Wait:
    """A wait that polls, ever more rarely, until its time is over.

    Args:
        patience: How long to wait.
        what: Describes what is waited for; it is logged as a warning after FIRST_WARNING_S, and
            again every NEXT_WARNING_S.
        begun: When it began; None for now.
    """

    def __init__(
        self,
        patience: Patience,
        what: Callable[[], str] | None = None,
        begun: float | None = None,
    ) -> None:
        self._patience = patience
        self._what = what
        self._begun = time.monotonic() if begun is None else begun
        self._warn_at = self._begun + FIRST_WARNING_S
        self._pause_s = 0.002

    @property
    def limit(self) -> tuple[float, str]:
        return self._patience.seconds, self._patience.origin

    def over(self) -> bool:
        return time.monotonic() >= self._begun + self._patience.seconds

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
