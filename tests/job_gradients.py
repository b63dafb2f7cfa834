"""What the tests of jobs in virtual time (gradwire.sim.job) give these to average."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def normal(
    elements: int, step: int, world: int = 3, scale: float = 1.0
) -> list[NDArray[np.float32]]:
    """The ranks' gradients of a step: standard normal, and the same however often they are made."""
    chance = np.random.default_rng(step)
    return [(scale * chance.standard_normal(elements)).astype(np.float32) for _ in range(world)]
