"""GradientPipeline: what one attachment does with each bucket, and how a step ends.

Before the push the bucket comes to host memory, the fresh gradient's norm is computed, the plan is
written, residuals are added, and chunks that are overdue or not finite are marked critical. After
the pull the books are updated and the result goes back to the bucket. When the last bucket of a
step is done, the agreed summary is folded, and the policy reads the report and decides the next
step's phase. All of this comes before DDP sees the last future, so every rank enters the next step
with the same decision.

The parts are in `gradwire.training.ballots` (values that the buckets carry),
`gradwire.training.feedback.books` (residuals and ages), `gradwire.training.consultation` (further
agreement at a step's end) and `gradwire.training.guard` (steps that delivered too little).
"""

import collections
import contextlib
import copy
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.agreed import Ballot, Phase, Summary, nonfinite, scales_differ
from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.hashed import HashedTuple
from gradwire.core.plan import TransferPlan, mix_seed
from gradwire.core.regions import TensorSlot
from gradwire.core.report import ReportWriter, StepReport, build_report
from gradwire.core.saved_state import State, unchanged_on_error
from gradwire.core.settings import Settings
from gradwire.core.transfer_report import TransferReport
from gradwire.exports.telemetry import Telemetry
from gradwire.live.publisher import Steps
from gradwire.policies import PlanContext, Policy
from gradwire.policies.parts.priorities import by_region
from gradwire.training.ballots import BallotBox
from gradwire.training.bucket import Bucket, ComparedLayout, Layouts, ParameterNames
from gradwire.training.consultation import Consultation
from gradwire.training.feedback.books import Books
from gradwire.training.feedback.optimizer_moments import FirstMoments
from gradwire.training.feedback.owing import Owing
from gradwire.training.flush import Flush
from gradwire.training.groups import Host
from gradwire.training.guard import StepGuard, nothing_applied, sent_twice
from gradwire.training.loss_watch import LossWatch
from gradwire.training.off import owed_nothing
from gradwire.training.optimizers import Optimizers, held_by
from gradwire.training.scaler import SkipWatch, Waiting
from gradwire.training.staging import Stage, StagePool, failed
from gradwire.training.step import (
    Step,
    StepEnd,
    Transfer,
    square_norm,
    tensor_squares,
)
from gradwire.transport import transforms
from gradwire.transport.arrays import own_encoding
from gradwire.transport.communicator import Communicator, Handle
from gradwire.transport.native import seconds_to_code
from gradwire.transport.threads import apart

__all__ = ["GradientPipeline"]

STATE_VERSION = 2
PRIVATE_KEYS = 1
"""The version of states in which a detector's keys begin with an underscore."""
LAST_STEP = 1 << 52
UNCHANGED = ("f32", "half", "bf16")
"""Encodings that carry a gradient unchanged; those of two bytes where it is of that type."""
SMALLEST_SCALE = float(np.finfo(np.float32).smallest_subnormal)
LARGEST_SCALE = float(np.finfo(np.float32).max)
"""Bounds of the scale of gradients, which are those of float32; its square is a float64."""

_STATE_KEYS = (
    *("version", "policy", "step", "grad_scale"),
    *("phases", "epoch", "applied_square", "residuals"),
)
_LATER_KEYS = (
    *("losses", "rates", "velocities", "ages", "magnitudes", "vote"),
    *("flush", "layer_steps", "layer_squares", "guarded", "speaks_for", "owing"),
)
"""Keys that states of older versions lack."""


