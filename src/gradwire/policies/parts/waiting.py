"""The decision when compression pays: how much of a step passes with waiting for its transfer.

This is gradwire's own. NetSenseML compresses while the data in flight exceed 0.9 of the
bandwidth-delay product (`gradwire.policies.parts.compression`). That rule has two gaps: a step that
does nothing but communicate fills its path to 0.75 or 0.8 only, because pushes come before pulls
and both have ends, and it does not notice that other traffic took most of the path. What
compression can save is the time for which training waits: from the start of the step's last bucket,
when no computation is left, to the end of the step. Transfers that hide behind computation or
behind a slower worker cost nothing.

So each worker estimates its *rest*, the share of its steps that would not be waiting if transfers
were dense. Of the time that it waited three round trips stay, and the remainder is proportional to
the bytes. The ranks agree on the largest rest, since a worker that waits for a slower one has less
than that one. The encoding is the mildest under which waiting takes at most its allowed share of a
step. For f16 and int8 that share is small, because they cost next to no accuracy
(docs/accuracy.md); top-k costs more and has a larger one.

Two things keep the choice steady. A milder encoding must suffice with the factor `EASE` to spare,
and each return that does not last doubles the time until the next. (A transfer that computation
hides when it is small may have to be waited for when it is large; the estimate of the dense step is
then too low.) And a pause (an evaluation, a checkpoint) does not count as a step's computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.agreed import Summary
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State
from gradwire.policies.parts.compression import INT8

__all__ = ["Choice", "Waiting"]

ROUND_TRIPS = 3.0
"""Round trips (RTprop) of the waiting time that no encoding shortens."""

MEMORY = 0.8
"""Weight of a step's times after another step; about the last five count."""

PAUSE = 2.0
"""Most that a step may spend without waiting, in mean steps of before.

More is taken for a pause. Where it recurs, the mean grows with it, until it is taken in full."""

SHARE, SHARE_OF_INT8 = 0.15, 0.4
"""Largest share of a step that may be waiting: in f32 and f16, and in int8 before top-k."""

EASE = 1.5
HOLD, LONGEST_HOLD = 16, 512
"""Steps for which a ratio stays before it may rise; doubled by each return that did not last."""

F32_BYTES = 4


@dataclass(frozen=True)
class _Wait:
    """The waiting time of a step, whose duration is known only when the next one begins.

    Attributes:
        exposed_s: Seconds from the last bucket's start to the step's end.
        rtprop_s: RTprop in seconds.
        ratio: Share of the dense bytes that was sent.
        short: Whether the path takes the gradient within a round trip.
    """

    exposed_s: float
    rtprop_s: float
    ratio: float
    short: bool

    def of(self, period_s: float) -> tuple[float, float]:
        """Returns (waiting, other) in seconds of a step that took `period_s`, were it dense."""
        waited = min(self.exposed_s, period_s) - ROUND_TRIPS * self.rtprop_s
        if self.short or waited <= 0.0:
            return 0.0, period_s
        return waited / self.ratio, period_s - waited


@dataclass
class Waiting:
    """One worker's times, as if its transfers were dense: sums that decay with each step.

    Attributes:
        waiting_s: Seconds of waiting for transfers.
        other_s: Seconds of anything else.
        steps: Number of steps.
        last: The step whose duration is not known yet.
    """

    waiting_s: float = 0.0
    other_s: float = 0.0
    steps: float = 0.0
    last: _Wait | None = None

    def rest(self, elapsed_s: float) -> float:
        """Returns the share of the last steps that would not be waiting.

        Args:
            elapsed_s: Seconds since the start of the last step.

        Returns:
            The share in [0, 1]; 1 while nothing is known.
        """
        waiting, other, _ = self._with_last(elapsed_s)
        return other / (waiting + other) if waiting > 0.0 else 1.0

    def observe(self, report: StepReport) -> None:
        """Takes a step's report.

        A gradient that the path takes within a round trip has nothing to save. A step whose path
        is not known yet does not count, for the share of its waiting is unknown.
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
        if self.steps > 1.0:  # a single step may have been a pause itself
            other = min(other, PAUSE * (self.waiting_s + self.other_s) / self.steps)
        sums = (self.waiting_s, waiting), (self.other_s, other), (self.steps, 1.0)
        waiting_s, other_s, steps = (MEMORY * old + new for old, new in sums)
        return waiting_s, other_s, steps

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums; the last step is left out, since its duration stays unknown."""
        return {"waiting_s": self.waiting_s, "other_s": self.other_s, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        read = State(state, "state['phases']['waiting']")
        read.keys(("waiting_s", "other_s", "steps"))
        self.waiting_s, self.other_s = read.number("waiting_s", 0.0), read.number("other_s", 0.0)
        self.steps = read.number("steps", 0.0)
        self.last = None


@dataclass
class Choice:
    """The agreed ratio of bytes sent to dense ones: 1, 1/2, 1/4 … and `floor` at the end.

    It is the same on all ranks.

    Attributes:
        floor: The smallest ratio.
        ratio: The ratio.
        age: Steps since it changed.
        hold: Age in steps from which on it may rise.
        eased: Whether it rose at the last change.
    """

    floor: float
    ratio: float = 1.0
    age: int = 0
    hold: int = HOLD
    eased: bool = False

    def stop_at(self, floor: float) -> None:
        """Raises the smallest ratio to `floor`, where smaller ones could not be sent."""
        self.floor = max(self.floor, floor)
        self.ratio = max(self.ratio, self.floor)

    def observe(self, summary: Summary) -> None:
        """Takes the agreed rest, in the steps that hold it, and adapts the ratio at once."""
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
        """Returns the mildest ratio that suffices with the factor `room` to spare."""
        ratio = 1.0
        while ratio > self.floor and room * ratio > _most(ratio, rest):
            ratio = max(self.floor, ratio / 2.0)
        return ratio

    def state_dict(self) -> dict[str, Any]:
        """Returns ratio, age, hold, and whether the last change was a rise."""
        return {"ratio": self.ratio, "age": self.age, "hold": self.hold, "eased": self.eased}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else."""
        read = State(state, "state['phases']['choice']")
        read.keys(("ratio", "age", "hold", "eased"))
        ratio = read.number("ratio", 0.0, 1.0)
        self.ratio, self.age = max(self.floor, ratio), read.whole("age")
        self.hold, self.eased = read.whole("hold", high=LONGEST_HOLD), read.flag("eased")


def _most(ratio: float, rest: float) -> float:
    """Returns the share of dense bytes under which waiting takes its allowed share of a step."""
    share = SHARE if ratio > INT8 else SHARE_OF_INT8
    return share / (1.0 - share) * rest / max(1.0 - rest, 1e-9)
