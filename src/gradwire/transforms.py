"""The randomised Hadamard transform of a bucket: a lost chunk costs every element a little.

In place and orthonormal, so its own inverse up to the signs and to rounding. Blocks are powers of
two: as many of BLOCK elements as there are, then ever smaller ones. The signs are drawn from the
plan's seed, alike on all ranks; only additions and multiplications of single elements are used, so
all replicas compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "forward", "inverse"]

BLOCK = 4096
"""Elements of a block: about eleven datagrams of 1,472 bytes share each loss."""

Flat = NDArray[np.float32]


def forward(values: Flat, seed: int) -> None:
    """Transforms in place: random signs, then the Walsh–Hadamard transform of each block."""
    values *= _signs(values.size, seed)
    _transform(values)


def inverse(values: Flat, seed: int) -> None:
    """Undoes `forward` with the same seed, to rounding."""
    _transform(values)
    values *= _signs(values.size, seed)


def _signs(elements: int, seed: int) -> Flat:
    bits = np.random.Generator(np.random.PCG64(seed)).bytes(-(-elements // 8))
    drawn = np.unpackbits(np.frombuffer(bits, np.uint8), count=elements)
    signs: Flat = 1.0 - 2.0 * drawn.astype(np.float32)
    return signs


def _transform(values: Flat) -> None:
    for begin, length, block in _runs(values.size):
        rows = values[begin : begin + length].reshape(-1, block)
        half = 1
        while half < block:
            pairs = rows.reshape(-1, block // (2 * half), 2, half)
            upper = pairs[:, :, 0, :] + pairs[:, :, 1, :]
            np.subtract(pairs[:, :, 0, :], pairs[:, :, 1, :], out=pairs[:, :, 1, :])
            pairs[:, :, 0, :] = upper
            half *= 2
        rows *= np.float32(1.0 / math.sqrt(block))


def _runs(elements: int) -> Iterator[tuple[int, int, int]]:
    """(offset, elements, block size): whole blocks, then the rest by its powers of two."""
    whole = elements // BLOCK * BLOCK
    if whole:
        yield 0, whole, BLOCK
    at, block = whole, BLOCK // 2
    while at < elements:
        if elements - at >= block:
            yield at, block, block
            at += block
        block //= 2
