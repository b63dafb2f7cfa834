"""A job in virtual time: the real pipelines of all ranks in one process, over `gradwire.sim`.

What is tested is what ships: policies, books, guard and phases run in `GradientPipeline`, and the
protocol is the engine's own. Only the process group, DDP and the network are replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.buckets import ParameterNames
from gradwire.communicator import Communicator, Handle
from gradwire.configure import configure
from gradwire.native import transfer_report
from gradwire.pipeline import GradientPipeline
from gradwire.policies import Policy
from gradwire.sim import NETWORK_A, Fabric, Link

__all__ = ["Job", "model_of"]

Flat = NDArray[np.float32]
UNLIMITED = 3600.0  # virtual seconds


def model_of(tensors: Mapping[str, int]) -> torch.nn.Module:
    """A module with flat parameters of these names ("layer.weight") and sizes, in this order."""
    root = torch.nn.Module()
    for name, elements in tensors.items():
        module, *path = root, *name.split(".")
        for part in path[:-1]:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(path[-1], torch.nn.Parameter(torch.zeros(elements)))
    return root


class _Host:
    """What a communicator needs of an engine, in virtual time."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric = fabric
        self.rank = rank
        self.datagram = fabric.datagram_bytes
        self.pending: list[tuple[int, Handle, Flat, tuple[float, ...]]] = []
        self._next = 0

    def start(
        self,
        handle: Handle,
        *,
        engine_plan: Any,
        effective_bounds: tuple[float, ...],
        data: Flat,
        step: int,
        critical: Any,
        stats: Sequence[float],
        timeout_ns: int,
    ) -> None:
        self.fabric.start(
            self.rank,
            self._next,
            engine_plan,
            data,
            step=step,
            critical=critical,
            stats=stats,
            at=self.fabric.now,
        )
        self.pending.append((self._next, handle, data, effective_bounds))
        self._next += 1

    def collect(self) -> None:
        """Finishes the handles of what is done; their callbacks may start more."""
        pending, self.pending = self.pending, []
        for entry in pending:
            self.finish(*entry)

    def finish(self, op: int, handle: Handle, data: Flat, effective: tuple[float, ...]) -> None:
        """Finishes one handle."""
        completion = self.fabric.completion(self.rank, op)
        assert completion is not None
        assert completion.ok, completion.error
        if not handle.done():
            data[:] = self.fabric.result(self.rank, op)
            handle.finish(transfer_report(completion, effective))


class _Bucket:
    """A GradBucket: the gradients of some parameters, one after another."""

    def __init__(
        self, index: int, last: bool, parameters: list[torch.nn.Parameter], values: Flat
    ) -> None:
        self._index, self._last = index, last
        self._parameters = parameters
        self._buffer = torch.from_numpy(values)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer


class Job:
    """`world` ranks that train `tensors` (elements by name) over one network.

    buckets: how many tensors each bucket holds, in order (None: all in one).
    """

    def __init__(
        self,
        world: int,
        tensors: Mapping[str, int],
        policy: str | Policy = "reliable",
        *,
        buckets: Sequence[int] | None = None,
        link: Link = NETWORK_A,
        servers: int = 0,
        seed: int = 1,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        self.world = world
        self.fabric = Fabric(world, servers=servers, link=link, seed=seed)
        self.hosts = [_Host(self.fabric, rank) for rank in range(world)]
        model = model_of(tensors)
        parameters = list(model.parameters())
        cuts = [0, *np.cumsum(buckets if buckets is not None else [len(parameters)]).tolist()]
        self.groups = [parameters[a:b] for a, b in itertools.pairwise(cuts)]
        self.elements = sum(tensors.values())
        if servers:
            options.update(route="server", servers=servers)
        self.pipelines = []
        for rank in range(world):
            chosen, settings = configure(policy, options, {}, optimizer)
            chosen.prepare(dict(tensors))
            face = Communicator(None, 0, 1)  # type: ignore[arg-type]
            face.rank, face.world_size, face.settings = rank, world, settings
            face._host = self.hosts[rank]  # type: ignore[assignment]
            self.pipelines.append(
                GradientPipeline(
                    face, chosen, settings, ParameterNames(model), 0, optimizer, self._now
                )
            )

    def _now(self) -> float:
        return self.fabric.now

    def compute(self, seconds: float) -> None:
        """Lets virtual time pass before the next step."""
        self.fabric.run(self.fabric.now + seconds, until_done=False)

    @property
    def policies(self) -> list[Policy]:
        return [pipeline.policy for pipeline in self.pipelines]

    @property
    def report(self) -> Any:
        """Rank 0's report of the last step."""
        return self.pipelines[0].report()

    def uplinks(self, link: Link) -> None:
        """Gives every port's way to the switch these properties from now on."""
        for host in range(self.world + self.fabric.servers):
            self.fabric.set_link(host, "up", link)

    def step(self, gradients: Sequence[Flat]) -> list[Flat]:
        """One step; gradients of each rank over all tensors. Returns what each rank applies."""
        results, futures = self.start(gradients)
        while any(host.pending for host in self.hosts):
            assert self.fabric.run(self.fabric.now + UNLIMITED), "the job hangs"
            for host in self.hosts:
                host.collect()
        for future in futures:
            future.wait()
        return results

    def start(self, gradients: Sequence[Flat]) -> tuple[list[Flat], list[Any]]:
        """Begins a step: where its results will be, and the futures by rank and bucket."""
        results = [np.array(gradient, np.float32) for gradient in gradients]
        futures = []
        for rank, pipeline in enumerate(self.pipelines):
            at = 0
            for index, group in enumerate(self.groups):
                length = sum(parameter.numel() for parameter in group)
                bucket = _Bucket(
                    index, index == len(self.groups) - 1, group, results[rank][at : at + length]
                )
                futures.append(pipeline.reduce(bucket))  # type: ignore[arg-type]
                at += length
        return results, futures

    def residual(self, rank: int) -> Flat:
        """The rank's residual over all tensors; zeros without error feedback."""
        state = self.pipelines[rank].state_dict()["residuals"]
        assert isinstance(state, dict)
        if not state:
            return np.zeros(self.elements, np.float32)
        names = self.pipelines[rank]._layouts._names
        return np.concatenate([state[names(p)].numpy() for group in self.groups for p in group])
