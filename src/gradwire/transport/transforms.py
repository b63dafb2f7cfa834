"""The randomised Hadamard transform of a bucket: a lost chunk costs every element a little.

In place and orthonormal, so its own inverse up to the signs and to rounding (OptiReduce, arXiv
2310.06993; the blocks, in which about eleven datagrams of 1,472 bytes share each loss, are ours).
The signs are drawn from the plan's seed, alike on all ranks, and all replicas compute the same
bits. The engine does it, block by block in the nearest cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwire.transport.native import load_engine

__all__ = ["forward", "inverse"]

Flat = NDArray[np.float32]


def forward(values: Flat, seed: int) -> None:
    """Transforms in place: random signs, then the Walsh–Hadamard transform of each block."""
    load_engine().hadamard(values, seed)


def inverse(values: Flat, seed: int) -> None:
    """Undoes `forward` with the same seed, to rounding."""
    load_engine().hadamard(values, seed, inverse=True)
