"""Chunk grids for the tests of what reads them."""

from __future__ import annotations

import numpy as np

from gradwire.transport.communicator import ChunkGrid


def grid(
    *lengths: int, regions: list[int] | None = None, owners: list[int] | None = None
) -> ChunkGrid:
    """Chunks of these lengths, one after another."""
    sizes = np.array(lengths, np.uint32)
    offsets = (np.cumsum(sizes) - sizes).astype(np.uint64)
    none = np.zeros(len(sizes), np.uint32)
    return ChunkGrid(
        offsets,
        sizes,
        none if regions is None else np.array(regions, np.uint32),
        none if owners is None else np.array(owners, np.uint32),
    )
