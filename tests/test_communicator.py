"""The communicator on real engines over loopback, with threads of this process for ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gradwire._engine import TAG_BYTES
from gradwire.core.errors import ConfigError, GradwireError, RendezvousError, TransferError
from gradwire.core.plan import CloseStep, TransferPlan, mix_seed
from gradwire.core.regions import Region
from gradwire.core.settings import Settings
from gradwire.core.transfer_report import TransferReport
from gradwire.transport import communicator, engines, joining, registry, threads
from gradwire.transport.communicator import Communicator, Handle
from gradwire.transport.engines import SharedEngine
from gradwire.transport.meeting import Meeting
from gradwire.transport.threads import CompletionPool, StartQueue
from threads import at_once

Array = NDArray[np.float32]


def engine_of(member: Communicator) -> Any:
    """The engine that a communicator shares with others of its group."""
    assert isinstance(member.engine, SharedEngine)
    return member.engine


class Team:
    """`world` communicators of one store, one per thread. own: settings of some of the ranks."""

    def __init__(
        self,
        world: int,
        *,
        ranks: tuple[int, ...] | None = None,
        store: Any = None,
        own: dict[int, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> None:
        self.world = world
        self.store = dist.HashStore() if store is None else store
        # Tests count chunks, which loopback's datagrams would make longer.
        limits = {"rendezvous_timeout": 20, "peer_timeout": 10, "timeout": 20}
        limits["datagram"] = 1472 + TAG_BYTES
        self.config = {**limits, **settings}
        self.own = own or {}
        self.ranks = ranks
        self.members: list[Communicator] = self.join()

    def join(self) -> list[Communicator]:
        """A further communicator of each rank."""
        return self.all(
            lambda rank: Communicator(
                self.store,
                rank,
                self.world,
                {**self.config, **self.own.get(rank, {})},
                ranks=self.ranks,
            )
        )

    def all(self, call: Callable[[int], Any]) -> list[Any]:
        """call(rank) on every rank at once; raises what a rank raised."""
        results = at_once(self.world, call)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def reduce(
        self, arrays: list[Array], plan: TransferPlan | None = None, **more: Any
    ) -> list[TransferReport]:
        """All-reduces arrays[rank] in place on every rank."""
        handles = [m.all_reduce(a, plan, **more) for m, a in zip(self.members, arrays, strict=True)]
        return [handle.wait(30) for handle in handles]

    def close(self) -> None:
        for member in self.members:
            member.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Team]:
    team = Team(3)
    yield team
    team.close()


class Numbered:
    """Communicators of one engine, each with a number: [use][rank]."""

    def __init__(self, team: Team, uses: int) -> None:
        self.team = team
        self.members: list[list[Communicator]] = []
        self.numbers: list[list[int]] = []
        try:
            for use in range(uses):
                self.members.append(
                    team.all(lambda rank: Communicator(team.store, rank, team.world, team.config))
                )
                self.numbers.append(team.all(functools.partial(self._take, use)))
        except BaseException:
            self.close()
            raise

    def _take(self, use: int, rank: int) -> int:
        member = self.members[use][rank]
        return member.take_number(member.meeting("numbers"))

    def close(self) -> None:
        for use, members in enumerate(self.members):
            for member in members:
                if use < len(self.numbers):
                    member.return_number()
                member.close()


def random_arrays(world: int, elements: int, seed: int = 0) -> list[Array]:
    chance = np.random.default_rng(seed)
    scales = 10.0 ** chance.integers(-3, 4, elements)
    return [(chance.standard_normal(elements) * scales).astype(np.float32) for _ in range(world)]


def rank_order_sum(arrays: list[Array], scale: float = 1.0) -> Array:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total * np.float32(scale)


def lossy(elements: int, bound: float, regions: int = 2, **fields: Any) -> TransferPlan:
    cuts = np.linspace(0, elements, regions + 1).astype(int)
    values: dict[str, Any] = {"spend": "anything", "order": "shuffled", "seed": 1, **fields}
    return TransferPlan(
        elements,
        tuple(Region(int(a), int(b - a), bound) for a, b in itertools.pairwise(cuts)),
        **values,
    )


# ---------------------------------------------------------------------------- exact


@pytest.mark.parametrize("elements", [1, 2, 357, 358, 359, 1074, 10_000, 300_001])
def test_exact_sums_equal_the_rank_order_sum_to_the_bit(three: Team, elements: int) -> None:
    arrays = random_arrays(3, elements, elements)
    expected = rank_order_sum(arrays)
    reports = three.reduce(arrays)
    for array, report in zip(arrays, reports, strict=True):
        assert array.tobytes() == expected.tobytes()
        assert report.delivered == (1.0,)
        assert report.counted.all()
        assert report.applied.all()


def test_a_scale_multiplies_the_finished_sum(three: Team) -> None:
    arrays = random_arrays(3, 5000)
    expected = rank_order_sum(arrays, 1 / 3)
    three.reduce(arrays, TransferPlan.whole(5000, scale=1 / 3))
    for array in arrays:
        assert array.tobytes() == expected.tobytes()


def test_torch_tensors_are_reduced_in_place(two: Team) -> None:
    tensors = [torch.full((30, 40), float(rank + 1)) for rank in range(2)]
    handles = [m.all_reduce(t) for m, t in zip(two.members, tensors, strict=True)]
    for handle, tensor in zip(handles, tensors, strict=True):
        handle.wait(20)
        assert torch.equal(tensor, torch.full((30, 40), 3.0))


def test_many_transfers_overlap(three: Team) -> None:
    batches = [random_arrays(3, 1000 * (i + 1), i) for i in range(20)]
    expected = [rank_order_sum(arrays) for arrays in batches]
    handles: list[Handle] = []
    for arrays in batches:
        handles += [m.all_reduce(a) for m, a in zip(three.members, arrays, strict=True)]
    for handle in handles:
        handle.wait(30)
    for arrays, want in zip(batches, expected, strict=True):
        assert all(array.tobytes() == want.tobytes() for array in arrays)


def test_nan_and_infinity_pass_through(two: Team) -> None:
    arrays = [np.ones(5000, np.float32), np.ones(5000, np.float32)]
    arrays[0][7], arrays[1][4000], arrays[0][4001] = np.nan, np.inf, -np.inf
    two.reduce(arrays)
    for array in arrays:
        assert np.isnan(array[7])
        assert array[4000] == np.inf
        assert array[4001] == -np.inf
        assert np.isfinite(array).sum() == 4997


def test_statistics_are_folded_alike(three: Team) -> None:
    slots = [[1.0 * r, 2.0, 0.1 * r, -1.0, float(r), -5.0 - r, 0.0, 1e300] for r in range(3)]
    handles = [
        m.all_reduce(np.ones(10, np.float32), stats=s)
        for m, s in zip(three.members, slots, strict=True)
    ]
    reports = [handle.wait(20) for handle in handles]
    assert len({(r.stats_sum, r.stats_max) for r in reports}) == 1
    assert reports[0].stats_sum == pytest.approx((3.0, 6.0, 0.3, -3.0))
    assert reports[0].stats_max == (2.0, -5.0, 0.0, 1e300)


# ---------------------------------------------------------------------------- lossy


def spread(member: Communicator, plan: TransferPlan, chunks: NDArray[np.uint8]) -> NDArray[Any]:
    """Per element: the mask of its chunk."""
    grid = member.chunk_grid(plan)
    elements = np.zeros(plan.elements, bool)
    for offset, length, yes in zip(grid.offsets, grid.lengths, chunks, strict=True):
        elements[int(offset) : int(offset) + int(length)] = yes
    return elements


@pytest.mark.parametrize("fill", ["zero", "mean"])
@pytest.mark.parametrize("spend", ["anything", "lost"])
def test_results_are_what_the_masks_say(three: Team, fill: str, spend: str) -> None:
    """The sum of exactly what counted, alike on all replicas, within the bound per region."""
    for member in three.members:
        member.set_drop(0.05, 3.0, 7)
    try:
        for step in range(5):
            arrays = random_arrays(3, 120_000, step)
            before = [array.copy() for array in arrays]
            plan = lossy(120_000, 0.2, fill=fill, spend=spend, seed=mix_seed(step))
            reports = three.reduce(arrays, plan, step=step)
            masks = [
                spread(m, plan, r.counted) for m, r in zip(three.members, reports, strict=True)
            ]
            arrived = np.sum(masks, axis=0)
            total = np.sum([np.where(k, b, 0) for k, b in zip(masks, before, strict=True)], axis=0)
            if fill == "mean":
                total = total * np.where(arrived > 0, 3 / np.maximum(arrived, 1), 0)
            np.testing.assert_allclose(arrays[0], total, rtol=2e-5, atol=1e-3)
            assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()
            for report in reports:
                assert all(d >= 0.8 for d in report.delivered)
                assert all(b <= 0.2 for b in report.effective_bounds)
                assert report.exceeded == ()
    finally:
        for member in three.members:
            member.set_drop(0.0)


@pytest.mark.parametrize(
    ("control", "pull"), [("probe", "exact"), ("probe", "lossy"), ("stream", "lossy")]
)
def test_the_published_control_and_its_lossy_way_down(three: Team, control: str, pull: str) -> None:
    """What arrived is alike wherever it did; replicas are where the way down is exact."""
    for member in three.members:
        member.set_drop(0.1, 3.0, 11)
    bound = 0.05 if pull == "lossy" else 0.0
    passes = missed = 0
    try:
        for step in range(5):
            arrays = random_arrays(3, 120_000, step)
            before = [array.copy() for array in arrays]
            plan = lossy(
                120_000,
                0.05,
                order="sequential",
                control=control,
                schedule=(CloseStep(scope="worker"),),
                pull=pull,
                pull_bound=bound,
            )
            reports = three.reduce(arrays, plan, step=step)
            pairs = list(zip(three.members, reports, strict=True))
            masks = [spread(m, plan, r.counted) for m, r in pairs]
            total = np.sum([np.where(k, b, 0) for k, b in zip(masks, before, strict=True)], axis=0)
            for array, (member, report) in zip(arrays, pairs, strict=True):
                applied = spread(member, plan, report.applied)
                np.testing.assert_allclose(array, np.where(applied, total, 0), rtol=2e-5, atol=1e-3)
                assert all(d >= 0.95 for d in report.delivered)
                assert applied.mean() >= np.any(masks, axis=0).mean() - (
                    0.05 if pull == "lossy" else 0.0
                )
                passes += report.passes
            missed += sum(array.tobytes() != arrays[0].tobytes() for array in arrays)
    finally:
        for member in three.members:
            member.set_drop(0.0)
    assert (passes > 15) == (control == "probe")
    assert (missed > 0) == (pull == "lossy")


def test_a_committed_pull_keeps_replicas_alike_and_the_rest_with_its_aggregator(
    three: Team,
) -> None:
    for member in three.members:
        member.set_drop(0.1, 2.0, 3)
    try:
        for step in range(5):
            arrays = random_arrays(3, 90_000, step)
            before = [array.copy() for array in arrays]
            plan = lossy(90_000, 0.3, pull="committed", pull_bound=0.3, seed=step)
            reports = three.reduce(arrays, plan)
            assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()
            masks = [
                spread(m, plan, r.counted) for m, r in zip(three.members, reports, strict=True)
            ]
            total = np.sum([np.where(k, b, 0) for k, b in zip(masks, before, strict=True)], axis=0)
            kept = arrays[0].astype(np.float64)
            grid = three.members[0].chunk_grid(plan)
            for report in reports:
                at = 0
                for chunk in report.withheld_chunks:
                    begin, length = int(grid.offsets[chunk]), int(grid.lengths[chunk])
                    assert not kept[begin : begin + length].any()
                    kept[begin : begin + length] += report.withheld_values[at : at + length]
                    at += length
                assert at == len(report.withheld_values)
            np.testing.assert_allclose(kept, total, rtol=2e-5, atol=1e-3)
    finally:
        for member in three.members:
            member.set_drop(0.0)


@pytest.mark.parametrize(
    ("encoding", "kept"),
    [("f16", 1.0), ("bf16", 1.0), ("half", 1.0), ("int8", 1.0), ("topk", 0.05)],
)
def test_encoded_results_are_alike_and_the_books_balance(
    three: Team, encoding: str, kept: float
) -> None:
    for member in three.members:
        member.set_drop(0.05, 2.0, 3)
    # Bytes that a rank pushes, and sends of results, in f32. Not what a plain step is seen to send:
    # a report counts until its own worker is done, while others may still be served.
    dense = 90_000 * 4 * 4 / 3
    try:
        for step in range(3):
            arrays = random_arrays(3, 90_000, step)
            residuals = [array.copy() for array in arrays]
            total = np.sum(residuals, axis=0, dtype=np.float64)
            plan = lossy(
                90_000, 0.2, spend="lost", scale=1 / 3, encoding=encoding, kept=kept, seed=step
            )
            reports = three.reduce(arrays, plan)
            assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()
            books = arrays[0].astype(np.float64) * 3
            for member, report, residual in zip(three.members, reports, residuals, strict=True):
                member.keep_encoding_error(plan, residual, report.counted)
                books += residual
                begin = report.error_offset
                books[begin : begin + len(report.result_error)] += report.result_error * 3.0
                first = 1 - report.retransmissions / report.packets_sent
                assert first * report.bytes_sent < 0.7 * dense
            np.testing.assert_allclose(books, total, rtol=2e-5, atol=1e-3)
    finally:
        for member in three.members:
            member.set_drop(0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 721, 90_001])
def test_numbers_of_two_bytes_are_summed_in_place_and_rounded_once(
    three: Team, dtype: torch.dtype, elements: int
) -> None:
    """Under loss, with every kind of number: all bits, hence subnormals, infinities and NaN."""
    chance = np.random.default_rng(elements)
    codes = chance.integers(-(1 << 15), 1 << 15, (3, elements)).astype(np.int16)
    tensors = [torch.from_numpy(each).view(dtype) for each in codes]
    total = tensors[0].float()
    for other in tensors[1:]:
        total = total + other.float()
    expected = (total * torch.tensor(1 / 3)).to(dtype)
    encoding = "half" if dtype == torch.float16 else "bf16"
    plan = TransferPlan.whole(elements, scale=1 / 3, encoding=encoding)
    for member in three.members:
        member.set_drop(0.05, 2.0, 3)
    try:
        reports = three.reduce(tensors, plan)
    finally:
        for member in three.members:
            member.set_drop(0.0)
    for tensor, report in zip(tensors, reports, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0.0, atol=0.0, equal_nan=True)
        assert report.result_error.size == 0
    halves = [np.full(elements, 1.5, np.float16) for _ in range(3)]
    three.reduce(halves)  # without a plan
    assert all((half == 4.5).all() for half in halves)


@pytest.mark.parametrize("plan", [TransferPlan.whole(9), lossy(9, 0.0, encoding="f16")])
def test_numbers_of_two_bytes_need_a_plan_of_their_own_encoding(
    two: Team, plan: TransferPlan
) -> None:
    with pytest.raises(ConfigError) as refused:
        two.members[0].all_reduce(torch.ones(9, dtype=torch.bfloat16), plan)
    assert (refused.value.setting, refused.value.value) == ("plan.encoding", plan.encoding)


def test_an_encoding_says_what_a_datagram_carries(two: Team) -> None:
    member = two.members[0]
    assert member.elements_per_chunk("int8") >= 4 * member.elements_per_chunk("f32") - 4
    plan = lossy(50_000, 0.0, encoding="topk", kept=0.1)
    values = random_arrays(1, 50_000)[0]
    assert np.count_nonzero(member.round_trip(plan, values)) == pytest.approx(5000, abs=30)
    # The grid of an encoding is its own.
    assert len(member.chunk_grid(plan)) < len(member.chunk_grid(plan.exact()))


def test_a_grid_belongs_to_the_cuts_whatever_the_bounds(two: Team) -> None:
    member = two.members[0]
    loose, strict = lossy(50_000, 0.4), lossy(50_000, 0.1)
    assert member.chunk_grid(loose) is member.chunk_grid(strict)
    assert member.chunk_grid(loose) is member.chunk_grid(loose.exact())
    assert member.effective_bounds(loose) > member.effective_bounds(strict)
    other = member.chunk_grid(lossy(50_000, 0.4, regions=3))
    assert other.regions.max() == 2
    assert member.chunk_grid(loose).regions.max() == 1


def test_a_plain_all_reduce_is_exact_however_much_is_lost(three: Team) -> None:
    """Only what a plan allows is lossy (docs/design.md, invariant 3)."""
    for member in three.members:
        member.set_drop(0.2, 2.0, 9)
    try:
        arrays = random_arrays(3, 50_000, 4)
        expected = rank_order_sum(arrays)
        for report in three.reduce(arrays):
            assert report.delivered == (1.0,)
        assert all(array.tobytes() == expected.tobytes() for array in arrays)
    finally:
        for member in three.members:
            member.set_drop(0.0)


def test_critical_chunks_count(three: Team) -> None:
    plan = lossy(200_000, 0.5)
    critical = np.array([0, 5, 17, 400], np.uint32)
    arrays = random_arrays(3, 200_000)
    for report in three.reduce(arrays, plan, critical=critical):
        assert report.counted[critical].all()
        assert report.delivered[0] < 0.9  # the eager close did leave something out


def test_each_worker_leaves_out_what_it_ranks_last(two: Team) -> None:
    elements = 60_000
    plan = lossy(elements, 0.3, order="priority", class_dscp=(40, 8))
    arrays = random_arrays(2, elements)
    before = [array.copy() for array in arrays]
    grid = two.members[0].chunk_grid(plan)
    classes = [((np.arange(len(grid)) + rank) % 2).astype(np.uint8) for rank in range(2)]
    reports = two.all(
        lambda rank: two.members[rank].all_reduce(arrays[rank], plan, priorities=classes[rank])
    )
    reports = [handle.wait(20) for handle in reports]
    assert arrays[0].tobytes() == arrays[1].tobytes()
    sums = np.zeros(elements)
    for rank, report in enumerate(reports):
        counted = report.counted.astype(bool)
        assert counted[classes[rank] == 0].all()
        assert not counted[classes[rank] == 1].all()
        sums += before[rank] * np.repeat(counted, grid.lengths)
    np.testing.assert_allclose(arrays[0], sums, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("order", "classes", "message"),
    [
        ("shuffled", np.zeros(3, np.uint8), "only order='priority' has classes"),
        (
            "priority",
            np.zeros(2, np.uint8),
            r"shape \(2,\) and type uint8: one uint8 for each of 3",
        ),
        ("priority", np.zeros(3, np.int64), "type int64: one uint8 for each of 3 chunks"),
        ("priority", np.full(3, 8, np.uint8), "priorities: class 8: allowed are 0 to 7"),
    ],
)
def test_priorities_that_do_not_fit_name_what_is_wrong(
    two: Team, order: str, classes: NDArray[Any], message: str
) -> None:
    plan = lossy(1000, 0.0, 1, order=order)
    with pytest.raises(ConfigError, match=message):
        two.members[0].all_reduce(np.zeros(1000, np.float32), plan, priorities=classes)


def test_servers_left_out_are_the_same_transport_as_their_number() -> None:
    team = Team(2)
    team.config["servers"] = 0
    more = team.join()
    for first, second in zip(team.members, more, strict=True):
        assert first.engine is second.engine
        second.close()
    team.close()


def test_one_engine_has_one_dscp() -> None:
    team = Team(2, dscp=10)
    try:

        def other(rank: int) -> None:
            Communicator(team.store, rank, 2, {**team.config, "dscp": 12})

        with pytest.raises(ConfigError) as raised:
            team.all(other)
        assert (raised.value.setting, raised.value.value) == ("dscp", 12)
    finally:
        team.close()


# ---------------------------------------------------------------------------- callbacks


def test_a_callback_may_block_on_another_completion(two: Team) -> None:
    """PowerSGD waits for its second all-reduce within the callback of the first."""
    finished = [threading.Event(), threading.Event()]

    def start(rank: int) -> None:
        member = two.members[rank]

        def then(first: Handle) -> None:
            first.report  # noqa: B018 - raises if it failed
            member.all_reduce(np.ones(5000, np.float32)).wait(20)
            finished[rank].set()

        member.all_reduce(np.ones(5000, np.float32)).add_done_callback(then)

    for rank in range(2):
        start(rank)
    assert all(event.wait(20) for event in finished)


def test_callbacks_run_after_the_fact_too_and_their_faults_harm_nobody(two: Team) -> None:
    handles = [two.members[0].all_reduce(np.ones(4, np.float32))]
    with pytest.raises(TransferError, match="not done yet"):  # rank 1 has not begun it
        handles[0].report  # noqa: B018
    handles.append(two.members[1].all_reduce(np.ones(4, np.float32)))
    for handle in handles:
        handle.add_done_callback(lambda _: 1 / 0)
    for handle in handles:
        handle.wait(20)
    seen: list[Handle] = []
    handles[0].add_done_callback(seen.append)
    assert seen == [handles[0]]
    two.reduce([np.ones(4, np.float32) for _ in range(2)])


def test_a_callback_that_raises_keeps_no_other_from_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither of the same handle nor of those that fail with it when the engine closes."""
    team = Team(2)
    member = team.members[0]
    seen: list[Handle] = []
    handles = [member.all_reduce(np.ones(5000, np.float32), step=step) for step in range(3)]
    for handle in handles:
        handle.add_done_callback(lambda _: 1 / 0)
        handle.add_done_callback(seen.append)
    engine_of(member)._fail_pending(lambda step: TransferError("told to", step=step))
    assert seen == handles
    for handle in handles:
        with pytest.raises(TransferError, match="told to"):
            handle.wait(1)
    own = [r for r in caplog.records if r.thread == threading.get_ident()]
    assert sum("ZeroDivisionError" in (r.exc_text or "") for r in own) == 3
    handles[0].add_done_callback(lambda _: 1 / 0)  # at once
    team.close()


