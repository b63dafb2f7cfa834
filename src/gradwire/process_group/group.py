"""GradwireGroup: a process group of torch whose large sums travel over the engine.

Everything else is Gloo's. An inner group carries it out, and the group has Gloo's backend
registered as its own besides, since torch does not call methods in Python for everything that
starts in C++.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from gradwire.core.errors import ConfigError
from gradwire.core.settings import Settings
from gradwire.process_group.collectives import CARRIED, EngineCollectives, Request
from gradwire.process_group.delegation import COLLECTIVES, delegate, outside_graphs
from gradwire.process_group.signals import Signals
from gradwire.process_group.work import EngineWork
from gradwire.training.groups import Group
from gradwire.transport.threads import apart

OVER_GLOO = (
    *COLLECTIVES,
    "_end_coalescing",
    "_start_coalescing",
    "allgather_into_tensor_coalesced",
)
"""The methods that go to the inner group as they are; some names are newer than others."""


GLOO_REDUCES = "2.9"
"""The first version of torch whose Gloo is known to average, and to reduce-scatter as it should.

Before, Gloo refuses averages in an all-reduce and lists in a reduce-scatter. A reduce-scatter of
one tensor takes the sum in place of every other operation, without an error.
"""


class GradwireGroup(dist.ProcessGroup):
    """A process group of backend "gradwire".

    All-reduce and reduce-scatter of float32, float16 and bfloat16 on the CPU, with SUM or AVG, go
    to the engine from `min_bytes` of input on. Only the number of elements, their type, the
    operation and the device decide, which are the same on all members. The sum is taken in the
    order of ranks in float32, multiplied by one over the number of members for AVG, and rounded
    once, so it is the same to the bit on every member and in every run.

    A reduce-scatter is the engine's own: each member sums its part, and nothing comes back.

    Args:
        group: The place of this process in the group, under a name that no other group of the job
            has.
        default: Whether it is the job's default group.

    Attributes:
        inner: The group that carries out everything else.
    """

    def __init__(
        self, group: Group, settings: Settings, timeout: datetime.timedelta, *, default: bool
    ) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg]  # of subclasses
        self.settings = settings
        self._group = group
        store: Any = group.store
        self.gloo = ProcessGroupGloo(
            PrefixStore("gloo/", store), group.rank, group.world_size, timeout=timeout
        )
        if hasattr(self.gloo.options, "global_ranks_in_group"):  # torch 2.7 has neither
            self.gloo.options.global_ranks_in_group = list(group.ranks)
            self.gloo.options.group_name = group.name  # type: ignore[assignment]
        if torch.__version__ < "2.14":  # later versions count by themselves
            self.gloo._set_sequence_number_for_group()
        self.inner = dist.ProcessGroup(store, group.rank, group.world_size)
        for each in (self, self.inner):
            each._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            for device in dist.Backend.backend_capability["gloo"]:
                each._register_backend(
                    torch.device(device), dist.ProcessGroup.BackendType.GLOO, self.gloo
                )
        self._signals = Signals(group, self.gloo)
        self._engine = EngineCollectives(group, settings, self._signals.watching)
        self._stays_after_rank_0 = default and group.world_size > 1

    def getBackendName(self) -> str:
        return "gradwire"

    def __repr__(self) -> str:
        group = self._group
        return f"GradwireGroup(rank={group.rank}, size={group.world_size}, name={group.name!r})"

    def counters(self) -> dict[str, float]:
        """Returns the engine's totals (`gradwire.Attachment.counters`); empty while it is closed.

        The engine opens with the group's first large collective.
        """
        return self._engine.counters()

    # ------------------------------------------------------------------ collectives

    @outside_graphs
    def allreduce(
        self,
        tensors: list[torch.Tensor] | torch.Tensor,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """Sums or averages tensors over the members, in group.

        Args:
            opts: `AllreduceOptions`, or the operation.
            timeout: Time-out of the collective; None for the options', or the group's.
        """
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        opts = _options(dist.AllreduceOptions, opts, timeout, op)
        if opts.reduceOp == dist.ReduceOp.AVG and all(map(_is_whole, tensors)):
            return self._average_whole(tensors, opts)
        if len(tensors) != 1 or not self._for_engine(tensors, tensors[0], opts.reduceOp):
            return self.inner.allreduce(tensors, opts)
        return self._start("all_reduce", tensors, tensors[0], (), opts)

    @outside_graphs
    def reduce_scatter(
        self,
        outputs: list[torch.Tensor] | torch.Tensor,
        inputs: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """Sums or averages lists of tensors over the members; each gets the one of its rank.

        Args:
            opts: `ReduceScatterOptions`, or the operation.
            timeout: Time-out of the collective; None for the options', or the group's.
        """
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _options(dist.ReduceScatterOptions, opts, timeout, op)
        parts: Any = inputs[0] if len(outputs) == len(inputs) == 1 else []
        shards = tuple(part.numel() for part in parts)
        fits = len(shards) == self._group.world_size
        fits = fits and shards[self._group.rank] == outputs[0].numel()
        if not fits or not self._for_engine(parts, outputs[0], opts.reduceOp, listed=True):
            return self.inner.reduce_scatter(outputs, inputs, opts)
        return self._start("reduce_scatter", parts, outputs[0], shards, opts)

    @outside_graphs
    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Sums or averages a tensor over the members; each gets the part of its rank.

        Args:
            opts: `ReduceScatterOptions`.
        """
        opts = _options(dist.ReduceScatterOptions, opts, None, None)
        alike = given.numel() == output.numel() * self._group.world_size
        if not alike or not self._for_engine([given], output, opts.reduceOp):
            self._check_operation(opts.reduceOp)
            return self.inner._reduce_scatter_base(output, given, opts)
        shards = (output.numel(),) * self._group.world_size
        return self._start("reduce_scatter", [given], output, shards, opts)

    _reduce_scatter_base = reduce_scatter_single  # before torch 2.13

    @outside_graphs
    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce-scatters several tensors over Gloo.

        Args:
            opts: `ReduceScatterOptions`.
        """
        opts = _options(dist.ReduceScatterOptions, opts, None, None)
        self._check_operation(opts.reduceOp)
        return self.inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Closes what the group has opened; `destroy_process_group` calls it. Idempotent."""
        self._engine.close()
        if self._stays_after_rank_0:
            self._stays_after_rank_0 = False
            self._signals.leave_after_rank_0()
        self.inner.shutdown()

    def abort(self) -> None:
        self._engine.close()
        self.inner.abort()

    # ------------------------------------------------------------------ the engine's part

    def _for_engine(
        self,
        inputs: list[torch.Tensor],
        output: torch.Tensor,
        operation: Any,
        listed: bool = False,
    ) -> bool:
        """Returns whether a collective goes to the engine, alike on all members.

        Args:
            listed: Whether it is a reduce-scatter of a list of tensors.
        """
        alone = torch.__version__ < GLOO_REDUCES and (listed or operation == dist.ReduceOp.AVG)
        return (
            self._group.world_size > 1
            and output.dtype in CARRIED
            and (operation == dist.ReduceOp.SUM or operation == dist.ReduceOp.AVG)
            and sum(each.numel() for each in inputs) * output.element_size()
            >= (1 if alone else self.settings.min_bytes)
            and all(
                each.dtype == output.dtype
                and each.device.type == "cpu"
                and each.layout == torch.strided
                for each in (*inputs, output)
            )
        )

    def _average_whole(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        """Averages whole numbers, rounded towards zero as NCCL does; Gloo cannot.

        Frameworks that divide Gloo's sums themselves ask any other backend for the average.
        """
        sums = _options(dist.AllreduceOptions, dist.ReduceOp.SUM, opts.timeout, None)
        summed = self.inner.allreduce(tensors, sums)
        work = EngineWork(tensors, f"rank {self._group.job_rank}: all_reduce")

        def divide() -> None:
            try:
                summed.wait()
                with torch.inference_mode():
                    for each in tensors:
                        each.copy_(each.div(self._group.world_size, rounding_mode="trunc"))
            except Exception as error:
                work.finish(error)
            else:
                work.finish()

        apart(divide)
        return work

    def _check_operation(self, operation: Any) -> None:
        """Refuses a reduce-scatter in which Gloo would take the sum without an error."""
        right = torch.__version__ >= GLOO_REDUCES or operation == dist.ReduceOp.SUM
        if not right and self._group.world_size > 1:
            raise ConfigError.of(
                "op",
                operation,
                f"Gloo of torch {torch.__version__} takes the sum in its place; take torch "
                f"{GLOO_REDUCES} or later, or all_reduce",
            )

    def _start(
        self,
        name: str,
        inputs: list[torch.Tensor],
        output: torch.Tensor,
        shards: tuple[int, ...],
        opts: Any,
    ) -> dist.Work:
        own = self.settings.timeout
        seconds: float = opts.timeout.total_seconds()
        if seconds <= 0:
            seconds = own if own is not None else self.gloo.options._timeout.total_seconds()
        average = bool(opts.reduceOp == dist.ReduceOp.AVG)
        start = sum(shards[: self._group.rank])
        return self._engine.start(Request(name, inputs, output, shards, start, average, seconds))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has whole numbers; truth values are none."""
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


def _options(
    kind: type[Any], given: Any, timeout: datetime.timedelta | None, operation: Any
) -> Any:
    """Returns the options of a collective, which torch's methods take in several forms."""
    if isinstance(given, kind):
        return given
    options = kind()
    operation = given if operation is None else operation
    if operation is not None:
        options.reduceOp = operation
    if timeout is not None:
        options.timeout = timeout
    return options


delegate(GradwireGroup, OVER_GLOO, dist.ProcessGroup, lambda group: group.inner)
