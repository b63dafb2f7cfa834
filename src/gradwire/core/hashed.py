"""HashedTuple is a tuple that computes its hash once.

A bucket's layout and its regions have an item for each tensor, and are the keys of dictionaries
that every step looks into several times.
"""

from __future__ import annotations

from typing import Any, TypeVar

Item = TypeVar("Item")


class HashedTuple(tuple[Item, ...]):
    """A tuple that keeps its hash; it equals a plain tuple and hashes like one."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash

    def __reduce__(self) -> tuple[type[Any], tuple[tuple[Item, ...]]]:
        """Leaves the hash out of a pickle, because another process hashes text differently."""
        return type(self), (tuple(self),)
