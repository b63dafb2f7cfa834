"""Hosts in virtual time whose processes have several engines each, as `cores=` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwire.sim.fabric import Fabric
from gradwire.transport.native import load_engine

if TYPE_CHECKING:
    from gradwire import _engine


class CoresFabric:
    """Hosts on one switch, each with several engines that share its port and every op.

    Args:
        workers: Number of workers.
        cores: Number of engines of each.
        options: Further arguments of `Fabric`, for all engines.

    Attributes:
        fabrics: One for each engine of a host.
    """

    def __init__(self, workers: int, cores: int, **options: Any) -> None:
        self.workers = workers
        self.fabrics = [Fabric(workers, engines=cores, **options)]
        for engine in range(1, cores):
            beside = self.fabrics[0]
            self.fabrics.append(
                Fabric(workers, engines=cores, engine=engine, beside=beside, **options)
            )

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return max(fabric.now for fabric in self.fabrics)

    def all_reduce(
        self, op: int, plan: _engine.Plan, data: Sequence[NDArray[np.float32]], **options: Any
    ) -> None:
        """Starts one op on all engines of all workers, as `Fabric.all_reduce` does."""
        for fabric in self.fabrics:
            fabric.all_reduce(op, plan, data, **options)

    def run(self, until: float = 120.0) -> bool:
        """Runs until a time, or until all ops are done; returns whether they are."""
        return Fabric.run_together(self.fabrics, until)

    def counted(self, worker: int, op: int) -> NDArray[np.uint8]:
        """Returns for each chunk whether the worker's contribution counted."""
        parts = [fabric.completion(worker, op) for fabric in self.fabrics]
        together: NDArray[np.uint8] = np.bitwise_or.reduce(
            [part.counted for part in parts if part is not None]
        )
        return together

    def result(self, worker: int, op: int, plan: _engine.Plan) -> NDArray[np.float32]:
        """Returns a worker's buffer after an exact op: of each engine the chunks that it has."""
        offsets, lengths, *_ = load_engine().chunk_grid(
            plan, self.fabrics[0].datagram_bytes, self.workers
        )
        values = np.full(plan.elements, np.nan, np.float32)
        for fabric in self.fabrics:
            own, part = fabric.completion(worker, op), fabric.result(worker, op)
            assert own is not None
            for chunk in np.flatnonzero(own.applied):
                at = slice(int(offsets[chunk]), int(offsets[chunk] + lengths[chunk]))
                values[at] = part[at]
        return values

    def finished_at(self, worker: int, op: int) -> float:
        """Returns when the last engine of a worker was done, in seconds since the start."""
        return max(fabric.finished_at(worker, op) for fabric in self.fabrics)

    def counters(self, worker: int) -> dict[str, float]:
        """Returns the sums of the counters of a worker's engines."""
        found = [fabric.counters(worker) for fabric in self.fabrics]
        return {key: sum(each[key] for each in found) for key in found[0]}
