"""A scenario's faults strike every contestant once, in its first turn."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gradwire_lab.network.network import LabUnavailable
from gradwire_lab.run.model import Event
from gradwire_lab.scenario.network import Fault

__all__ = ["Faults"]


class Faults:
    """Faults begin and end by the clock, within the turn of the contestant they are meant for."""

    def __init__(
        self, faults: Sequence[Fault], apply: Callable[[Fault, bool], None], events: list[Event]
    ) -> None:
        """Prepare the faults; none begins yet.

        Args:
            apply: begins a fault (True), or ends it; called from timer threads, one at a time.
            events: list that gets an entry for each fault that began or ended.
        """
        self._faults = tuple(faults)
        self._apply = apply
        self._events = events
        self._struck: set[str] = set()  # the contestants that faults have met
        self._ahead: list[Fault] = []
        self._lasting: list[Fault] = []
        self._trouble: list[OSError] = []
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()

    def begin(self, contestant: str, start: float | None = None) -> None:
        """Start the faults' timers if this is the contestant's first turn.

        Args:
            start: the start of its first timed round, by ``time.monotonic()``; now if not given.
        """
        if contestant in self._struck:
            return
        self._struck.add(contestant)
        lead = 0.0 if start is None else max(0.0, start - time.monotonic())
        with self._lock:
            for fault in self._faults:
                self._ahead.append(fault)
                self._later(lead + fault.at_s, self._strike, fault)

    @contextlib.contextmanager
    def turn(self, contestant: str) -> Iterator[None]:
        """Surround a contestant's turn; at its end all faults are over.

        Raises:
            LabUnavailable: a fault could not begin, or the turn was over before it.
        """
        try:
            yield
        except BaseException:
            self.stop()
            raise
        self._end(contestant)

    def stop(self) -> None:
        """Begin no more faults, and end none, since the network goes away."""
        with self._lock:
            self._silence()
            self._lasting.clear()

    def _end(self, contestant: str) -> None:
        with self._lock:
            ahead = self._silence()
            for fault in list(self._lasting):
                self._heal(fault)
        if self._trouble:
            raise self._trouble[0]
        for fault in ahead:
            raise LabUnavailable(
                f"faults: {fault.kind} of host {fault.host}, at_s={fault.at_s:g}: the first turn "
                f"of {contestant!r} was over before; a smaller at_s is allowed, or longer turns "
                "(work.block)"
            )

    def _silence(self) -> list[Fault]:
        """Stop all timers; return the faults that had not begun."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        ahead, self._ahead = self._ahead, []
        return ahead

    def _strike(self, fault: Fault) -> None:
        with self._lock:
            if fault not in self._ahead:
                return
            self._ahead.remove(fault)
            if self._done(fault, True) and fault.kind != "kill":
                self._lasting.append(fault)
                self._later(fault.lasts_s, self._heal_late, fault)

    def _heal_late(self, fault: Fault) -> None:
        with self._lock:
            if fault in self._lasting:
                self._heal(fault)

    def _heal(self, fault: Fault) -> None:
        self._lasting.remove(fault)
        self._done(fault, False)

    def _done(self, fault: Fault, on: bool) -> bool:
        """Begin or end a fault; return whether it worked, which then is an event."""
        at = time.monotonic()
        try:
            self._apply(fault, on)
        except OSError as error:
            self._trouble.append(error)
            return False
        self._events.append(Event(at, f"{fault.kind if on else 'heal'} host {fault.host}"))
        return True

    def _later(self, seconds: float, action: Callable[[Fault], None], fault: Fault) -> None:
        timer = threading.Timer(seconds, action, [fault])
        timer.daemon = True
        self._timers.append(timer)
        timer.start()
