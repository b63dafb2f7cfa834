"""GradientPipeline: the way of a bucket, from the hook to the future that the hook returns.

1. `reduce` takes the bucket. `_begin` begins a step with the first one, has the plan written
   (`gradwire.training.planner`) and makes the transfer.
2. `_start` runs once the gradients are in host memory (`gradwire.training.staging`). It computes
   the norm of the fresh gradient, adds residuals (`gradwire.training.feedback.books`), marks chunks
   that are overdue or not finite as critical, and gives the engine the transfer.
3. `_finish` takes the engine's report, and the books are updated by it.
4. `_done` completes the future, or holds the result until the step ends
   (`gradwire.training.step_cycle`); `_go_on` follows that end from transfer to transfer.
"""

import collections
import functools
import math
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.agreed import Ballot
from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.hashed import HashedTuple
from gradwire.core.plan import TransferPlan
from gradwire.core.regions import TensorSlot
from gradwire.policies.parts.priorities import by_region
from gradwire.training.bucket import Bucket, Layouts
from gradwire.training.failures import Failures
from gradwire.training.staging import Stage, StagePool, failed
from gradwire.training.step import Ending, Step, Transfer, square_norm, tensor_squares
from gradwire.training.step_cycle import StepCycle
from gradwire.transport import transforms
from gradwire.transport.arrays import own_encoding
from gradwire.transport.threads import apart
from gradwire.transport.transfer import Handle


