"""Gloo's all-reduce is a contestant, also with a congestion control of its own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradwire_lab.contest.congestion_control import (
    choose_congestion_control,
    open_sockets,
)
from gradwire_lab.contest.contestant import as_bfloats, upper_halves

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=120)


class GlooAllReduce:
    """This contestant is an all-reduce by PyTorch's Gloo over TCP."""

    _group: Any

    def __init__(
        self,
        timeout_s: float = _TIMEOUT.total_seconds(),
        half: bool = False,
        bfloats: bool = False,
    ) -> None:
        """Choose how it sums.

        Args:
            half: whether values travel and are summed as float16, as torch's
                ``fp16_compress_hook`` lets them.
            bfloats: whether the buffer's memory is taken as bfloat16, which are twice as many.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._half = half
        self._bfloats = bfloats

    def setup(self, rank: int, world: int, store: Store) -> None:
        self._group = dist.ProcessGroupGloo(store, rank, world, self._timeout)

    def run_round(self, buffer: torch.Tensor) -> None:
        if not self._half:
            self._group.allreduce([as_bfloats(buffer) if self._bfloats else buffer]).wait()
            return
        short = buffer.to(torch.float16)
        self._group.allreduce([short]).wait()
        buffer.copy_(short)

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        expected = sum(inputs.values())
        if self._bfloats:
            buffer = upper_halves(buffer)
        if not bool((buffer == expected).all()):
            raise ValueError(f"gloo: the sum is not {expected} everywhere")

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        del self._group


class GlooOver(GlooAllReduce):
    """This contestant is Gloo with a chosen congestion control; servers take no part."""

    def __init__(self, congestion_control: str, workers: int, timeout_s: float) -> None:
        """Choose the congestion control.

        Args:
            workers: how many of the ranks, the first ones, are workers.
            timeout_s: seconds that one sum may take.
        """
        super().__init__(timeout_s)
        self._congestion_control = congestion_control
        self._workers = workers
        self._working = True

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Connect, then choose on each connection, since a host has only one default."""
        self._working = rank < self._workers
        if not self._working:
            return
        before = open_sockets()
        super().setup(rank, self._workers, store)
        self._group.allreduce([torch.zeros(1)]).wait()
        chosen = choose_congestion_control(open_sockets() - before, self._congestion_control)
        if self._workers > 1 and not chosen:
            raise RuntimeError(
                f"congestion_control={self._congestion_control!r}: Gloo opened no TCP connection "
                "to choose it on"
            )

    def run_round(self, buffer: torch.Tensor) -> None:
        if self._working:
            super().run_round(buffer)

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        if self._working:
            super().verify(buffer, {rank: inputs[rank] for rank in range(self._workers)})

    def close(self) -> None:
        if self._working:
            super().close()

    def report(self) -> dict[str, Any]:
        return {"congestion_control": self._congestion_control}
