"""The randomised Hadamard transform of a bucket, which spreads a lost chunk over many elements.

It works in place and is orthonormal, so it is its own inverse up to the signs and to rounding
(OptiReduce, arXiv 2310.06993). It is applied in blocks, in which about eleven datagrams of 1,472
bytes share each loss; the blocks are gradwire's own. The signs are drawn from the plan's seed, so
all replicas compute the same bits. The engine computes it, block by block in the nearest cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradwire.transport.native import load_engine

Flat = NDArray[np.float32]


def forward(values: Flat, seed: int) -> None:
    """Transforms float32 values in place: random signs, then the transform of each block."""
    load_engine().hadamard(values, seed)


def inverse(values: Flat, seed: int) -> None:
    """Inverts `forward` with the same seed in place, up to rounding."""
    load_engine().hadamard(values, seed, inverse=True)
