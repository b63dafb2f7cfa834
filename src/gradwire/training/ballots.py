"""BallotBox: the values of this worker for the agreement of each step.

Users vote for a phase, begin epochs, give losses and ask for exact steps. The last step yielded a
norm, push times, the share that was lost, and estimates of the path. The statistics of the buckets'
transfers carry all of these to the other ranks, as ballots (`gradwire.core.agreed.Ballot`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.core import callers
from gradwire.core.agreed import GAUGES, LAST_EPOCH, PHASES, Ballot, Pace, Phase
from gradwire.core.checks import is_number, is_whole, plain
from gradwire.core.errors import ConfigError
from gradwire.core.regions import TensorSlot
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State
from gradwire.core.transfer_report import TransferReport
from gradwire.policies import Policy
from gradwire.policies.parts.phases import RateWatch

PAUSE = 2.0
"""Most that a step may take beside its transfers, in mean steps of before; more is a pause.

Where it recurs, the mean grows with it, until it counts in full."""

MEMORY = 0.8
"""Weight of that mean after another step; about the last five steps count."""

CODINGS = 2.0
"""How often an element is encoded and decoded: as a contribution, and as a result."""


class BallotBox:
    """Collects one worker's values until they are sent.

    Args:
        watched: Whether the losses have an effect (setting `loss_rise`).
        coding_s: Seconds that the processor takes to encode and decode one element.

    Attributes:
        epoch: The newest epoch begun, -1 for none.
        applied_square: Squared norm of the last step's applied gradient; None before there is one.
        flush: Whether the user asked for an exact step, until all ranks have agreed on one.
    """

    def __init__(
        self,
        policy: Policy,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        watched: bool = False,
        coding_s: float = 0.0,
    ) -> None:
        self.epoch = -1
        self.applied_square: float | None = None
        self.flush = False
        self._policy = policy
        self._optimizers = optimizers
        self._warns = not watched
        self._rates = RateWatch()
        self._vote: Phase | None = None
        self._loss_sum = 0.0  # of the losses since the last step began
        self._losses = 0  # their number
        self._push_s: dict[tuple[TensorSlot, ...], float] = {}
        self._lost = 0.0  # largest share of a step lost since this was last sent
        self._coding_s = coding_s
        self._step_s: float | None = None  # mean seconds of a step

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
        epoch = plain(epoch)
        if not is_whole(epoch) or not 0 <= epoch <= LAST_EPOCH:
            raise ConfigError.of("epoch", epoch, f"a whole number from 0 to {LAST_EPOCH}")
        self.epoch = epoch

    def add_loss(self, loss: float) -> None:
        """Adds a training loss to those whose mean is sent with the next step.

        It may be NaN or infinite; the first such loss causes a warning unless losses are watched.
        """
        self._loss_sum += loss
        self._losses += 1
        if self._warns and not math.isfinite(loss):
            self._warns = False
            callers.warn(
                f"attachment.loss({loss}): the training loss is not finite; with loss_rise= the "
                "steps after such a loss are exact",
            )

    def cast(
        self, step: int, last: StepReport | None, elapsed_s: float = 0.0, scale: float | None = 1.0
    ) -> Ballot:
        """Makes the ballot of a step that begins.

        Args:
            elapsed_s: Seconds since that step began.
            scale: What the gradients are multiplied by; None for a worker that has joined.
        """
        loss = self._loss_sum / self._losses if self._losses else None
        self._loss_sum, self._losses = 0.0, 0
        return Ballot(
            loss=loss,
            critical=self._vote == "critical",
            tolerant=self._vote == "tolerant",
            applied_square=self.applied_square,
            epoch=self.epoch,
            falling=self._rates.observe(_learning_rates(self._optimizers)),
            congested=self._policy.congested,
            flush=self.flush,
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
        """Makes the step's ballot for one bucket.

        Args:
            fresh_square: Squared norm of the bucket of the fresh gradient; None if it is not
                finite.
            first: Whether it is the step's first bucket, the only one that carries the loss and
                the call for an exact step.
        """
        return replace(
            ballot,
            fresh_square=fresh_square or 0.0,
            nonfinite=fresh_square is None,
            loss=ballot.loss if first else None,
            flush=ballot.flush and first,
            push_s=self._push_s.get(slots, 0.0),
        )

    def pushed(self, slots: tuple[TensorSlot, ...], report: TransferReport) -> None:
        """Notes how long a bucket's push took, which the next step sends."""
        whole = all(share >= 1.0 for share in report.delivered)
        self._push_s[slots] = report.push_s if whole else math.inf

    def lost(self, share: float) -> None:
        self._lost = max(self._lost, share)

    def state_dict(self) -> dict[str, object]:
        return {
            "epoch": self.epoch,
            "applied_square": self.applied_square,
            "rates": list(self._rates.reference),
            "vote": self._vote,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores the values; a vote that stands remains where the state has none."""
        self._rates = RateWatch()
        if "rates" in state.values:
            self._rates.reference = state.numbers("rates", 0.0)
        self.epoch = state.whole("epoch", -1, LAST_EPOCH)
        self.applied_square = state.optional("applied_square", state.magnitude)
        self._vote = self._read_vote(state) or self._vote
        self.flush = self.flush or ("flush" in state.values and state.flag("flush"))

    def _read_vote(self, state: State) -> Phase | None:
        if state.values.get("vote") is None:
            return None
        vote = state.choice("vote", PHASES)
        if self._policy.phases is None:
            raise state.wrong("vote", "None")
        return "critical" if vote == "critical" else "tolerant"

    def _without_pause(self, elapsed_s: float, comm_s: float) -> float:
        """Returns the seconds of a step, of a pause after its transfers (a validation) only a part.

        Args:
            elapsed_s: Seconds from its start to that of the next one.
            comm_s: Seconds of its transfers, which count whatever they took.
        """
        other_s = max(0.0, elapsed_s - comm_s)
        known = self._step_s
        if known is None:
            self._step_s = comm_s + other_s
            return self._step_s
        step_s = comm_s + min(other_s, PAUSE * known)
        self._step_s = MEMORY * known + (1.0 - MEMORY) * step_s
        return step_s

    def _gauge(self, step: int, last: StepReport | None, elapsed_s: float) -> float:
        step_s = 0.0
        if last is not None and elapsed_s > 0.0:
            step_s = self._without_pause(elapsed_s, last.comm_s)
        name = GAUGES[step % len(GAUGES)]
        if name == "lost":
            lost, self._lost = self._lost, 0.0
            return lost
        if last is None:
            return 0.0
        if name == "pace":
            return self._pace(last, step_s).gauge() if step_s > 0.0 else 0.0
        if name == "rtprop":
            return last.rtprop_s
        return 1.0 / last.btlbw if last.btlbw > 0 else 0.0

    def _pace(self, last: StepReport, step_s: float) -> Pace:
        """Returns the pace of the last step.

        Its bytes cannot have kept the network for longer than they take at BtlBw, and its result
        comes a round trip after its contributions whatever they hold. What the worker waited beyond
        that was for processors, and other bytes would change neither.
        """
        waited_s = last.exposed_s - last.rtprop_s
        if last.btlbw > 0.0:
            waited_s = min(waited_s, last.bytes / last.btlbw)
        coding_s = CODINGS * last.elements * self._coding_s
        return Pace(step_s, _share(waited_s, step_s), _share(coding_s, step_s))


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0)


def _learning_rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """Returns the learning rates of the parameter groups of all optimizers, in order.

    Groups that compute their own (Adafactor's relative steps) have none to be watched.
    """
    groups = itertools.chain.from_iterable(each.param_groups for each in optimizers)
    rates = (plain(_single(group.get("lr"))) for group in groups)
    return [float(rate) for rate in rates if is_number(rate)]


def _single(rate: object) -> object:
    return rate.squeeze() if isinstance(rate, torch.Tensor) else rate
