"""EngineCollectives: the collectives of one process group that the engine carries out.

torch expects a collective to return at once, and a group's first collective may find its peers
busy. So all of a group's collectives start on one thread, in the order of the calls, and the first
of them opens the engine there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gradwire.core.errors import GradwireError, RendezvousError, TransferError
from gradwire.core.plan import TransferPlan
from gradwire.core.settings import SHORTEST_S, Settings
from gradwire.process_group.work import EngineWork
from gradwire.training.groups import Group
from gradwire.transport.arrays import own_encoding
from gradwire.transport.communicator import Communicator
from gradwire.transport.meeting import LINGER_S, Patience
from gradwire.transport.threads import StartQueue, apart
from gradwire.transport.transfer import Handle

Watch = Callable[[], contextlib.AbstractContextManager[Callable[[], None]]]
"""Watches other members, and gives a check that raises once one has died."""

CARRIED = (torch.float32, torch.float16, torch.bfloat16)
"""The types that the engine carries, each in its own width."""


@dataclass(frozen=True)
class Request:
    """One collective: the sum or the average of all members' inputs, or a part of it.

    Attributes:
        name: What it is, for errors.
        inputs: The tensors that are summed, one behind the other; of one type, on the CPU.
        output: Where the result goes.
        shards: Number of elements of the result that each member gets, in order; () where all get
            all of it.
        start: The element of the result at which the output begins.
        average: Whether the sum is multiplied by one over the number of members.
        timeout_s: Longest duration in seconds.
    """

    name: str
    inputs: list[torch.Tensor]
    output: torch.Tensor
    shards: tuple[int, ...]
    start: int
    average: bool
    timeout_s: float

    @property
    def in_place(self) -> bool:
        """Whether the engine can work on the output's own memory."""
        output = self.output
        alone = self.inputs[0] is output and not self.shards
        return alone and output.is_contiguous() and not output.is_neg()

    def staged(self) -> torch.Tensor:
        """Returns the inputs as one flat tensor: the output's own memory, or a copy.

        The copy is float32 where members get parts of the sum, which no encoding rounds then.
        """
        if self.in_place:
            return self.output.detach().view(-1)
        dtype = torch.float32 if self.shards else self.output.dtype
        flat = torch.empty(sum(each.numel() for each in self.inputs), dtype=dtype)
        at = 0
        for each in self.inputs:
            flat[at : at + each.numel()].view(each.shape).copy_(each.detach())
            at += each.numel()
        return flat

    def deliver(self, flat: torch.Tensor) -> None:
        """Writes the result, given as one flat tensor, to the output."""
        if not self.in_place:
            result = flat[self.start : self.start + self.output.numel()]
            self.output.detach().copy_(result.view(self.output.shape))


class EngineCollectives:
    """Carries out collectives of one group over an engine, which the first of them opens.

    The members start them in the same order; those of other groups come before or after on any
    rank. Each group has an engine of its own, since threads of a process may open those of several
    groups at once, in another order on each rank. A group whose engine could not be opened stays
    without one, and its collectives fail.

    Args:
        group: The place of this process in the group, under a name that no other group of the job
            has.
    """

    def __init__(self, group: Group, settings: Settings, watch: Watch) -> None:
        self._group = group
        self._settings = settings
        self._watch = watch
        self._mutex = threading.Lock()
        self._start_queue = StartQueue(f"gradwire-{group.name}-{group.rank}")
        weakref.finalize(self, self._start_queue.stop).atexit = False
        self._communicator: Communicator | None = None
        self._failure: Exception | None = None
        self._closed = False

    def start(self, request: Request) -> EngineWork:
        """Starts a collective and returns at once.

        Returns:
            The work. Its tensors belong to the engine until it is done.
        """
        work = EngineWork([request.output], f"rank {self._group.job_rank}: {request.name}")
        with self._mutex:
            if self._closed:
                work.finish(self._ended())
                return work
            self._start_queue.submit(lambda: self._carry_out(request, work))
        return work

    def counters(self) -> dict[str, float]:
        communicator = self._communicator
        return {} if communicator is None else communicator.counters()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            communicator, self._communicator = self._communicator, None
            self._start_queue.stop()
        if communicator is not None:
            communicator.close()

    def _carry_out(self, request: Request, work: EngineWork) -> None:
        deadline = time.monotonic() + request.timeout_s
        try:
            communicator = self._opened(request.timeout_s)
            with torch.inference_mode():  # results are no part of a graph of autograd
                flat = request.staged()
            scale = 1.0 / self._group.world_size if request.average else 1.0
            encoding = own_encoding(request.output.dtype)
            plan = TransferPlan.whole(flat.numel(), scale=scale, encoding=encoding)
            seconds = max(deadline - time.monotonic(), SHORTEST_S)
            if request.shards:
                handle = communicator.reduce_scatter(
                    flat, plan, shards=request.shards, timeout_s=seconds
                )
            else:
                handle = communicator.all_reduce(flat, plan, timeout_s=seconds)
        except Exception as error:
            # A callback of the work may wait for a later collective, which this thread starts.
            apart(functools.partial(work.finish, error))
            return

        def done(handle: Handle) -> None:
            error: Exception | None = handle.error
            if error is None:
                try:
                    with torch.inference_mode():
                        request.deliver(flat)
                except Exception as failure:  # such as a lack of memory
                    error = failure
            work.finish(error)

        handle.when_done(done)

    def _opened(self, timeout_s: float) -> Communicator:
        if self._failure is not None:
            raise self._failure
        communicator = self._communicator
        if communicator is None:
            try:
                communicator = self._open(timeout_s)
            except Exception as error:
                self._failure = error
                raise
            with self._mutex:
                if not self._closed:
                    self._communicator = communicator
                    return communicator
            communicator.close()
            raise self._ended()
        return communicator

    def _open(self, timeout_s: float) -> Communicator:
        """Meets the members, who may come late, and opens the engine with them.

        They meet in the store, since a barrier of Gloo would be in one order with whatever
        collectives other threads run in the group.
        """
        group, settings = self._group, self._settings
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(group.meeting("open", settings.rendezvous_timeout)) as meeting:
            try:
                with self._watch() as check:

                    def go_on() -> None:
                        if self._closed:
                            raise self._ended()
                        check()

                    go_on()
                    origin = "time-out of the collective"
                    meeting.exchange("", Patience(timeout_s, origin, go_on))
            except RendezvousError as error:
                # Those at fault need not be told: they came too late, have given up or have died.
                others = set(group.ranks) - {group.job_rank, *error.ranks}
                left = deadline - time.monotonic()
                meeting.tell_failure(error, min(LINGER_S, left) if others else 0.0)
                raise RendezvousError(
                    f"rank {group.job_rank}: not all members of group {group.name!r} came to its "
                    f"first large collective: {error}",
                    error.ranks,
                ) from error
            except BaseException as error:
                meeting.tell_failure(error, min(LINGER_S, deadline - time.monotonic()))
                raise
            left = max(deadline - time.monotonic(), SHORTEST_S)
            waits = min(settings.rendezvous_timeout, left)
            return Communicator(
                group.store,
                group.rank,
                group.world_size,
                replace(settings, rendezvous_timeout=waits),
                group=group.name,
                meeting=meeting,
                ranks=group.ranks,
            )

    def _ended(self) -> GradwireError:
        return TransferError(
            f"rank {self._group.job_rank}: process group {self._group.name!r} was destroyed",
            cause="closed",
        )
