"""BallotBox: what this worker tells the others with each step.

Users vote for a phase, begin epochs and give losses; the last step showed a norm, push times, what
was lost and what the path is like. All of it travels in the ballots that go with the buckets
(`gradwire.core.agreed.Ballot`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from gradwire.core.agreed import GAUGES, LAST_EPOCH, PHASES, Ballot, Phase
from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.errors import ConfigError
from gradwire.core.plan import TensorSlot, TransferReport
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State
from gradwire.policies import Policy
from gradwire.policies.parts.phases import RateWatch

__all__ = ["BallotBox"]


class BallotBox:
    """Gathers what one worker has to say until it travels.

    optimizer: the one whose learning rate is watched, None for none. watched: whether somebody
    acts on the losses.
    """

    def __init__(
        self, policy: Policy, optimizer: torch.optim.Optimizer | None, *, watched: bool = False
    ) -> None:
        self.epoch = -1
        self.applied_square: float | None = None  # of the last step's applied gradient
        self._policy = policy
        self._optimizer = optimizer
        self._warns = not watched
        self._rates = RateWatch()
        self._vote: Phase | None = None
        self._loss_sum = 0.0  # of the losses given since the last step began
        self._losses = 0  # their number
        self._push_s: dict[tuple[TensorSlot, ...], float] = {}
        self._lost = 0.0  # largest share of a step lost since the ranks were told

    def set_phase(self, phase: Phase | None) -> None:
        """Votes for a phase from now on; None leaves it to the detector again."""
        if phase is not None and phase not in PHASES:
            raise ConfigError.of("phase", phase, "allowed are 'critical', 'tolerant', None")
        if phase is not None and self._policy.phases is None:
            raise ConfigError.of(
                "phase",
                phase,
                f"policy {self._policy.name!r} has no phases; 'dblp' and 'adaptive' have",
            )
        self._vote = phase

    def begin_epoch(self, epoch: object) -> None:
        """Notes that an epoch begins."""
        epoch = plain(epoch)
        if not is_whole(epoch) or not 0 <= epoch <= LAST_EPOCH:
            raise ConfigError.of("epoch", epoch, f"a whole number from 0 to {LAST_EPOCH}")
        self.epoch = epoch

    def add_loss(self, loss: float) -> None:
        """Adds a training loss to those whose mean travels with the next step; also one that is not
        finite."""
        self._loss_sum += loss
        self._losses += 1
        if self._warns and not math.isfinite(loss):
            self._warns = False
            warnings.warn(
                f"attachment.loss({loss}): the training loss is not finite; with loss_rise= the "
                "steps after such a loss are exact",
                RuntimeWarning,
                stacklevel=4,
            )

    def cast(
        self, step: int, last: StepReport | None, elapsed_s: float = 0.0, scale: float | None = 1.0
    ) -> Ballot:
        """The ballot of a step that begins; last: the report of the step before it, which began
        elapsed_s before this one. scale: of the gradients."""
        loss = self._loss_sum / self._losses if self._losses else None
        self._loss_sum, self._losses = 0.0, 0
        return Ballot(
            loss=loss,
            critical=self._vote == "critical",
            tolerant=self._vote == "tolerant",
            applied_square=self.applied_square,
            epoch=self.epoch,
            falling=self._optimizer is not None
            and self._rates.observe(_learning_rates(self._optimizer)),
            congested=self._policy.congested,
            gauge=self._gauge(step, last, elapsed_s),
            scale=scale,
        )

    def of_bucket(
        self,
        ballot: Ballot,
        slots: tuple[TensorSlot, ...],
        fresh_square: float | None,
        *,
        first: bool,
    ) -> Ballot:
        """The step's ballot as one bucket carries it; fresh_square: None for a fresh gradient that
        is not finite. The loss travels with the first bucket only."""
        return replace(
            ballot,
            fresh_square=fresh_square or 0.0,
            nonfinite=fresh_square is None,
            loss=ballot.loss if first else None,
            push_s=self._push_s.get(slots, 0.0),
        )

    def pushed(self, slots: tuple[TensorSlot, ...], report: TransferReport) -> None:
        """Notes how long a bucket's push took; the others are told in the next step."""
        whole = all(share >= 1.0 for share in report.delivered)
        self._push_s[slots] = report.push_s if whole else math.inf

    def lost(self, share: float) -> None:
        """Notes the share of a step that was lost."""
        self._lost = max(self._lost, share)

    def state_dict(self) -> dict[str, object]:
        """What a resumed run would tell."""
        return {
            "epoch": self.epoch,
            "applied_square": self.applied_square,
            "rates": list(self._rates.reference),
            "vote": self._vote,
        }

    def read(self, state: State) -> Callable[[], None]:
        """Checks a state that holds what `state_dict` returned; what is returned takes it over. A
        vote that stands stays where the state has none."""
        rates = state.numbers("rates", 0.0) if "rates" in state.values else []
        epoch = state.whole("epoch", -1, LAST_EPOCH)
        square = state.optional("applied_square", state.magnitude)  # of one that may not be finite
        vote = self._read_vote(state)

        def take() -> None:
            self._vote = vote or self._vote
            self._rates.reference = rates
            self.epoch, self.applied_square = epoch, square

        return take

    def _read_vote(self, state: State) -> Phase | None:
        if state.values.get("vote") is None:
            return None
        vote = state.word("vote", PHASES)
        if self._policy.phases is None:
            raise state.wrong("vote", "None")
        return "critical" if vote == "critical" else "tolerant"

    def _gauge(self, step: int, last: StepReport | None, elapsed_s: float) -> float:
        """This worker's value for the slot that step numbers take turns in."""
        told = GAUGES[step % len(GAUGES)]
        if told == "lost":
            lost, self._lost = self._lost, 0.0
            return lost
        if told == "rest":
            return self._policy.rest(elapsed_s)
        if last is None:
            return 0.0
        if told == "rtprop":
            return last.rtprop_s
        return 1.0 / last.btlbw if last.btlbw > 0 else 0.0


def _learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """The rates of its parameter groups; those that make their own (Adafactor's relative steps)
    have none to be watched."""
    rates = (plain(_single(group.get("lr"))) for group in optimizer.param_groups)
    return [float(rate) for rate in rates if is_number(rate)]


def _single(rate: object) -> object:
    """The tensor without dimensions that a tensor of one element is."""
    return rate.squeeze() if isinstance(rate, torch.Tensor) else rate
