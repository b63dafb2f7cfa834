"""GradientPipeline: what one attachment does with each bucket, and how a step ends.

Before the push: the bucket comes to host memory, the fresh gradient's norm is taken, the plan is
written, residuals are added, due and non-finite chunks are marked critical. After the pull: the
books are settled and the result goes back to the bucket. When the last bucket of a step is done,
the agreed summary is folded, the policy reads the report and decides the next step's phase: all
before DDP sees the last future, so every rank enters the next step with the same decision.

Two things take a small exact transfer of their own at a step's end, the consultation: a phase per
layer, when it is looked at, and the guard, which holds all results back until the ranks have
agreed that the step delivered enough, and else sends it again exactly or skips it. Transfers are
numbered alike on all ranks only while one attachment at a time runs a backward pass: where two
modules share one, use neither.
"""

import functools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire import transforms
from gradwire.buckets import GradBucket, Layouts, ParameterNames
from gradwire.communicator import Communicator, Handle
from gradwire.errors import ConfigError, GradwireError
from gradwire.feedback import AgeBook, ResidualBook, join_chunks, nonfinite_chunks
from gradwire.guard import LossWatch
from gradwire.phases import GAUGES, PHASES, Ballot, Phase, RateWatch, Summary
from gradwire.plans import TensorSlot, TransferPlan, TransferReport, mix_seed
from gradwire.policies import PlanContext, Policy
from gradwire.settings import Settings
from gradwire.staging import StagePool
from gradwire.steps import Step, Transfer, is_finite, layer_norms, square_norm
from gradwire.telemetry import ReportWriter, StepReport, build_report

__all__ = ["GradientPipeline"]

STATE_VERSION = 1