def test_the_pool_grows_to_what_blocks_and_shrinks_again() -> None:
    items: queue.Queue[threading.Event] = queue.Queue()

    def poll() -> threading.Event | None:
        try:
            return items.get(timeout=0.05)
        except queue.Empty:
            return None

    entered = threading.Semaphore(0)

    def handle(gate: threading.Event) -> None:
        entered.release()
        gate.wait(10)

    pool = CompletionPool(poll, handle, "test", lambda error: None)
    gate = threading.Event()
    for _ in range(8):
        items.put(gate)
    assert all(entered.acquire(timeout=30) for _ in range(8))  # all eight at once
    assert pool.size >= 9
    gate.set()
    deadline = time.monotonic() + 30
    while pool.size > 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.size <= 4
    pool.stop()
    assert pool.size == 0


def test_a_pool_whose_poll_fails_says_so_once_and_ends() -> None:
    told: list[BaseException] = []
    heard = threading.Event()

    def poll() -> None:
        raise ValueError("no more")

    def broken(error: BaseException) -> None:
        told.append(error)
        heard.set()

    pool: CompletionPool[None] = CompletionPool(poll, lambda item: None, "test", broken)
    assert heard.wait(30)
    pool.stop()
    assert pool.size == 0
    (error,) = told
    assert isinstance(error, ValueError)


