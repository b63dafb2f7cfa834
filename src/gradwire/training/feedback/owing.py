"""Owing: which tensors something may be owed of, as every rank knows from the plans.

A step may carry a part of a model only, as where a head and a body have backward passes of their
own, so what is owed is known by tensor, and when its part should come again by its rhythm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradwire.core.regions import TensorSlot


@dataclass
class Bucket:
    """A bucket that steps have carried.

    Attributes:
        gap: How many steps lay between the last two that did; 0 where there was one.
    """

    keys: frozenset[str]
    last: int
    gap: int = 0


class Owing:
    """Knows which tensors something may be owed of, and when they should come again."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.keys = set(keys)
        self._buckets: dict[tuple[TensorSlot, ...], Bucket] = {}
        self._first: int | None = None  # the first step

    def note(self, step: int, slots: tuple[TensorSlot, ...], *, loses: bool, exact: bool) -> None:
        """Notes a bucket of a step.

        Args:
            loses: Whether something of it may not have been delivered.
            exact: Whether all of it was, and what had been owed, too.
        """
        if self._first is None:
            self._first = step
        bucket = self._buckets.get(slots)
        if bucket is None:
            bucket = self._buckets[slots] = Bucket(keys_of(slots), step)
        else:
            bucket.gap, bucket.last = step - bucket.last, step
        if loses:
            self.keys |= bucket.keys
        elif exact:
            self.keys -= bucket.keys

    def add(self, keys: Iterable[str]) -> None:
        """Notes that something may be owed of these tensors again."""
        self.keys.update(keys)

    def awaited(self, step: int) -> bool:
        """Returns whether a bucket of which something is owed should soon come again.

        A bucket that stays away for longer than before is not awaited, since its parameters may not
        be used any more.
        """
        owed = [each for each in self._buckets.values() if not each.keys.isdisjoint(self.keys)]
        return any(step < self._next(each) for each in owed)

    def _next(self, bucket: Bucket) -> int:
        """Returns the latest step in which a bucket should come again."""
        if bucket.gap:
            return bucket.last + bucket.gap
        assert self._first is not None
        others = self._buckets.values()
        repeated = any(each.gap and each.last - each.gap > bucket.last for each in others)
        after = 1 + bucket.last - self._first  # as long as it took to come at all
        return bucket.last + after if repeated else max(each.last for each in others) + 1


def keys_of(slots: tuple[TensorSlot, ...]) -> frozenset[str]:
    return frozenset(slot.key for slot in slots)
