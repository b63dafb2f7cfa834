"""The bridge to the compiled engine: plans in, chunk grids and reports out.

It also offers the engine's arithmetic over the chunks of a grid.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwire.core.errors import EngineMissingError
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import Region
from gradwire.core.transfer_report import TransferReport, Waits

if TYPE_CHECKING:
    from gradwire import _engine

CODED, TIMES = 1 << 16, 5
"""Elements whose encoding is timed, and how often; the shortest time counts."""


def load_engine() -> Any:
    """Imports `gradwire._engine`."""
    try:
        from gradwire import _engine
    except ImportError as error:
        raise EngineMissingError(
            f"the compiled engine gradwire._engine cannot be imported ({error}); in a source "
            "checkout build it with `make engine`"
        ) from error
    return _engine


def seconds_to_code(clock: Callable[[], float]) -> float:
    """Measures the seconds that the processor takes to encode and decode one element as int8."""
    plan = native_plan(TransferPlan(CODED, (Region(0, CODED, 0.0),), encoding="int8"))
    values, engine = np.ones(CODED, np.float32), load_engine()
    taken = []
    for _ in range(TIMES):
        began = clock()
        engine.round_trip(plan, values, 1472, 2)
        taken.append(clock() - began)
    return min(taken) / CODED


class ChunkGrid:
    """The chunks of a plan, each carried by one datagram: arrays of one entry per chunk.

    Attributes:
        offsets: uint64; each chunk's first element.
        lengths: uint32; each chunk's number of elements.
        regions: uint32; the index of the region that a chunk belongs to.
        aggregators: uint32; the index of the aggregator that sums it.
    """

    def __init__(
        self,
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        regions: NDArray[np.uint32],
        aggregators: NDArray[np.uint32],
    ) -> None:
        self.offsets = offsets
        self.lengths = lengths
        self.regions = regions
        self.aggregators = aggregators

    def __len__(self) -> int:
        return len(self.offsets)

    @functools.cached_property
    def rising(self) -> NDArray[np.intp]:
        return np.argsort(self.offsets, kind="stable")

    @functools.cached_property
    def groups(
        self,
    ) -> tuple[NDArray[np.unsignedinteger[Any]], NDArray[np.intp], NDArray[np.intp]]:
        """For each chunk its group, where that begins, and how many chunks are in it.

        A group is the chunks of one region at one aggregator, which are neighbours.
        """
        changes = (np.diff(self.regions) != 0) | (np.diff(self.aggregators) != 0)
        starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        sizes = np.diff(np.append(starts, len(self)))
        # numpy sorts 16-bit integers by radix, so they are used where they suffice.
        kind = np.dtype(np.uint16 if len(sizes) < 1 << 16 else np.uint64)
        groups: NDArray[Any] = np.repeat(np.arange(len(sizes)).astype(kind), sizes)
        return groups, np.repeat(starts, sizes), np.repeat(sizes, sizes)

    def per_element(self, values: NDArray[Any]) -> NDArray[Any]:
        """Spreads one value per chunk over the chunk's elements."""
        return np.repeat(values[self.rising], self.lengths[self.rising])

    def mean_magnitudes(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns each chunk's mean magnitude, the same to the bit on any machine.

        Args:
            values: float32, one value per element.

        Returns:
            float32 for each chunk, infinite where the sum of its magnitudes is not finite.
        """
        means: NDArray[np.float32] = load_engine().mean_magnitudes(
            values, self.offsets, self.lengths
        )
        return means

    def write(
        self,
        values: NDArray[np.float32],
        chunks: NDArray[np.intp],
        source: NDArray[np.float32],
        begin: int,
        factor: float,
    ) -> None:
        """Writes what `source` holds of some chunks into `values`, in place."""
        load_engine().write_chunks(
            values, self.offsets[chunks], self.lengths[chunks], source, begin, factor
        )

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, int, int, int], ...]:
        """The runs of neighbouring chunks of one length, as (first chunk, chunks, offset, length).

        The chunks first … first + chunks - 1 cover the elements from `offset` on, `length` each, so
        that a run can be treated as the rows of a matrix.
        """
        if not len(self):
            return ()
        offsets, lengths = self.offsets.astype(np.int64), self.lengths.astype(np.int64)
        breaks = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (lengths[1:] != lengths[:-1])
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(self)]
        return tuple(
            (first, end - first, int(offsets[first]), int(lengths[first]))
            for first, end in itertools.pairwise(starts)
        )


def native_plan(plan: TransferPlan) -> _engine.Plan:
    """Returns the plan as the engine takes it; its times are in nanoseconds."""
    native: _engine.Plan = load_engine().Plan(
        elements=plan.elements,
        regions=[(region.offset, region.length, region.bound) for region in plan.regions],
        spend=plan.spend,
        schedule=[
            (step.clock, step.scope, int(step.delay_s * 1e9), step.fraction)
            for step in plan.schedule
        ],
        fill="mean" if plan.fill == "momentum" else plan.fill,
        order=plan.order,
        pull=plan.pull,
        pull_bound=plan.pull_bound,
        control=plan.control,
        scale=plan.scale,
        seed=plan.seed,
        encoding=plan.encoding,
        kept=plan.kept,
        class_dscp=plan.class_dscp,
        datagram_bytes=plan.datagram,
        shards=plan.shards,
    )
    return native


def transfer_report(completion: _engine.Completion, effective: tuple[float, ...]) -> TransferReport:
    return TransferReport(
        op=completion.op,
        step=completion.step,
        counted=completion.counted,
        applied=completion.applied,
        withheld_chunks=completion.withheld_chunks,
        withheld_values=completion.withheld_values,
        delivered=tuple(completion.delivered),
        effective_bounds=effective,
        exceeded=tuple(completion.exceeded),
        stats_sum=tuple(completion.stats_sum),
        stats_max=tuple(completion.stats_max),
        push_s=completion.push_ns / 1e9,
        pull_s=completion.pull_ns / 1e9,
        total_s=completion.total_ns / 1e9,
        bytes_sent=completion.bytes_sent,
        packets_sent=completion.packets_sent,
        retransmissions=completion.retransmissions,
        rtprop_s=completion.rtprop_ns / 1e9,
        btlbw=completion.btlbw,
        result_error=completion.take_result_error(),
        error_offset=completion.error_offset,
        passes=completion.passes,
        datagram=completion.datagram_bytes,
        waits=Waits.of(completion.waits),
    )


def trivial_report(
    plan: TransferPlan, elements: int, step: int, stats: Sequence[float]
) -> TransferReport:
    """Makes the report of a transfer that needed no network, in which everything counted."""
    padded = [*stats, *[0.0] * (8 - len(stats))]
    chunks = 1 if elements else 0
    return TransferReport(
        op=-1,
        step=step,
        counted=np.ones(chunks, np.uint8),
        applied=np.ones(chunks, np.uint8),
        withheld_chunks=np.zeros(0, np.uint32),
        withheld_values=np.zeros(0, np.float32),
        delivered=(1.0,) * len(plan.regions),
        effective_bounds=(0.0,) * len(plan.regions),
        exceeded=(),
        stats_sum=tuple(padded[:4]),
        stats_max=tuple(padded[4:]),
    )
