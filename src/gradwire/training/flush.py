"""Flush: which steps are exact because a user asked for all that is owed.

The call travels with the ballots of a step, and the steps from the next one on are exact until all
is delivered. A step may carry a part of the model only, as where a head and a body have backward
passes of their own. The user calls before the first of them, so the part that the call travels with
begins a turn of all parts, and the exact steps go on to the end of a turn. Every rank knows of all
this from the ballots and plans.
"""

from __future__ import annotations

import collections

from gradwire.core.regions import TensorSlot
from gradwire.training.feedback.owing import Owing, keys_of

Slots = tuple[TensorSlot, ...]


class Flush:
    """Decides which steps are exact."""

    def __init__(self, owing: Owing) -> None:
        self.owing = owing
        self._active = False
        self._started = False  # whether an exact step has ended
        self._awaited = False  # whether a part that owes something is to come
        self._first: frozenset[str] | None = None  # the keys with which a turn begins
        self._begun: collections.Counter[Slots] = collections.Counter()

    @property
    def pending(self) -> bool:
        """Whether something is still to be delivered."""
        return self._active and (self._awaited or not self._started)

    def ask(self, first: Slots | None = None) -> None:
        """Makes the next steps exact.

        Args:
            first: The first bucket of the step that a call travelled with; None where there is no
                such step, so that the next one begins a turn.
        """
        self._active, self._started = True, False
        self._first = None if first is None else keys_of(first)
        self._begun.clear()

    def begin(self, first: Slots) -> bool:
        """Returns whether a step that begins with this bucket is exact."""
        if not self._active:
            return False
        keys = keys_of(first)
        if self._first is None:
            self._first = keys
        turns = not keys.isdisjoint(self._first) or self._begun[first] > 1
        if self._started and turns and not self._awaited:
            self._active = False
            return False
        self._begun[first] += 1
        return True

    def end(self, step: int) -> None:
        self._started = True
        self._awaited = self.owing.awaited(step)
