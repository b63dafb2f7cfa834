"""When compression pays: the share of a step that passes with waiting for its transfer.

Ours; no paper's. NetSenseML compresses while the data in flight exceed 0.9 of the bandwidth-delay
product (`gradwire.policies.parts.ladder`). A step that does nothing but communicate fills its path
to 0.75 or 0.8 only, as pushes come before pulls and both have ends, so that rule calls it free; and
it cannot see that others took most of the path. What compression can save is the time that training
waits for the transfer: from the start of its last bucket, when there is nothing left to compute, to
the end of the step. What hides behind computation, or behind a slower worker, saves nothing.

So each worker says which share of its steps is *rest*, spent otherwise, if transfers were dense:
of what it waited three round trips stay what they are, the remainder shrinks with the bytes. The
largest rest of all workers is agreed (a worker that waits for a slower one has less than that one),
and the encoding is the mildest that leaves a transfer at most its share of the step: a small one,
since f16 costs nothing and int8 far less than what counts as lossless (docs/accuracy.md); top-k
costs more, and needs a better reason than they.

It does not flap: a milder encoding has to be good enough by the factor `EASE`, and a return that
had to be taken back doubles the time until the next (a transfer that computation hides when it is
small may need to be waited for when it is large; then the estimate of the dense step is too low).

Nor does it take a pause (an evaluation, a checkpoint) for the computation of the steps to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.agreed import Summary
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State
from gradwire.policies.parts.ladder import INT8

__all__ = ["Choice", "Waiting"]

ROUND_TRIPS = 3.0
"""Of what is waited for, in RTprop, that no encoding makes shorter."""

MEMORY = 0.8
"""What a step's times weigh after another one: the last five or so count."""

PAUSE = 2.0
"""What a step may have spent otherwise, in mean steps of before; more was no step's computation, or
is believed when it comes again: the mean grows with it."""

SHARE, SHARE_OF_INT8 = 0.15, 0.4
"""What of a step may be waiting for its transfer: in f32 and f16, and in int8, after which only
top-k comes."""

EASE = 1.5
HOLD, LONGEST_HOLD = 16, 512
"""Steps for which a ratio stays before it may rise; doubled by each return that did not last."""

F32_BYTES = 4


@dataclass(frozen=True)
class _Wait:
    """How long a step waited; how long it took is known when the next one begins.

    exposed_s, rtprop_s: seconds. ratio: the share of the dense bytes that were sent. short: the
    path takes the gradient within a round trip.
    """

    exposed_s: float
    rtprop_s: float
    ratio: float
    short: bool

    def of(self, period_s: float) -> tuple[float, float]:
        """(waiting, other) of a step that took `period_s`, were it dense."""
        waited = min(self.exposed_s, period_s) - ROUND_TRIPS * self.rtprop_s
        if self.short or waited <= 0.0:
            return 0.0, period_s
        return waited / self.ratio, period_s - waited


@dataclass
class Waiting:
    """One worker's times in seconds, as if its transfers were dense, and steps: decaying sums."""

    waiting_s: float = 0.0
    other_s: float = 0.0
    steps: float = 0.0
    last: _Wait | None = None

    def rest(self, elapsed_s: float) -> float:
        """The share of the last steps that would not be waiting; 1 while nothing is known.

        elapsed_s: since the start of the last one.
        """
        waiting, other, _ = self._with_last(elapsed_s)
        return other / (waiting + other) if waiting > 0.0 else 1.0

    def observe(self, report: StepReport) -> None:
        """Takes a step's report.

        A gradient that the path takes within a round trip has nothing to save. A step whose path
        is not known yet counts for nothing: it may have been all waiting, or none.
        """
        if report.period_s > 0.0:
            self.waiting_s, self.other_s, self.steps = self._with_last(report.period_s)
        self.last = None
        if report.btlbw > 0.0 and report.rtprop_s > 0.0:
            short = F32_BYTES * report.elements <= report.btlbw * report.rtprop_s
            sent = report.encoded_share
            self.last = _Wait(report.exposed_s, report.rtprop_s, sent, short)

    def _with_last(self, period_s: float) -> tuple[float, float, float]:
        if self.last is None:
            return self.waiting_s, self.other_s, self.steps
        waiting, other = self.last.of(period_s)
        if self.steps > 1.0:  # one step alone may itself have been anything
            other = min(other, PAUSE * (self.waiting_s + self.other_s) / self.steps)
        sums = (self.waiting_s, waiting), (self.other_s, other), (self.steps, 1.0)
        waiting_s, other_s, steps = (MEMORY * old + new for old, new in sums)
        return waiting_s, other_s, steps

    def state_dict(self) -> dict[str, Any]:
        """The sums; after a restart no step has begun that could be paired with the last one."""
        return {"waiting_s": self.waiting_s, "other_s": self.other_s, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError."""
        read = State(state, "state['phases']['waiting']")
        read.keys(("waiting_s", "other_s", "steps"))
        self.waiting_s, self.other_s = read.number("waiting_s", 0.0), read.number("other_s", 0.0)
        self.steps = read.number("steps", 0.0)
        self.last = None


@dataclass
class Choice:
    """The agreed ratio: 1, 1/2, 1/4 …, with `floor` in place of the first below it; the same on
    all ranks.

    age: steps since it changed. hold: how old it must be before it may rise. eased: whether it rose
    at the last change.
    """

    floor: float
    ratio: float = 1.0
    age: int = 0
    hold: int = HOLD
    eased: bool = False

    def stop_at(self, floor: float) -> None:
        """The ratio goes no lower than `floor`: what is below it could not be sent."""
        self.floor = max(self.floor, floor)
        self.ratio = max(self.ratio, self.floor)

    def observe(self, summary: Summary) -> None:
        """Takes the agreed rest, in the steps that tell it, and moves the ratio at once as far as
        it says."""
        self.age += 1
        if summary.rest is None:
            return
        if (lower := self._rung(summary.rest)) < self.ratio:
            if self.eased and self.age < self.hold:
                self.hold = min(2 * self.hold, LONGEST_HOLD)
            self._move(lower, eased=False)
        elif self.age >= self.hold and (higher := self._rung(summary.rest, EASE)) > self.ratio:
            self._move(higher, eased=True)

    def _move(self, ratio: float, *, eased: bool) -> None:
        self.ratio, self.age, self.eased = ratio, 0, eased

    def _rung(self, rest: float, room: float = 1.0) -> float:
        """The mildest ratio that is enough, with room by this factor."""
        ratio = 1.0
        while ratio > self.floor and room * ratio > _most(ratio, rest):
            ratio = max(self.floor, ratio / 2.0)
        return ratio

    def state_dict(self) -> dict[str, Any]:
        """Ratio, age, hold, and whether the last change was a rise."""
        return {"ratio": self.ratio, "age": self.age, "hold": self.hold, "eased": self.eased}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError."""
        read = State(state, "state['phases']['choice']")
        read.keys(("ratio", "age", "hold", "eased"))
        ratio = read.number("ratio", 0.0, 1.0)
        self.ratio, self.age = max(self.floor, ratio), read.whole("age")
        self.hold, self.eased = read.whole("hold", high=LONGEST_HOLD), read.flag("eased")


def _most(ratio: float, rest: float) -> float:
    """The share of the dense bytes with which waiting takes what it may of a step at `ratio`."""
    share = SHARE if ratio > INT8 else SHARE_OF_INT8
    return share / (1.0 - share) * rest / max(1.0 - rest, 1e-9)
