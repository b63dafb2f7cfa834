"""The books of what did not count: residuals, ages, non-finite chunks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gradwire.core.errors import ConfigError
from gradwire.core.hashed import HashedTuple
from gradwire.core.regions import TensorSlot
from gradwire.core.transfer_report import TransferReport
from gradwire.training.feedback.residuals import (
    AgeBook,
    ResidualBook,
    join_chunks,
    nonfinite_chunks,
)
from gradwire.transport.communicator import ChunkGrid

A = (TensorSlot("a", 0, 30), TensorSlot("b", 30, 70))
REBUILT = ((TensorSlot("b", 0, 70),), (TensorSlot("a", 0, 30), TensorSlot("c", 30, 5)))


def grid(elements: int, chunk: int, order: NDArray[np.intp] | None = None) -> ChunkGrid:
    offsets = np.arange(0, elements, chunk)
    lengths = np.minimum(chunk, elements - offsets)
    if order is not None:
        offsets, lengths = offsets[order], lengths[order]
    none = np.zeros(len(offsets), np.uint32)
    return ChunkGrid(offsets.astype(np.uint64), lengths.astype(np.uint32), none, none)


def outcome(counted: NDArray[np.uint8], **withheld: object) -> TransferReport:
    fields: dict[str, object] = dict.fromkeys(TransferReport.__dataclass_fields__, 0)
    fields["withheld_chunks"] = np.zeros(0, np.uint32)
    fields["withheld_values"] = np.zeros(0, np.float32)
    fields["result_error"] = np.zeros(0, np.float32)
    fields.update(counted=counted, applied=np.ones_like(counted), **withheld)
    return TransferReport(**fields)  # type: ignore[arg-type]


def mask(chunks: ChunkGrid, counted: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Per element: did it count?"""
    elements = np.zeros(int(chunks.lengths.sum()), bool)
    for offset, length, yes in zip(chunks.offsets, chunks.lengths, counted, strict=True):
        elements[int(offset) : int(offset) + int(length)] = yes
    return elements


