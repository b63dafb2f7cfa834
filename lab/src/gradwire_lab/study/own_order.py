"""This policy closes eagerly with masks of each worker's own, to compare with shared ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradwire.core.plan import PRIORITY_CLASSES
from gradwire.policies import MLT
from gradwire.policies.base import PlanContext
from gradwire.policies.parts.priorities import Chunks, Priorities

__all__ = ["OwnOrder"]


@dataclass
class OwnOrder(MLT):
    """This MLT has random priorities: each worker draws its own, anew in every step."""

    name: ClassVar[str] = "own-order"

    priority: str = "magnitude"

    def priorities(
        self, context: PlanContext, gradient: NDArray[np.float32], chunks: Chunks
    ) -> Priorities | None:
        """Draw the classes by a seed that the worker's own gradient makes."""
        chance = np.random.default_rng(zlib.crc32(gradient.tobytes()))
        return chance.integers(PRIORITY_CLASSES, size=len(chunks.lengths), dtype=np.uint8)