def test_a_pool_logs_what_its_handler_raises(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    items = [1, 0]
    handled = threading.Event()

    def handle(item: int) -> None:
        if item:
            raise ValueError("no such item")
        handled.set()

    pool = CompletionPool(lambda: items.pop(0) if items else None, handle, "t", lambda error: None)
    assert handled.wait(30)
    pool.stop()
    (record,) = caplog.records
    assert isinstance(record.exc_info and record.exc_info[1], ValueError)
    assert "Traceback" not in capfd.readouterr().err


def test_a_completion_waits_for_no_thread_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory has run out, a new thread ends before it begins; its start waits for ever."""
    items: queue.Queue[int] = queue.Queue()
    seen: queue.Queue[int] = queue.Queue()
    released = threading.Event()

    def poll() -> int | None:
        try:
            return items.get(timeout=0.05)
        except queue.Empty:
            return None

    pool = CompletionPool(poll, seen.put, "test", lambda error: None)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: released.wait(60.0))
    for item in range(3):
        items.put(item)
        assert seen.get(timeout=30) == item
    released.set()
    monkeypatch.undo()
    pool.stop()


def test_a_pool_that_cannot_grow_goes_on_with_the_threads_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the system gives no more threads; no item may be lost then."""
    items: queue.Queue[int] = queue.Queue()
    seen: queue.Queue[int] = queue.Queue()

    def poll() -> int | None:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=0.05)
        return None

    pool = CompletionPool(poll, seen.put, "test", lambda error: None)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        for number in range(3):
            items.put(number)
        assert [seen.get(timeout=30) for _ in range(3)] == [0, 1, 2]
    pool.stop()


