"""GradientPipeline: what one attachment does with each bucket, and how a step ends.

Before the push: the bucket comes to host memory, the fresh gradient's norm is taken, the plan is
written, residuals are added, due and non-finite chunks are marked critical. After the pull: the
books are settled and the result goes back to the bucket. When the last bucket of a step is done,
the agreed summary is folded, the policy reads the report and decides the next step's phase: all
before DDP sees the last future, so every rank enters the next step with the same decision.
"""

import math
import threading
import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.buckets import GradBucket, Layouts, ParameterNames
from gradwire.communicator import Communicator, Handle
from gradwire.errors import ConfigError, GradwireError
from gradwire.feedback import AgeBook, ResidualBook, join_chunks, nonfinite_chunks
from gradwire.phases import GAUGES, PHASES, Ballot, Phase, Summary
from gradwire.plans import TensorSlot, TransferPlan, TransferReport, mix_seed
from gradwire.policies import PlanContext, Policy
from gradwire.settings import Settings
from gradwire.staging import Stage, StagePool, Stager
from gradwire.telemetry import ReportWriter, StepReport, build_report

__all__ = ["GradientPipeline"]

STATE_VERSION = 1


class GradientPipeline:
    """Carries the buckets of one DDP module; thread-safe against its own completions."""

    def __init__(
        self,
        communicator: Communicator,
        policy: Policy,
        settings: Settings,
        names: ParameterNames,
    ) -> None:
        self.communicator = communicator
        self.policy = policy
        self.settings = settings
        self._layouts = Layouts(names)
        self._stages = StagePool()
        self._stager = Stager()
        self._residuals = ResidualBook() if settings.feedback else None
        self._ages = AgeBook(settings.max_age)
        self._writer = (
            None if settings.report is None else ReportWriter(settings.report, communicator.rank)
        )
        self._mutex = threading.Lock()
        self._step = 0
        self._running: _Step | None = None
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
        """What a resumed run needs: step, phase, votes, residuals (this rank's own)."""
        residuals = {} if self._residuals is None else self._residuals.state_dict()
        return {
            "version": STATE_VERSION,
            "policy": self.policy.name,
            "step": self._step,
            "epoch": self._epoch,
            "applied_square": self._applied_square,
            "grad_scale": self._grad_scale,
            "phases": self.policy.state_dict(),
            "residuals": {name: torch.from_numpy(v) for name, v in residuals.items()},
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
        residuals = state["residuals"]
        phases = state["phases"]
        assert isinstance(residuals, dict)
        assert isinstance(phases, dict)
        if residuals and self._residuals is None:
            raise ConfigError(
                "gradwire state with residuals loaded with error_feedback off: their gradient "
                "would be lost; set error_feedback=True, or flush() before saving"
            )
        self.policy.load_state_dict(phases)
        self._step = int(state["step"])  # type: ignore[call-overload]
        self._epoch = int(state["epoch"])  # type: ignore[call-overload]
        self._applied_square = float(state["applied_square"])  # type: ignore[arg-type]
        self._grad_scale = float(state["grad_scale"])  # type: ignore[arg-type]
        if self._residuals is not None:
            self._residuals.load_state_dict(
                {name: np.asarray(values) for name, values in residuals.items()}
            )

    def close(self) -> None:
        """Closes the report file. The engine stays, for the next attachment."""
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
            device = transfer.stage.buffer.device
            if device.type == "cuda":
                result = torch.futures.Future[torch.Tensor](devices=[device])
                self._stager.submit(lambda: self._guarded_start(transfer, result))
            else:
                result = torch.futures.Future[torch.Tensor]()
                self._start(transfer, result)
        except Exception as error:
            self._failure = error  # this rank has fallen out of step with the others
            raise
        return result.then(transfer.value)

    def _begin(self, bucket: GradBucket) -> "_Transfer":
        index = bucket.index()
        slots = self._layouts.of(bucket)
        with self._mutex:
            if index == 0 or self._running is None:
                self._running = _Step(
                    self._step, self.policy.phase, self._ballot(), self._flush, time.perf_counter()
                )
                self._flush = False
                self._losses = []
            step = self._running
        transfer = _Transfer(step, index, slots, self._stages.stage(index, bucket.buffer()))
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
        self, transfer: "_Transfer", result: torch.futures.Future[torch.Tensor]
    ) -> None:
        try:
            self._start(transfer, result)
        except Exception as error:
            self._failure = error
            transfer.error = error
            result.set_result(transfer.stage.buffer)

    def _start(self, transfer: "_Transfer", result: torch.futures.Future[torch.Tensor]) -> None:
        step = transfer.step
        host = transfer.stage.host()
        first = transfer.index == 0
        plan = transfer.plan = self._plan(transfer, host.size)
        ballot, finite = self._vote_with(step.ballot, host, plan, first)
        ballot = replace(ballot, push_s=self._push_s.get(transfer.slots, 0.0))
        critical: NDArray[np.uint32] | None = None
        if self._residuals is not None:
            self._residuals.add_to(transfer.slots, host)
        if plan.lossy:
            grid = self.communicator.chunk_grid(plan)
            parts = [self._ages.due(transfer.slots, grid)]
            if not finite or (self._residuals is not None and not _is_finite(host)):
                parts.append(nonfinite_chunks(grid, host))
            critical = join_chunks(parts)
        handle = self.communicator.all_reduce(
            host, plan, step=step.number, critical=critical, stats=ballot.slots()
        )
        handle.add_done_callback(lambda done: self._finish(transfer, done, result))

    def _plan(self, transfer: "_Transfer", elements: int) -> TransferPlan:
        step = transfer.step
        context = PlanContext(
            tensors=transfer.slots,
            elements=elements,
            step=step.number,
            phase=step.phase,
            world_size=self.communicator.world_size,
            seed=mix_seed(self.settings.seed, step.number, transfer.index),
            chunk_elements=self.communicator.chunk_elements,
            bucket=transfer.index,
        )
        plan = self.policy.plan(context)
        return plan.exact() if step.exact else plan

    def _vote_with(
        self, ballot: Ballot, host: NDArray[np.float32], plan: TransferPlan, first: bool
    ) -> tuple[Ballot, bool]:
        """The ballot of one bucket, and whether its fresh gradient is finite."""
        phases = self.policy.phases
        square, finite = 0.0, True
        if plan.lossy or phases is not None:
            square = _square_norm(host)
            finite = math.isfinite(square)
        ballot = replace(
            ballot,
            fresh_square=square / self._grad_scale**2 if finite else 0.0,
            nonfinite=not finite,
            loss=ballot.loss if first else 0.0,
            losses=ballot.losses if first else 0,
        )
        return ballot, finite

    def _finish(
        self,
        transfer: "_Transfer",
        handle: Handle,
        result: torch.futures.Future[torch.Tensor],
    ) -> None:
        try:
            transfer.report = handle.report
            self._settle(transfer, handle.report)
        except Exception as error:
            transfer.error = error
        finally:
            self._end(transfer)
            try:
                transfer.stage.deliver(result)
            except Exception as error:
                transfer.error = transfer.error or error
                if not result.done():
                    result.set_result(transfer.stage.buffer)

    def _settle(self, transfer: "_Transfer", report: TransferReport) -> None:
        plan = transfer.plan
        assert plan is not None
        grid = self.communicator.chunk_grid(plan)
        if self._residuals is not None:
            self._residuals.settle(transfer.slots, grid, report, plan.scale)
        if plan.lossy:
            self._ages.settle(transfer.slots, grid, report)
        whole = all(share >= 1.0 for share in report.delivered)
        self._push_s[transfer.slots] = report.push_s if whole else math.inf
        phases = self.policy.phases
        if phases is not None and phases.source == "paper":
            transfer.applied_square = _square_norm(transfer.stage.host()) / self._grad_scale**2

    # ------------------------------------------------------------------ a step's end

    def _end(self, transfer: "_Transfer") -> None:
        step = transfer.step
        with self._mutex:
            transfer.done = True
            if transfer.error is not None:
                self._failure = self._failure or transfer.error
            over = step.complete and all(each.done for each in step.transfers)
            if not over or self._failure is not None or self._running is not step:
                return
            self._running = None
            try:
                self._close_step(step)
            except Exception as error:
                transfer.error = self._failure = error

    def _close_step(self, step: "_Step") -> None:
        done = [(t.plan, t.report) for t in step.transfers]
        transfers = [(p, r) for p, r in done if p is not None and r is not None]
        agreed = Summary.fold(
            step.number,
            self.communicator.world_size,
            [(report.stats_sum, report.stats_max) for _, report in transfers],
        )
        self._applied_square = sum(t.applied_square for t in step.transfers)
        report = self._report(step, transfers, agreed)
        self.policy.observe(report)
        phases = self.policy.phases
        if phases is not None:
            report = report.with_phases(phases.critical_share, phases.verdict)
        self._last = report
        self._lost = max(self._lost, 1.0 - report.delivered)
        self._step = step.number + 1
        if self._writer is not None:
            self._writer.write(report)

    def _report(
        self,
        step: "_Step",
        transfers: list[tuple[TransferPlan, TransferReport]],
        agreed: Summary,
    ) -> StepReport:
        return build_report(
            step=step.number,
            rank=self.communicator.rank,
            policy=self.policy.name,
            phase=step.phase,
            transfers=transfers,
            comm_s=time.perf_counter() - step.started,
            agreed=agreed,
            critical_share=1.0 if step.phase == "critical" else 0.0,
            verdict="fixed bound",
        )


