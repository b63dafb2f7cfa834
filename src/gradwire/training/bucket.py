"""Bucket layouts: which parameters lie where in the bucket that DDP hands over.

DDP rebuilds its buckets after the first iteration, so nothing may depend on a bucket's index. A
parameter is identified by its object and named as in the model.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradwire.core.errors import ConfigError
from gradwire.core.hashed import HashedTuple
from gradwire.core.names import named_parameters
from gradwire.core.regions import TensorSlot

if TYPE_CHECKING:  # torch.distributed exports it, too, but type checkers do not see it there
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    from torch.distributed import GradBucket as GradBucket


@dataclass(frozen=True, eq=False)
class Scatter:
    """What becomes of a bucket whose sum is scattered: each worker gets its own shard of it.

    Attributes:
        shards: Number of elements of each worker's shard, in order.
        scale: Factor of the sum.
        output: Where this worker's shard goes, 1-D.
    """

    shards: tuple[int, ...]
    rank: int
    scale: float
    output: torch.Tensor

    @functools.cached_property
    def parts(self) -> list[slice]:
        ends = list(itertools.accumulate(self.shards))
        return [slice(end - size, end) for end, size in zip(ends, self.shards, strict=True)]

    @property
    def own(self) -> slice:
        return self.parts[self.rank]


class ComparedLayout(HashedTuple[TensorSlot]):
    """The tensors of a bucket in order, which may be others from step to step.

    Ranks that use different ones would sum gradients of different tensors where the sizes agree, so
    the layout is part of the plan.
    """

    @functools.cached_property
    def digest(self) -> int:
        """A number of 64 bits that stands for the tensors, the same on all ranks."""
        text = "\n".join(f"{slot.length} {slot.key}" for slot in self)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients that travel together: DDP's bucket, FSDP2's group, or the sum of a host's ranks.

    Attributes:
        last: Whether it is the step's last one.
        values: The gradients, 1-D.
        parameters: The parameters whose gradients follow each other in the values.
        layout: The tensors in the values, where they are not the whole parameters.
        scatter: What becomes of the sum where each worker gets its shard; None where all get all
            of it.
    """

    index: int
    last: bool
    values: torch.Tensor
    parameters: Sequence[torch.Tensor]
    layout: ComparedLayout | None = None
    scatter: Scatter | None = None

    @staticmethod
    def of(given: GradBucket) -> Bucket:
        return Bucket(given.index(), given.is_last(), given.buffer(), given.parameters())


class ParameterNames:
    """Names parameters as the model does (`gradwire.core.names`), or in the order they are seen.

    Attributes:
        trained: Number of elements of each trained parameter by name; None without a model.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._model = None if model is None else type(model).__name__
        self._known: dict[int, tuple[torch.Tensor, str]] = {}  # keeps tensors, so ids stay valid
        self.trained: dict[str, int] | None = None
        if model is not None:
            named = named_parameters(model)
            self.trained = {n: p.numel() for n, p in named.items() if p.requires_grad}
            for name, parameter in named.items():
                self._known[id(parameter)] = (parameter, name)

    def knows(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._known

    def __call__(self, parameter: torch.Tensor) -> str:
        """Returns the parameter's name: "p0", "p1", … where no model names them.

        Raises:
            ConfigError: the model does not hold it.
        """
        known = self._known.get(id(parameter))
        if known is None:
            if self._model is not None:
                raise ConfigError.about(
                    f"model is a {self._model} that does not hold a parameter of shape "
                    f"{tuple(parameter.shape)} whose gradient is averaged",
                    "give the module inside DDP, as in HookState(model=ddp.module)",
                    setting="model",
                    value=self._model,
                )
            known = (parameter, f"p{len(self._known)}")
            self._known[id(parameter)] = known
        return known[1]


class Layouts:
    """The layouts of the buckets seen so far.

    Args:
        check: Called with the names and parameters of each new layout; may raise ConfigError.
    """

    def __init__(
        self, names: ParameterNames, check: Callable[[list[tuple[str, torch.Tensor]]], None]
    ) -> None:
        self._names = names
        self._check = check
        self._known: dict[tuple[int, ...], HashedTuple[TensorSlot]] = {}

    def of(self, bucket: Bucket) -> HashedTuple[TensorSlot]:
        if bucket.layout is not None:
            return bucket.layout
        key = tuple(map(id, bucket.parameters))
        known = self._known.get(key)
        if known is None:
            named = [(self._names(each), each) for each in bucket.parameters]
            self._check(named)
            known = self._known[key] = slots_of(
                [(name, each.numel()) for name, each in named], bucket.values.numel()
            )
        return known


def in_bucket_order(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Lays values of a parameter's shape out as DDP lays its gradient into a bucket.

    That is the order of the parameter's memory where it is dense (channels_last included), else
    that of its indices.
    """
    dims = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    if parameter.permute(dims).is_contiguous():
        values = values.permute(dims)
    return values.flatten()


def slots_of(tensors: list[tuple[str, int]], elements: int) -> HashedTuple[TensorSlot]:
    slots: list[TensorSlot] = []
    at = 0
    for name, length in tensors:
        if length:
            slots.append(TensorSlot(name, at, length))
        at += length
    if at != elements:
        raise ConfigError.about(
            f"bucket of {elements} elements holds parameters of {at} elements",
            "an unknown layout (gradwire reads buckets whose parameters follow each "
            "other without gaps)",
            setting="bucket",
            value=elements,
        )
    return HashedTuple(slots)
