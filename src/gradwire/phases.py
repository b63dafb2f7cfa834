"""Training phases: the agreed summary of a step, and the detector that reads it.

The detector of DBLP (arXiv 2605.01989): a phase is critical when the gradient's norm changed by at
least the share η since the last look, |prev - curr| / prev >= η; training starts critical. Two
inputs are offered:

"ours"   RMS over the steps since the last look of the norms of the workers' *fresh* gradients
         (before residuals are added and before anything is lost). Minibatch noise is averaged
         out and the detector does not see its own loss.
"paper"  the L2 norm of one step's averaged gradient as it was applied, what the paper looks at.

Every value that enters a decision has been folded by the aggregators, alike for all ranks, and
belongs to a step that is complete everywhere, so every rank decides the same without a message
of its own. The slots below say where each value travels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gradwire.errors import ConfigError
from gradwire.plans import check_choice

__all__ = ["Ballot", "Every", "Phase", "PhaseDetector", "Summary"]

Phase = Literal["critical", "tolerant"]
Every = int | Literal["epoch"]

PHASES = ("critical", "tolerant")
DETECTORS = ("ours", "paper")


@dataclass(frozen=True)
class Ballot:
    """What one worker sends with one bucket, in the engine's eight statistics slots.

    Summed over the workers: fresh_square, the bucket's squared L2 norm of the worker's fresh
    gradient (0 when it is not finite); nonfinite, 1 when it is not finite; loss and losses, the
    sum and number of losses given since the last step (first bucket only).
    Maximum over the workers: critical and tolerant, 1 for a manual vote; applied_square, the
    squared norm of the last step's applied gradient; epoch, the newest epoch begun plus 1.
    """

    fresh_square: float = 0.0
    nonfinite: bool = False
    loss: float = 0.0
    losses: int = 0
    critical: bool = False
    tolerant: bool = False
    applied_square: float = 0.0
    epoch: int = -1

    def slots(self) -> tuple[float, ...]:
        """The eight slots: four summed, then four maximised. All are finite."""
        applied = self.applied_square
        return (
            self.fresh_square,
            float(self.nonfinite),
            self.loss,
            float(self.losses),
            float(self.critical),
            float(self.tolerant),
            applied if math.isfinite(applied) else -1.0,
            float(self.epoch + 1),
        )


@dataclass(frozen=True)
class Summary:
    """The agreed summary of one step: the same values on every rank.

    fresh_norm: sqrt of the mean over workers of the squared L2 norm of the fresh gradient over
    all buckets. nonfinite: some worker's gradient was not finite. applied_norm: L2 norm of the
    averaged gradient applied in the step *before* (it is known only once that step is over).
    vote: the phase that ranks ask for by hand (critical wins), None without a vote.
    epoch: the newest epoch any rank has begun, -1 for none. loss: mean of the losses given.
    """

    step: int
    fresh_norm: float = 0.0
    nonfinite: bool = False
    applied_norm: float = 0.0
    vote: Phase | None = None
    epoch: int = -1
    loss: float | None = None

    @staticmethod
    def fold(
        step: int,
        world_size: int,
        buckets: Iterable[tuple[Sequence[float], Sequence[float]]],
    ) -> Summary:
        """Folds each bucket's (summed slots, maximum slots), given in bucket order."""
        fresh = losses = loss = 0.0
        nonfinite = False
        critical = tolerant = False
        applied = 0.0
        epoch = -1
        for sums, maxima in buckets:
            fresh += sums[0]
            nonfinite |= sums[1] > 0
            loss += sums[2]
            losses += sums[3]
            critical |= maxima[0] > 0
            tolerant |= maxima[1] > 0
            applied = max(applied, maxima[2])
            epoch = max(epoch, int(maxima[3]) - 1)
        mean_square = fresh / world_size
        return Summary(
            step=step,
            fresh_norm=math.sqrt(mean_square) if mean_square >= 0 else math.nan,
            nonfinite=nonfinite,
            applied_norm=math.sqrt(applied),
            vote="critical" if critical else "tolerant" if tolerant else None,
            epoch=epoch,
            loss=loss / losses if losses else None,
        )


class PhaseDetector:
    """Decides the phase of the next step from the agreed summaries of the steps before.

    eta: relative change of the norm that makes a phase critical, > 0. every: look every so many
    steps, or "epoch" for once an epoch (`attachment.epoch(n)`). source: "ours" or "paper".
    Zero and non-finite norms mean critical. `phase` is the phase of the next step.
    """

    def __init__(self, eta: float = 0.5, every: Every = 10, source: str = "ours") -> None:
        if isinstance(eta, bool) or not isinstance(eta, (int, float)) or not 0 < eta < math.inf:
            raise ConfigError(f"eta={eta!r}: a relative change, a number above 0")
        if every != "epoch" and (isinstance(every, bool) or not isinstance(every, int)):
            raise ConfigError(f"every={every!r}: a number of steps (1 or more) or 'epoch'")
        if isinstance(every, int) and every < 1:
            raise ConfigError(f"every={every!r}: a number of steps (1 or more) or 'epoch'")
        check_choice("detector", source, DETECTORS)
        self.eta = float(eta)
        self.every: Every = every
        self.source = source
        self.phase: Phase = "critical"
        self.steps = 0
        self.critical_steps = 0
        self.looks = 0
        self.fired = 0
        self._detected: Phase = "critical"
        self._previous: float | None = None
        self._squares = 0.0
        self._count = 0
        self._epoch = -1

    @property
    def critical_share(self) -> float:
        """The share of the steps so far that were critical; 1 before the first."""
        return self.critical_steps / self.steps if self.steps else 1.0

    @property
    def verdict(self) -> str:
        """ "phases", or "fixed bound" for a run in which nothing fired after the start."""
        return "phases" if self.fired else "fixed bound"

    def observe(self, summary: Summary) -> None:
        """Takes the summary of the step just completed and decides the phase of the next."""
        self.steps += 1
        self.critical_steps += self.phase == "critical"
        if self.every == "epoch":
            if summary.epoch > self._epoch:
                self._epoch = summary.epoch
                if self.source == "paper":
                    self._gather(summary)
                self._look()
            if self.source == "ours":
                self._gather(summary)
        else:
            self._gather(summary)
            if self.steps % self.every == 0:
                self._look()
        if summary.nonfinite:
            self._fire()
        self.phase = summary.vote if summary.vote is not None else self._detected

    def state_dict(self) -> dict[str, object]:
        """Everything the next decision depends on, as plain values."""
        return {key: value for key, value in vars(self).items() if key not in _CONFIGURATION}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        names = set(vars(self)) - _CONFIGURATION
        if set(state) != names:
            raise ConfigError(
                f"phase state with keys {sorted(state)}: expected exactly {sorted(names)}"
            )
        vars(self).update(state)

    def _gather(self, summary: Summary) -> None:
        if self.source == "paper":
            self._squares, self._count = summary.applied_norm**2, 1
        elif not summary.nonfinite:
            self._squares += summary.fresh_norm**2
            self._count += 1

    def _look(self) -> None:
        if not self._count:
            return
        current = math.sqrt(self._squares / self._count)
        previous = self._previous
        self._squares, self._count = 0.0, 0
        self._previous = current
        self.looks += 1
        if previous is None:
            return
        usable = math.isfinite(previous) and math.isfinite(current) and previous > 0
        if usable and abs(previous - current) / previous < self.eta:
            self._detected = "tolerant"
        else:
            self._fire()

    def _fire(self) -> None:
        self._detected = "critical"
        self.fired += 1


_CONFIGURATION = frozenset({"eta", "every", "source"})
