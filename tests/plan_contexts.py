"""Contexts in which the tests of policies have plans written."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.core.agreed import Phase
from gradwire.core.regions import TensorSlot
from gradwire.policies import PlanContext

CHUNK = 358


def context(
    tensors: Mapping[str, int],
    phase: Phase = "critical",
    *,
    step: int = 1,
    world_size: int = 4,
    chunk_elements: int = CHUNK,
) -> PlanContext:
    """A bucket of these tensors, one after another."""
    slots, at = [], 0
    for name, length in tensors.items():
        slots.append(TensorSlot(name, at, length))
        at += length
    return PlanContext(tuple(slots), at, step, phase, world_size, 5, chunk_elements)
