"""Notices: what endpoints tell each other in the job's store where datagrams do not arrive.

An endpoint whose kernel refuses its datagrams, as a firewall of its host makes it, hears the others
and cannot answer. They would know its silence alone, so it writes the cause into the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from gradwire.core.begin import begin
from gradwire.core.names import Names
from gradwire.transport.store import NoAnswerError, Worker, base_store

if TYPE_CHECKING:
    from gradwire import _engine

ANSWER_S = 1.0
"""How long a failure waits for the store at most; its cause is known without."""

WAIT_S = 0.5
"""How long a failure waits for a notice, which the other end may write at the same moment."""

POLL_S = 0.05


class Notices:
    """The notices of the endpoints of one engine.

    Args:
        store: The job's store, which this does not keep from being closed.
        session: The session of the engine, which no other job has.
        endpoint: The number of this endpoint.
        names: Names all endpoints.
    """

    def __init__(self, store: Any, session: int, endpoint: int, names: Names) -> None:
        self._store = weakref.ref(store)
        self._prefix = f"gradwire/refused/{session}"
        self._endpoint = endpoint
        self._names = names
        self._refusal = ""  # as the engine told it the last time
        self._text = ""  # of this endpoint's notice
        self._writing = threading.Lock()
        self._asking = threading.Lock()
        self._read: dict[int, str] = {}

    @property
    def told(self) -> bool:
        """Whether this endpoint has a notice."""
        return bool(self._text)

    def watch(self, refusal: str) -> None:
        """Tells why datagrams were refused since the last call; takes it back where none were.

        Args:
            refusal: Why, and how many so far, as the engine has it; "" for none.
        """
        refused, self._refusal = refusal != self._refusal, refusal
        if refused != self.told:
            self.tell(refusal if refused else "")

    def tell(self, refusal: str) -> None:
        """Has a thread write this endpoint's notice, "" for none; waits for nothing.

        Without a thread nothing is written, and the others know of the silence alone.
        """
        self._text = refusal
        with contextlib.suppress(RuntimeError):
            begin(self._write, "gradwire-notice")

    def explain(self, engine: _engine.Engine | None, at_fault: int, cause: str) -> tuple[int, str]:
        """Returns the endpoint at fault, and whose datagrams were refused, as text for an error.

        Args:
            engine: The engine that has failed; None for one that is closed.
            at_fault: The endpoint at fault as far as the engine knows, -1 for none.
            cause: The cause of the failure. Silence is explained by what the silent ones tell.
        """
        if engine is None:
            return at_fault, ""
        own = engine.refusal()
        refused = {self._endpoint: own} if own else {}
        if own:
            self.tell(own)
        elif cause == "silence" and at_fault != self._endpoint:
            peers = [peer.endpoint for peer in engine.peers()]
            refused = self._of(peers if at_fault == -1 else [at_fault])
        if at_fault == -1 and len(refused) == 1:
            (at_fault,) = refused
        return at_fault, "".join(
            f"; the kernel of {self._names.name(endpoint)}'s host refused datagrams: {refusal}"
            for endpoint, refusal in refused.items()
        )

    def _of(self, endpoints: list[int]) -> dict[int, str]:
        """Returns the notices of those endpoints that have one; asks once for each."""
        with self._asking:
            missing = [each for each in endpoints if each not in self._read]
            if missing:
                with contextlib.suppress(Exception):
                    self._read.update(Worker().ask(lambda: self._found(missing), ANSWER_S))
            return {each: self._read[each] for each in endpoints if self._read.get(each)}

    def _found(self, endpoints: list[int]) -> dict[int, str]:
        end = time.monotonic() + WAIT_S
        while True:
            store = self._open()
            there = [e for e in endpoints if store.check([f"{self._prefix}/{e}"])]
            found = {e: store.get(f"{self._prefix}/{e}").decode(errors="replace") for e in there}
            if any(found.values()) or time.monotonic() >= end:
                return {**dict.fromkeys(endpoints, ""), **found}
            time.sleep(POLL_S)

    def _write(self) -> None:
        with contextlib.suppress(Exception), self._writing:  # the store may be gone
            self._open().set(f"{self._prefix}/{self._endpoint}", self._text)

    def _open(self) -> Any:
        store = self._store()
        if store is None:
            raise NoAnswerError("the job's store is closed")
        return base_store(store)
