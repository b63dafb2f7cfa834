"""Trials: the encoding under which whole steps are shortest, found by trying.

This is gradwire's own. What an encoding saves depends on the network, and what it costs on the
processor, so neither is assumed: steps are timed. All ranks agree on how long each *block* of two
steps took at the slowest of them (`gradwire.core.agreed.GAUGES`), hence they decide alike.

- An encoding is tried for four blocks. The median of its last blocks is its time, so that a pause
  (an evaluation, a checkpoint) does not count.
- The mildest encoding whose time is within 3 % of the shortest is used. It replaces a stronger one
  only where steps take no longer with it, so that equal ones do not take turns.
- An encoding that is replaced is tried once more, since its own blocks may have been those of a job
  that was still finding its rate. Now and then the one that was tried longest ago is tried again.
- Where blocks of the encoding in use begin to take another time, the network has changed, or the
  job. The times of the others are forgotten then, and they are tried again.

The steps of trials are paid out of an allowance: 2 % of all steps, and what a job has at its start.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.core.agreed import GAUGES
from gradwire.core.plan import encoded_share
from gradwire.core.report import StepReport
from gradwire.core.saved_state import State

__all__ = ["ALLOWANCE", "BLOCK", "SHARE", "Encoding", "Trials"]

Encoding = tuple[str, float]
"""An encoding, and the share of the elements that it keeps."""

BLOCK = len(GAUGES) // GAUGES.count("block")
"""Steps of a block. The step after it sends its time."""

TRIAL, KEPT = 4, 12
"""Blocks of a trial, and the least and the most that make the time of an encoding."""

GAIN = 0.97
"""Longest time of a stronger encoding, relative to the milder one that it replaces."""

CHANGE, NEWEST = 1.5, 3
"""Factor that is a change of time, and the number of blocks in a row that have to show it."""

MOST = 4
"""Number of encodings that there can be."""

SHARE, ALLOWANCE, RESERVE = 0.02, 40.0, 16.0
"""Share of the steps that may be on trial, the most such steps that are saved up, as at first, and
how many of them are kept for a change."""


@dataclass
class Trials:
    """The encoding of the next step, which is the same on all ranks.

    Attributes:
        encodings: What may be sent, from the mildest to the strongest.
        current: The encoding in use, as an index of these, like all below.
        running: The encoding of the present block, which may be on trial.
        left: Number of blocks of a trial that are not over.
        untried: What is to be tried next.
        times: Seconds of the last blocks by encoding.
        allowance: Number of steps that may be on trial.
        chosen: Whether the encoding in use was chosen by the times of all of them. One with which a
            job begins gives way to a milder one as if that had been in use.
    """

    encodings: Sequence[Encoding]
    current: int = 0
    running: int = 0
    left: int = 0
    untried: list[int] = field(default_factory=list)
    times: dict[int, list[float]] = field(default_factory=dict)
    allowance: float = ALLOWANCE
    chosen: bool = True
    _whole: bool = False  # whether the present block has been sent in its encoding from its start
    _timed: int | None = None  # the encoding of the block whose time comes next

    def __post_init__(self) -> None:
        self.untried = self._others()

    @classmethod
    def from_half(cls, encodings: Sequence[Encoding]) -> Trials:
        """Makes trials that begin with the second encoding, or the only one.

        A job that is worth an encoding waits for its network from the first step on, and half
        precision costs least where it is of no use.
        """
        start = min(1, len(encodings) - 1)
        return cls(encodings, start, start, chosen=False)

    @property
    def encoding(self) -> Encoding:
        """The encoding of the next step."""
        return self.encodings[self.running]

    def observe(self, report: StepReport) -> None:
        """Reads the report of a step; at the end of a block it decides about the next one."""
        self.allowance = min(ALLOWANCE, self.allowance + SHARE)
        if self.running != self.current:
            self.allowance -= 1.0
        if report.agreed.block_s is not None and self._timed is not None:
            self._take(self._timed, report.agreed.block_s)
        self._timed = None
        # A step that was made exact, or sent again, says nothing about the encoding.
        if report.encoded_share > encoded_share(*self.encoding) + 1e-6:
            self._whole = False
        if (report.step + 1) % BLOCK == GAUGES.index("block"):
            self._timed = self.running if self._whole else None
            self._whole = True
            self._begin_block()

    def state_dict(self) -> dict[str, Any]:
        """Returns the times and the allowance. A trial that was interrupted is still to come."""
        started = [self.running] if self.running != self.current else []
        return {
            "current": self.current,
            "untried": started + self.untried,
            "times": {index: list(times) for index, times in self.times.items()},
            "allowance": self.allowance,
            "chosen": self.chosen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; raises ConfigError for anything else.

        What was measured of encodings that are not allowed here is dropped.
        """
        read = State(state, "state['phases']['trials']")
        read.keys(("current", "untried", "times", "allowance", "chosen"))
        last = len(self.encodings) - 1
        saved = read.whole("current", high=MOST - 1)
        current = min(saved, last)
        untried = [int(each) for each in read.numbers("untried", 0)]
        if saved in untried or max(untried, default=0) >= MOST:
            raise read.wrong("untried", f"encodings from 0 to {MOST - 1}, but {saved}")
        untried = [each for each in untried if each <= last and each != current]
        times = read.part("times").lists_by_bucket()
        if any(index >= MOST for index in times):
            raise read.wrong("times", f"encodings from 0 to {MOST - 1}")
        times = {index: seconds for index, seconds in times.items() if index <= last}
        self.allowance = read.number("allowance", -ALLOWANCE, ALLOWANCE)
        self.chosen = read.flag("chosen") and saved == current
        self.current = self.running = current
        self.untried, self.times, self.left = untried, times, 0
        self._whole, self._timed = False, None

    def _others(self) -> list[int]:
        return [each for each in range(len(self.encodings)) if each != self.current]

    def _take(self, encoding: int, seconds: float) -> None:
        """Takes the time of a block."""
        known = self.times.setdefault(encoding, [])
        known.append(seconds)
        if len(known) <= KEPT:
            return
        del known[0]
        usual, newest = statistics.median(known[:-NEWEST]), known[-NEWEST:]
        if encoding == self.current and (
            min(newest) > CHANGE * usual or CHANGE * max(newest) < usual
        ):
            self.times = {encoding: newest}
            self.untried = self._others()

    def _begin_block(self) -> None:
        """Decides about the encoding of the block that comes."""
        if self.left > 0:
            self.left -= 1
            if self.left == 0:
                self.running = self.current  # for a block, in which the trial's last time comes
            return
        known = len(self.times.get(self.current, ())) >= TRIAL
        affordable = known and self.allowance >= TRIAL * BLOCK
        if not (self.untried and affordable):
            self._choose()
        others = self._others()
        if others and not self.untried and self.allowance >= RESERVE + TRIAL * BLOCK:
            # Times are in the order in which they were begun; one without any has none that counts.
            begun = [*self.times]
            self.untried = [
                min(others, key=lambda index: begun.index(index) if index in begun else -1)
            ]
        if self.untried and affordable:
            self.running, self.left = self.untried.pop(0), TRIAL
            self.times.pop(self.running, None)
        else:
            self.running = self.current

    def _choose(self) -> None:
        """Decides about the encoding in use."""
        known = {
            index: statistics.median(times)
            for index, times in self.times.items()
            if len(times) >= TRIAL
        }
        now = known.get(self.current)
        if now is None:
            return
        most = min(known.values()) / GAIN
        before = self.current
        self.current = min(
            index
            for index, time in known.items()
            if time <= most and (index > before or time <= now or not self.chosen)
        )
        self.chosen = self.chosen or len(known) == len(self.encodings)
        if self.current != before:
            self.untried = [each for each in self.untried if each != self.current]
            self.untried += [before] if before not in self.untried else []