class GradientPipeline:
    """Carries the buckets of one DDP module; thread-safe against its own completions.

    number: which of the communicator's numbers it has taken; `close` returns it.
    """

    def __init__(
        self,
        communicator: Communicator,
        policy: Policy,
        settings: Settings,
        names: ParameterNames,
        number: int,
        optimizer: torch.optim.Optimizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.communicator = communicator
        self.policy = policy
        self.settings = settings
        self._optimizer = optimizer
        self._clock = clock
        self._started: float | None = None  # the last step
        self._rates = RateWatch()
        self._floor = settings.floor if settings.floor is not None else policy.floor
        if settings.guard == "off":
            self._floor = 0.0
        self._guarded_steps = 0  # running
        self._loss_watch = (
            None
            if settings.loss_rise is None
            else LossWatch(settings.loss_rise, settings.strict_steps)
        )
        self._layer_squares: dict[str, float] = {}  # since the last look
        self._layer_steps = 0
        self._skip = False
        self._number = number
        self._closed = False
        self._layouts = Layouts(names)
        self._stages = StagePool()
        self._residuals = ResidualBook() if settings.feedback else None
        self._ages = AgeBook(settings.max_age)
        self._writer = (
            None if settings.report is None else ReportWriter(settings.report, communicator.rank)
        )
        self._mutex = threading.Lock()
        self._step = 0
        self._running: Step | None = None
        self._last: StepReport | None = None
        self._applied_square = 0.0
        self._push_s: dict[tuple[TensorSlot, ...], float] = {}
        self._lost = 0.0  # largest share of a step lost since the ranks were told
        self._vote: Phase | None = None
        self._epoch = -1
        self._losses: list[float] = []
        self._flush = False
        self._grad_scale = 1.0
        self._failure: Exception | None = None

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
        if phase is not None and phase not in PHASES:
            raise ConfigError(f"phase={phase!r}: allowed are 'critical', 'tolerant', None")
        if phase is not None and self.policy.phases is None:
            raise ConfigError(
                f"phase={phase!r}: policy {self.policy.name!r} has no phases; 'dblp' has"
            )
        self._vote = phase

    def begin_epoch(self, epoch: int) -> None:
        """Notes that an epoch begins."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"epoch={epoch!r}: a whole number, 0 or more")
        self._epoch = epoch

    def add_loss(self, loss: float) -> None:
        """Stores a training loss, to travel with the next step."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def flush(self) -> None:
        """Makes the next step exact, which also empties the residuals."""
        self._flush = True

    def set_grad_scale(self, scale: float) -> None:
        """Tells the scale that gradients are multiplied by from now on."""
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"grad_scale={scale!r}: a finite number above 0")
        if self._residuals is not None and scale != self._grad_scale:
            self._residuals.rescale(scale / self._grad_scale)
        self._grad_scale = scale

    @property
    def grad_scale(self) -> float:
        """The scale that gradients are multiplied by."""
        return self._grad_scale

    def report(self) -> StepReport:
        """The report of the last completed step; raises GradwireError before the first."""
        if self._last is None:
            raise GradwireError("no step has been completed yet: there is no report")
        return self._last

    def state_dict(self) -> dict[str, object]:
        """What a resumed run needs: step, phase, votes, residuals and ages (this rank's own)."""
        residuals = {} if self._residuals is None else self._residuals.state_dict()
        return {
            "version": STATE_VERSION,
            "policy": self.policy.name,
            "step": self._step,
            "epoch": self._epoch,
            "applied_square": self._applied_square,
            "grad_scale": self._grad_scale,
            "phases": self.policy.state_dict(),
            "rates": list(self._rates.reference),
            "losses": {} if self._loss_watch is None else self._loss_watch.state_dict(),
            "residuals": {name: torch.from_numpy(v) for name, v in residuals.items()},
            "ages": {name: torch.from_numpy(v) for name, v in self._ages.state_dict().items()},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"gradwire state of version {state.get('version')!r}: this gradwire reads "
                f"version {STATE_VERSION}"
            )
        if state.get("policy") != self.policy.name:
            raise ConfigError(
                f"gradwire state of policy {state.get('policy')!r} loaded into policy "
                f"{self.policy.name!r}"
            )
        residuals = _arrays(state["residuals"])
        ages = _arrays(state.get("ages", {}))
        phases = state["phases"]
        assert isinstance(phases, dict)
        if self._residuals is None and any(values.any() for values in residuals.values()):
            raise ConfigError(
                "gradwire state with residuals loaded with error_feedback off: their gradient "
                "would be lost; set error_feedback=True, or flush() before saving"
            )
        self._ages.load_state_dict(ages)
        self.policy.load_state_dict(phases)
        self._rates.reference = list(state.get("rates", ()))  # type: ignore[call-overload]
        losses = state.get("losses", {})
        assert isinstance(losses, dict)
        if self._loss_watch is not None and losses:
            self._loss_watch.load_state_dict(losses)
        self._step = int(state["step"])  # type: ignore[call-overload]
        self._epoch = int(state["epoch"])  # type: ignore[call-overload]
        self._applied_square = float(state["applied_square"])  # type: ignore[arg-type]
        self._grad_scale = float(state["grad_scale"])  # type: ignore[arg-type]
        if self._residuals is not None:
            self._residuals.load_state_dict(residuals)

    def take_skip(self) -> bool:
        """Whether the optimizer must skip the step just reduced; asking resets it."""
        skip, self._skip = self._skip, False
        return skip

    def close(self) -> None:
        """Closes the report file. The engine stays, for the next attachment. Idempotent."""
        if not self._closed:
            self._closed = True
            self.communicator.return_number(self._number)
        if self._writer is not None:
            self._writer.close()

    # ------------------------------------------------------------------ a bucket's way

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages one bucket over the workers; the future's value is the bucket's buffer."""
        if self._failure is not None:
            raise GradwireError(
                f"gradwire stopped at an earlier failure: {self._failure}"
            ) from self._failure
        try:
            transfer = self._begin(bucket)
            result = transfer.stage.future()
            stager = self.communicator.stager
            if transfer.stage.waits or stager.started:  # then nobody overtakes those that wait
                stager.submit(lambda: self._guarded_start(transfer, result))
            else:
                self._start(transfer, result)
        except Exception as error:
            self._fail(self._running, error)  # this rank has fallen out of step with the others
            raise
        return result.then(transfer.value)

    def _begin(self, bucket: GradBucket) -> Transfer:
        index = bucket.index()
        slots = self._layouts.of(bucket)
        with self._mutex:
            if index == 0 or self._running is None:
                self._skip = False  # a loss scaler may have kept the optimizer from asking
                strict = self._loss_watch is not None and self._loss_watch.strict
                self._running = Step(
                    self._step,
                    self.policy.phase,
                    self._ballot(),
                    exact=self._flush or strict,
                    strict=strict,
                    floor=self._floor,
                    started=self._clock(),
                )
                self._flush = False
                self._losses = []
            step = self._running
        transfer = Transfer(step, index, slots, self._stages.stage(index, bucket.buffer()))
        with self._mutex:
            step.transfers.append(transfer)
            step.complete = bucket.is_last()
        return transfer

    def _ballot(self) -> Ballot:
        return Ballot(
            loss=sum(self._losses),
            losses=len(self._losses),
            critical=self._vote == "critical",
            tolerant=self._vote == "tolerant",
            applied_square=self._applied_square,
            epoch=self._epoch,
            falling=self._optimizer is not None
            and self._rates.observe([float(g["lr"]) for g in self._optimizer.param_groups]),
            congested=self.policy.congested,
            gauge=self._gauge(),
        )

    def _gauge(self) -> float:
        """This worker's value for the slot that step numbers take turns in."""
        told = GAUGES[self._step % len(GAUGES)]
        if told == "lost":
            lost, self._lost = self._lost, 0.0
            return lost
        if self._last is None:
            return 0.0
        if told == "rtprop":
            return self._last.rtprop_s
        return 1.0 / self._last.btlbw if self._last.btlbw > 0 else 0.0

    def _guarded_start(
        self, transfer: Transfer, result: torch.futures.Future[torch.Tensor]
    ) -> None:
        try:
            self._start(transfer, result)
        except Exception as error:
            transfer.error = error
            result.set_result(transfer.stage.buffer)
            self._fail(transfer.step, error)

    def _start(self, transfer: Transfer, result: torch.futures.Future[torch.Tensor]) -> None:
        step = transfer.step
        transfer.result = result
        host = transfer.stage.host()
        first = transfer.index == 0
        plan = transfer.plan = self._plan(transfer, host.size)
        ballot, finite = self._vote_with(step.ballot, host, plan, first)
        ballot = replace(ballot, push_s=self._push_s.get(transfer.slots, 0.0))
        critical: NDArray[np.uint32] | None = None
        if self.policy.phases is not None and self.policy.phases.source == "layers":
            step.add_layers(transfer.slots, host)
        if self._residuals is not None:
            self._residuals.add_to(transfer.slots, host)
        elif step.guarded:
            transfer.kept = host.copy()
        if plan.transform != "none":
            transforms.forward(host, plan.seed)
        if plan.lossy:
            grid = self.communicator.chunk_grid(plan)
            parts = [self._ages.due(transfer.slots, grid)]
            if not finite or (self._residuals is not None and not is_finite(host)):
                parts.append(nonfinite_chunks(grid, host))
            critical = join_chunks(parts)
        handle = self.communicator.all_reduce(
            host, plan, step=step.number, critical=critical, stats=ballot.slots()
        )
        handle.add_done_callback(lambda done: self._finish(transfer, done))

    def _plan(self, transfer: Transfer, elements: int) -> TransferPlan:
        step = transfer.step
        context = PlanContext(
            tensors=transfer.slots,
            elements=elements,
            step=step.number,
            phase=step.phase,
            world_size=self.communicator.world_size,
            seed=mix_seed(self.settings.seed, self._number, step.number, transfer.index),
            chunk_elements=self.communicator.chunk_elements,
            bucket=transfer.index,
        )
        plan = self.policy.plan(context)
        if plan.encoding == "topk" and self.settings.server_count:
            # A server keeps no residuals, so what top-k left out of its results would be gone.
            plan = replace(plan, encoding="int8", kept=1.0)
        if plan.seed != context.seed:
            # Also where the order needs none: ranks that number their ops differently then have
            # different plans, which is an error, and not each other's gradients.
            plan = replace(plan, seed=context.seed)
        return plan.exact() if step.exact else plan

    def _vote_with(
        self, ballot: Ballot, host: NDArray[np.float32], plan: TransferPlan, first: bool
    ) -> tuple[Ballot, bool]:
        """The ballot of one bucket, and whether its fresh gradient is finite."""
        phases = self.policy.phases
        square, finite = 0.0, True
        if plan.lossy or phases is not None:
            square = square_norm(host)
            finite = math.isfinite(square)
        ballot = replace(
            ballot,
            fresh_square=square / self._grad_scale**2 if finite else 0.0,
            nonfinite=not finite,
            loss=ballot.loss if first else 0.0,
            losses=ballot.losses if first else 0,
        )
        return ballot, finite

    def _finish(self, transfer: Transfer, handle: Handle) -> None:
        try:
            transfer.first = transfer.report = handle.report
            whole = all(share >= 1.0 for share in handle.report.delivered)
            self._push_s[transfer.slots] = handle.report.push_s if whole else math.inf
            if not transfer.step.guarded:
                self._settle(transfer, handle.report)
        except Exception as error:
            transfer.error = error
        self._end(transfer)

    def _settle(self, transfer: Transfer, report: TransferReport) -> None:
        plan = transfer.resent or transfer.plan
        assert plan is not None
        grid = self.communicator.chunk_grid(plan)
        if self._residuals is not None:
            keep_error = None
            if plan.encoding != "f32":
                keep_error = functools.partial(self.communicator.keep_encoding_error, plan)
            owed = bool(len(report.withheld_chunks) or len(report.result_error))
            turn = plan.transform != "none" and (owed or not report.counted.all())
            sent = self._residuals.sent(transfer.slots)
            if turn:  # what is owed is known by coefficient
                transforms.forward(sent, plan.seed)
            self._residuals.settle(transfer.slots, grid, report, plan.scale, keep_error)
            if turn:
                transforms.inverse(sent, plan.seed)
        if plan.transform != "none" and transfer.step.action != "skipped":
            transforms.inverse(transfer.stage.host(), plan.seed)
        self._ages.settle(transfer.slots, grid, report)
        phases = self.policy.phases
        if phases is not None and phases.source == "paper":
            transfer.applied_square = square_norm(transfer.stage.host()) / self._grad_scale**2

    # ------------------------------------------------------------------ a step's end

    def _end(self, transfer: Transfer) -> None:
        """Notes that a bucket is done; the last one of a step waits for the step's end."""
        step = transfer.step
        with self._mutex:
            transfer.done = True
            self._failure = self._failure or transfer.error
            failed = self._failure is not None
            over = (
                not failed
                and step.complete
                and self._running is step
                and all(each.done for each in step.transfers)
            )
            if over:
                self._running = None
            hold = not failed and (over or step.guarded)
            if hold:
                step.held.append(transfer)
        if not hold:
            self._deliver(transfer)
        if failed:
            self._release(step)
        if over:
            self._attempt(step, lambda: self._close(step))

    def _release(self, step: Step) -> None:
        """Gives the results that were held back to DDP."""
        with self._mutex:
            held, step.held = step.held, []
        for transfer in held:
            self._deliver(transfer)

    @staticmethod
    def _deliver(transfer: Transfer) -> None:
        assert transfer.result is not None
        try:
            transfer.stage.deliver(transfer.result)
        except Exception as error:
            transfer.error = transfer.error or error
            if not transfer.result.done():
                transfer.result.set_result(transfer.stage.buffer)

    def _fail(self, step: Step | None, error: Exception) -> None:
        """Stops this pipeline: nothing may be held back any more."""
        self._failure = self._failure or error
        if step is not None:
            for transfer in step.held:
                transfer.error = transfer.error or error
            self._release(step)

    def _attempt(self, step: Step, work: Callable[[], None]) -> None:
        """Does a part of a step's end; a failure is every waiting bucket's."""
        try:
            work()
        except Exception as error:
            self._fail(step, error)

    def _close(self, step: Step) -> None:
        """All buckets are done: consults the other ranks if there is something to agree on."""
        summary = Summary.fold(
            step.number,
            self.communicator.world_size,
            [(t.first.stats_sum, t.first.stats_max) for t in step.transfers if t.first is not None],
        )
        names = self._layers_due(step, summary)
        if not names and not step.guarded:
            self._conclude(step, summary)
            return
        squares = np.array([self._layer_squares[name] for name in names] or [0.0], np.float32)
        # As for buckets: another attachment's consultation under the same number is a plan error.
        seed = mix_seed(self.settings.seed, self._number, step.number, len(step.transfers))
        handle = self.communicator.all_reduce(
            squares,
            replace(TransferPlan.whole(squares.size), seed=seed),
            step=step.number,
            stats=(0.0, 0.0, 0.0, 0.0, step.lost),
        )

        def consulted(done: Handle) -> None:
            lost = done.report.stats_max[0]
            agreed = summary
            if names:
                samples = self._layer_steps * self.communicator.world_size
                agreed = replace(summary, layers=layer_norms(squares, names, samples))
                self._layer_squares, self._layer_steps = {}, 0
            self._judge(step, agreed, lost)

        handle.add_done_callback(lambda done: self._attempt(step, lambda: consulted(done)))

    def _layers_due(self, step: Step, summary: Summary) -> list[str]:
        """The layers whose norms the ranks agree on at the end of this step."""
        for name, square in step.layer_squares.items():
            known = self._layer_squares.get(name, 0.0)
            self._layer_squares[name] = known + square / self._grad_scale**2
        self._layer_steps += 1
        phases = self.policy.phases
        if phases is None or phases.source != "layers" or not phases.due(summary):
            return []
        return list(self._layer_squares)

    # ------------------------------------------------------------------ the guard

    def _judge(self, step: Step, summary: Summary, lost: float) -> None:
        """Goes by the share that the unluckiest worker lost, the same number on all ranks."""
        if not step.guarded:
            self._conclude(step, summary)
            return
        if 1.0 - lost >= step.floor - 1e-9:
            self._guarded_steps = 0
            self._settle_all(step)
            self._conclude(step, summary)
            return
        self._guarded_steps += 1
        halt = self.policy.halt_after
        if halt and self._guarded_steps >= halt:
            raise GradwireError(
                f"rank {self.communicator.rank}, step {step.number}: {halt} steps running "
                f"delivered less than floor={step.floor:g} of a gradient (this one "
                f"{1.0 - lost:.3f}): policy {self.policy.name!r} halts (halt_after={halt})"
            )
        if self.settings.guard == "skip":
            self._skip_step(step)
            self._conclude(step, summary)
        else:
            self._resend(step, summary)

    def _settle_all(self, step: Step) -> None:
        for transfer in step.transfers:
            assert transfer.report is not None
            self._settle(transfer, transfer.report)

    def _resend(self, step: Step, summary: Summary) -> None:
        """Sends all buckets again, exactly, in their order."""
        step.action = "resent"
        left = len(step.transfers)

        def resent(transfer: Transfer, done: Handle) -> None:
            nonlocal left
            assert transfer.first is not None
            transfer.report = _both(transfer.first, done.report)
            with self._mutex:
                left -= 1
                over = left == 0
            if over:
                self._settle_all(step)
                self._conclude(step, summary)

        def callback(transfer: Transfer) -> Callable[[Handle], None]:
            return lambda done: self._attempt(step, lambda: resent(transfer, done))

        for transfer in step.transfers:
            assert transfer.plan is not None
            transfer.resent = transfer.plan.exact()
            host = transfer.stage.host()
            np.copyto(host, self._sent(transfer))
            handle = self.communicator.all_reduce(host, transfer.resent, step=step.number)
            handle.add_done_callback(callback(transfer))

    def _skip_step(self, step: Step) -> None:
        """Applies nothing: everything sent returns to the residuals, the optimizer is told."""
        step.action = "skipped"
        self._skip = True
        for transfer in step.transfers:
            assert transfer.report is not None
            sent = self._sent(transfer)
            sent[~np.isfinite(sent)] = 0.0
            none = np.zeros_like(transfer.report.counted)
            transfer.report = replace(
                transfer.report,
                counted=none,
                applied=none,
                withheld_chunks=np.zeros(0, np.uint32),
                withheld_values=np.zeros(0, np.float32),
                result_error=np.zeros(0, np.float32),
                delivered=(0.0,) * len(transfer.report.delivered),
            )
            transfer.stage.host().fill(0.0)
            self._settle(transfer, transfer.report)

    def _sent(self, transfer: Transfer) -> NDArray[np.float32]:
        """What this worker sent: the residual as it is before it is settled, or the copy."""
        if self._residuals is not None:
            return self._residuals.sent(transfer.slots)
        assert transfer.kept is not None
        return transfer.kept

    # ------------------------------------------------------------------ the report

    def _conclude(self, step: Step, agreed: Summary) -> None:
        """The step is decided: the policy reads the report, and DDP gets its results."""
        done = [(t.plan, t.report) for t in step.transfers]
        transfers = [(p, r) for p, r in done if p is not None and r is not None]
        self._applied_square = sum(t.applied_square for t in step.transfers)
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
        self._lost = max(self._lost, step.lost)
        self._step = step.number + 1
        if self._writer is not None:
            self._writer.write(report)
        self._release(step)

    def _report(
        self,
        step: Step,
        transfers: list[tuple[TransferPlan, TransferReport]],
        agreed: Summary,
        period_s: float,
    ) -> StepReport:
        return build_report(
            step=step.number,
            rank=self.communicator.rank,
            policy=self.policy.name,
            phase=step.phase,
            transfers=transfers,
            comm_s=self._clock() - step.started,
            agreed=agreed,
            critical_share=1.0 if step.phase == "critical" else 0.0,
            verdict="fixed bound",
            guard=step.action,
            period_s=period_s,
        )


def _arrays(tensors: object) -> dict[str, NDArray[Any]]:
    """Arrays by name from a state's tensors, wherever the loader mapped them to."""
    assert isinstance(tensors, dict)
    return {name: torch.as_tensor(values).cpu().numpy() for name, values in tensors.items()}


def _both(first: TransferReport, second: TransferReport) -> TransferReport:
    """The report of a bucket that was sent twice: what came of it, and what it cost together."""
    return replace(
        second,
        stats_sum=first.stats_sum,
        stats_max=first.stats_max,
        exceeded=first.exceeded,
        effective_bounds=first.effective_bounds,
        push_s=first.push_s + second.push_s,
        pull_s=first.pull_s + second.pull_s,
        total_s=first.total_s + second.total_s,
        bytes_sent=first.bytes_sent + second.bytes_sent,
        packets_sent=first.packets_sent + second.packets_sent,
        retransmissions=first.retransmissions + second.retransmissions,
        passes=first.passes,
    )
