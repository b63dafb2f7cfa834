"""Sharded: gradients that the ranks of a mesh scatter among themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from gradwire.training.bucket import ComparedLayout, Scatter
from gradwire.training.fsdp import FullySharded
from gradwire.training.fsdp_module import ShardGroup, process_group_of


class Sharded(FullySharded):
    """Scatters the gradients among the ranks that share the parameters."""

    scattered = True

    def __init__(self, model: torch.nn.Module, groups: list[ShardGroup], *args: Any, **more: Any):
        super().__init__(model, groups, process_group_of(groups), *args, **more)
        self._before = [group.inner._reduce_scatter_comm for group in groups]
        for group in groups:
            self._take(group)

    def deactivate(self) -> None:
        """Closes the pipeline, and gives torch its own reduce-scatters back."""
        for group, before in zip(self._groups, self._before, strict=True):
            self._give_back(group, before)
        super().deactivate()

    def _take(self, group: ShardGroup) -> None:
        group.module.set_custom_reduce_scatter(ReduceScatter(self, group))  # type: ignore[arg-type]

    def _give_back(self, group: ShardGroup, before: Any) -> None:
        group.module.set_custom_reduce_scatter(before)

    def _configure(self, *args: Any) -> None:
        super()._configure(*args)
        policy = self.policy
        if policy.fill == "momentum":
            raise self._needs_all("fill", policy.fill, "moments of the optimizer")
        if policy.ranks_results:
            raise self._needs_all("priority", "results", "results")
        if policy.phases is not None and policy.phases.source == "paper":
            raise self._needs_all("detector", "paper", "results")

    def _reads_always(
        self, group: ShardGroup, members: tuple[int, ...], reduced: torch.dtype
    ) -> str:
        if group.inner._all_reduce_hook is not None:
            return "it has an all-reduce hook"
        return super()._reads_always(group, members, reduced)

    def _layout(self, group: ShardGroup, members: tuple[int, ...]) -> ComparedLayout:
        return group.slots(members, range(group.world_size))

    def _elements(self, group: ShardGroup) -> int:
        return group.world_size * group.elements

    def reduce(
        self, group: ShardGroup, output: torch.Tensor, given: torch.Tensor, op: Any
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduces the gradients of a group, and scatters the sum.

        Args:
            given: The gradients; they belong to the engine until the result is there.

        Returns:
            A future of the output, which is done where torch reads the output at once.
        """
        group.check_members(output.numel())
        members = group.members
        shards = (output.numel(),) * group.world_size
        scatter = Scatter(shards, self._rank, _factor(op, group.world_size), output)
        reads = "it divides it" if op == dist.ReduceOp.SUM else ""
        reads = reads or self._reads_at_once(group, members, output.dtype)
        return self._start(group, given, members, reads, scatter)


class Alone(Sharded):
    """Takes the gradients of one rank that shares its parameters with nobody.

    torch scatters nothing there, but calls its all-reduce hook.
    """

    def _take(self, group: ShardGroup) -> None:
        group.module.set_all_reduce_hook(functools.partial(self._reduce, group))

    def _give_back(self, group: ShardGroup, before: Any) -> None:
        group.module.set_all_reduce_hook(None)  # type: ignore[arg-type]

    def _reads_always(
        self, group: ShardGroup, members: tuple[int, ...], reduced: torch.dtype
    ) -> str:
        return FullySharded._reads_always(self, group, members, reduced)

    def _reduce(self, group: ShardGroup, shard: torch.Tensor) -> None:
        group.check_members(shard.numel())
        reads = self._reads_at_once(group, group.members, shard.dtype)
        self._start(group, shard, group.members, reads)


class ReduceScatter:
    """The reduce-scatter of one group, as torch calls it."""

    def __init__(self, state: Sharded, group: ShardGroup) -> None:
        self._state = state
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        result = self._state.reduce(self._group, output_tensor, input_tensor, op)
        if not async_op:
            return None
        work: dist.Work = c10d._create_work_from_future(result)  # type: ignore[attr-defined]
        return work


def _factor(op: Any, world_size: int) -> float:
    """Returns the factor of the sum that torch's operation stands for."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    return float(op.__getstate__()[1])  # PREMUL_SUM