def test_callbacks_that_wait_for_each_other_end_where_no_thread_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them would wait for what no thread takes any more."""
    items: queue.Queue[int] = queue.Queue()
    gate = threading.Event()
    told: queue.Queue[Exception] = queue.Queue()

    def poll() -> int | None:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=0.05)
        return None

    def broken(error: Exception) -> None:
        told.put(error)
        gate.set()  # as transfers end

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def wait(_: int) -> None:
        gate.wait(60)

    monkeypatch.setattr(threads, "HELD_S", 0.2)
    pool = CompletionPool(poll, wait, "test", broken)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        for number in range(8):
            items.put(number)
        assert isinstance(told.get(timeout=30), RuntimeError)
    pool.stop()
    assert pool.size == 0


class OutOfMemory:
    """An engine whose completions cannot be read any more."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def next_completion(self, timeout_ns: int) -> None:
        raise MemoryError


def test_transfers_fail_when_completions_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may wait for what then never ends."""
    team = Team(2)
    handle = team.members[0].all_reduce(np.ones(5000, np.float32), step=3)  # waits for rank 1
    engine = engine_of(team.members[0])
    monkeypatch.setattr(engine, "native", OutOfMemory(engine.native))
    with pytest.raises(TransferError) as raised:
        handle.wait(10)
    assert (raised.value.step, raised.value.cause) == (3, "engine")
    with pytest.raises(TransferError) as raised:
        team.members[0].all_reduce(np.ones(4, np.float32), step=4)
    assert (raised.value.step, raised.value.cause) == (4, "engine")
    team.close()


def test_what_another_rank_reports_of_itself_is_told_with_the_step() -> None:
    team = Team(2)
    handle = team.members[0].all_reduce(np.ones(5000, np.float32), step=3)
    team.members[1].fail("it has enough")
    with pytest.raises(TransferError, match=r"step 3: rank 1 .*it has enough"):
        handle.wait(30)
    team.close()


def test_a_transfer_whose_report_cannot_be_made_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(2)

    def full(*_: object) -> object:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engines, "transfer_report", full)
        with pytest.raises(TransferError) as raised:
            team.reduce([np.ones(10, np.float32)] * 2, step=3)
    assert (raised.value.step, raised.value.cause) == (3, "engine")
    team.close()


def test_what_fails_together_has_failed_before_any_callback_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A callback may wait for another transfer."""
    team = Team(2)
    handles = [team.members[0].all_reduce(np.ones(5000, np.float32), step=n) for n in range(2)]
    seen: queue.Queue[int] = queue.Queue()

    def wait_for_the_other(_: Handle) -> None:
        with contextlib.suppress(TransferError):
            handles[1].wait()
        seen.put(handles[1].error.step if handles[1].error else -1)

    handles[0].add_done_callback(wait_for_the_other)
    engine = engine_of(team.members[0])
    monkeypatch.setattr(engine, "native", OutOfMemory(engine.native))
    assert seen.get(timeout=10) == 1
    team.close()


