"""Job: a whole job in virtual time, the real pipelines of all ranks over `gradwire.sim.fabric`.

Policies, books, guard and phases in `GradientPipeline` and the engine's protocol are the product's
own code. Only the process group, DDP and the network are replaced.

    job = Job(4, {"layer.weight": 4096, "layer.bias": 64}, "dblp", p_low=0.1)
    applied = job.step([gradient of rank 0, …])[0]     # the same on every rank
    print(job.report.delivered)
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import HashStore  # type: ignore[attr-defined]

from gradwire.core.errors import GradwireError, TransferError
from gradwire.core.report import ReportWriter, StepReport
from gradwire.policies import Policy
from gradwire.sim.fabric import NETWORK_A, Fabric, Link
from gradwire.sim.going_over import Table
from gradwire.training.bucket import Bucket, ParameterNames
from gradwire.training.configure import configure
from gradwire.training.optimizers import Given, Optimizers, several
from gradwire.training.pipeline import GradientPipeline
from gradwire.transport.arrays import as_tensor
from gradwire.transport.communicator import Communicator
from gradwire.transport.native import native_plan, transfer_report
from gradwire.transport.threads import StartQueue
from gradwire.transport.transfer import Engine, Handle, TransferRequest

Flat = NDArray[np.float32]
PATIENCE_S = 3600.0
"""Virtual seconds that a step may take."""


def model_of(tensors: Mapping[str, int]) -> torch.nn.Module:
    """Makes a module with flat parameters of these names and sizes, in this order.

    Args:
        tensors: Number of elements by name, as in "layer.weight".
    """
    root = torch.nn.Module()
    for name, elements in tensors.items():
        module, *path = root, *name.split(".")
        for part in path[:-1]:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = cast(torch.nn.Module, getattr(module, part))
        module.register_parameter(path[-1], torch.nn.Parameter(torch.zeros(elements)))
    return root


class VirtualEngine(Engine):
    """One rank's engine in virtual time.

    Args:
        fabric: The network of all ranks.
        rank: The rank.

    Attributes:
        pending: The ops whose handles have not ended: number, request, handle.
        ended: Whether its thread has ended.
    """

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.session = 0
        self.datagram = fabric.datagram_bytes
        self.start_queue = StartQueue(f"gradwire-stage-{rank}")
        self.pending: list[tuple[int, TransferRequest, Handle]] = []
        self.ended = False
        self._fabric = fabric
        self._rank = rank
        self._next_ops: collections.Counter[int] = collections.Counter()  # by lane
        self.numbers: dict[int, str] = {}

    def start(self, request: TransferRequest) -> Handle:
        """Starts one op now, in virtual time; returns its handle, which `collect` ends."""
        if self.ended:
            raise self._gone(request)
        op = self._next_ops[request.lane]
        self._fabric.start(
            self._rank,
            op,
            native_plan(request.plan),
            as_tensor(request.data, request.plan.encoding).float().numpy(),
            lane=request.lane,
            step=request.step,
            critical=request.critical,
            priorities=request.priorities,
            stats=request.stats,
            timeout=request.timeout_s,
            at=self._fabric.now,
        )
        handle = Handle(request.plan, request.data)
        self.pending.append((op, request, handle))
        self._next_ops[request.lane] += 1
        return handle

    def counters(self) -> dict[str, float]:
        """Returns the endpoint's counters."""
        return self._fabric.counters(self._rank)

    def record(self, entries: int) -> list[list[tuple[int, str, int | None, int]]]:
        """Keeps a timeline of the endpoint."""
        return [self._fabric.record(self._rank, entries)]

    def set_drop(self, rate: float, burst: float, seed: int) -> None:
        """Refuses: the loss of a virtual network is that of its links (`Job.uplinks`)."""
        raise GradwireError(
            "a virtual network loses what its links lose: Job.uplinks(Link(loss=…))"
        )

    def fail(self, why: str) -> None:
        """Refuses: in virtual time nothing but the network stops a rank (`Fabric.kill`)."""
        raise GradwireError(f"a virtual rank cannot stop by itself ({why}): Fabric.kill(rank)")

    def forget(self) -> None:
        """Does nothing: the engine lives as long as its fabric."""

    def leave(self) -> None:
        """Does nothing: the engine lives as long as its fabric."""

    def end(self) -> None:
        """Ends the engine's thread; its process lives on. Handles end with an error."""
        if self.ended:
            return
        self.ended = True
        self._fabric.kill(self._rank)
        pending, self.pending = self.pending, []
        for _, request, handle in pending:
            handle.finish(self._gone(request))

    def _gone(self, request: TransferRequest) -> TransferError:
        return TransferError(
            f"rank {self._rank}, step {request.step}: the engine's thread has ended",
            step=request.step,
        )

    def collect_done(self) -> None:
        """Ends the handles of ops that are done or failed, and leaves the others."""
        pending, self.pending = self.pending, []
        for entry in pending:
            op, request, handle = entry
            completion = self._fabric.completion(self._rank, op, lane=request.lane)
            if completion is None:
                self.pending.append(entry)
                continue
            try:
                self.finish(*entry)
            except TransferError as error:
                handle.finish(error)

    def collect(self) -> None:
        """Ends the handles of ops that are done; their callbacks may start more."""
        pending, self.pending = self.pending, []
        for entry in pending:
            self.finish(*entry)

    def finish(self, op: int, request: TransferRequest, handle: Handle) -> None:
        """Ends one handle."""
        completion = self._fabric.completion(self._rank, op, lane=request.lane)
        assert completion is not None
        if not completion.ok:
            raise TransferError(
                completion.error,
                rank=completion.error_rank,
                step=completion.step,
                cause=completion.error_cause,
            )
        if not handle.done():
            result = torch.from_numpy(self._fabric.result(self._rank, op, lane=request.lane))
            as_tensor(request.data, request.plan.encoding).copy_(result)
            handle.finish(transfer_report(completion, request.effective_bounds))


