"""The job's store: how long an operation may take, and what all prefixes have in common.

torch's clients wait for an answer as long as the connection lasts, so an operation stands for ever
when the network to the store's host goes away. `BoundedStore` runs each operation on a thread of
its own, for which the caller waits no longer than a time-out, and in which signals act.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from gradwire.core.errors import RendezvousError

__all__ = ["BoundedStore", "Store", "base_store", "identity_of", "store_errors", "store_host"]

Answer = TypeVar("Answer")

LEAST_S = 5.0
"""Seconds that an operation may take in any case: a store that answers at all does so by then."""


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


class BoundedStore:
    """A store whose operations raise RuntimeError when no answer comes in time.

    After the first operation without an answer all others fail at once, since they would wait
    behind it.

    Args:
        store: the store to ask.
        timeout_s: how long an operation may take, in seconds; LEAST_S if that is longer.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = max(timeout_s, LEAST_S)
        self._stuck = False

    def shorten(self) -> None:
        """Gives every further operation LEAST_S: nothing depends on them any more."""
        self._timeout_s = LEAST_S

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """Returns the value of a key."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all keys are there."""
        return self._ask(lambda: self._store.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter and returns its new value."""
        return self._ask(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Sets a key that has the expected value, and returns its value after that."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str, /) -> bool:
        """Removes a key; returns whether it was there."""
        return self._ask(lambda: self._store.delete_key(key))

    def _ask(self, operation: Callable[[], Answer]) -> Answer:
        if self._stuck:
            raise RuntimeError("an earlier operation has had no answer")
        answers: list[Answer] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                answers.append(operation())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        threading.Thread(target=run, name="gradwire-store", daemon=True).start()
        if not done.wait(self._timeout_s):
            self._stuck = True
            raise RuntimeError(f"no answer within {self._timeout_s:g} s")
        if errors:
            raise errors[0]
        return answers[0]


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


def identity_of(store: Any) -> str:
    """Returns an identifier of the store under all prefixes, the same for all its users."""
    with store_errors():
        made: bytes = base_store(store).compare_set("gradwire/identity", "", secrets.token_hex(8))
    return made.decode()


def store_host(store: object) -> str | None:
    """Returns the host of the job's store: a TCPStore's own, else MASTER_ADDR, else None."""
    host = getattr(base_store(store), "host", None)
    if isinstance(host, str) and host:
        return host
    return os.environ.get("MASTER_ADDR") or None
