"""Fallback: takes an attachment over to the host's network when its engine fails (on_failure).

The protocol has one idea. A step's results go to torch only once the step is *committed*, which
every rank does by one exact transfer that it starts when it has all results of the step. So as soon
as any rank has committed a step, all have its results. When an engine fails, every rank closes its
vote: the number of steps that it has committed, which no completion changes any more. The ranks
exchange their votes, and go on from the largest: who is one behind commits that step as it stands,
and a step that nobody committed is sent again from kept values, exactly.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from gradwire.core.begin import begin
from gradwire.core.errors import TransferError
from gradwire.core.leaving import inside
from gradwire.core.plan import TransferPlan
from gradwire.core.settings import Settings
from gradwire.transport.communicator import Communicator
from gradwire.transport.host_engine import GlooMail, HostEngine, Mail
from gradwire.transport.meeting import Meeting
from gradwire.transport.native import trivial_report
from gradwire.transport.store import BoundedStore
from gradwire.transport.texts import read_all, read_whole
from gradwire.transport.transfer import Handle

log = logging.getLogger("gradwire")

OF_THE_NETWORK = ("engine", "mtu", "silence")
"""Causes of failures that another way through the network may not have.

All others are errors of the job. At a time-out some rank has mostly not begun the transfer."""

LOOK_S = 0.5
"""How often a rank looks whether its engine, or that of another one, has failed."""


class Agreement(Protocol):
    """How the ranks of an attachment agree that they go over."""

    def notice(self) -> None:
        """Has the ranks agree now; `Fallback.close_vote` is called then, or was before."""

    def give_up(self, error: BaseException) -> None:
        """Has the others fail by an error where they go over, which this rank cannot."""

    def anew(self) -> Agreement:
        """Returns what takes its place once the ranks are back on an engine."""

    def close(self) -> None:
        """Ends the watch."""


class Fallback:
    """What one attachment does when its engine fails and all ranks live.

    Attributes:
        way: What carries the transfers of the steps that begin now.
        over: Whether that is the host's network.
        fresh: What carries transfers over a new engine, once this rank knows that all have one.
        agreement: How the ranks agree.
    """

    agreement: Agreement

    def __init__(self, communicator: Communicator) -> None:
        self.way = communicator
        self.over = False
        self.fresh: Communicator | None = None
        self._communicator = communicator
        self._host: Communicator | None = None  # which others may still read from after a way back
        self._mutex = threading.Lock()
        self._committed = 0
        self._closed = False  # whether the vote is
        self._adopts = False
        self._cause: BaseException | None = None
        self._verdict = Handle(None, None)

    def takes(self, error: BaseException) -> bool:
        """Returns whether the ranks may go on after this failure of a transfer."""
        return isinstance(error, TransferError) and error.cause in OF_THE_NETWORK

    def commits(self) -> bool:
        """Notes that this rank commits a step; returns False where its vote is closed."""
        with self._mutex:
            if not self._closed:
                self._committed += 1
            return not self._closed

    def verdict(self, cause: BaseException) -> Handle:
        """Returns a handle that ends when the ranks have agreed, or cannot.

        Args:
            cause: Why this rank needs it.
        """
        with self._mutex:
            self._cause = self._cause or cause
        self.agreement.notice()
        return self._verdict

    @property
    def adopts(self) -> bool:
        """Whether this rank commits the step in which it was, once the ranks have agreed."""
        return self._adopts

    # ------------------------------------------------------------------ for the agreement

    def close_vote(self) -> int:
        """Returns the number of steps that this rank has committed, which stays as it is."""
        with self._mutex:
            self._closed = True
            return self._committed

    def go_over(self, votes: list[int], host: Communicator) -> bool:
        """Goes on over the host's network, as all ranks do; returns False where none can.

        Args:
            votes: What all ranks have committed.
        """
        last = max(votes)
        if last - min(votes) > 1:
            self.refuse(TransferError(f"the ranks have committed {votes} steps", cause="plan"))
            return False
        with self._mutex:
            self._adopts = self._committed < last
            self._committed = last
            self.way, self.over, spent = host, True, self._host
            self._host = host
        if spent is not None:
            spent.close()
        if host.rank == 0:
            log.warning(
                "the engine failed (%s): from step %d of this attachment on the ranks go over the "
                "host's network, by Gloo",
                self._cause or "on another rank",
                last,
            )
        self._verdict.finish(trivial_report(TransferPlan.whole(1), 1, last, ()))
        return True

    def go_back(self, step: int) -> None:
        """Goes on over the new engine, as all ranks do before the same step."""
        fresh, self.fresh = self.fresh, None
        assert fresh is not None
        self._communicator.take_over(fresh)
        with self._mutex:
            self.way, self.over = self._communicator, False
            self._committed, self._closed, self._adopts = 0, False, False
            self._cause, self._verdict = None, Handle(None, None)
        self.agreement = self.agreement.anew()
        if self.way.rank == 0:
            log.warning("from step %d of this attachment on the ranks use an engine again", step)

    def refuse(self, error: Exception) -> None:
        """Ends the attempt: this rank fails by what it met itself, as it would without it."""
        cause = self._cause
        if isinstance(cause, TransferError):
            text = f"{cause}; on_failure='host' did not help: {error}"
            error = TransferError(text, rank=cause.rank, step=cause.step, cause=cause.cause)
        elif not isinstance(error, TransferError):
            error = TransferError(f"on_failure='host' did not help: {error}")
        self._verdict.finish(error)

    def give_up(self, error: BaseException) -> None:
        """Has the other ranks fail, since this one does."""
        self.agreement.give_up(error)
        if self.over:
            self.way.fail(str(error))

    def close(self) -> None:
        self.agreement.close()
        for each in (self._host, self.fresh):
            if each is not None:
                each.close()


class Watch(Agreement):
    """Watches the engines of all ranks of one attachment, on a thread of its own, and agrees.

    The first rank whose engine fails sets a key in the store, which all others look for. So ranks
    agree while they compute.

    Args:
        number: The attachment's number.
    """

    def __init__(
        self, fallback: Fallback, communicator: Communicator, settings: Settings, number: int
    ) -> None:
        engine = communicator.engine
        assert engine is not None
        self._number = number
        self._fallback = weakref.ref(fallback)
        self._communicator = communicator
        self._settings = settings
        self._topic = f"host/{engine.session}/{number}"
        self._key = f"gradwire/{self._topic}"
        self._store = BoundedStore(communicator.store, settings.rendezvous_timeout)
        self._woken = threading.Event()
        self._ended = False
        self._error: BaseException | None = None
        begin(self._run, "gradwire-fallback")

    def notice(self) -> None:
        self._woken.set()

    def give_up(self, error: BaseException) -> None:
        self._error = self._error or error
        self._woken.set()

    def close(self) -> None:
        self._ended = True
        self._woken.set()

    def _run(self) -> None:
        try:
            while not self._woken.wait(LOOK_S):
                if self._fallback() is None:
                    return
                if self._failed() or self._store.check([self._key]):
                    break
            if self._ended:
                return
            with inside():
                gone_over = self._agree()
        except Exception as error:  # such as a store that has ended
            fallback = self._fallback()
            if fallback is not None:
                fallback.refuse(error)
            return
        self._woken.clear()
        if gone_over and not self._settings.server_count:  # servers end with their engine
            self._return()

    def _failed(self) -> bool:
        failure: Callable[[], object] = getattr(self._communicator.engine, "failure", lambda: None)
        return failure() is not None

    def anew(self) -> Agreement:
        fallback = self._fallback()
        assert fallback is not None
        return Watch(fallback, self._communicator, self._settings, self._number)

    def _return(self) -> None:
        """Opens a new engine with all ranks, as soon as one can be opened."""
        while not self._ended:
            if self._woken.wait(self._settings.peer_timeout):
                self._woken.clear()  # transfers of the engine that has failed, or the end
                continue
            meeting = self._communicator.meeting(f"{self._topic}/back")
            try:
                fresh = _renewed(self._communicator, meeting, f"attachment {self._number}")
            except Exception as error:
                meeting.tell_failure(error)
                log.info("no engine could be opened again: %s", error)
                continue
            meeting.close()
            fallback = self._fallback()
            if fallback is None or self._ended:
                fresh.close()
                return
            fallback.fresh = fresh
            return

    def _agree(self) -> bool:
        """Agrees with the other ranks; returns whether they go over."""
        here = self._communicator
        meeting = here.meeting(self._topic)
        with contextlib.suppress(Exception):  # a store that is gone shows in the meeting
            self._store.set(self._key, "1")
        try:
            fallback = self._fallback()
            if self._error is not None or fallback is None:
                meeting.tell_failure(self._error or RuntimeError("the attachment is gone"))
                return False
            vote = fallback.close_vote()
            here.fail("another rank's engine failed")
            votes = read_all(meeting, "the vote", meeting.exchange(str(vote)), read_whole)
            mail = self._connect(meeting.prefix)
            meeting.exchange("")
        except Exception as error:
            meeting.tell_failure(error)
            raise
        meeting.close()
        return fallback.go_over(votes, over_host(self._communicator, mail))

    def _connect(self, prefix: str) -> Mail:
        here: Any = self._communicator
        group = ProcessGroupGloo(
            PrefixStore(f"{prefix}/gloo", here.store),
            here.rank,
            here.world_size,
            timeout=datetime.timedelta(seconds=here.timeout_s),
        )
        mail = GlooMail(group, here.world_size)
        mail.tell(np.zeros(1, np.int64))
        return mail


def over_host(communicator: Communicator, mail: Mail) -> Communicator:
    """Makes a communicator of the same ranks whose transfers go over the host's network."""
    engine = HostEngine(
        mail,
        communicator.rank,
        communicator.ranks,
        communicator.datagram,
        communicator.aggregators,
    )
    return communicator.alike(engine=engine)


def _renewed(communicator: Communicator, meeting: Meeting, user: str) -> Communicator:
    """Opens another engine with the workers, and takes a number of it; collective."""
    fresh = communicator.alike(meeting=meeting)
    try:
        fresh.take_number(meeting, user)
    except BaseException:
        fresh.let_go()
        raise
    return fresh


def fallback_of(communicator: Communicator, settings: Settings, number: int) -> Fallback | None:
    """Returns the fallback of an attachment, None where nothing can fail or none is asked for."""
    if settings.on_failure != "host" or communicator.engine is None:
        return None
    fallback = Fallback(communicator)
    fallback.agreement = Watch(fallback, communicator, settings, number)
    return fallback