class GradientPipeline(StepCycle):
    """Carries the buckets of one model; thread-safe against its own completions.

    For the arguments see `TrainingState`.

    Attributes:
        failures: Why it has stopped, if it has.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._closed = False
        self._layouts = Layouts(self._names, self._optimizers.check)
        self._stages = StagePool()
        self._mutex = threading.Lock()
        self._running: Step | None = None
        # Results of the last step begun that nobody has waited for yet.
        self._awaited: collections.deque[threading.Event] = collections.deque()
        self.failures = Failures()

    # ------------------------------------------------------------------ a bucket's way

    def reduce(
        self,
        bucket: Bucket,
        *,
        joined: bool = False,
        others: Sequence[Ballot] = (),
        at_once: int | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Averages one bucket over the workers.

        Args:
            joined: Whether this worker has joined (`DistributedDataParallel.join`), so that its
                gradient is none.
            others: The ballots of the other ranks that this worker leads; those that come with a
                step's first bucket count.
            at_once: How many buckets may be under way, so that no more memory is held for them;
                None for any number. A guarded step holds all of its buckets.

        Returns:
            A future of where the result is: the bucket's buffer, or the scatter's output. Transfers
            that fail make the future fail.
        """
        stopped = self.failures.stopped()
        if stopped is not None:
            self._awaited = collections.deque()
            return self._refuse(bucket, stopped)
        if not bucket.values.numel():
            return self._answer_empty(bucket)
        try:
            slots = self._layouts.of(bucket)
            if self.holds_back:
                at_once = None
            elif at_once is not None:
                self.wait(but=at_once - 1)
            transfer = self._begin(bucket, slots, joined, others, at_once)
            stage, start_queue = transfer.stage, self.communicator.start_queue
            if stage.waits or start_queue.started:  # no bucket may overtake those that wait
                start_queue.submit(lambda: self._staged_start(transfer))
            else:
                handle = self._start(transfer)
                handle.add_done_callback(functools.partial(self._finish, transfer))
        except GradwireError as error:  # this rank is no longer in the same step as the others
            self._fail(self._running, error.with_traceback(None))
            return failed(bucket.values, error)
        except BaseException as error:  # KeyboardInterrupt, too
            self._fail(self._running, error)
            raise
        self._awaited.append(stage.delivered)
        return stage.future()

    def _begin(
        self,
        bucket: Bucket,
        slots: HashedTuple[TensorSlot],
        joined: bool,
        others: Sequence[Ballot],
        at_once: int | None,
    ) -> Transfer:
        with self._mutex:
            if bucket.index == 0 or self._running is None:
                step = self._begin_step(slots, others, joined=joined)
                self._abandon()
                self._running, self._awaited = step, collections.deque()
            step = self._running
            index = len(step.transfers)  # the bucket's own index counts those without elements
        buffer, scatter = bucket.values, bucket.scatter
        plan = self._planner.plan(step, self._planner.context(step, index, slots, buffer))
        if scatter is not None:
            plan = replace(
                plan, pull="none", pull_bound=0.0, shards=scatter.shards, scale=scatter.scale
            )
        memory = index if at_once is None else index % at_once
        in_place = scatter is None and self._leaves_values(step, plan, buffer)
        stage = self._stages.stage(memory, buffer, scatter, in_place=in_place)
        parameters = bucket.parameters
        self._let_optimizers_step(parameters)
        owners = self._note_owners(step, slots, parameters) if step.scaled else ()
        transfer = Transfer(step, index, bucket, slots, plan, owners, stage)
        with self._mutex:
            step.transfers.append(transfer)
            step.open.add(stage)
            step.last = bucket.last
        return transfer

    def _note_owners(
        self, step: Step, slots: tuple[TensorSlot, ...], parameters: Sequence[torch.Tensor]
    ) -> tuple[int, ...]:
        """Notes that a bucket's gradients wait for their optimizers, and returns these by slot."""
        owners = self._optimizers.owners(slots, parameters)
        for owner in set(owners):
            keys = [slot.key for slot, held in zip(slots, owners, strict=True) if held == owner]
            self._skips.wait(owner, keys, self._grad_scale, flushes=step.flushes)
            step.owners.add(owner)
        return owners

    def _staged_start(self, transfer: Transfer) -> None:
        """Starts a transfer on the StartQueue's thread.

        Callbacks of results never run there, since they may wait for a bucket that starts later.
        """
        try:
            handle = self._start(transfer)
        except Exception as error:
            transfer.stage.error = error
            apart(lambda: self._done(transfer.step, transfer.stage))
        else:
            handle.when_done(functools.partial(self._finish, transfer))

    def _start(self, transfer: Transfer) -> Handle:
        step = transfer.step
        host = transfer.stage.host()
        step.exposed = self._clock()
        first = transfer.index == 0
        plan = transfer.plan
        phases = self.policy.phases
        by_layer = phases is not None and phases.source == "layers"
        squares = tensor_squares(transfer.slots, host) if by_layer else None
        square, finite = 0.0, True
        # Of a scattered sum a rank sees its shard alone, so ballots say whether all is finite.
        scattered = transfer.bucket.scatter is not None
        if plan.lossy or phases is not None or (step.scaled and scattered):
            square = square_norm(host) if squares is None else float(squares.sum())
            finite = math.isfinite(square)
        if by_layer:
            assert squares is not None
            step.add_layers(transfer.slots, squares.tolist())
        self._books.open(transfer, host)
        if plan.transform != "none":
            for part in transfer.parts:
                transforms.forward(host[part], plan.seed)
        critical: NDArray[np.uint32] | None = None
        if plan.lossy:
            critical = self._books.critical(transfer, host, finite)
        fresh_square = square / self._grad_scale**2 if finite else None
        ballot = self._ballots.of_bucket(step.ballot, transfer.slots, fresh_square, first=first)
        priorities = None
        if plan.order == "priority":
            priorities = self._priorities(transfer, host)
        transfer.stats = ballot.slots()
        try:
            return self._send(
                step,
                transfer.stage.values,
                plan,
                critical=critical,
                priorities=priorities,
                stats=transfer.stats,
            )
        except TransferError as error:
            if not self._returns(step, error):
                raise
            handle = Handle(plan, None)
            handle.finish(error)
            return handle

    def _returns(self, step: Step, error: BaseException) -> bool:
        """Returns whether a step that failed so is sent again over the host's network."""
        return step.returns and self._fallback is not None and self._fallback.takes(error)

    def _priorities(
        self, transfer: Transfer, host: NDArray[np.float32]
    ) -> NDArray[np.uint8] | None:
        grid = self.communicator.chunk_grid(transfer.plan)
        if self.policy.ranks_results:
            known = self._books.last_magnitudes(transfer)
            return None if known is None else by_region(known, grid, transfer.plan.seed)
        context = self._planner.context(
            transfer.step, transfer.index, transfer.slots, transfer.bucket.values
        )
        return self.policy.priorities(context, host, grid)

    def _leaves_values(self, step: Step, plan: TransferPlan, buffer: torch.Tensor) -> bool:
        """Returns whether nothing but the engine reads or changes the values of a bucket."""
        return (
            buffer.element_size() == 2
            and plan.encoding == own_encoding(buffer.dtype)
            and not plan.lossy
            and plan.order != "priority"
            and self.policy.phases is None
            and self._books.empty
            and not step.held_back
        )

    def _finish(self, transfer: Transfer, handle: Handle) -> None:
        try:
            report = handle.report
            if transfer.bucket.scatter is not None:  # others apply what this worker has in the sum
                report = replace(report, applied=report.applied | report.counted)
            transfer.first = transfer.report = report
            self._ballots.pushed(transfer.slots, handle.report)
            if not transfer.step.held_back:
                self._settle(transfer)
        except Exception as error:
            if isinstance(error, TransferError) and self._returns(transfer.step, error):
                transfer.lost = error
                assert self._fallback is not None
                self._fallback.verdict(error)
            else:
                transfer.stage.error = self.failures.explained(error)
        self._done(transfer.step, transfer.stage)

    def _done(self, step: Step, stage: Stage, *, last: bool = False) -> None:
        """Notes that a bucket is done: its result goes to DDP, or waits for the end of its step.

        Args:
            last: Whether no other bucket begins after it.
        """
        with self._mutex:
            error = self.failures.first or stage.error
            step.last = step.last or last
            step.open.discard(stage)
            ends = step.complete and error is None
            if ends:
                self._running = None
            waits = ends or (step.held_back and error is None)
            if waits:
                step.held.append(stage)
        if error is not None:
            self._fail(step, error, stage)
        elif ends:
            self._go_on(step, self._step_end(step))
        elif not waits:
            stage.deliver()

    def _go_on(self, step: Step, end: Ending[None], done: Handle | None = None) -> None:
        """Takes the end of a step to the next transfer that it waits for.

        The results that the step holds go to DDP once it is over.
        """
        if step.failed:
            return
        try:
            transfer = end.send(done)
            self._prolong()
        except StopIteration:
            with self._mutex:
                held = step.take_held()
            for stage in held:
                stage.deliver()
        except Exception as error:
            self._fail(step, error)
        else:
            transfer.add_done_callback(functools.partial(self._go_on, step, end))

    def _prolong(self) -> None:
        """Notes that the end of a step waits for another transfer."""

    def _abandon(self) -> None:
        """Gives up a step that waits for further buckets; the caller holds the mutex."""
        if self._running is not None:
            self._running.abandoned = True
            self._running = None

    def _answer_empty(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Answers a bucket without elements, which is not sent; it may be a step's last one."""
        stage = self._stages.stage(bucket.index, bucket.values)
        with self._mutex:
            if bucket.index == 0:
                self._abandon()  # the first bucket with elements begins the step
            step = self._running
        if step is None or not bucket.last:
            stage.deliver()
            return stage.future()
        self._awaited.append(stage.delivered)
        self._done(step, stage, last=True)
        return stage.future()

    # ------------------------------------------------------------------ waiting, and failures

    def wait(self, *, but: int = 0) -> None:
        """Waits until the results of the running step are where they go.

        On the main thread signals are handled meanwhile. An exception of a handler is raised here
        and stops the pipeline, because this rank has left the step.

        Args:
            but: How many of the newest are not waited for.
        """
        try:
            while len(self._awaited) > but:
                self._awaited[0].wait()
                self._awaited.popleft()
        except BaseException as error:
            self._fail(self._running, error)
            raise

    def confirm_end(self) -> None:
        """Waits until all ranks confirm that the running step has no further bucket.

        A rank that has one fails, and so do all others.
        """
        step = self._running
        if step is None:
            return
        started: queue.SimpleQueue[Handle | Exception] = queue.SimpleQueue()

        def start() -> None:
            try:
                started.put(self._consultation.confirm_end(step))
            except Exception as error:
                started.put(error)

        try:
            if self.communicator.start_queue.started:  # it may not overtake the buckets
                self.communicator.start_queue.submit(start)
            else:
                start()
            found = started.get()
            if isinstance(found, Exception):
                raise found
            found.wait()
            step.confirmed = True
        except TransferError as error:
            if self._returns(step, error):
                step.confirmed = True
                return
            explained = self.failures.explained(error)
            self._fail(step, explained)
            raise explained from None
        except BaseException as error:
            self._fail(step, error)
            raise

    def fail(self, error: BaseException) -> None:
        """Stops this pipeline for good, and the other ranks with it, unless it has stopped."""
        if self.failures.first is None:
            self._fail(self._running, error)
            known = isinstance(error, (GradwireError, ConfigError))
            what = str(error) if known else f"{type(error).__name__}: {error}"
            self.communicator.fail(f"step {self._step}: {what}")

    def _fail(
        self, step: Step | None, error: BaseException, *stages: Stage, in_step: bool = True
    ) -> None:
        """Stops this pipeline, and hands the results that a step holds back to DDP as failed.

        Args:
            *stages: Stages of other buckets of the step, which fail, too.
            in_step: Whether a step fails by it, although none is running.
        """
        error = self.failures.explained(error)
        with self._mutex:
            self.failures.note(error, in_step=in_step or step is not None)
            if self._fallback is not None:
                self._fallback.give_up(error)
            if step is not None:
                step.failed = True
                stages = (*step.take_held(), *stages)
        for stage in stages:
            stage.deliver(error)

    def _refuse(self, bucket: Bucket, stopped: GradwireError) -> torch.futures.Future[torch.Tensor]:
        with self._mutex:
            self.failures.note(stopped, in_step=True)
        return failed(bucket.values, stopped)

    # ------------------------------------------------------------------ the engine

    def counters(self) -> dict[str, float]:
        return self.communicator.counters()

    def close(self) -> None:
        """Closes what takes reports, and the engine unless others use it. Idempotent."""
        if not self._closed:
            self._closed = True
            self._shown.end()
            if self._fallback is not None:
                self._fallback.close()
            self.communicator.return_number()
            self.communicator.let_go()
            self._books.close()
        if self._writer is not None:
            self._writer.close()
