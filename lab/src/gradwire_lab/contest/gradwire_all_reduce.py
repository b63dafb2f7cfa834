"""gradwire's all-reduce under one plan is a contestant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradwire.core.plan import TransferPlan
from gradwire.core.settings import Settings
from gradwire.transport.communicator import Communicator
from gradwire_lab.contest.contestant import as_bfloats, upper_halves
from gradwire_lab.contest.gradwire_rounds import ROUND_TIMEOUT, Rounds, make_plan

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ENCODING_ERROR = 0.02


class GradwireAllReduce:
    """This contestant is an all-reduce over the sharded route; bound 0 is exact."""

    def __init__(
        self,
        bound: float = 0.0,
        spend: str = "nothing",
        pull: str = "exact",
        encoding: str = "f32",
        bfloats: bool = False,
        settings: Mapping[str, object] | None = None,
        group: str = "world",
        entries: int = 0,
    ) -> None:
        """Choose the plan, see `make_plan`, or take the buffer's memory as bfloat16.

        Args:
            settings: those that differ from what the environment says.
            group: its name, another one for each settings in a store.
            entries: how many of the engine's timeline a round may have, which its details then
                hold; 0 for none.
        """
        self._group = group
        self._settings = Settings.build(settings)
        self._bfloats = bfloats
        self._entries = entries
        self._bound, self._spend, self._pull = bound, spend, pull
        self._encoding = encoding
        self._delivered: list[float] = []
        self._rounds: Rounds | None = None

    def setup(self, rank: int, world: int, store: Store) -> None:
        self._rounds = Rounds(
            Communicator(
                store,
                rank,
                world,
                self._settings,
                group=self._group,
                timeout_s=ROUND_TIMEOUT,
            )
        )
        if self._entries:
            self._rounds.record(self._entries)

    def run_round(self, buffer: torch.Tensor) -> dict[str, Any] | None:
        assert self._rounds is not None
        if self._bfloats:
            self._rounds.run(
                as_bfloats(buffer), TransferPlan.whole(2 * buffer.numel(), encoding="bf16")
            )
            return None
        plan = make_plan(
            buffer.numel(), self._bound, self._spend, self._pull, self._rounds.step, self._encoding
        )
        self._delivered.append(min(self._rounds.run(buffer, plan).delivered))
        return {"timeline": self._rounds.record(self._entries)} if self._entries else None

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        total = sum(inputs.values())
        if self._bfloats:
            buffer = upper_halves(buffer)
        if self._encoding != "f32":
            if not bool(((buffer - total).abs() <= _ENCODING_ERROR * total).all()):
                raise ValueError(f"gradwire {self._encoding}: the sum is not about {total}")
            return
        values = np.unique(buffer.numpy())
        sums = {0.0}
        for value in inputs.values():
            sums |= {each + value for each in sums}
        allowed = sums if self._bound else {total}
        if not set(values.tolist()) <= allowed:
            raise ValueError(f"gradwire: values {values[:8]} where the sum is {total}")

    def report(self) -> dict[str, Any]:
        assert self._rounds is not None
        delivered = self._delivered or [1.0]
        return {
            **self._rounds.report(),
            "delivered_mean": sum(delivered) / len(delivered),
            "delivered_min": min(delivered),
        }

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
