"""HashedTuple: a tuple that is looked up in every step, of as many items as a model has tensors."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["HashedTuple"]

Item = TypeVar("Item")


class HashedTuple(tuple[Item, ...]):
    """A tuple that works its hash out once; equal to, and hashed like, a plain one."""

    _hash: int

    def __hash__(self) -> int:
        """That of a plain tuple of these items."""
        try:
            return self._hash
        except AttributeError:
            self._hash = super().__hash__()
            return self._hash

    def __reduce__(self) -> tuple[type[Any], tuple[tuple[Item, ...]]]:
        """Without the hash: another process hashes text otherwise."""
        return type(self), (tuple(self),)