class GradientPipeline:
    """Carries the buckets of one DDP module; thread-safe against its own completions.

    Args:
        communicator: The communicator.
        policy: The policy.
        settings: The settings.
        names: Names of the parameters.
        number: The number that it has taken of the communicator; `close` returns it.
        optimizers: The optimizers; None where they are not known.
        writer: What takes the steps' reports, which `close` closes; None for nothing.
        clock: Returns the time in seconds.
        scaler: The loss scaler, which gives the scale of gradients at each step's start and skips
            steps that are not finite; None where `set_grad_scale` gives the scale.
        host: The ranks that this worker speaks for; None for its own alone, among workers of which
            each one does so.

    Raises:
        ConfigError: The policy's fill needs the optimizer, which is not known.

    Attributes:
        communicator: See above.
        policy: See above.
        settings: See above.
        number: See above.
        when_stopped: Called once, on any thread, when a step has failed.
        compared: Returns, as a step begins, numbers of which the plans of the step are part, so
            that ranks that have others fail at its first bucket.
    """

    def __init__(
        self,
        communicator: Communicator,
        policy: Policy,
        settings: Settings,
        names: ParameterNames,
        number: int,
        optimizers: Optimizers | None = None,
        writer: ReportWriter | Telemetry | None = None,
        clock: Callable[[], float] = time.perf_counter,
        scaler: torch.amp.GradScaler | None = None,
        host: Host | None = None,
    ) -> None:
        self.communicator = communicator
        self._host = host or Host((communicator.job_rank,), communicator.ranks)
        self.policy = policy
        self.settings = settings
        self._optimizers = optimizers or Optimizers()
        each = self._optimizers.each
        compares = policy.compares_encodings and communicator.world_size > 1
        self._ballots = BallotBox(
            policy,
            each,
            watched=settings.loss_rise is not None,
            coding_s=seconds_to_code(clock) if compares else 0.0,
        )
        if policy.fill == "momentum" and not each:
            raise ConfigError.of(
                "fill",
                "momentum",
                "make a new HookState, or attach, with optimizer=…",
                beside=f"of policy {policy.name!r} without its optimizer (a copied HookState has "
                "none)",
            )
        self._moments = FirstMoments(each)
        self._clock = clock
        self._scaler = scaler
        self._skips = SkipWatch(self._optimizers)
        self._started: float | None = None  # the start of the last step
        self._books = Books(communicator, policy, settings)
        self._consultation = Consultation(
            communicator, policy, settings, number, self._host.members
        )
        self._guard = StepGuard(policy, settings, communicator.job_rank)
        self._skipped: dict[int, torch.Tensor] = {}  # parameters to be skipped, by their ids
        self._loss_watch = (
            None
            if settings.loss_rise is None
            else LossWatch(settings.loss_rise, settings.strict_steps)
        )
        self.number = number
        self._closed = False
        self._names = names
        self._layouts = Layouts(names, self._optimizers.check)
        self._stages = StagePool()
        self._writer = writer
        self._shown = Steps(policy.name, self._host.ranks, number)
        self._mutex = threading.Lock()
        self._step = 0
        self._running: Step | None = None
        self._last: StepReport | None = None
        self._flush = Flush(Owing())
        self._grad_scale = 1.0
        self._failure: BaseException | None = None
        self._step_lost = False  # the failure met a step, or a later one was refused
        # Results of the last step begun that nobody has waited for yet.
        self._awaited: collections.deque[threading.Event] = collections.deque()
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        self._datagram = 0  # the size for which plans cut chunks; 0 for the agreed one
        self.when_stopped: Callable[[], None] = lambda: None
        self.compared: Callable[[], tuple[int, ...]] = tuple

    # ------------------------------------------------------------------ what users set and read

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._step

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return self.policy.phase

    def set_phase(self, phase: Phase | None) -> None:
        """Votes for a phase from now on; None leaves it to the detector again."""
        self._ballots.set_phase(phase)

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins."""
        self._ballots.begin_epoch(epoch)

    def add_loss(self, loss: float) -> None:
        """Adds a training loss, which is sent with the next step."""
        self._ballots.add_loss(loss)

    def flush(self) -> None:
        """Makes the step after the next one exact on all ranks, which also empties the residuals.

        The step after that is exact, too, if a scaler skips it.
        """
        self._ballots.flush = True

    @property
    def flush_pending(self) -> bool:
        """Whether a flush is still to come."""
        self._check_skips()
        return self._flush.pending or self._ballots.flush

    def set_grad_scale(self, scale: object) -> None:
        """Sets the scale of gradients from now on; raises ConfigError for an impossible one."""
        scale = plain(scale)
        if not (is_number(scale) and SMALLEST_SCALE <= scale <= LARGEST_SCALE):
            raise ConfigError.of(
                "grad_scale",
                scale,
                f"a finite number above 0, from {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}",
            )
        scale = float(scale)
        if scale != self._grad_scale:
            self._books.rescale(scale / self._grad_scale)
        self._grad_scale = scale

    @property
    def grad_scale(self) -> float:
        """The scale by which gradients are multiplied."""
        return self._grad_scale

    @property
    def _scaled(self) -> bool:
        """Whether steps that are not finite are skipped, as a scaler does even at a scale of 1."""
        return self._grad_scale != 1.0 or (self._scaler is not None and self._scaler.is_enabled())

    def counters(self) -> dict[str, float]:
        """Returns the engine's totals; empty without any engine."""
        return self.communicator.counters()

    def report(self) -> StepReport:
        """Returns the report of the last completed step; raises GradwireError before the first."""
        if self._last is None:
            raise GradwireError("no step has been completed yet: there is no report")
        return self._last

    def find_unused(self) -> None:
        """Notes that DDP looks for unused parameters, whose results it may ignore."""
        self._books.finds_unused = True

    def state_dict(self) -> dict[str, object]:
        """Returns what a resumed run needs.

        That is step, phase, votes, a flush to come, and norms since the detector last decided; and
        residuals, velocities, ages and magnitudes, which are this rank's own.
        """
        self._check_skips()
        return {
            "version": STATE_VERSION,
            "policy": self.policy.name,
            "step": self._step,
            "grad_scale": self._grad_scale,
            "phases": self.policy.state_dict(),
            "losses": {} if self._loss_watch is None else self._loss_watch.state_dict(),
            "flush": self._flush.pending or self._ballots.flush,
            "speaks_for": len(self._host.ranks),
            **self._ballots.state_dict(),
            **self._decisive_state(),
            **self._books.state_dict(),
        }

    def _decisive_state(self) -> dict[str, object]:
        """Returns the part of the state that decides later steps and that no report has."""
        return {
            **self._consultation.state_dict(),
            **self._guard.state_dict(),
            "owing": bool(self._flush.owing.keys),
        }

    def _keep_decisive(self, kept: dict[str, object]) -> None:
        """Takes over what another rank's `_decisive_state` returned."""
        state = State(kept)
        self._consultation.load_state_dict(state)
        self._guard.load_state_dict(state)
        self._keep_owing(state.flag("owing"))

    def load_state_dict(
        self, state: object, *, strict: bool = True, owner: str | None = None
    ) -> None:
        """Restores what `state_dict` returned.

        The scale of gradients is not restored, since they may no longer be scaled; residuals are
        converted to the present scale.

        Args:
            state: The state; one that was saved under policy "off" changes nothing.
            strict: Whether values of parameters that the model lacks are an error; else they are
                dropped with a warning.
            owner: The rank that the state belongs to, as in "rank 0 of 2"; None for this one. What
                another rank kept by itself is not taken, and is an error where it owes something.

        Raises:
            ConfigError: The state is anything else; nothing is changed then.
        """
        read = State(state)
        if owed_nothing(read.values):
            return
        version = read.values.get("version")
        if not is_whole(version) or version not in (PRIVATE_KEYS, STATE_VERSION):
            raise ConfigError.about(
                f"state['version']={version!r}",
                f"this gradwire reads versions {PRIVATE_KEYS} and {STATE_VERSION} of what "
                "attachment.state_dict() returns",
                setting="state['version']",
                value=version,
            )
        read.keys(_STATE_KEYS, _LATER_KEYS)
        policy = read.values["policy"]
        if not isinstance(policy, str) or policy != self.policy.name:
            raise ConfigError.about(
                f"state['policy']={policy!r}",
                f"loaded into policy {self.policy.name!r}; attach with the policy of the state",
                setting="state['policy']",
                value=policy,
            )
        step = read.whole("step", 0, LAST_STEP)
        scale = read.number("grad_scale", SMALLEST_SCALE, LARGEST_SCALE)
        owing = "owing" in read.values and read.flag("owing")
        if owner is not None:
            read = _of_another(read, owner, owing)
        self._check_host(read)
        losses = read.part("losses") if "losses" in read.values else State({})
        phases = dict(read.part("phases").values)
        detector = phases.get("phases")
        if version == PRIVATE_KEYS and isinstance(detector, Mapping):
            phases["phases"] = {str(key).removeprefix("_"): detector[key] for key in detector}
        watch = () if self._loss_watch is None else (self._loss_watch,)
        parts = self._ballots, self._consultation, self._guard, *watch, *self._books.parts
        with unchanged_on_error(*parts):
            self._books.load_state_dict(read, self._names.trained, strict=strict)
            self._ballots.load_state_dict(read)
            self._consultation.load_state_dict(read)
            self._guard.load_state_dict(read)
            for each in watch if losses.values else ():
                each.load_state_dict(losses)
            self._load_policy(phases)
        if scale != self._grad_scale:
            self._books.rescale(self._grad_scale / scale)
        self._keep_owing(owing)
        self._step = step

    def _check_host(self, read: State) -> None:
        """Raises ConfigError for residuals that stand for another number of ranks than this one.

        What a worker owes is in the scale of what it contributes, which for a host is the mean of
        its ranks.
        """
        here = len(self._host.ranks)
        saved = read.whole("speaks_for") if "speaks_for" in read.values else 1
        if saved != here and _owes(read):
            raise ConfigError.about(
                f"{read.at('speaks_for')}={saved}",
                f"its residuals belong to a worker that speaks for {saved} ranks, and this one "
                f"speaks for {here}; flush() before saving, or place the ranks on hosts as they "
                "were",
                setting=read.at("speaks_for"),
                value=saved,
            )

    def _load_policy(self, phases: dict[str, Any]) -> None:
        """Restores the policy's state; an error, which it may find late, changes nothing."""
        before = copy.deepcopy(vars(self.policy))
        try:
            self.policy.load_state_dict(phases)
        except Exception as error:
            vars(self.policy).update(before)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError.about(
                f"state['phases'] does not fit policy {self.policy.name!r}",
                f"{error!r}",
                setting="state['phases']",
                value=phases,
            ) from error

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the optimizer steps."""
        self._skips.stepped(optimizer)

    def take_skipped(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Returns, once, an optimizer's parameters whose step, just reduced, it must skip."""
        held = map(id, held_by(optimizer)) if self._skipped else ()
        taken = (self._skipped.pop(each, None) for each in held)
        return [each for each in taken if each is not None]

    def _keep_from_optimizers(self, parameters: Sequence[torch.Tensor]) -> None:
        """Has optimizers skip these parameters until they have another gradient."""
        self._skipped.update((id(each), each) for each in parameters)

    def _let_optimizers_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Notes that parameters get another gradient; a scaler may have kept an optimizer off."""
        for each in parameters if self._skipped else ():
            self._skipped.pop(id(each), None)

    def close(self) -> None:
        """Closes what takes reports, and the engine unless others use it. Idempotent."""
        if not self._closed:
            self._closed = True
            self.communicator.return_number(self.number)
            self.communicator.let_go()
            self._books.close()
        if self._writer is not None:
            self._writer.close()

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
            bucket: The bucket.
            joined: Whether this worker has joined (`DistributedDataParallel.join`), so that its
                gradient is none.
            others: The ballots of the other ranks that this worker speaks for; those that come
                with a step's first bucket count.
            at_once: How many buckets may be under way, so that no more memory is held for them;
                None for any number. A guarded step holds all of its buckets.

        Returns:
            A future of where the result is: the bucket's buffer, or the scatter's output. Transfers
            that fail make the future fail.
        """
        stopped = self.stopped()
        if stopped is not None:
            self._awaited = collections.deque()
            return self._refuse(bucket, stopped)
        if not bucket.values.numel():
            return self._answer_empty(bucket)
        try:
            slots = self._layouts.of(bucket)
            if self.guards:
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

    @property
    def guards(self) -> bool:
        """Whether all results of a step may wait for its end."""
        return self._guard.floor > 0.0

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
        number = step.number
        started: queue.SimpleQueue[Handle | Exception] = queue.SimpleQueue()

        def start() -> None:
            try:
                started.put(self._consultation.confirm_end(number))
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
        except TransferError as error:
            explained = self._explained(error)
            self._fail(step, explained)
            raise explained from None
        except BaseException as error:
            self._fail(step, error)
            raise

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
                self._check_skips()
                theirs = [each.scale for each in others if each.scale is not None]
                if joined and theirs:  # this rank's own scaler takes no steps any more
                    self.set_grad_scale(theirs[0])
                elif self._scaler is not None and not joined:
                    self.set_grad_scale(self._scaler.get_scale())
                for each in self._skips.settled(self._grad_scale, joined=joined):
                    self._books.forget(each.keys)
                strict = self._loss_watch is not None and self._loss_watch.strict
                self._abandon()
                flushes = self._flush.begin(slots)
                started = self._clock()
                elapsed = 0.0 if self._started is None else started - self._started
                ballot = self._ballots.cast(
                    self._step, self._last, elapsed, None if joined else self._grad_scale
                )
                self._running = Step(
                    self._step,
                    self.policy.phase,
                    ballot.with_others(others),
                    started,
                    exact=flushes or strict,
                    strict=strict,
                    flushes=flushes,
                    floor=0.0 if flushes or strict else self._guard.floor,
                    scaled=self._scaled,
                    compared=self.compared(),
                )
                self._awaited = collections.deque()
            step = self._running
            index = len(step.transfers)  # the bucket's own index counts those without elements
        buffer, scatter = bucket.values, bucket.scatter
        plan = self._plan(step, self._context(step, index, slots, buffer))
        if scatter is not None:
            plan = replace(
                plan, pull="none", pull_bound=0.0, shards=scatter.shards, scale=scatter.scale
            )
        place = index if at_once is None else index % at_once
        in_place = scatter is None and self._leaves_values(step, plan, buffer)
        stage = self._stages.stage(place, buffer, scatter, in_place=in_place)
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
        return self._transfer(
            transfer.stage.values,
            plan,
            step=step.number,
            critical=critical,
            priorities=priorities,
            stats=ballot.slots(),
        )

    def _transfer(
        self, values: NDArray[np.float32] | torch.Tensor, plan: TransferPlan, **options: Any
    ) -> Handle:
        if plan.shards:
            return self.communicator.reduce_scatter(values, plan, **options)
        return self.communicator.all_reduce(values, plan, **options)

    def _priorities(
        self, transfer: Transfer, host: NDArray[np.float32]
    ) -> NDArray[np.uint8] | None:
        grid = self.communicator.chunk_grid(transfer.plan)
        if self.policy.ranks_results:
            known = self._books.last_magnitudes(transfer)
            return None if known is None else by_region(known, grid, transfer.plan.seed)
        context = self._context(
            transfer.step, transfer.index, transfer.slots, transfer.bucket.values
        )
        return self.policy.priorities(context, host, grid)

    def _context(
        self, step: Step, index: int, slots: tuple[TensorSlot, ...], buffer: torch.Tensor
    ) -> PlanContext:
        encoding = own_encoding(buffer.dtype)
        tensors = [slots.digest] if isinstance(slots, ComparedLayout) else []
        return PlanContext(
            tensors=slots,
            elements=buffer.numel(),
            step=step.number,
            phase=step.phase,
            world_size=self.communicator.world_size,
            seed=mix_seed(
                self.settings.seed, self.number, step.number, index, *tensors, *step.compared
            ),
            chunk_elements=self.communicator.elements_per_chunk(encoding, datagram=self._datagram),
            bucket=index,
            encoding=encoding,
        )

    def _leaves_values(self, step: Step, plan: TransferPlan, buffer: torch.Tensor) -> bool:
        """Returns whether nothing but the engine reads or changes the values of a bucket."""
        return (
            buffer.element_size() == 2
            and plan.encoding == own_encoding(buffer.dtype)
            and not plan.lossy
            and plan.order != "priority"
            and self.policy.phases is None
            and self._books.empty
            and not step.guarded
        )

    def _plan(self, step: Step, context: PlanContext) -> TransferPlan:
        plan = self.policy.plan(context)
        if plan.encoding == "topk" and self.settings.server_count:
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

    def _finish(self, transfer: Transfer, handle: Handle) -> None:
        try:
            report = handle.report
            if transfer.bucket.scatter is not None:  # others apply what this worker has in the sum
                report = replace(report, applied=report.applied | report.counted)
            transfer.first = transfer.report = report
            self._ballots.pushed(transfer.slots, handle.report)
            if not transfer.step.guarded:
                self._settle(transfer)
        except Exception as error:
            transfer.stage.error = self._explained(error)
        self._done(transfer.step, transfer.stage)

    def _settle(self, transfer: Transfer) -> None:
        """Updates the books by what came back, and completes the result."""
        report, plan = transfer.report, transfer.applied_plan
        assert report is not None
        host = transfer.stage.host()
        result = host[transfer.own]
        self._books.settle(transfer, report)
        if plan.transform != "none":
            transforms.inverse(result, plan.seed)
        self._books.note_result(transfer, report, host, self._grad_scale)
        if plan.fill == "momentum":
            self._fill(transfer, plan, report)
        whole = transfer.bucket.scatter is None
        if transfer.step.scaled and whole:
            transfer.step.overflowed |= transfer.overflowed
        phases = self.policy.phases
        if phases is not None and phases.source == "paper":
            transfer.applied_square = square_norm(result) / self._grad_scale**2

    def _fill(self, transfer: Transfer, plan: TransferPlan, report: TransferReport) -> None:
        """Fills elements that no contribution reached from the optimizer."""
        missing = report.applied == 0
        assert transfer.bucket.scatter is None
        if not missing.any():
            return
        with transfer.stage.behind():  # the optimizer's step came before the gradients
            self._moments.fill(
                transfer.slots,
                transfer.bucket.parameters,
                transfer.stage.host(),
                self.communicator.chunk_grid(plan),
                missing,
                self._grad_scale,
            )

    # ------------------------------------------------------------------ a step's end

    def _abandon(self) -> None:
        """Gives up a step that waits for further buckets; the caller holds the mutex."""
        if self._running is not None:
            self._running.abandoned = True
            self._running = None

    def _done(self, step: Step, stage: Stage, *, last: bool = False) -> None:
        """Notes that a bucket is done: its result goes to DDP, or waits for the end of its step.

        Args:
            step: Its step.
            stage: Its stage.
            last: Whether no other bucket begins after it.
        """
        with self._mutex:
            error = self._failure or stage.error
            step.last = step.last or last
            step.open.discard(stage)
            ends = step.complete and error is None
            if ends:
                self._running = None
            waits = ends or (step.guarded and error is None)
            if waits:
                step.held.append(stage)
        if error is not None:
            self._fail(step, error, stage)
        elif ends:
            self._go_on(step, self._step_end(step))
        elif not waits:
            stage.deliver()

    def _step_end(self, step: Step) -> StepEnd:
        """Ends a step whose buckets are all done; it is resumed with each transfer that it yields.

        Whatever it raises fails the results that the step holds.
        """
        agreement = self._consultation
        firsts = [transfer.first for transfer in step.transfers if transfer.first is not None]
        if scales_differ(first.stats_max for first in firsts):
            own = (step.ballot.scale, *step.ballot.other_scales)
            scales = dict(zip(self._host.ranks, own, strict=True))
            agreement.refuse_scales((yield agreement.compare_scales(step.number, scales)))
        stats = [(first.stats_sum, first.stats_max) for first in firsts]
        agreed = Summary.fold(step.number, self.communicator.world_size, stats)
        agreement.note(step, self._grad_scale)
        for transfer in step.transfers:
            step.overflowed |= self._scattered_overflow(transfer)
        if step.guarded or agreement.layers_due(agreed):
            agreed, lost = agreement.agreed(agreed, (yield agreement.start(step, agreed)))
        if step.guarded:
            verdict = step.verdict = self._guard.judge(step, agreed, lost)
            if verdict.error is not None:
                raise verdict.error
            if verdict.choice == "skip":
                self._skip(step)
            else:
                if verdict.choice == "resend":
                    yield from self._resend(step)
                for transfer in step.transfers:
                    self._settle(transfer)
        self._conclude(step, agreed)

    def _go_on(self, step: Step, end: StepEnd, done: Handle | None = None) -> None:
        """Takes the end of a step to the next transfer that it waits for.

        The results that the step holds go to DDP once it is over.
        """
        if step.failed:
            return
        try:
            transfer = end.send(done)
        except StopIteration:
            with self._mutex:
                held = step.take_held()
            for stage in held:
                stage.deliver()
        except Exception as error:
            self._fail(step, error)
        else:
            self._prolong()
            transfer.add_done_callback(functools.partial(self._go_on, step, end))

    def _prolong(self) -> None:
        """Notes that the end of a step waits for another transfer."""

    @property
    def failure(self) -> BaseException | None:
        """The failure that has stopped this pipeline; None before one."""
        return self._failure

    def stopped(self, more: str = "") -> GradwireError | None:
        """Returns the error of every use of this pipeline after a failure; None before one.

        Args:
            more: What else came of the failure.
        """
        failure = self._failure
        if failure is None:
            return None
        text = f"gradwire stopped at an earlier failure: {str(failure) or repr(failure)}"
        text = f"{text}; {more}" if more else text
        if isinstance(failure, TransferError):
            return TransferError(text, rank=failure.rank, step=failure.step, cause=failure.cause)
        return GradwireError(text)

    def check(self, more: str = "") -> None:
        """Raises the error that `stopped` returns, if a step has failed.

        A rank that leaves between two steps stops the pipeline, and the step before is whole.
        """
        stopped = self.stopped(more) if self._step_lost else None
        if stopped is not None:
            raise stopped

    def fail(self, error: BaseException) -> None:
        """Stops this pipeline for good, and the other ranks with it, unless it has stopped."""
        if self._failure is None:
            self._fail(self._running, error)
            known = isinstance(error, (GradwireError, ConfigError))
            what = str(error) if known else f"{type(error).__name__}: {error}"
            self.communicator.fail(f"step {self._step}: {what}")

    def _fail(
        self, step: Step | None, error: BaseException, *stages: Stage, in_step: bool = True
    ) -> None:
        """Stops this pipeline, and hands the results that a step holds back to DDP as failed.

        Args:
            step: The step, which fails; None where none is running.
            error: Why.
            *stages: Stages of other buckets of the step, which fail, too.
            in_step: Whether a step fails by it, although none is running.
        """
        error = self._explained(error)
        with self._mutex:
            self._stop_at(error, in_step=in_step or step is not None)
            if step is not None:
                step.failed = True
                stages = (*step.take_held(), *stages)
        for stage in stages:
            stage.deliver(error)

    def _explained(self, error: BaseException) -> BaseException:
        """Returns what `explain` makes of an error; the same one where that fails."""
        with contextlib.suppress(Exception):
            return self.explain(error)
        return error

    def _stop_at(self, error: BaseException, *, in_step: bool) -> None:
        """Notes the first failure; the caller holds the mutex."""
        self._failure = self._failure or error
        if in_step and not self._step_lost:
            self._step_lost = True
            self.when_stopped()

    def _refuse(self, bucket: Bucket, stopped: GradwireError) -> torch.futures.Future[torch.Tensor]:
        """Answers a bucket that comes after a failure."""
        with self._mutex:
            self._stop_at(stopped, in_step=True)
        return failed(bucket.values, stopped)

    def _scattered_overflow(self, transfer: Transfer) -> set[int]:
        """Returns the optimizer of a scattered bucket whose result is not finite, as ballots say.

        Where several share the bucket, nobody knows whose gradients are meant, and the scale of the
        next step shows who was kept from a step.
        """
        first, owners = transfer.first, set(transfer.owners)
        if transfer.bucket.scatter is None or first is None or len(owners) != 1:
            return set()
        return owners if nonfinite(first.stats_sum) else set()

    def _resend(self, step: Step) -> StepEnd:
        """Sends all buckets again, exactly, in their order."""
        started = []
        for transfer in step.transfers:
            plan = transfer.resent = transfer.plan.exact()
            self._books.restore_pruned(transfer)
            host = transfer.stage.host()
            np.copyto(host, self._books.sent(transfer))
            started.append((transfer, self._transfer(host, plan, step=step.number)))
        for transfer, handle in started:
            done = yield handle
            assert transfer.first is not None
            transfer.report = sent_twice(transfer.first, done.report)

    def _skip(self, step: Step) -> None:
        """Applies nothing: all that was sent returns to the residuals, and the optimizer skips."""
        for transfer in step.transfers:
            assert transfer.report is not None
            self._keep_from_optimizers(transfer.bucket.parameters)
            transfer.report = nothing_applied(transfer.report)
            transfer.stage.host().fill(0.0)
            self._books.settle(transfer, transfer.report)

    # ------------------------------------------------------------------ the report

    def _conclude(self, step: Step, agreed: Summary) -> None:
        """Concludes a decided step: the policy reads its report."""
        self._note_owing(step)
        self._note_flush(agreed, step.transfers[0].slots, flushed=step.flushes)
        for owner in step.overflowed:
            self._undo(self._skips.overflowed(owner))
        self._follow_paths(step)
        came = [(t.plan, t.report) for t in step.transfers]
        transfers = [(plan, report) for plan, report in came if report is not None]
        self._ballots.applied_square = sum(t.applied_square for t in step.transfers)
        period_s = 0.0 if self._started is None else step.started - self._started
        self._started = step.started
        report = self._report(step, transfers, agreed, period_s)
        self.policy.observe(report)
        if self._loss_watch is not None:
            self._loss_watch.observe(agreed)
        phases = self.policy.phases
        if phases is not None:
            report = report.with_phases(phases.critical_share, phases.verdict)
        self._last = report
        self._ballots.lost(step.lost)
        self._step = step.number + 1
        self._shown.note(report)
        if self._writer is not None:
            self._writer.write(report)
        step.transfers.clear()  # breaks the reference cycle with the step

    def _note_owing(self, step: Step) -> None:
        """Notes of what any rank may owe something after a step, which its plans tell all ranks."""
        skipped = step.action == "skipped"
        for transfer in step.transfers if self.settings.feedback else ():
            plan = transfer.applied_plan
            self._flush.owing.note(
                step.number,
                transfer.slots,
                loses=plan.lossy or plan.encoding not in UNCHANGED or skipped,
                exact=plan.encoding == "f32",
            )

    def _follow_paths(self, step: Step) -> None:
        """Cuts later plans for the datagrams that all paths carry, which may have changed.

        All ranks do so after the same step, because a transfer's report has the same size on all.
        """
        firsts = [t.first for t in step.transfers]
        carried = [first.datagram for first in firsts if first is not None]
        shortest = min((size for size in carried if size), default=0)
        if shortest:
            self._datagram = shortest if shortest < self.communicator.datagram else 0

    def _keep_owing(self, owing: bool) -> None:
        """Takes over whether anything may be owed, of whatever parameter."""
        self._flush.owing = Owing(self._names.trained or () if owing else ())

    def _note_flush(
        self, agreed: Summary, first: tuple[TensorSlot, ...] | None, *, flushed: bool
    ) -> None:
        """Takes over whether the next steps are exact because some rank's user asked for it.

        Args:
            agreed: The summary of the step that has ended.
            first: Its first bucket, where it is known.
            flushed: Whether it was exact itself, because of an earlier call.
        """
        if flushed:
            self._flush.end(agreed.step)
        if agreed.flush:
            self._flush.ask(first)
            self._ballots.flush = False

    def _check_skips(self) -> None:
        """Reverts the books of gradients that a loss scaler has kept from their optimizer."""
        scale = self._grad_scale if self._scaler is None else self._scaler.get_scale()
        for each in self._skips.skipped(scale):
            self._undo(each)

    def _undo(self, waiting: Waiting | None) -> None:
        """Reverts the books of gradients that nobody applies."""
        if waiting is not None:
            self._books.undo(waiting.keys)
            if waiting.flushes:
                self._flush.ask()
            self._flush.owing.add(waiting.keys if self.settings.feedback else ())

    def _report(
        self,
        step: Step,
        transfers: list[tuple[TransferPlan, TransferReport]],
        agreed: Summary,
        period_s: float,
    ) -> StepReport:
        now = self._clock()
        return build_report(
            step=step.number,
            rank=self.communicator.job_rank,
            policy=self.policy.name,
            phase=step.phase,
            transfers=transfers,
            comm_s=now - step.started,
            exposed_s=now - step.exposed,
            agreed=agreed,
            critical_share=1.0 if step.phase == "critical" else 0.0,
            verdict="fixed bound",
            guard=step.action,
            period_s=period_s,
            resent=[plan for t in step.transfers if (plan := t.resent) is not None],
            attachment=self.number,
            ranks=self.communicator.ranks,
            slots=[t.slots for t in step.transfers] if self.communicator.engine else (),
        )


def _owes(state: State) -> bool:
    """Returns whether a state holds residuals or velocities other than zero."""
    return any(
        isinstance(values, (torch.Tensor, np.ndarray)) and bool(values.any())
        for key in ("residuals", "velocities")
        if key in state.values
        for values in state.part(key).values.values()
    )


def _of_another(state: State, owner: str, owing: bool) -> State:
    """Returns what a rank takes of another one's state.

    Args:
        state: The state.
        owner: The rank that it belongs to.
        owing: Whether any rank may have owed something when it was saved.

    Raises:
        ConfigError: Something was owed, which this rank's own state would hold.
    """
    if owing or _owes(state):
        raise ConfigError.about(
            f"the state of {owner}",
            "it is another rank's, and something was owed when it was saved: each rank loads its "
            "own, on as many ranks as saved them; or flush() before saving",
            setting="state",
            value=owner,
        )
    return State({**state.values, "residuals": {}, "velocities": {}, "ages": {}}, state.name)
