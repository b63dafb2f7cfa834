"""How plans are cut into chunks, which is asked for at each transfer and computed once."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.core.plan import REMEMBERED, TransferPlan
from gradwire.core.regions import Regions
from gradwire.transport.native import ChunkGrid, load_engine, native_plan


class CutPlan(NamedTuple):
    """A plan's chunks, and the loss bound that each of its regions has by them."""

    grid: ChunkGrid
    bounds: tuple[float, ...]


class PlanCache:
    """Remembers how the last plans were cut."""

    def __init__(self) -> None:
        self._plans: dict[object, CutPlan] = {}
        self._grids: dict[object, ChunkGrid] = {}  # for any bounds

    def cut(self, plan: TransferPlan, datagram: int, aggregators: int, cores: int) -> CutPlan:
        """Cuts a plan into chunks.

        Args:
            datagram: Bytes of a datagram at most.
            aggregators: How many ranks sum parts of it.
            cores: How many engine threads share it.
        """
        regions = Regions.of(plan.regions)
        shape = (plan.encoding, plan.kept, plan.datagram, plan.shards, datagram, aggregators)
        key = (plan.elements, regions, *shape, cores)
        known = self._plans.get(key)
        if known is None:
            native = native_plan(plan)
            grid = self._grid((plan.elements, regions.cuts, *shape), native, datagram, aggregators)
            bounds = tuple(native.effective_bounds(datagram, aggregators, cores))
            if len(self._plans) >= REMEMBERED:
                self._plans.clear()
            known = self._plans[key] = CutPlan(grid, bounds)
        return known

    def _grid(self, key: object, native: object, datagram: int, aggregators: int) -> ChunkGrid:
        known = self._grids.get(key)
        if known is None:
            if len(self._grids) >= REMEMBERED // 4:
                self._grids.clear()
            known = ChunkGrid(*load_engine().chunk_grid(native, datagram, aggregators))
            self._grids[key] = known
        return known
