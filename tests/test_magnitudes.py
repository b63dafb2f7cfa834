"""priority="results": what is left out had the smallest results, the same chunks on all workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chunk_grids import grid
from gradwire.core.errors import ConfigError
from gradwire.core.regions import TensorSlot
from gradwire.core.transfer_report import TransferReport
from gradwire.policies import DBLP, MLT
from gradwire.policies.parts.priorities import by_region
from gradwire.sim.fabric import Link
from gradwire.sim.job import Job
from gradwire.training.feedback.result_sizes import MagnitudeBook
from gradwire.transport.communicator import ChunkGrid

CHUNK = 361
TENSORS = {f"layer{i}.weight": 40 * CHUNK for i in range(6)}
ELEMENTS = sum(TENSORS.values())
WORLD = 3
INF = np.inf

A = (TensorSlot("a", 0, 6), TensorSlot("b", 6, 4))
REBUILT = (TensorSlot("b", 0, 4), TensorSlot("a", 4, 6))


def outcome(applied: list[int]) -> TransferReport:
    """A report of whose contributions reached which chunk, which is all that the book reads."""
    report = object.__new__(TransferReport)
    object.__setattr__(report, "applied", np.array(applied, np.uint8))
    return report


def ramp(step: int) -> list[NDArray[np.float32]]:
    """Gradients of all workers: noise, in each chunk as large as its number in its tensor says."""
    chance = np.random.default_rng(step)
    size = np.repeat(np.tile(np.arange(1, 41, dtype=np.float32), len(TENSORS)), CHUNK)
    return [size * chance.uniform(0.9, 1.1, ELEMENTS).astype(np.float32) for _ in range(WORLD)]


def arrived(result: NDArray[np.float32]) -> NDArray[np.bool_]:
    """By tensor and chunk."""
    chunks: NDArray[np.bool_] = result.reshape(len(TENSORS), 40, CHUNK).any(axis=2)
    return chunks


# ---------------------------------------------------------------------------- the book


def test_it_keeps_what_was_heard_last() -> None:
    book, chunks = MagnitudeBook(), grid(2, 3, 5)
    assert book.of(A, chunks) is None
    result = np.array([1, -3, 2, 2, -2, 0, 0, 0, 0, 5], np.float32)
    book.note(A, chunks, outcome([3, 0, 1]), result, 1.0)
    np.testing.assert_array_equal(book.of(A, chunks), [2, INF, 1])
    book.note(A, chunks, outcome([0, 3, 0]), 8 * result, 4.0)  # a loss scaler's
    np.testing.assert_array_equal(book.of(A, chunks), [2, 4, 1])
    result[0] = np.nan
    book.note(A, chunks, outcome([1, 0, 0]), result, 1.0)
    np.testing.assert_array_equal(book.of(A, chunks), [INF, 4, 1])


def test_it_follows_parameters_into_other_buckets_and_states() -> None:
    book, chunks = MagnitudeBook(), grid(2, 4, 2, 2)
    values = np.repeat(np.array([1, 2, 3, 4], np.float32), [2, 4, 2, 2])
    book.note(A, chunks, outcome([1, 1, 1, 1]), values, 1.0)
    state = book.state_dict()
    np.testing.assert_array_equal(state["a"], [(2, 1), (4, 2)])
    np.testing.assert_array_equal(book.of(REBUILT, grid(4, 3, 3)), [4, 2, 2])
    other = MagnitudeBook()
    other.load_state_dict({name: torch.from_numpy(runs).numpy() for name, runs in state.items()})
    np.testing.assert_array_equal(other.of(A, chunks), [1, 2, 3, 4])


@pytest.mark.parametrize(
    "runs", [[1.0, 2.0], [[0.0, 1.0]], [[1.5, 1.0]], [[5.0, -1.0]], [[5.0, np.nan]]]
)
def test_magnitudes_that_cannot_be_are_an_error(runs: list[object]) -> None:
    with pytest.raises(ConfigError, match="magnitudes of parameter 'a': numbers"):
        MagnitudeBook().load_state_dict({"a": np.array(runs)})


def test_classes_are_each_regions_own() -> None:
    chunks = grid(*[1] * 24, regions=[0] * 16 + [1] * 8)
    values = np.array([*range(16), *range(107, 99, -1)], np.float32)
    classes = by_region(values, chunks, 1)
    np.testing.assert_array_equal(classes[:16], np.repeat(np.arange(7, -1, -1), 2))
    np.testing.assert_array_equal(classes[16:], np.arange(8))
    few = by_region(np.array([INF, 1, 2], np.float32), grid(1, 1, 1), 1)
    np.testing.assert_array_equal(few, [2, 7, 5])


def test_equal_magnitudes_go_by_the_seed() -> None:
    chunks, same = grid(*[1] * 64), np.zeros(64, np.float32)
    drawn = by_region(same, chunks, 1)
    assert np.bincount(drawn).tolist() == [8] * 8
    np.testing.assert_array_equal(drawn, by_region(same, chunks, 1))
    assert (drawn != by_region(same, chunks, 2)).any()
    assert (np.diff(drawn.astype(int)) > 0).any()  # not by place


def test_classes_of_more_chunks_than_fit_beside_their_values() -> None:
    """Groups, places and 31 bits of value do not fit 64 bits; what is cut off are last bits."""
    count, chance = 140_000, np.random.default_rng(5)
    sizes = chance.integers(1, 3, count)
    regions = np.repeat(np.arange(count), sizes)[:count].astype(np.uint32)
    values = chance.integers(0, 1000, count).astype(np.float32)
    one = np.ones(count, np.uint32)
    owners = (np.arange(count) >= count // 2).astype(np.uint32)
    chunks = ChunkGrid(np.arange(count, dtype=np.uint64), one, regions, owners)
    classes = by_region(values, chunks, 1)
    first = np.concatenate([[True], (np.diff(regions) != 0) | (np.diff(owners) != 0)])
    alone = first & np.append(first[1:], True)
    assert (classes[alone] == 7).all()
    pairs = np.flatnonzero(first & ~alone)
    assert len(pairs) > 40_000
    assert set(classes[pairs] + classes[pairs + 1]) == {7 + 3}
    larger = values[pairs] > values[pairs + 1]
    differ = values[pairs] != values[pairs + 1]
    np.testing.assert_array_equal((classes[pairs] == 3)[differ], larger[differ])


def test_a_zero_with_a_sign_is_as_small_as_any() -> None:
    values = np.array([1.0, -0.0, 2.0, 3.0], np.float32)
    assert by_region(values, grid(1, 1, 1, 1), 1)[1] == 7


# ---------------------------------------------------------------------------- a job


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("pull", ["exact", "committed"])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_an_eager_close_leaves_out_what_was_smallest(servers: int, pull: str, loss: float) -> None:
    job = Job(
        WORLD,
        TENSORS,
        "mlt",
        p=0.4,
        priority="results",
        pull=pull,
        servers=servers,
        link=Link(loss=loss),
        error_feedback=False,
        max_age=254,
    )
    job.pipelines[0].flush()
    for _ in range(2):
        job.step(ramp(0))  # the second is exact: all magnitudes are known from here on
    for number in range(1, 4):
        results = job.step(ramp(number))
        assert all(np.array_equal(results[0], other) for other in results[1:])
        heard = arrived(results[0])
        if pull == "exact":  # a commitment gives up what the network lost, large or not
            assert heard[:, 20:].all()
        assert not heard[:, :10].any()
        assert 0.6 <= job.report.delivered <= 0.7


def test_masks_are_shared_so_that_the_pull_shrinks_too() -> None:
    def seconds(priority: str) -> float:
        job = Job(WORLD, TENSORS, "mlt", p=0.4, priority=priority, error_feedback=False)
        total = 0.0
        for number in range(6):
            job.step(ramp(number))
            total += job.report.comm_s
        return total

    assert seconds("results") < 1.05 * seconds("none")


def test_nothing_starves() -> None:
    job = Job(WORLD, TENSORS, "dblp", p_low=0.4, p_high=0.4, max_age=2, error_feedback=False)
    counts = np.zeros((len(TENSORS), 40), int)
    for number in range(9):
        counts += arrived(job.step(ramp(number))[0])
    assert counts.min() >= 3  # at the latest every third step
    assert counts[:, 30:].min() >= 8  # the largest, once they are known


def test_a_resumed_job_leaves_out_the_same() -> None:
    options = {"p_low": 0.4, "p_high": 0.4, "error_feedback": False}
    first = Job(WORLD, TENSORS, "dblp", **options)
    for number in range(4):
        first.step(ramp(number))
    states = [pipeline.state_dict() for pipeline in first.pipelines]
    second = Job(WORLD, TENSORS, "dblp", **options)
    for pipeline, state in zip(second.pipelines, states, strict=True):
        pipeline.load_state_dict(state)
    for number in range(4, 8):
        before, after = first.step(ramp(number)), second.step(ramp(number))
        np.testing.assert_array_equal(arrived(before[0]), arrived(after[0]))


# ---------------------------------------------------------------------------- options


def test_dblp_ranks_where_it_closes_early_and_replicas_stay_the_same() -> None:
    def asked(**options: str) -> tuple[object, bool]:
        policy = DBLP(**options)
        return policy.options()["priority"], policy.ranks_results

    assert asked() == asked(pull="committed") == ("results", True)
    for options in (
        {"priority": "none"},
        {"order": "shuffled"},
        {"order": "sequential"},
        {"spend": "lost"},
        {"control": "probe"},
        {"pull": "lossy"},
    ):
        assert asked(**options) == ("none", False)
    assert asked(priority="results", spend="lost") == ("results", True)
    assert MLT(priority="results").ranks_results
    assert not MLT(priority="magnitude").ranks_results


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "magnitude"}, "priority='magnitude': allowed are 'none', 'results'"),
        ({"priority": "results", "control": "probe"}, "control='probe' with priority='results'"),
        ({"priority": "results", "order": "sequential"}, "order='sequential' with priority='re"),
        ({"priority": "results", "pull": "lossy"}, "pull='lossy' with priority='results'"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DBLP(**options)
    assert message in str(raised.value)