@given(seed=st.integers(0, 2**32), chunk=st.integers(1, 120), steps=st.integers(1, 8))
def test_the_books_balance(seed: int, chunk: int, steps: int) -> None:
    """applied + residual = all gradients, per element, whatever was lost."""
    chance = np.random.default_rng(seed)
    chunks = grid(100, chunk, chance.permutation(-(-100 // chunk)))
    book = ResidualBook()
    total = np.zeros(100)
    applied = np.zeros(100)
    for _ in range(steps):
        gradient = chance.standard_normal(100).astype(np.float32)
        total += gradient
        bucket = gradient.copy()
        book.add_to(A, bucket)
        counted = (chance.random(len(chunks)) < 0.6).astype(np.uint8)
        applied += np.where(mask(chunks, counted), bucket, 0)
        bucket[:] = 1e9  # the engine writes the result over what was sent
        book.settle(A, chunks, outcome(counted), 1.0)
    state = book.state_dict()
    residual = np.concatenate([state["a"], state["b"]])
    np.testing.assert_allclose(applied + residual, total, atol=1e-4)


def test_residuals_follow_their_parameters_into_rebuilt_buckets() -> None:
    book = ResidualBook()
    bucket = np.arange(100, dtype=np.float32)
    book.add_to(A, bucket)
    book.settle(A, grid(100, 10), outcome(np.zeros(10, np.uint8)), 1.0)
    first, second = np.zeros(70, np.float32), np.zeros(35, np.float32)
    book.add_to(REBUILT[0], first)
    book.add_to(REBUILT[1], second)
    np.testing.assert_array_equal(first, np.arange(30, 100))
    np.testing.assert_array_equal(second[:30], np.arange(30))
    np.testing.assert_array_equal(second[30:], 0)


def test_a_book_knows_when_nothing_is_owed() -> None:
    everything, nothing = np.ones(10, np.uint8), np.zeros(10, np.uint8)
    book = ResidualBook()
    assert not book.clean(A)
    for counted in (everything, nothing, everything):
        book.add_to(A, np.ones(100, np.float32))
        book.settle(A, grid(100, 10), outcome(counted), 1.0)
        assert book.clean(A) == bool(counted.all())
    book.mark_dirty(A)
    assert not book.clean(A)


class Meanwhile(HashedTuple[TensorSlot]):
    """A layout during whose look-up another thread does something."""

    act: Callable[[], None] | None = None

    def __hash__(self) -> int:
        if (act := self.act) is not None:
            self.act = None
            other = threading.Thread(target=act)
            other.start()
            other.join(0.5)  # it may have to wait until the look-up is over
        return super().__hash__()


def test_a_bucket_that_ends_while_another_layout_is_opened_is_not_taken_for_clean() -> None:
    everything, nothing = np.ones(10, np.uint8), np.zeros(10, np.uint8)
    book, other = ResidualBook(), Meanwhile((TensorSlot("c", 0, 100),))
    for slots in (A, other):
        book.add_to(slots, np.ones(100, np.float32))
        book.settle(slots, grid(100, 10), outcome(everything), 1.0)
    book.add_to(A, np.ones(100, np.float32))
    ended = threading.Event()

    def end() -> None:
        book.settle(A, grid(100, 10), outcome(nothing), 1.0)
        ended.set()

    other.act = end
    book.open((TensorSlot("d", 0, 10),), 10)
    assert ended.wait(10.0)
    assert book.clean(other)
    assert not book.clean(A)


def test_a_layout_that_comes_back_takes_over_what_is_owed() -> None:
    book = ResidualBook()
    book.add_to(A, np.ones(100, np.float32))
    book.settle(A, grid(100, 10), outcome(np.ones(10, np.uint8)), 1.0)
    book.add_to(REBUILT[0], np.ones(70, np.float32))
    book.settle(REBUILT[0], grid(70, 10), outcome(np.zeros(7, np.uint8)), 1.0)
    assert not book.clean(A)
    again = np.zeros(100, np.float32)
    book.add_to(A, again)
    assert not book.clean(A)
    np.testing.assert_array_equal(again, [0.0] * 30 + [1.0] * 70)


def test_a_withheld_result_returns_to_the_sum() -> None:
    book = ResidualBook()
    bucket = np.ones(100, np.float32)
    book.add_to(A, bucket)
    report = outcome(
        np.ones(10, np.uint8),
        withheld_chunks=np.array([2, 9], np.uint32),
        withheld_values=np.arange(20, dtype=np.float32),
    )
    book.settle(A, grid(100, 10), report, scale=0.25)
    again = np.zeros(100, np.float32)
    book.add_to(A, again)
    expected = np.zeros(100, np.float32)
    expected[20:30] = np.arange(10) * 4
    expected[90:100] = np.arange(10, 20) * 4
    np.testing.assert_array_equal(again, expected)


def test_what_the_encoding_of_our_results_took_returns_to_the_sum() -> None:
    book = ResidualBook()
    bucket = np.ones(100, np.float32)
    book.add_to(A, bucket)
    report = outcome(
        np.ones(10, np.uint8),
        result_error=np.full(20, 0.5, np.float32),
        error_offset=30,
    )
    book.settle(A, grid(100, 10), report, scale=0.25)
    again = np.zeros(100, np.float32)
    book.add_to(A, again)
    expected = np.zeros(100, np.float32)
    expected[30:50] = 2.0
    np.testing.assert_array_equal(again, expected)


@given(seed=st.integers(0, 2**32))
def test_the_books_balance_with_an_encoding(seed: int) -> None:
    """What a chunk that counted lost on the wire stays, all of one that did not count does."""
    chance = np.random.default_rng(seed)
    chunks = grid(100, 10)
    book = ResidualBook()
    total, applied = np.zeros(100), np.zeros(100)
    for _ in range(6):
        gradient = chance.standard_normal(100).astype(np.float32)
        total += gradient
        bucket = gradient.copy()
        book.add_to(A, bucket)
        counted = (chance.random(10) < 0.7).astype(np.uint8)
        got = bucket.astype(np.float16).astype(np.float32)
        applied += np.where(mask(chunks, counted), got, 0)

        def keep(sent: NDArray[np.float32], which: NDArray[np.uint8]) -> None:
            here = mask(chunks, which)
            sent[here] -= sent[here].astype(np.float16).astype(np.float32)

        book.settle(A, chunks, outcome(counted), 1.0, keep)
    state = book.state_dict()
    residual = np.concatenate([state["a"], state["b"]])
    np.testing.assert_allclose(applied + residual, total, atol=1e-5)


def test_what_counted_leaves_no_trace_even_if_it_was_not_finite() -> None:
    book = ResidualBook()
    bucket = np.full(100, np.nan, np.float32)
    book.add_to(A, bucket)
    counted = np.ones(10, np.uint8)
    book.settle(A, grid(100, 10), outcome(counted), 1.0)
    assert not any(values.any() for values in book.state_dict().values())
    bucket[:] = np.inf
    book.add_to(A, bucket)
    counted[3] = 0
    bucket[30:40] = 0
    book.settle(A, grid(100, 10), outcome(counted), 1.0)
    state = book.state_dict()
    assert np.isfinite(state["a"]).all()


def test_residuals_scale_with_a_gradient_scaler_and_survive_a_restart() -> None:
    book = ResidualBook()
    book.add_to(A, np.ones(100, np.float32))
    book.rescale(0.5)
    other = ResidualBook()
    other.load_state_dict(book.state_dict())
    bucket = np.zeros(100, np.float32)
    other.add_to(A, bucket)
    np.testing.assert_array_equal(bucket, 0.5)
    other.load_state_dict({"a": np.ones(29, np.float32)})
    with pytest.raises(ConfigError, match="residual of parameter 'a' has 29 elements"):
        other.add_to(A, bucket)


@given(seed=st.integers(0, 2**32), max_age=st.integers(1, 6))
def test_nothing_goes_uncounted_for_more_than_max_age_steps(seed: int, max_age: int) -> None:
    """Also across a change of the grid, and with everything lost that may be."""
    chance = np.random.default_rng(seed)
    book = AgeBook(max_age)
    uncounted = np.zeros(100, int)
    for step in range(20):
        chunks = grid(100, 7 if step < 10 else 13)
        due = book.due(A, chunks)
        counted = (chance.random(len(chunks)) < 0.1).astype(np.uint8)
        counted[due] = 1
        book.settle(A, chunks, outcome(counted))
        hit = mask(chunks, counted)
        uncounted = np.where(hit, 0, uncounted + 1)
        assert uncounted.max() <= max_age


def test_ages_follow_their_parameters_into_rebuilt_buckets() -> None:
    book = AgeBook(1)
    counted = np.ones(10, np.uint8)
    counted[4] = 0  # elements 40..49: b's 10..19
    book.due(A, grid(100, 10))
    book.settle(A, grid(100, 10), outcome(counted))
    assert list(book.due(REBUILT[0], grid(70, 10))) == [1]
    assert list(book.due(REBUILT[1], grid(35, 10))) == []


def test_ages_wait_for_the_last_of_the_rebuilt_buckets() -> None:
    book = AgeBook(1)
    counted = np.ones(10, np.uint8)
    counted[1] = 0  # elements 10..19: a's
    book.due(A, grid(100, 10))
    book.settle(A, grid(100, 10), outcome(counted))
    assert list(book.due(REBUILT[0], grid(70, 10))) == []
    assert list(book.due(REBUILT[1], grid(35, 10))) == [1]
    assert set(book._kept) == set(REBUILT)


def test_ages_survive_a_restart_into_other_buckets() -> None:
    book = AgeBook(2)
    for missing in (1, 4), (4,):  # chunk 4: b's elements 10..19, two steps running
        counted = np.ones(10, np.uint8)
        counted[list(missing)] = 0
        book.due(A, grid(100, 10))
        book.settle(A, grid(100, 10), outcome(counted))
    state = book.state_dict()
    assert set(state) == {"b"}  # a has counted again
    np.testing.assert_array_equal(state["b"], [(10, 0), (10, 2), (50, 0)])
    other = AgeBook(2)
    other.load_state_dict(state)
    assert list(other.due(REBUILT[1], grid(35, 10))) == []
    assert list(other.due(REBUILT[0], grid(70, 7))) == [1, 2]
    np.testing.assert_array_equal(other.state_dict()["b"], [(7, 0), (14, 2), (49, 0)])


@pytest.mark.parametrize("runs", [[1, 2], [[0, 1]], [[5, 256]], [[5, -1]], [[5.0, 1.0]]])
def test_ages_that_cannot_be_are_an_error(runs: list[object]) -> None:
    with pytest.raises(ConfigError, match="ages of parameter 'a'"):
        AgeBook(1).load_state_dict({"a": np.array(runs)})


def test_ages_of_another_model_are_an_error() -> None:
    book = AgeBook(1)
    book.load_state_dict({"a": np.array([(29, 1)])})
    with pytest.raises(ConfigError, match="ages of parameter 'a' are of 29 elements"):
        book.due(A, grid(100, 10))


def test_an_exact_step_leaves_no_age() -> None:
    book = AgeBook(1)
    chunks = grid(100, 10)
    book.settle(A, chunks, outcome(np.ones(10, np.uint8)))
    assert book._kept == {}  # reliable plans keep no books
    book.settle(A, chunks, outcome(np.zeros(10, np.uint8)))
    assert len(book.due(A, chunks)) == 10
    book.settle(A, grid(100, 50), outcome(np.ones(2, np.uint8)))
    assert book.state_dict() == {}


def test_nonfinite_chunks_are_found_wherever_they_lie() -> None:
    order = np.array([3, 0, 2, 1, 9, 8, 7, 6, 5, 4])
    bucket = np.ones(100, np.float32)
    assert len(nonfinite_chunks(grid(100, 10), bucket)) == 0
    bucket[5], bucket[99] = np.nan, -np.inf
    assert list(nonfinite_chunks(grid(100, 10), bucket)) == [0, 9]
    assert list(nonfinite_chunks(grid(100, 10, order), bucket)) == [1, 4]


def test_lists_of_chunks_join() -> None:
    none = np.zeros(0, np.uint32)
    assert join_chunks([none, none]) is None
    joined = join_chunks([np.array([3, 1], np.uint32), none, np.array([3], np.uint32)])
    assert joined is not None
    assert joined.dtype == np.uint32
    assert list(joined) == [1, 3]
