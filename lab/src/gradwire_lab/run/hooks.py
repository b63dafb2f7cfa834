"""DDP's communication hooks take part as contestants: torch's own, and a plain top-k."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by value.

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from gradwire.training.bucket import GradBucket
from gradwire_lab.training.trainee import TORCH_HOOKS

__all__ = ["POWERSGD_RANK", "TOPK_SHARE", "hook_of", "topk_hook"]

TOPK_SHARE = 0.1
"""Share of a bucket's elements that top-k sends, as compression papers choose it."""

POWERSGD_RANK = 2
POWERSGD_START = 2
"""The first step that torch lets it compress."""

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def hook_of(name: str, group: Any) -> tuple[Any, Hook]:
    """Return the state and the hook of this name in scenario files, over a process group."""
    if name == "powersgd":
        state = PowerSGDState(
            group,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_START,
        )
        return state, cast(Hook, powerSGD_hook)
    if name == "topk":
        return TopK(group), topk_hook
    return group, TORCH_HOOKS[name]


class TopK:
    """The state of `topk_hook` keeps what was left out of each bucket so far."""

    def __init__(self, group: Any, share: float = TOPK_SHARE) -> None:
        self.group = group
        self.share = share
        self.residuals: dict[int, torch.Tensor] = {}


def topk_hook(state: TopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send the largest elements of a bucket, with their indices, to all; add those of the others.

    The rest is kept and added to the next step's gradient (error feedback).
    """
    flat = bucket.buffer()
    residual = state.residuals.get(bucket.index())
    if residual is not None and residual.numel() == flat.numel():
        flat.add_(residual)
    count = max(1, math.ceil(state.share * flat.numel()))
    indices = flat.abs().topk(count, sorted=False).indices
    values = flat[indices]
    kept = flat.clone()
    kept[indices] = 0.0
    state.residuals[bucket.index()] = kept
    packet = torch.cat([indices.to(torch.int32), values.view(torch.int32)])
    world = dist.get_world_size(state.group)
    packets = [torch.empty_like(packet) for _ in range(world)]
    work = dist.all_gather(packets, packet, group=state.group, async_op=True)
    assert work is not None

    def add(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()
        flat.zero_()
        for each in packets:
            flat.index_add_(0, each[:count].long(), each[count:].view(torch.float32))
        return flat.div_(world)

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(add)
    return future
