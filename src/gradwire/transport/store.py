"""The job's store: how long an operation may take, and what all prefixes have in common.

torch's clients wait for an answer as long as the connection lasts, so an operation stands for ever
when the network to the store's host goes away. `BoundedStore` runs its operations on a thread of
its own, for which the caller waits no longer than a time-out, and while which signals act.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from typing import Any, Protocol, TypeVar

from gradwire.core.begin import begin
from gradwire.core.errors import RendezvousError
from gradwire.core.leaving import inside

Answer = TypeVar("Answer")

LEAST_S = 5.0
"""Seconds that an operation may take in any case: a store that answers at all does so by then."""

IDLE_S = 0.5
"""Seconds without any operation after which the thread of a store ends."""


class Store(Protocol):
    """The part of torch.distributed.Store that gradwire uses."""

    def set(self, key: str, value: str, /) -> Any:
        """Sets the value of a key."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of a key; waits for it."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all keys have a value."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter, and returns its value."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Sets the value of a key where it is the expected one; returns the value then."""

    def delete_key(self, key: str, /) -> bool:
        """Removes a key; returns whether it had a value."""


class NoAnswerError(RuntimeError):
    """An operation has had no answer in time."""


class _Operations:
    """The operations that a thread carries out while it runs."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._asked = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._running = False  # whether the thread takes what is asked

    def put(self, question: tuple[Callable[[], Any], Future[Any]]) -> None:
        with self._mutex:
            if not self._running:
                begin(self._run, "gradwire-store")
                self._running = True
            self._asked.put(question)

    def end(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while True:
            try:
                question = self._asked.get(timeout=IDLE_S)
            except queue.Empty:
                question = None
            if question is None:
                with self._mutex:
                    self._running = not self._asked.empty()
                    if not self._running:
                        return
                continue
            operation, answer = question
            try:
                with inside():
                    found = operation()
                answer.set_result(found)
                del found
            except BaseException as error:
                answer.set_exception(error)
            del question, operation, answer  # which may hold the last reference to a store


class Worker:
    """A thread that carries out operations, for whose end nobody waits longer than they say.

    It ends with this object, or as soon as its last operation does. An error's traceback may keep
    the object, so the thread also ends where there is nothing to do for a moment.
    """

    def __init__(self) -> None:
        self._operations = _Operations()
        weakref.finalize(self, self._operations.end)

    def ask(self, operation: Callable[[], Answer], timeout_s: float) -> Answer:
        """Returns what an operation returns; raises NoAnswerError when that takes too long."""
        answer: Future[Answer] = Future()
        self._operations.put((operation, answer))
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise NoAnswerError(f"no answer within {timeout_s:g} s") from None


class BoundedStore:
    """A store whose operations raise NoAnswerError when no answer comes in time.

    After the first operation without an answer all others fail at once, since they would wait
    behind it.

    Args:
        timeout_s: how long an operation may take, in seconds; LEAST_S if that is longer.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = max(timeout_s, LEAST_S)
        self._worker: Worker | None = None
        self._stuck = False

    def shorten(self) -> None:
        """Gives every further operation LEAST_S: nothing depends on them any more."""
        self._timeout_s = LEAST_S

    def set(self, key: str, value: str, /) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str, /) -> bytes:
        return self._ask(self._store.get, key)

    def check(self, keys: list[str], /) -> bool:
        return self._ask(self._store.check, keys)

    def add(self, key: str, amount: int, /) -> int:
        return self._ask(self._store.add, key, amount)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._ask(self._store.compare_set, key, expected, desired)

    def delete_key(self, key: str, /) -> bool:
        return self._ask(self._store.delete_key, key)

    def _ask(self, operation: Callable[..., Answer], *arguments: object) -> Answer:
        if self._stuck:
            raise NoAnswerError("an earlier operation has had no answer")
        if self._worker is None:
            self._worker = Worker()
        try:
            return self._worker.ask(functools.partial(operation, *arguments), self._timeout_s)
        except NoAnswerError:
            self._stuck = True
            raise


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turns torch's errors of a store that does not answer into RendezvousError."""
    try:
        yield
    except RendezvousError:
        raise
    except RuntimeError as error:
        raise RendezvousError(
            f"the job's store does not answer: {error}; the process that hosts it (rank 0, under "
            "most launchers) may have ended, and its own output then shows the cause",
            [],
        ) from error


def base_store(store: Any) -> Any:
    """Returns the store under all prefixes, which other process groups and servers share."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def identity_of(store: Any, timeout_s: float) -> str:
    """Returns an identifier of the store under all prefixes, the same for all its users."""
    with store_errors():
        base = BoundedStore(base_store(store), timeout_s)
        identity = base.compare_set("gradwire/identity", "", secrets.token_hex(8))
        return identity.decode(errors="replace")


def store_host(store: object) -> str | None:
    """Returns the host of the job's store: a TCPStore's own, else MASTER_ADDR, else None."""
    host = getattr(base_store(store), "host", None)
    if isinstance(host, str) and host:
        return host
    return os.environ.get("MASTER_ADDR") or None


MOST_COMPARED = 64
"""How many ranks' texts are compared at most."""


def compare_texts(
    job_store: Store, prefix: str, rank: int, ranks: Sequence[int], text: str, wait_s: float
) -> dict[int, str]:
    """Publishes a rank's text in the store, and returns those of the ranks that publish theirs.

    Errors of the store are dropped, since they would hide the cause. A rank that has read the
    texts stays until the others have, because the store may end with it.

    Args:
        prefix: The prefix of the keys, the same on all ranks and new for each comparison.
        ranks: All ranks; of large jobs some are compared.
        wait_s: Seconds to wait for the others, at most.
    """
    texts = {rank: text}
    with contextlib.suppress(Exception):
        store = BoundedStore(job_store, wait_s)
        store.set(f"{prefix}/{rank}", text)
        keys = {each: f"{prefix}/{each}" for each in ranks[:MOST_COMPARED]}
        end = time.monotonic() + wait_s
        _await_keys(store, keys.values(), end)
        for each, key in keys.items():
            if store.check([key]):
                texts[each] = store.get(key).decode(errors="replace")
        store.set(f"{prefix}/{rank}/read", "1")
        _await_keys(store, [f"{keys[each]}/read" for each in texts if each in keys], end)
    return dict(sorted(texts.items()))


def _await_keys(store: BoundedStore, keys: Iterable[str], end: float) -> None:
    """Waits until a store has all of these keys, or the time has come."""
    asked = list(keys)
    while not store.check(asked) and time.monotonic() < end:
        time.sleep(0.05)
