"""Planner: what the policy is told of a bucket, and what its plan becomes on this network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.core.plan import TransferPlan, mix_seed
from gradwire.core.regions import TensorSlot
from gradwire.core.settings import Settings
from gradwire.policies import PlanContext, Policy
from gradwire.training.bucket import ComparedLayout
from gradwire.training.step import (
    Step,
    Transfer,
)
from gradwire.transport.arrays import own_encoding
from gradwire.transport.communicator import Communicator


class Planner:
    """Writes the plans of one attachment's buckets."""

    def __init__(
        self, communicator: Communicator, policy: Policy, settings: Settings, number: int
    ) -> None:
        self._communicator = communicator
        self._policy = policy
        self._servers = settings.server_count
        self._seed, self._number = settings.seed, number
        self._datagram = 0  # the size for which plans cut chunks; 0 for the agreed one

    def context(
        self, step: Step, index: int, slots: tuple[TensorSlot, ...], buffer: torch.Tensor
    ) -> PlanContext:
        encoding = own_encoding(buffer.dtype)
        tensors = [slots.digest] if isinstance(slots, ComparedLayout) else []
        return PlanContext(
            tensors=slots,
            elements=buffer.numel(),
            step=step.number,
            phase=step.phase,
            world_size=self._communicator.world_size,
            seed=mix_seed(self._seed, self._number, step.number, index, *tensors, *step.compared),
            chunk_elements=self._communicator.elements_per_chunk(encoding, datagram=self._datagram),
            bucket=index,
            encoding=encoding,
        )

    def plan(self, step: Step, context: PlanContext) -> TransferPlan:
        plan = self._policy.plan(context)
        if plan.encoding == "topk" and self._servers:
            # A server keeps no residuals, so what top-k leaves out of its results would be lost.
            plan = replace(plan, encoding="int8", kept=1.0, pruned=0.0)
        if plan.seed != context.seed:
            # The seed is set even where the order needs none. Ranks that number their ops
            # differently then have different plans, which is an error, instead of exchanging the
            # gradients of different buckets.
            plan = replace(plan, seed=context.seed)
        if self._datagram:
            plan = replace(plan, datagram=self._datagram)
        return plan.exact() if step.exact else plan.in_width_of(context.encoding)

    def follow_agreed(self) -> None:
        """Cuts later plans for the agreed datagrams, as on a new engine."""
        self._datagram = 0

    def follow_paths(self, transfers: Sequence[Transfer]) -> None:
        """Cuts later plans for the datagrams that all paths carry, which may have changed.

        All ranks do so after the same step, because a transfer's report has the same size on all.
        """
        firsts = [transfer.first for transfer in transfers]
        carried = [first.datagram for first in firsts if first is not None]
        shortest = min((size for size in carried if size), default=0)
        if shortest:
            self._datagram = shortest if shortest < self._communicator.datagram else 0
