"""Signals between the members of a group: messages of one byte over Gloo, in order with nothing.

Gloo keeps the messages from one rank to another apart from collectives, by their tags. So a signal
may come while another thread runs a collective of the group, as an asynchronous checkpoint does.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, TCPStore

from gradwire.core.begin import begin
from gradwire.core.errors import RendezvousError
from gradwire.training.groups import Group
from gradwire.transport.store import BoundedStore, base_store

MET_TAG, LEAVES_TAG = 2**31 - 1, 2**31 - 2
"""Tags of the messages, as far as possible from those that users choose."""
MET, GAVE_UP = 0, 1
"""What a member says at the end of its wait for the others."""

ANSWER_S = 2.0
"""Seconds for which a member waits to read why another has given up."""
FOREVER_S = 365 * 24 * 3600.0
"""Seconds for a receive that may outlast a failure: Gloo's time-outs break connections."""
LEAVE_S = 1.0
"""Seconds for which a member waits at most until rank 0 leaves, too."""
CONNECTED_S = 0.1
"""Seconds for which it then waits at most until rank 0 has ended its connections."""
STORE_S = 1.0
"""Seconds for which it then waits at most until rank 0 has ended the store."""
HEAD_START_S = 0.03
"""Seconds that rank 0 then has to end what else it has."""


class Signals:
    """The signals of one member."""

    def __init__(self, group: Group, gloo: ProcessGroupGloo) -> None:
        self._group = group
        self._gloo: Any = gloo  # the methods that torch's types lack
        self._sent: list[object] = []  # Gloo needs them until they have arrived

    @contextlib.contextmanager
    def watching(self) -> Iterator[Callable[[], None]]:
        """Watches the next member while this one waits for all others; once only.

        Gloo learns at once of a process that has died, and the store does not. Each member is
        watched by the one before it, which notifies the others by its own failure.

        Yields:
            A check, which raises RendezvousError once the next member has died or given up.
        """
        group = self._group
        after = (group.rank + 1) % group.world_size
        failures: list[tuple[float, str]] = []  # when, and what
        receive = self._receiving(after, MET_TAG)

        def watch() -> None:
            # A next member that never comes to this says nothing. The group's small collectives
            # go on then, and this waits until the group's connections end.
            try:
                if receive(FOREVER_S) == GAVE_UP:
                    failures.append((time.monotonic() + ANSWER_S, "has given up"))
            except RuntimeError as error:
                failures.append((time.monotonic(), f"has ended, or left the group: {error}"))

        def check() -> None:
            if failures and time.monotonic() >= failures[0][0]:
                rank = group.ranks[after]
                raise RendezvousError(f"the process of rank {rank} {failures[0][1]}", [rank])

        begin(watch, "gradwire-watch")
        before = (group.rank - 1) % group.world_size
        try:
            yield check
        except BaseException:
            self._send(before, MET_TAG, GAVE_UP)
            raise
        self._send(before, MET_TAG, MET)

    def leave_after_rank_0(self) -> None:
        """Waits until rank 0 of the job leaves, too, for a bounded time, and lets it go first.

        Its process often hosts the job's store and ends it as it leaves. A process that makes a new
        group on the same port before that would look for the others in the old store.
        """
        group = self._group
        if group.rank == 0:
            for other in range(1, group.world_size):
                self._send(other, LEAVES_TAG, 0)
            return
        for seconds in (LEAVE_S, CONNECTED_S):  # the second message never comes
            with contextlib.suppress(RuntimeError):  # it has gone, or is busy for longer
                self._receiving(0, LEAVES_TAG)(seconds)
        _await_end(group.store)
        time.sleep(HEAD_START_S)

    def _receiving(self, source: int, tag: int) -> Callable[[float], int]:
        """Begins to receive a message.

        Returns:
            A function that waits for the message for so many seconds, and returns it or raises
            RuntimeError. It holds neither the group nor its store, which may end before.
        """
        value = torch.empty(1, dtype=torch.uint8)
        failure: RuntimeError | None = None
        try:
            work = self._gloo.recv([value], source, tag)
        except RuntimeError as error:  # it has gone
            failure = error

        def receive(seconds: float) -> int:
            if failure is not None:
                raise failure
            work.wait(datetime.timedelta(seconds=seconds))
            return int(value.item())

        return receive

    def _send(self, to: int, tag: int, value: int) -> None:
        tensor = torch.full((1,), value, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # it has gone
            self._sent.append(self._gloo.send([tensor], to, tag))


def _await_end(store: Any) -> None:
    """Waits for a bounded time until a store ends that the process of rank 0 hosts."""
    asked = base_store(store)
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it is torchrun's
    if outlives or not isinstance(asked, TCPStore):
        return
    bounded = BoundedStore(asked, STORE_S)
    until = time.monotonic() + STORE_S
    with contextlib.suppress(RuntimeError):  # it has ended
        while time.monotonic() < until:
            bounded.check(["gradwire"])
            time.sleep(0.005)
