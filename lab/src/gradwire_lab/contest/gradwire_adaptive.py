"""gradwire's policy adaptive, behind DDP's hook, is a contestant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradwire.training.bucket import Bucket
from gradwire.training.hook import HookState

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class GradwireAdaptive:
    """In this contestant a bucket goes through the policy "adaptive", as DDP's hook would do."""

    def __init__(self) -> None:
        """Start without a state; each size of bucket gets one of its own."""
        self._states: dict[int, tuple[HookState, torch.nn.Parameter]] = {}

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Make the process group; states open at their first round."""
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

    def run_round(self, buffer: torch.Tensor) -> None:
        if buffer.numel() not in self._states:
            model = torch.nn.Module()
            layer = model.layer = torch.nn.Parameter(torch.empty(1, buffer.numel()))
            state = HookState("adaptive", model=model, hosts=False)
            self._states[buffer.numel()] = (state, layer)
        state, layer = self._states[buffer.numel()]
        state.pipeline.reduce(Bucket(0, True, buffer, [layer])).wait()

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check nothing, because the policy decides how exact it is."""

    def report(self) -> dict[str, Any]:
        for state, _ in self._states.values():
            return {"engine": state.pipeline.communicator.counters()}
        return {}

    def close(self) -> None:
        for state, _ in self._states.values():
            state.deactivate()
        dist.destroy_process_group()
