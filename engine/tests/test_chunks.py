"""Arithmetic over chunks: mean magnitudes, and values written into some chunks."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gradwire import _engine
from gradwire.transport.native import ChunkGrid


def grid(lengths: list[int]) -> ChunkGrid:
    sizes = np.array(lengths, np.uint32)
    none = np.zeros(len(sizes), np.uint32)
    return ChunkGrid((np.cumsum(sizes) - sizes).astype(np.uint64), sizes, none, none)


def test_mean_magnitudes_of_chunks_of_any_length() -> None:
    chance = np.random.default_rng(3)
    lengths = [*range(1, 40), 361, 2243]
    values = chance.standard_normal(sum(lengths)).astype(np.float32)
    starts = np.cumsum([0, *lengths[:-1]])
    expected = np.add.reduceat(np.abs(values.astype(np.float64)), starts) / lengths
    np.testing.assert_allclose(grid(lengths).mean_magnitudes(values), expected, rtol=1e-6)


def by_lanes(values: NDArray[np.float32]) -> np.float32:
    """Sixteen sums in float32, added up in their order: what every machine has to get."""
    lanes = np.zeros(16, np.float32)
    for at in range(0, len(values), 16):
        row = np.abs(values[at : at + 16])
        lanes[: len(row)] += row
    total = np.float32(0)
    for lane in lanes:
        total += lane
    return total / np.float32(len(values))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 361, 2243])
def test_mean_magnitudes_are_the_same_to_the_bit_on_any_machine(length: int) -> None:
    values = np.random.default_rng(length).standard_normal(length).astype(np.float32)
    assert grid([length]).mean_magnitudes(values)[0] == by_lanes(values)


def test_what_is_written_is_what_the_source_has_of_the_chunks() -> None:
    values = np.zeros(10, np.float32)
    source = np.arange(3, 8, dtype=np.float32)  # of the elements 3 to 7
    grid([2, 3, 2, 3]).write(values, np.array([1, 3]), source, 3, 10.0)
    np.testing.assert_array_equal(values, [0, 0, 0, 30, 40, 0, 0, 70, 0, 0])
    grid([2, 3, 2, 3]).write(values, np.array([0]), source, 3, 10.0)
    np.testing.assert_array_equal(values, [0, 0, 0, 30, 40, 0, 0, 70, 0, 0])


@pytest.mark.parametrize(("offset", "length"), [(8, 3), (11, 0), ((1 << 64) - 1, 2)])
def test_a_chunk_beyond_the_values_is_refused(offset: int, length: int) -> None:
    offsets, lengths = np.array([0, offset], np.uint64), np.array([1, length], np.uint32)
    values = np.zeros(10, np.float32)
    with pytest.raises(ValueError, match=f"chunk 1 of {length} elements from {offset} on"):
        _engine.mean_magnitudes(values, offsets, lengths)
    with pytest.raises(ValueError, match="reaches beyond the 10 that there are"):
        _engine.write_chunks(values, offsets, lengths, values.copy(), 0, 1.0)
    with pytest.raises(ValueError, match="lengths has 2 entries, offsets has 1"):
        _engine.mean_magnitudes(values, offsets[:1], lengths)


def test_square_sums_of_the_parts_between_the_starts() -> None:
    values = np.array([1, 2, 3, 3e38, 4, np.inf], np.float32)
    starts = np.array([0, 3, 4, 5], np.uint64)
    found = _engine.square_sums(values, starts)
    np.testing.assert_allclose(found, [14, float(values[3]) ** 2, 16, np.inf])
    assert found.dtype == np.float64
    chance = np.random.default_rng(4)
    many = chance.standard_normal(1000).astype(np.float32)
    at = np.array([0, 1, 17, 17, 400], np.uint64)
    expected = [float((p.astype(np.float64) ** 2).sum()) for p in np.split(many, [1, 17, 17, 400])]
    np.testing.assert_allclose(_engine.square_sums(many, at), expected, rtol=1e-12)


@pytest.mark.parametrize("starts", [[0, 5, 4], [0, 11], [(1 << 64) - 1]])
def test_starts_out_of_order_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="is beyond where the next begins, or the 10 elements end"):
        _engine.square_sums(np.zeros(10, np.float32), np.array(starts, np.uint64))
