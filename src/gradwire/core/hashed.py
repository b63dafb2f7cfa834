"""HashedTuple: a tuple that remembers its hash.

Caches look up tuples with one item for each tensor of a model in every step.
"""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["HashedTuple"]

Item = TypeVar("Item")


class HashedTuple(tuple[Item, ...]):
    """A tuple that computes its hash once; it equals a plain one and has the same hash."""

    _hash: int

    def __hash__(self) -> int:
        """Returns the hash of a plain tuple of these items."""
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash

    def __reduce__(self) -> tuple[type[Any], tuple[tuple[Item, ...]]]:
        """Pickles the items without the hash, since hashes of text differ between processes."""
        return type(self), (tuple(self),)