class Job:
    """Ranks that train a model over one simulated network.

    Args:
        world: Number of ranks.
        tensors: Number of elements by name, or a model.
        policy: Name of the policy, or a policy.
        buckets: Number of tensors of each bucket, in order; None for all in one.
        backwards: Whether buckets take the tensors from the last to the first, as DDP's do;
            gradients and results are then in that order.
        link: Every direction of every port.
        datagram: Largest UDP payload in bytes.
        servers: Number of servers.
        seed: Seed of the network's random events.
        shuffle: Setting `seed`.
        dtype: Type of the gradients and results.
        optimizer: As for `gradwire.attach`.
        number: The attachment's number.
        fabric: The network, for these ranks and servers; None for one of `link`, `datagram` and
            `seed`.
        options: As for `gradwire.attach`.

    Attributes:
        world: Number of ranks.
        fabric: The network.
        engines: Each rank's engine.
        groups: The parameters of each bucket.
        elements: Number of elements of all tensors.
        pipelines: Each rank's pipeline.
        table: How the ranks agree to go over, under on_failure="host".
    """

    def __init__(
        self,
        world: int,
        tensors: Mapping[str, int] | torch.nn.Module,
        policy: str | Policy = "reliable",
        *,
        buckets: Sequence[int] | None = None,
        backwards: bool = False,
        link: Link = NETWORK_A,
        datagram: int = 1472,
        servers: int = 0,
        seed: int = 1,
        shuffle: int = 0,
        dtype: torch.dtype = torch.float32,
        optimizer: Given = None,
        number: int = 0,
        fabric: Fabric | None = None,
        **options: Any,
    ) -> None:
        self.world = world
        self._dtype = dtype
        self.fabric = fabric or Fabric(
            world, servers=servers, link=link, seed=seed, datagram_bytes=datagram
        )
        self.engines = [VirtualEngine(self.fabric, rank) for rank in range(world)]
        model = tensors if isinstance(tensors, torch.nn.Module) else model_of(tensors)
        known = dict(model.named_parameters())
        self._names = ParameterNames(model)
        elements = self._names.trained or {}
        order = list(reversed(list(elements))) if backwards else list(elements)
        self.groups: list[list[torch.nn.Parameter]] = []
        for count in buckets if buckets is not None else [len(order)]:
            self.groups.append([known[name] for name in order[:count]])
            del order[:count]
        self.elements = sum(elements.values())
        if servers:
            options.update(route="server", servers=servers)
        options["seed"] = shuffle
        vectors: frozenset[str] = frozenset()
        if isinstance(tensors, torch.nn.Module):
            vectors = frozenset(name for name in elements if known[name].dim() < 2)
        self.pipelines = []
        self.table = Table(world)
        seat = self.table.seat if options.get("on_failure") == "host" else None
        store = HashStore()  # nobody meets in it
        for rank in range(world):
            chosen, settings = configure(policy, options, {}, optimizer)
            chosen.prepare(elements, vectors=vectors, servers=servers)
            alone = world == 1 and not servers  # as on a real network, it needs no engine
            communicator = Communicator(
                store, rank, world, settings, engine=None if alone else self.engines[rank]
            )
            self.pipelines.append(
                GradientPipeline(
                    communicator,
                    chosen,
                    settings,
                    self._names,
                    number,
                    Optimizers(several(optimizer)),
                    ReportWriter.open(settings.report, rank),
                    self._now,
                    fallback=seat(communicator, self.engines[rank].end) if seat else None,
                )
            )

    def _now(self) -> float:
        return self.fabric.now

    def compute(self, seconds: float) -> None:
        """Lets virtual time pass before the next step."""
        self.fabric.run(self.fabric.now + seconds, until_done=False)

    @property
    def policies(self) -> list[Policy]:
        """The policy of each rank."""
        return [pipeline.policy for pipeline in self.pipelines]

    @property
    def report(self) -> StepReport:
        """Rank 0's report of the last step."""
        return self.pipelines[0].report()

    def uplinks(self, link: Link) -> None:
        """Gives every port's direction to the switch these properties from now on."""
        for host in range(self.world + self.fabric.servers):
            self.fabric.set_link(host, "up", link)

    def step(self, gradients: Sequence[Flat], apart_s: float = 0.0) -> list[Flat]:
        """Runs one step.

        Args:
            gradients: Each rank's gradient over all tensors, which is rounded to the job's type.
            apart_s: Seconds by which each rank begins later than the one before it.

        Returns:
            What each rank applies, as float32.

        Raises:
            TransferError: A transfer failed, or the step hangs.
        """
        results, futures = self.start(gradients, apart_s)
        while any(engine.pending for engine in self.engines):
            if not self.fabric.run(self.fabric.now + PATIENCE_S):
                raise TransferError(f"the job hangs: {PATIENCE_S:g} virtual seconds are over")
            for engine in self.engines:
                engine.collect()
        for future in futures:
            future.wait()
        self.fabric.forget()
        return [result.float().numpy() for result in results]

    def start(
        self, gradients: Sequence[Flat], apart_s: float = 0.0
    ) -> tuple[list[torch.Tensor], list[torch.futures.Future[torch.Tensor]]]:
        """Begins a step; returns the memory of its results, and futures by rank and bucket."""
        results = [torch.tensor(gradient).to(self._dtype) for gradient in gradients]
        futures = []
        for rank, pipeline in enumerate(self.pipelines):
            if rank and apart_s:
                self.compute(apart_s)
            at = 0
            for index, group in enumerate(self.groups):
                length = sum(parameter.numel() for parameter in group)
                values = results[rank][at : at + length]
                bucket = Bucket(index, index == len(self.groups) - 1, values, group)
                futures.append(pipeline.reduce(bucket))
                at += length
        return results, futures

    def residual(self, rank: int) -> Flat:
        """Returns a rank's residual over all tensors; zeros without error feedback."""
        return self._kept(rank, "residuals")

    def velocity(self, rank: int) -> Flat:
        """Returns a rank's velocity over all tensors; zeros without a momentum memory."""
        return self._kept(rank, "velocities")

    def _kept(self, rank: int, what: str) -> Flat:
        state = self.pipelines[rank].state_dict()[what]
        assert isinstance(state, dict)
        if not state:
            return np.zeros(self.elements, np.float32)
        parts = [p for group in self.groups for p in group if p.numel()]
        return np.concatenate([state[self._names(p)].numpy() for p in parts])
