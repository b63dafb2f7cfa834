"""Replicated: shards of gradients that are averaged over the replicas of a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.core.names import some_of
from gradwire.training.bucket import ComparedLayout
from gradwire.training.fsdp import FullySharded
from gradwire.training.fsdp_module import ShardGroup
from gradwire.training.optimizers import held_by


class Replicated(FullySharded):
    """Averages each rank's shard of the gradients over the replicas of the model."""

    wrapper = "fully_shard with replicas"

    def __init__(
        self,
        model: torch.nn.Module,
        groups: list[ShardGroup],
        replicas: dist.ProcessGroup,
        *args: Any,
        **more: Any,
    ):
        super().__init__(model, groups, replicas, *args, **more)
        self._kept = {group: dict[int, torch.Tensor]() for group in groups}
        for group in groups:
            group.module.set_all_reduce_hook(functools.partial(self._reduce, group))

    def deactivate(self) -> None:
        """Closes the pipeline; torch's hook averages over the process group from now on."""
        for group in self._groups:
            group.module.set_all_reduce_hook(functools.partial(average, self.process_group))
        super().deactivate()

    def _layout(self, group: ShardGroup, members: tuple[int, ...]) -> ComparedLayout:
        return group.slots(members, [None])

    def _elements(self, group: ShardGroup) -> int:
        return group.elements

    def _is_due(self, group: ShardGroup) -> bool:
        return super()._is_due(group) and bool(group.inner.all_reduce_grads)

    def _after_backward(self, group: ShardGroup, reduce: Any, *unused: Any) -> None:
        """Keeps the shard of a pass that averages nothing (`set_requires_all_reduce(False)`).

        torch heeds that on a mesh of two dimensions alone. Here it takes the shard for the gradient
        and hands it to hooks, all of which is undone.
        """
        if group.inner.all_reduce_grads:
            super()._after_backward(group, reduce, *unused)
            return
        with _untouched([each.sharded_param for each in group.inner.fsdp_params]):
            super()._after_backward(group, reduce, *unused)

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError, too, where a step would leave out what micro-batches have kept.

        What they have kept of parameters that are frozen by now is let go, since none reaches them.
        """
        super()._check_step(optimizer)
        held = set(map(id, held_by(optimizer))) if any(self._kept.values()) else ()
        for group, kept in self._kept.items():
            mine = zip(list(kept), group.parameters(kept), strict=True)
            stepped = [(index, each) for index, each in mine if id(each) in held]
            for index in (index for index, each in stepped if not each.requires_grad):
                del kept[index]
            names = [group.names[index] for index, each in stepped if each.requires_grad]
            if names:
                raise ConfigError.about(
                    f"{group.described}: gradients of {some_of(names)} from micro-batches under "
                    "set_requires_all_reduce(False) are not averaged, and the optimizer steps",
                    "call set_requires_all_reduce(True) before the last one's backward pass, and "
                    "set_reduce_scatter_unused_params(True) where that may leave parameters out",
                    setting="requires_all_reduce",
                    value=names[0],
                )

    def _reduce(self, group: ShardGroup, shard: torch.Tensor) -> None:
        group.check_members(shard.numel())
        members, kept = group.members, self._kept[group]
        parts = torch.split(shard, [group.lengths[index] for index in members])
        for index, part in zip(members, parts, strict=True):
            earlier = kept.pop(index, None)
            if earlier is not None:
                part += earlier
                if earlier.is_cuda:  # it was made on another stream
                    earlier.record_stream(torch.cuda.current_stream(earlier.device))
        if group.inner.all_reduce_grads:
            reads = self._reads_at_once(group, members, shard.dtype)
            self._start(group, shard, members, reads)
        else:
            kept.update(zip(members, parts, strict=True))


@contextlib.contextmanager
def _untouched(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Lets nothing that happens meanwhile reach the gradients of parameters, or their hooks."""
    before = [parameter.grad for parameter in parameters]
    hooks = [getattr(each, "_post_accumulate_grad_hooks", None) or {} for each in parameters]
    called = [dict(each) for each in hooks]
    for parameter, each in zip(parameters, hooks, strict=True):
        parameter.grad = None
        each.clear()
    try:
        yield
    finally:
        for parameter, grad, each, those in zip(parameters, before, hooks, called, strict=True):
            parameter.grad = grad
            each.update(those)


def average(group: dist.ProcessGroup | None, shard: torch.Tensor) -> None:
    dist.all_reduce(shard, group=group)
    shard.div_(dist.get_world_size(group))