class _Step:
    """One training step on its way."""

    def __init__(
        self, number: int, phase: Phase, ballot: Ballot, exact: bool, started: float
    ) -> None:
        self.number = number
        self.phase = phase
        self.ballot = ballot
        self.exact = exact
        self.started = started
        self.transfers: list[_Transfer] = []
        self.complete = False  # its last bucket has begun


class _Transfer:
    """One bucket of one step on its way."""

    def __init__(
        self, step: _Step, index: int, slots: tuple[TensorSlot, ...], stage: Stage
    ) -> None:
        self.step = step
        self.index = index
        self.slots = slots
        self.stage = stage
        self.plan: TransferPlan | None = None
        self.report: TransferReport | None = None
        self.error: Exception | None = None
        self.applied_square = 0.0
        self.done = False

    def value(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """For `.then()`: the averaged bucket. Raising here is the one safe way to fail: an
        exception set on the future itself crashes DDP's backward."""
        if self.error is not None:
            raise self.error
        return self.stage.buffer


def _square_norm(values: NDArray[np.float32]) -> float:
    """The squared L2 norm; NaN or infinite only if an element is."""
    tensor = torch.from_numpy(values)
    square = float(torch.linalg.vector_norm(tensor)) ** 2
    if math.isfinite(square):
        return square
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _is_finite(values: NDArray[np.float32]) -> bool:
    return math.isfinite(_square_norm(values))
