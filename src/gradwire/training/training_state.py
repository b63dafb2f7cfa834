"""TrainingState: what an attachment keeps from step to step, as users set, read and save it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gradwire.core.agreed import Phase
from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.errors import ConfigError, GradwireError
from gradwire.core.report import ReportWriter, StepReport
from gradwire.core.saved_state import State, unchanged_on_error
from gradwire.core.settings import Settings
from gradwire.exports.telemetry import Telemetry
from gradwire.live.publisher import Steps
from gradwire.policies import Policy
from gradwire.training.ballots import BallotBox
from gradwire.training.bucket import ParameterNames
from gradwire.training.consultation import Consultation
from gradwire.training.fallback import Fallback
from gradwire.training.feedback.books import Books
from gradwire.training.feedback.optimizer_moments import FirstMoments
from gradwire.training.feedback.owing import Owing
from gradwire.training.flush import Flush
from gradwire.training.groups import HostRanks
from gradwire.training.guard import StepGuard
from gradwire.training.loss_watch import LossWatch
from gradwire.training.off import owed_nothing
from gradwire.training.optimizers import Optimizers
from gradwire.training.planner import Planner
from gradwire.training.scaler import SkipWatch, Waiting
from gradwire.transport.communicator import Communicator
from gradwire.transport.native import seconds_to_code

STATE_VERSION = 2
PRIVATE_KEYS = 1
"""The version of states in which a detector's keys begin with an underscore."""
LAST_STEP = 1 << 52
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


class TrainingState:
    """The values that an attachment keeps from step to step.

    Args:
        number: The number that it has taken of the communicator; `close` returns it.
        writer: What takes the steps' reports, which `close` closes; None for nothing.
        scaler: The loss scaler, which gives the scale of gradients at each step's start and skips
            steps that are not finite; None where `set_grad_scale` gives the scale.
        host: The ranks that this worker leads; None for its own alone, among workers of which each
            one does so.
        fallback: What goes on where the engine fails; None where that ends training.

    Attributes:
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
        host: HostRanks | None = None,
        fallback: Fallback | None = None,
    ) -> None:
        self.communicator = communicator
        self._fallback = fallback
        self._host = host or HostRanks((communicator.job_rank,), communicator.ranks)
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
        self._planner = Planner(communicator, policy, settings, number)
        self._guard = StepGuard(policy, settings, communicator.job_rank)
        self._skipped: dict[int, torch.Tensor] = {}  # parameters to be skipped, by their ids
        self._loss_watch: LossWatch | None = None
        if settings.loss_rise is not None:
            self._loss_watch = LossWatch(settings.loss_rise, settings.strict_steps)
        self.number = number
        self._names = names
        self._writer = writer
        self._shown = Steps(policy.name, self._host.ranks, number)
        self._step = 0
        self._last: StepReport | None = None
        self._flush = Flush(Owing())
        self._grad_scale = 1.0
        self.compared: Callable[[], tuple[int, ...]] = tuple

    # ------------------------------------------------------------------ what users set and read

    @property
    def step(self) -> int:
        return self._step

    @property
    def phase(self) -> Phase:
        return self.policy.phase

    def set_phase(self, phase: Phase | None) -> None:
        self._ballots.set_phase(phase)

    def begin_epoch(self, epoch: int) -> None:
        self._ballots.begin_epoch(epoch)

    def add_loss(self, loss: float) -> None:
        self._ballots.add_loss(loss)

    def flush(self) -> None:
        """Makes the step after the next one exact on all ranks, which also empties the residuals.

        The step after that is exact, too, if a scaler skips it.
        """
        self._ballots.flush = True

    @property
    def flush_pending(self) -> bool:
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
        return self._grad_scale

    @property
    def _scaled(self) -> bool:
        """Whether steps that are not finite are skipped, as a scaler does even at a scale of 1."""
        return self._grad_scale != 1.0 or (self._scaler is not None and self._scaler.is_enabled())

    def report(self) -> StepReport:
        if self._last is None:
            raise GradwireError("no step has been completed yet: there is no report")
        return self._last

    def find_unused(self) -> None:
        self._books.finds_unused = True

    # ------------------------------------------------------------------ what is saved

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
            strict: Whether values of parameters that the model lacks are an error; else they are
                dropped with a warning.
            owner: The rank that the state belongs to, as in "rank 0 of 2"; None for this one. What
                another rank kept by itself is not taken, and is an error where it owes something.
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

        Residuals are in the scale of what a worker contributes, which for a host is the mean of its
        ranks.
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

    def _keep_owing(self, owing: bool) -> None:
        """Takes over whether anything may be owed, of whatever parameter."""
        self._flush.owing = Owing(self._names.trained or () if owing else ())

    # ------------------------------------------------------------------ what optimizers took

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._skips.stepped(optimizer)

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
        owing: Whether any rank may have owed something when it was saved.
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
