"""FSDP2: the gradients that fully_shard scatters among the ranks travel over gradwire.

torch calls the reduce-scatter of each group of parameters when their gradients are there, and says
neither which parameters they are nor which call is the last of a backward pass. The parameters
follow from the group and the number of elements, and the step ends in a callback that autograd runs
when the pass is over.

A result may come after the call has returned, as with DDP, where torch only notes where it is. In
other cases torch reads it at once, so the call waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.errors import ConfigError
from gradwire.policies import Policy
from gradwire.training.bucket import Scatter
from gradwire.training.connection import Connection
from gradwire.training.fsdp_module import ShardGroup, process_group_of, shard_groups

__all__ = ["ShardedState"]

IN_FLIGHT = 2
"""How many reduce-scatters of a rank are under way at once; each holds gradients of a whole group.

One travels while the next group's gradients are computed."""


@dataclass(frozen=True)
class GroupBucket:
    """The gradients of one group, as the pipeline takes them.

    Attributes:
        place: Its index in the step.
        values: The gradients, 1-D.
        members: The parameters.
    """

    place: int
    values: torch.Tensor
    members: list[torch.Tensor]
    last = False

    def index(self) -> int:
        """Returns its index in the step."""
        return self.place

    def is_last(self) -> bool:
        """Returns whether it is the step's last one."""
        return self.last

    def buffer(self) -> torch.Tensor:
        """Returns the gradients."""
        return self.values

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters."""
        return self.members


class LastBucket(GroupBucket):
    """An empty bucket, which ends a step."""

    last = True


class ShardedState(Connection):
    """The connection of one model under fully_shard.

    Args:
        model: The model.
        policy: As for `Connection`, as are all others.
        options: See `Connection`.
        optimizer: See `Connection`.
        scaler: See `Connection`.
    """

    wrapper = "fully_shard"
    feedback = False  # a rank's contribution is unsharded, and so would be its residual

    def __init__(
        self,
        model: torch.nn.Module,
        policy: str | Policy | None,
        options: dict[str, object],
        *,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._groups = shard_groups(model)
        super().__init__(
            policy,
            options,
            model=model,
            process_group=process_group_of(self._groups),
            optimizer=optimizer,
            scaler=scaler,
        )
        self._begun = False  # whether a step is under way
        self._next = 0  # the index of the step's next bucket
        self._results: list[torch.futures.Future[torch.Tensor]] = []
        self._before: list[Any] = []
        for group in self._groups:
            self._before.append(group.inner._reduce_scatter_comm)
            group.module.set_custom_reduce_scatter(ReduceScatter(self, group))  # type: ignore[arg-type]

    def _configure(self, *args: Any) -> None:
        super()._configure(*args)
        policy, settings = self.policy, self._settings
        if settings.server_count:
            raise ConfigError.of(
                "route",
                settings.route,
                "each rank sums its own shard, and servers would keep it; use route='sharded'",
                beside="under fully_shard",
            )
        phases = policy.phases
        for option, value, why in (
            ("fill", policy.fill, "momentum"),
            ("detector", None if phases is None else phases.source, "paper"),
        ):
            if value == why:
                raise ConfigError.of(
                    option,
                    value,
                    "no rank has more than its shard of moments and results; use another value",
                    beside="under fully_shard",
                )
        self._settings = replace(settings, hosts=False)

    def deactivate(self) -> None:
        """Closes the pipeline, and gives torch its own reduce-scatters back."""
        for group, before in zip(self._groups, self._before, strict=True):
            group.module.set_custom_reduce_scatter(before)
        super().deactivate()

    def reduce(
        self, group: ShardGroup, output: torch.Tensor, given: torch.Tensor, op: Any
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduces the gradients of a group, and scatters the sum.

        Args:
            group: The group.
            output: Where this rank's shard of the sum goes.
            given: The gradients; they belong to the engine until the result is there.
            op: torch's operation.

        Returns:
            A future of the output, which is done where torch reads the output at once.
        """
        pipeline = self.pipeline
        members = group.members(given.numel())
        reads = _reads_at_once(group, members, output, op)
        if reads and pipeline.guards:
            raise ConfigError.of(
                "guard",
                self._settings.guard,
                f"it may send {group.described} again at the end of the step, and torch reads the "
                f"result before ({reads}); set guard='off', or floor=0",
            )
        if not self._begun:
            self._begun, self._next, self._results = True, 0, []
            _after_backward(lambda: _after_backward(self._end))
        if not pipeline.guards:
            pipeline.wait(but=IN_FLIGHT - 1)
        parameters = group.parameters(members)
        scatter = Scatter(
            group.slots(members),
            (output.numel(),) * group.world_size,
            dist.get_rank(self.process_group),
            _factor(op, group.world_size),
            output,
        )
        bucket = GroupBucket(self._next, given, parameters)
        self._next += 1
        result = pipeline.reduce(bucket, scatter=scatter)
        if reads:
            pipeline.wait()
        if result.done() or reads:
            result.wait()  # raises what failed, and orders streams
        else:
            self._results.append(result)
        return result

    def _end(self) -> None:
        """Ends the step, when the backward pass is over and all groups are reduced."""
        self._begun = False
        results, self._results = self._results, []
        pipeline = self.pipeline
        results.append(pipeline.reduce(LastBucket(self._next, torch.empty(0), [])))
        pipeline.wait()
        for each in results:
            each.wait()


class ReduceScatter:
    """The reduce-scatter of one group, as torch calls it.

    Args:
        state: The state.
        group: The group.
    """

    def __init__(self, state: ShardedState, group: ShardGroup) -> None:
        self._state = state
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces and scatters; see `ShardedState.reduce`."""
        result = self._state.reduce(self._group, output_tensor, input_tensor, op)
        return torch._C._distributed_c10d._create_work_from_future(result) if async_op else None


def _after_backward(function: Any) -> None:
    """Calls a function when the backward pass is over, after all that wait for that now."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _factor(op: Any, world_size: int) -> float:
    """Returns the factor of the sum that torch's operation stands for."""
    if op == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if op == dist.ReduceOp.SUM:
        return 1.0
    return float(op.__getstate__()[1])  # PREMUL_SUM


def _reads_at_once(group: ShardGroup, members: Sequence[int], output: torch.Tensor, op: Any) -> str:
    """Returns why torch reads a result as soon as the call is over; "" where it does not."""
    if op == dist.ReduceOp.SUM:
        return "it divides it"
    if group.inner._all_reduce_hook is not None:
        return "it has an all-reduce hook"
    for index in members:
        each = group.inner.fsdp_params[index]
        if each.orig_dtype != output.dtype:
            return f"it makes {each.orig_dtype} of {output.dtype}"
        if each.offload_to_cpu:
            return "it moves it to the CPU"
        if each.sharded_param.grad is not None:
            return "it adds it to gradients that are there already"
        if getattr(each.sharded_param, "_post_accumulate_grad_hooks", None):
            return "a hook of a parameter takes it"
    return ""