def test_a_stager_runs_in_order_and_survives_what_is_thrown() -> None:
    start_queue = StartQueue("test")
    assert not start_queue.started
    seen: list[int] = []
    done = threading.Event()
    start_queue.submit(lambda: time.sleep(0.1))
    assert start_queue.started
    start_queue.submit(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    for number in range(5):
        start_queue.submit(functools.partial(seen.append, number))
    start_queue.stop()
    assert not start_queue.started
    start_queue.stop()
    start_queue.submit(done.set)  # starts anew
    assert done.wait(30)
    deadline = time.monotonic() + 30
    while len(seen) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen == list(range(5))
    start_queue.stop()


# ---------------------------------------------------------------------------- reduce-scatter


@pytest.mark.parametrize("shards", [None, (4, 30_000, 996)])
def test_a_reduce_scatter_leaves_each_worker_its_shard(shards: tuple[int, ...] | None) -> None:
    with contextlib.closing(Team(3)) as team:
        random = np.random.default_rng(1)
        given = [random.standard_normal(31_000 - 1000 * (not shards), np.float32) for _ in range(3)]
        total = (given[0] + given[1] + given[2]) * np.float32(1 / 3)
        arrays = [each.copy() for each in given]
        plan = TransferPlan.whole(len(total), scale=1 / 3)
        handles = [
            member.reduce_scatter(array, plan, shards=shards)
            for member, array in zip(team.members, arrays, strict=True)
        ]
        reports = [handle.wait(30) for handle in handles]
        ends = np.cumsum(shards or (10_000,) * 3)
        for rank, (array, end) in enumerate(zip(arrays, ends, strict=True)):
            own = np.zeros(len(total), bool)
            own[ends[rank - 1] if rank else 0 : end] = True
            assert np.array_equal(array[own], total[own])
            assert np.array_equal(array[~own], given[rank][~own])
        assert all(report.delivered == (1.0,) for report in reports)


def test_shards_that_do_not_fit_are_refused() -> None:
    with contextlib.closing(Team(2)) as team:
        member = team.members[0]
        for shards in [None, (5,), (4, 6), (12, -1), (4, 3, 4)]:
            with pytest.raises(ConfigError) as refused:
                member.reduce_scatter(np.zeros(11, np.float32), shards=shards)
            assert refused.value.setting == "shards"


# ---------------------------------------------------------------------------- one process


def test_world_size_1_needs_no_sockets() -> None:
    alone = Communicator(dist.HashStore(), 0, 1)
    array = np.array([1.0, np.nan, 3.0], np.float32)
    report = alone.all_reduce(array, TransferPlan.whole(3, scale=0.5), stats=[2.0]).wait()
    assert array[0] == 0.5
    assert np.isnan(array[1])
    assert report.delivered == (1.0,)
    assert report.stats_sum[0] == 2.0
    assert alone.counters() == {}
    alone.reduce_scatter(array, TransferPlan.whole(3, scale=0.5)).wait()
    assert array[0] == 0.25
    array[0] = 0.5
    # What travels nowhere is encoded nowhere, so nothing is left of it.
    coarse = TransferPlan(3, (Region(0, 3, 0.0),), encoding="topk", kept=0.1)
    sent = np.float32([1.0, 2.0, 3.0])
    np.testing.assert_array_equal(alone.round_trip(coarse, sent), sent)
    alone.keep_encoding_error(coarse, sent, alone.all_reduce(array, coarse).wait().counted)
    assert not sent.any()
    alone.close()
    with pytest.raises(TransferError) as raised:
        alone.all_reduce(array)
    assert raised.value.cause == "closed"


def test_a_groups_endless_timeout_is_one_the_engine_can_count() -> None:
    endless = Communicator(dist.HashStore(), 0, 1, timeout_s=float("inf"))
    assert int(endless.timeout_s * 1e9) < 1 << 62
    endless.close()


def test_communicators_of_one_group_share_an_engine(two: Team) -> None:
    more = two.all(lambda rank: Communicator(two.store, rank, 2, two.members[rank].settings))
    assert more[0].engine is two.members[0].engine
    with pytest.raises(ConfigError, match="this process's engine already runs with") as raised:
        Communicator(two.store, 0, 2, {"port": 4567})
    assert (raised.value.setting, raised.value.value) == ("port", 4567)
    for member in more:
        member.close()
    two.reduce([np.ones(10, np.float32) for _ in range(2)])  # the first ones still work


class Slow:
    """A store that is slow to say which one it is, once `answers` is clear."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.asked = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        if not self.answers.is_set() and "identity" in key:
            self.asked.set()
            self.answers.wait(20)
        return self._store.compare_set(key, expected, desired)


def test_a_store_that_does_not_answer_keeps_no_finalizer_waiting() -> None:
    """Garbage is collected on any thread, maybe on one that the store needs for its answer."""
    store = Slow()
    team = Team(2, store=store)
    forgotten = team.join()
    store.answers.clear()
    later: list[Communicator] = []
    joining = threading.Thread(target=lambda: later.extend(team.join()))
    joining.start()
    assert store.asked.wait(10)
    collecting = threading.Thread(target=forgotten.clear)
    collecting.start()
    collecting.join(5)
    stuck = collecting.is_alive()
    store.answers.set()
    joining.join(20)
    assert not stuck
    for member in later:
        member.close()
    team.close()


def test_an_engine_that_forgotten_communicators_keep_open_is_not_in_the_way_of_another_job() -> (
    None
):
    """They are garbage in a cycle, as attached modules are, and nothing has collected them."""
    gc.disable()
    try:
        forgotten: list[Any] = Team(2).members
        forgotten.append(forgotten)
        before = [engine_of(member) for member in forgotten[:2]]
        del forgotten
        later = Team(2)
    finally:
        gc.enable()
    assert all(engine.native is None for engine in before)
    later.close()


class Hosted:
    """A rank's view of a store that another rank hosts and closes once it has compared.

    Args:
        store: The store.
        read: The host has read what this rank has published.
        closed: The host has gone.
    """

    def __init__(self, store: Any, read: threading.Event, closed: threading.Event) -> None:
        self._store, self._read, self._closed = store, read, closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        assert self._read.wait(10)
        if self._closed.wait(0.5):
            raise RuntimeError("connection closed")
        there: bool = self._store.check(keys)
        return there


class Host:
    """The host's view."""

    def __init__(self, store: Any, read: threading.Event) -> None:
        self._store, self._read = store, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        if value == b"text 1":
            self._read.set()
        return value


def test_the_rank_that_hosts_the_store_stays_until_all_have_compared() -> None:
    store, read, closed = dist.HashStore(), threading.Event(), threading.Event()
    team = Team(2, store=store)
    first, second = team.members
    first.store, second.store = Host(store, read), Hosted(store, read, closed)

    def compare(rank: int) -> dict[int, str]:
        texts = team.members[rank].compare("topic", f"text {rank}", 5.0)
        if rank == 0:
            closed.set()
        return texts

    assert team.all(compare) == [{0: "text 0", 1: "text 1"}] * 2
    team.close()


class FakeEngine:
    def __init__(self, session: int, settings: Settings) -> None:
        self.store, self.group, self.rank, self.world_size = "s", "world", 0, 2
        self.session, self.settings, self.users = session, settings, 0
        self.closed = False

    def failure(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


def test_an_engine_closed_before_it_is_joined_is_not_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings.build({}, environment={})
    closed: Any = FakeEngine(1, settings)
    fresh: Any = FakeEngine(2, settings)
    opened: list[Any] = []
    monkeypatch.setattr(registry, "open_engines", opened)
    monkeypatch.setattr(joining, "_find", lambda *_: closed)
    monkeypatch.setattr(joining, "_open", lambda *_: fresh)
    store = dist.HashStore()
    alone = Meeting(store, "t", endpoint=0, workers=1, servers=0, timeout_s=1)
    assert joining.join_engine(alone, store, "world", settings) is fresh
    assert opened == [fresh]


def test_an_engine_in_use_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FakeEngine(1, Settings.build({}, environment={}))
    opened: list[Any] = [engine]
    monkeypatch.setattr(registry, "open_engines", opened)
    engine.users = 1
    assert not registry.drop(engine, used=False)
    assert opened == [engine]
    engine.users = 0
    assert registry.drop(engine, used=False)
    assert registry.drop(engine, used=False)  # gone already
    assert engine.closed
    assert opened == []


@pytest.mark.parametrize(
    ("array", "kind", "message"),
    [
        (np.ones(4), TypeError, "float64"),
        (np.ones((4, 4), np.float32)[:, 1], ValueError, "contiguous"),
        (torch.ones(4, dtype=torch.float64), TypeError, "float64"),
        (torch.ones(4, 4).t()[:2], ValueError, "contiguous"),
        ([1.0], TypeError, "list"),
    ],
)
def test_arrays_that_cannot_be_reduced(
    two: Team, array: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        two.members[0].all_reduce(array)


def test_what_the_engine_refuses_is_not_waited_for(two: Team) -> None:
    for member in two.members:
        with pytest.raises((TypeError, ValueError)):
            member.all_reduce(np.ones(4, np.float32), stats=["many"])  # type: ignore[list-item]
        assert engine_of(member)._pending == {}
    two.reduce([np.ones(10, np.float32) for _ in range(2)])  # the next one has its number


def test_a_plan_of_another_size_is_an_error(two: Team) -> None:
    with pytest.raises(ConfigError, match=r"plan\.elements=5 for an array of 4"):
        two.members[0].all_reduce(np.ones(4, np.float32), TransferPlan.whole(5))


def test_empty_arrays_need_no_transfer(two: Team) -> None:
    assert two.members[0].all_reduce(np.ones(0, np.float32)).wait(1).bytes_sent == 0


def test_a_forked_child_keeps_its_hands_off(two: Team) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            two.members[0].all_reduce(np.ones(4, np.float32))
        except TransferError as error:
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    two.reduce([np.ones(10, np.float32) for _ in range(2)])


def test_a_forked_child_holds_no_port_that_its_parent_has_closed() -> None:
    """As a DataLoader's worker does, which outlives an attachment of its parent."""
    team = Team(2)
    addresses = [engine_of(member).native.address for member in team.members]
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    try:
        # The engines run on beside the child.
        team.reduce([np.ones(100_000, np.float32) for _ in range(2)])
        team.close()
        for address in addresses:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
                again.bind(address)
    finally:
        os.close(theirs)
        os.waitpid(pid, 0)
    assert len(addresses) == 2


# ---------------------------------------------------------------------------- faults


def test_another_plan_is_an_error_that_names_the_rank() -> None:
    team = Team(2, timeout=10)
    handles = [
        member.all_reduce(np.ones(5000, np.float32), lossy(5000, bound), step=4)
        for member, bound in zip(team.members, (0.1, 0.2), strict=True)
    ]
    errors = []
    for handle in handles:
        with pytest.raises(TransferError) as raised:
            handle.wait(15)
        errors.append(raised.value)
    assert {error.step for error in errors} == {4}
    assert any(error.cause == "plan" and error.rank >= 0 for error in errors)
    team.close()


def test_a_transfer_that_one_rank_has_no_memory_for_ends_on_all_ranks_and_names_it() -> None:
    team = Team(3, own={1: {"memory_limit": 1 << 20}})
    small = [np.ones(100_000, np.float32) for _ in range(3)]
    team.reduce(small)
    assert all((values == 3).all() for values in small)

    def attempt(rank: int) -> TransferError:
        with pytest.raises(TransferError) as raised:
            team.members[rank].all_reduce(np.ones(3_000_000, np.float32), step=9).wait(30)
        return raised.value

    for error in team.all(lambda rank: [attempt(rank)]):  # at once, else it would be a time-out
        assert (error[0].rank, error[0].step, error[0].cause) == (1, 9, "memory")
        assert "memory_limit=1048576 at rank 1" in str(error[0])
    team.close()


def test_a_port_in_use_is_named_and_told_to_the_others() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        store = dist.HashStore()
        config = {"interface": "lo"}
        errors = at_once(
            2, lambda rank: Communicator(store, rank, 2, {**config, "port": port if rank else 0})
        )
    assert isinstance(errors[1], ConfigError)
    assert (errors[1].setting, errors[1].value) == ("port", port)
    assert isinstance(errors[0], RendezvousError)
    assert errors[0].ranks == (1,)
    assert f"port={port}" in str(errors[0])


def test_closing_fails_what_is_open() -> None:
    team = Team(2)
    handle = team.members[0].all_reduce(np.ones(5000, np.float32), step=3)
    team.members[0].close()
    with pytest.raises(TransferError):
        handle.wait(10)
    with pytest.raises(TransferError) as raised:
        team.members[0].all_reduce(np.ones(4, np.float32))
    assert raised.value.cause == "closed"
    team.close()


def test_a_transfer_that_a_peer_never_joins_times_out() -> None:
    team = Team(2, timeout=1.0)
    handle = team.members[0].all_reduce(np.ones(5000, np.float32), step=9)
    with pytest.raises(TransferError) as raised:
        handle.wait(60)
    assert (raised.value.rank, raised.value.step, raised.value.cause) == (1, 9, "timeout")
    team.close()


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_an_impossible_rank_is_an_error(rank: int, world: int) -> None:
    with pytest.raises(ConfigError) as raised:
        Communicator(dist.HashStore(), rank, world)
    assert (raised.value.setting, raised.value.value) == ("rank", rank)


def test_an_interface_is_checked_with_one_worker_and_told_to_the_others() -> None:
    wrong = {"interface": "no-such-interface", "rendezvous_timeout": 20}
    with pytest.raises(ConfigError, match=": neither an interface") as raised:
        Communicator(dist.HashStore(), 0, 1, wrong)
    assert (raised.value.setting, raised.value.value) == ("interface", "no-such-interface")
    store, right = dist.HashStore(), {"rendezvous_timeout": 120}
    found = at_once(2, lambda rank: Communicator(store, rank, 2, wrong if rank else right))
    assert isinstance(found[1], ConfigError)
    assert isinstance(found[0], RendezvousError)
    assert found[0].ranks == (1,)
    assert "rank 1 failed: interface='no-such-interface'" in str(found[0])


# ---------------------------------------------------------------------------- groups


def test_errors_name_ranks_of_the_job() -> None:
    """Of a group of some of the job's ranks: the 4th and the 7th."""
    team = Team(2, ranks=(4, 7))
    assert [member.job_rank for member in team.members] == [4, 7]
    team.members[1].close()
    handle = team.members[0].all_reduce(np.ones(5000, np.float32), step=3)
    with pytest.raises(TransferError, match=r"rank 7 .*step 3") as raised:
        handle.wait(10)
    assert (raised.value.rank, raised.value.step) == (7, 3)
    team.close()


def test_what_a_closed_engine_leaves_open_names_its_rank_in_the_job() -> None:
    team = Team(2, ranks=(4, 7))
    handle = team.members[0].all_reduce(np.ones(5000, np.float32), step=3)
    team.members[0].close()
    with pytest.raises(TransferError, match=r"^rank 4, step 3: "):
        handle.wait(10)
    team.close()


def test_absent_ranks_are_named_as_in_the_job() -> None:
    config = {"rendezvous_timeout": 0.1}
    said = r"^rank 7 did not join .* when rank 4 gave up"
    with pytest.raises(RendezvousError, match=said) as raised:
        Communicator(dist.HashStore(), 0, 2, config, ranks=(4, 7))
    assert raised.value.ranks == (7,)


def test_each_worker_has_one_rank_in_the_job() -> None:
    with pytest.raises(ConfigError, match=r"ranks=\(4,\) with world_size=2: one of each worker"):
        Communicator(dist.HashStore(), 0, 2, ranks=(4,))


# ---------------------------------------------------------------------------- several users


def test_users_with_numbers_need_no_common_order(three: Team) -> None:
    numbered = Numbered(three, 3)
    assert numbered.numbers == [[0] * 3, [1] * 3, [2] * 3]
    arrays = [random_arrays(3, 5000 * (1 + use), use) for use in range(3)]
    expected = [rank_order_sum(each) for each in arrays]
    handles = []
    for rank in range(3):
        for n in range(3):
            use = (rank + n) % 3
            handles.append(numbered.members[use][rank].all_reduce(arrays[use][rank]))
    for handle in handles:
        handle.wait(30)
    for use in range(3):
        for rank in range(3):
            assert np.array_equal(arrays[use][rank], expected[use])
    numbered.close()


def test_more_users_than_numbers_are_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team = Team(2)
    monkeypatch.setattr(communicator, "NUMBERS", 2)
    with pytest.raises(GradwireError, match="2 modules are attached over one engine"):
        Numbered(team, 3)
    Numbered(team, 2).close()
    team.close()
