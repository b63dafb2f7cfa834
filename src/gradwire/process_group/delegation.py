"""Methods of the group and of the backend that delegate a collective to Gloo.

A method that a subclass inherits would do the same with the GIL held, for which a thread of Gloo
waits while it holds the lock of its queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

outside_graphs: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
"""Keeps Dynamo out of a method, since it cannot trace a process group in Python."""

COLLECTIVES = (
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_single",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)
"""The collectives that Gloo carries out; some names are newer than others."""


def delegate(
    owner: type[Any], names: Iterable[str], known: type[Any], target: Callable[[Any], Any]
) -> None:
    """Gives a class the methods that call those of the same names of another object.

    Args:
        known: The class of the other object; this torch may lack some of the names there.
        target: Returns the other object of an instance of the class.
    """
    for name in names:
        if hasattr(known, name):
            setattr(owner, name, _method(name, target))


def _method(name: str, target: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(target(self), name)(*args, **kwargs)

    call.__name__ = name
    return outside_graphs(call)
