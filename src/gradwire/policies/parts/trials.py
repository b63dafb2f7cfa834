"""Trials: the encoding under which steps are shortest, found by trying where that can pay.

This is gradwire's own. What an encoding saves depends on the network, and what it costs on the
processor. In every other step all ranks agree on the *pace* of the step before
(`gradwire.core.agreed.Pace`): how long it took, for how much of that the network held it up, and
what encoding takes of the processor. Hence they decide alike.

- A pace promises the time of another encoding: the network's share changes as the bytes do, and the
  processor's comes or goes.
- An encoding is worth a trial where it promises a gain: a stronger one of 3 %, while a milder one
  may promise a loss of 3 %, since exact sums are worth that. Others are never tried.
- The gains that steps promise are added up. Once they exceed what a trial may cost, it begins.
- A trial goes on while its steps are shorter than those of the encoding in use, by 3 % for a
  stronger one, and is over at the first sign that they are not. After four paces it is won.
- What the steps of the encoding that is beaten take beyond its promise is a cost that is added to
  its promises from then on. The cost fades, since it may have been chance.
- Where paces of the encoding in use become longer or shorter by half, the network has changed, or
  the job. Then promises and costs are forgotten.

A job begins with the second encoding, half precision, and its first paces decide about the first
choice, which takes no trial. The steps of lost trials are paid out of an allowance besides: 2 % of
all steps, and what a job has at its start.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.core.agreed import GAUGES, Pace
from gradwire.core.plan import encoded_share
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State

Encoding = tuple[str, float]
"""An encoding, and the share of the elements that it keeps."""

EVERY = len(GAUGES) // GAUGES.count("pace")
"""Mean number of steps from one pace to the next."""

GAIN = 0.97
"""Longest time of a stronger encoding on trial, relative to the one in use."""

PROMISE = 0.03
"""Gain that a stronger encoding has to promise, and loss that a milder one may promise."""

PRICE, MILD_PRICE = 0.5, 0.15
"""What a trial may cost, in steps: as much as if two steps took a quarter longer; of a milder
encoding, what it promises to lose at most, and a half more."""

DEBT = 1.0
"""The gain, in steps, that an encoding has to promise besides once it has lost a trial."""

CLEAR, BEARABLE = 0.2, 0.3
"""Promised gain for which the first choice is a stronger encoding than half precision, and promised
loss up to which it is a milder one."""

TRIAL, KEPT = 4, 12
"""Paces of a trial that is won, and the most that make the time of the encoding in use."""

LONGEST = TRIAL * EVERY + 1
"""The most steps that a trial takes."""

DOUBT = 0.04
"""What the time of a trial may be longer by after its first pace, and a part of that after further
ones, since single steps vary."""

FADING = 0.99
"""What is left of a cost after another pace."""

CHANGE, NEWEST = 1.5, 3
"""Factor that is a change of time, and the number of paces in a row that have to show it."""

MOST = 4
"""Number of encodings that there can be."""

SHARE, ALLOWANCE = 0.02, 24.0
"""Share of the steps that may be on trials that are lost, and the most such steps that are saved
up, as at first."""


@dataclass
class Trials:
    """The encoding of the next step, which is the same on all ranks.

    Attributes:
        encodings: What may be sent, from the mildest to the strongest.
        current: The encoding in use, as an index of these, like all below.
        running: The encoding of the next step, which may be on trial.
        times: Seconds of the last steps in the encoding in use.
        tried: Seconds of the steps of the trial.
        promised: Seconds that they were to take.
        credits: By encoding, the gains that it promised since it was last tried, in steps.
        costs: By encoding, the seconds that a step takes beyond what was promised.
        allowance: Number of steps that may be on trials that are lost.
        chosen: Whether the first choice was made.
    """

    encodings: Sequence[Encoding]
    current: int = 0
    running: int = 0
    times: list[float] = field(default_factory=list)
    tried: list[float] = field(default_factory=list)
    promised: float = 0.0
    spent: float = 0.0
    credits: dict[int, float] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    allowance: float = ALLOWANCE
    chosen: bool = True
    _sent: int | None = None  # the encoding of the step before, if it went in that

    @classmethod
    def from_half(cls, encodings: Sequence[Encoding]) -> Trials:
        """Makes trials that begin with the second encoding, or the only one.

        Half precision costs least where it is of no use, and saves half where it is of use.
        """
        start = min(1, len(encodings) - 1)
        return cls(encodings, start, start, chosen=False)

    @property
    def encoding(self) -> Encoding:
        return self.encodings[self.running]

    def observe(self, report: StepReport) -> None:
        """Reads the report of a step, and decides about the next one where it brings a pace."""
        self.allowance = min(ALLOWANCE, self.allowance + SHARE)
        if self.running != self.current:
            self.allowance -= 1.0
            self.spent += 1.0
        sent, self._sent = self._sent, self.running
        # A step that was made exact, or sent again, says nothing about the encoding.
        if report.encoded_share > encoded_share(*self.encoding) + 1e-6:
            self._sent = None
        pace = report.agreed.pace
        if pace is None or sent != self.running:
            return
        if not self.chosen:
            self._choose(pace)
        elif self.running != self.current:
            self._judge(pace)
        else:
            self._take(pace.step_s)
            self._consider(pace)

    def state_dict(self) -> dict[str, Any]:
        """Returns what is known. A trial that is interrupted is still to come."""
        credits = dict(self.credits)
        if self.running != self.current:
            credits[self.running] = PRICE
        return {
            "current": self.current,
            "times": list(self.times),
            "credits": credits,
            "costs": dict(self.costs),
            "allowance": self.allowance,
            "chosen": self.chosen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else.

        Where the encoding in use is not allowed here, what was measured of it is dropped.
        """
        read = State(state, "state['phases']['trials']")
        read.keys(("current", "times", "credits", "costs", "allowance", "chosen"))
        last = len(self.encodings) - 1
        saved = read.whole("current", high=MOST - 1)
        current = min(saved, last)
        times = read.numbers("times", 0.0)
        credits = self._read_each(read, "credits", -DEBT)
        costs = self._read_each(read, "costs", 0.0)
        self.allowance = read.number("allowance", -ALLOWANCE, ALLOWANCE)
        self.chosen = read.flag("chosen") and saved == current
        self.current = self.running = current
        self.times = times[-KEPT:] if saved == current else []
        self.credits, self.costs = credits, costs
        self.tried, self._sent = [], None

    def _read_each(self, read: State, key: str, low: float) -> dict[int, float]:
        values = read.part(key).by_bucket(low)
        if any(index >= MOST for index in values):
            raise read.wrong(key, f"encodings from 0 to {MOST - 1}")
        return {index: value for index, value in values.items() if index < len(self.encodings)}

    def _others(self) -> list[int]:
        return [each for each in range(len(self.encodings)) if each != self.current]

    def _gain(self, index: int, pace: Pace) -> float:
        """Returns the share of a step that an encoding promises to save by a pace of another."""
        (now, kept), (then, would_keep) = self.encodings[self.running], self.encodings[index]
        bytes_saved = 1.0 - encoded_share(then, would_keep) / encoded_share(now, kept)
        coding_saved = (now != "f32") - (then != "f32")
        cost = self.costs.get(index, 0.0) / pace.step_s
        return pace.network * bytes_saved + pace.coding * coding_saved - cost

    def _best(self, gains: Mapping[int, float]) -> int:
        """Returns the mildest encoding that no stronger one promises to beat by enough."""
        least = (1.0 - max(gains.values())) / (1.0 - PROMISE)
        return min(index for index, gain in gains.items() if 1.0 - gain <= least)

    def _choose(self, pace: Pace) -> None:
        """Makes the first choice, by the first pace only where it is clear.

        The first step is slow of itself, for whatever is done once is done in it.
        """
        gains = {each: self._gain(each, pace) for each in self._others()}
        clear = {each: gain for each, gain in gains.items() if gain >= CLEAR}
        mild = [each for each in gains if each < self.current and gains[each] >= -BEARABLE]
        if not clear and not self.times:
            self.times = [pace.step_s]
            return
        self.chosen = True
        if clear:
            self.current = self._best(clear)
        elif mild:
            self.current = min(mild)
        self.running, self.times = self.current, []

    def _take(self, seconds: float) -> None:
        self.times = [*self.times, seconds][-KEPT - NEWEST :]
        before, newest = self.times[:-NEWEST], self.times[-NEWEST:]
        if not before:
            return
        usual = statistics.median(before)
        if min(newest) > CHANGE * usual or CHANGE * max(newest) < usual:
            self.times, self.credits, self.costs = newest, {}, {}

    def _consider(self, pace: Pace) -> None:
        """Adds up what other encodings promise, and begins a trial that has earned its price."""
        gains = {each: self._gain(each, pace) for each in self._others()}
        for each, gain in gains.items():
            worth = gain + (PROMISE if each < self.current else -PROMISE)
            credit = self.credits.get(each, 0.0)
            self.credits[each] = max(min(0.0, credit), credit + EVERY * worth)
        self.costs = {index: FADING * cost for index, cost in self.costs.items()}
        usual = statistics.median(self.times)
        steady = usual / CHANGE < pace.step_s < usual * CHANGE
        earned = {
            each: gain
            for each, gain in gains.items()
            if self.credits[each] >= (MILD_PRICE if each < self.current else PRICE)
        }
        if earned and steady and self.allowance >= LONGEST:
            trial = self._best(earned)
            self.promised, self.spent = usual * (1.0 - gains[trial]), 0.0
            self.running, self.tried, self.credits[trial] = trial, [], -DEBT

    def _judge(self, pace: Pace) -> None:
        self.tried.append(pace.step_s)
        trial, usual, tried = self.running, statistics.median(self.times), len(self.tried)
        took = statistics.median(self.tried)
        doubt = DOUBT / tried if tried < TRIAL else 0.0
        if took > usual * ((GAIN if trial > self.current else 1.0) + doubt):
            self.costs[trial] = max(0.0, self.costs.get(trial, 0.0) + took - self.promised)
            self.running = self.current
        elif tried == TRIAL:
            promised = took * (1.0 - self._gain(self.current, pace))
            self.costs = {self.current: max(0.0, usual - promised)}
            self.credits = {self.current: -DEBT}
            self.current, self.times = trial, self.tried
            self.allowance += self.spent
