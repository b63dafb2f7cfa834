"""Which encoding the trials find, how soon, and what they spend on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gradwire.core.agreed import GAUGES, Ballot, Pace, Summary
from gradwire.core.errors import ConfigError
from gradwire.core.plan import encoded_share
from gradwire.core.report import StepReport
from gradwire.policies.parts.trials import ALLOWANCE, SHARE, Trials
from gradwire.sim.job import Job

ENCODINGS = [("f32", 1.0), ("f16", 1.0), ("int8", 1.0)]


@pytest.fixture(scope="module")
def report() -> StepReport:
    job = Job(2, {"a.weight": 1000}, "adaptive")
    job.step([np.ones(1000, np.float32)] * 2)
    return job.report


@dataclass
class Steps:
    """What the steps of a job are made of, in seconds.

    Attributes:
        compute: What the model takes.
        network: What the network takes for float32.
        coding: What the processor takes for an encoding.
        seen: What is seen of `coding` before an encoding was tried; None for all of it.
    """

    compute: float = 1.0
    network: float = 0.0
    coding: float = 0.0
    seen: float | None = None

    def pace(self, encoding: str, kept: float) -> Pace:
        network = self.network * encoded_share(encoding, kept)
        step_s = self.compute + network + self.coding * (encoding != "f32")
        seen = self.coding if self.seen is None else self.seen
        return Pace(step_s, network / step_s, seen / step_s)


class Run:
    """Steps of a job; reports as a worker would have them."""

    def __init__(self, report: StepReport, steps: Steps, start: int = 0) -> None:
        self.report, self.steps = report, steps
        self.trials = Trials(ENCODINGS, start, start)
        self.step = 0
        self.last: Pace | None = None
        self.seen: list[str] = []
        self.took: list[float] = []
        self.on_trial = 0
        self.lost = 0  # steps of trials that were lost
        self.trial = 0  # steps of this one
        self.noise = np.random.default_rng(0)
        self.spread = 0.0

    def go(self, steps: int, **report: Any) -> list[str]:
        """Returns the encodings of some more steps."""
        for _ in range(steps):
            encoding, kept = self.trials.encoding
            self.on_trial += self.trials.running != self.trials.current
            pace = self.last if GAUGES[self.step % len(GAUGES)] == "pace" else None
            agreed = replace(self.report.agreed, step=self.step, pace=pace)
            given = {"encoded_share": encoded_share(encoding, kept), **report}
            before = self.trials.current, self.trials.running
            self.trials.observe(replace(self.report, step=self.step, agreed=agreed, **given))
            if before[0] != before[1]:
                self.trial += 1
                if self.trials.running == before[0]:
                    self.lost += self.trial
            if self.trials.running != before[1]:
                self.trial = 0
            pace = self.steps.pace(encoding, kept)
            took = pace.step_s * float(self.noise.lognormal(0.0, self.spread))
            self.last = replace(pace, step_s=took)
            self.took.append(took)
            self.seen.append(encoding)
            self.step += 1
        return self.seen[-steps:]


@pytest.mark.parametrize(
    ("steps", "used", "tried"),
    [
        (Steps(network=0.0), "f32", 0),
        (Steps(network=0.03), "f32", 0),  # too little to give up exact sums for
        (Steps(network=0.2, coding=0.15), "f32", 0),  # the processor would take what is saved
        (Steps(network=0.05, coding=0.02), "f32", 0),  # as over the loopback interface
        (Steps(network=0.1), "int8", 16),  # and f16 for a moment
        (Steps(network=1.0, coding=0.1), "int8", 12),
        (Steps(network=0.1, coding=0.2, seen=0.0), "f32", 6),  # found out by trying each
    ],
)
def test_only_what_can_win_is_tried_and_used_where_it_wins(
    report: StepReport, steps: Steps, used: str, tried: int
) -> None:
    run = Run(report, steps)
    run.go(100)
    assert run.seen[-1] == used
    assert run.on_trial <= tried
    assert sum(run.took) <= 1.03 * 100 * min(steps.pace(*each).step_s for each in ENCODINGS)


def test_a_trial_begins_only_when_the_network_cost_more_than_the_trial_can(
    report: StepReport,
) -> None:
    few, many = Run(report, Steps(network=0.1)), Run(report, Steps(network=2.0))
    few.go(100)
    many.go(100)
    first, soon = few.seen.index("int8"), many.seen.index("int8")
    assert soon <= 3
    assert first >= 10
    assert 0.75 * 0.1 / 1.1 * first >= 0.5  # two steps that take a quarter longer


def test_a_lost_trial_is_over_within_three_steps_and_not_soon_repeated(report: StepReport) -> None:
    """The network promises much, and the processor takes it all."""
    run = Run(report, Steps(network=1.0, coding=0.9, seen=0.0))
    run.go(100)
    assert run.on_trial <= 9  # of both encodings, of one again
    assert run.go(100).count("f32") >= 90


@pytest.mark.parametrize("seed", range(5))
def test_noise_costs_no_more_than_two_per_cent_of_the_steps(report: StepReport, seed: int) -> None:
    run = Run(report, Steps(network=0.1, coding=0.07, seen=0.0))
    run.noise, run.spread = np.random.default_rng(seed), 0.2
    run.go(5000)
    assert 0 < run.lost <= SHARE * 5000 + ALLOWANCE


def test_it_looks_again_when_the_network_changes(report: StepReport) -> None:
    run = Run(report, Steps())
    assert set(run.go(400)) == {"f32"}
    run.steps = Steps(network=3.0)
    assert run.go(60)[-40:].count("int8") == 40
    run.steps = Steps(coding=0.02)
    assert run.go(40)[-20:].count("f32") == 20


def test_a_network_that_changes_all_the_time_has_no_more_lost_trials(report: StepReport) -> None:
    run = Run(report, Steps())
    for turn in range(100):
        run.steps = Steps(network=3.0 * (turn % 2))
        run.go(60)
    assert run.lost <= SHARE * run.step + ALLOWANCE
    assert run.seen.count("int8") >= 0.7 * 3000


def test_a_milder_encoding_takes_the_place_of_a_stronger_one_that_saves_nothing(
    report: StepReport,
) -> None:
    run = Run(report, Steps(coding=0.02), start=2)
    run.go(60)
    assert run.seen[-1] == "f32"
    busy = Run(report, Steps(network=1.0), start=2)
    busy.go(300)
    assert set(busy.seen) == {"int8"}


@pytest.mark.parametrize(
    ("steps", "first", "used"),
    [
        (Steps(network=3.0), 2, "int8"),  # by the first pace, which is clear
        (Steps(network=0.05, coding=0.01), 3, "f32"),  # the first step may be slow of itself
        (Steps(network=0.9, coding=0.01), 3, "f16"),
    ],
)
def test_a_job_begins_with_half_precision_and_chooses_by_its_first_paces(
    report: StepReport, steps: Steps, first: int, used: str
) -> None:
    run = Run(report, steps)
    run.trials = Trials.from_half(ENCODINGS)
    assert run.go(first) == ["f16"] * first
    assert run.go(1) == [used]
    assert run.on_trial == 0


def test_pauses_count_in_no_encoding(report: StepReport) -> None:
    run = Run(report, Steps(network=0.5))
    for _ in range(20):
        run.go(9)
        run.steps = Steps(compute=60.0, network=0.5)
        run.go(1)
        run.steps = Steps(network=0.5)
    assert set(run.go(100)) == {"int8"}


def test_an_exact_step_says_nothing_of_an_encoding(report: StepReport) -> None:
    run = Run(report, Steps(network=1.0))
    run.go(60)
    assert run.trials.encoding == ("int8", 1.0)
    run.steps = Steps(compute=9.0)
    assert set(run.go(200, encoded_share=1.0)) == {"int8"}  # all flushed, which is no change


def test_the_pace_of_the_worker_that_waited_least_is_agreed_on() -> None:
    paces = [Pace(0.25, 0.8, 0.1), Pace(0.2501, 0.02, 0.3), Pace(0.2499, 0.9, 0.0)]
    step = GAUGES.index("pace")
    slots = [Ballot(gauge=pace.gauge()).slots() for pace in paces]
    sums = [sum(column) for column in zip(*(each[:4] for each in slots), strict=True)]
    maxima = [max(column) for column in zip(*(each[4:] for each in slots), strict=True)]
    agreed = Summary.fold(step, 3, [(sums, maxima)]).pace
    assert agreed is not None
    assert agreed.step_s == pytest.approx(0.2501, rel=1e-6)
    assert (agreed.network, agreed.coding) == pytest.approx((0.02, 0.3), abs=0.001)
    assert Summary.fold(step, 3, [([0.0] * 4, [0.0] * 4)]).pace is None
    assert Summary.fold(step + 2, 3, [(sums, maxima)]).pace is None


def test_what_was_measured_survives_a_restart(report: StepReport) -> None:
    run = Run(report, Steps(network=0.2))
    while run.trials.running == run.trials.current:
        run.go(1)
    other = Trials(ENCODINGS)
    other.load_state_dict(run.trials.state_dict())
    assert other.state_dict() == run.trials.state_dict()
    assert other.encoding == ("f32", 1.0)
    run.trials = other  # the trial that was interrupted is begun again
    run.go(60)
    assert set(run.go(40)) == {"int8"}


def test_a_state_with_stronger_encodings_goes_on_with_those_that_are_left() -> None:
    saved = Trials([*ENCODINGS, ("topk", 0.125)], 3, 3).state_dict()
    trials = Trials(ENCODINGS)
    trials.load_state_dict({**saved, "times": [0.5], "costs": {0: 1.0, 3: 0.5}})
    assert trials.encoding == ("int8", 1.0)
    assert trials.times == []
    assert trials.costs == {0: 1.0}


@pytest.mark.parametrize(
    "wrong",
    [{"current": 4}, {"credits": {7: 1.0}}, {"costs": {0: -1.0}}, {"allowance": 1e9}, {"times": 1}],
)
def test_a_damaged_state_is_refused(wrong: dict[str, object]) -> None:
    trials = Trials(ENCODINGS)
    with pytest.raises(ConfigError):
        trials.load_state_dict({**trials.state_dict(), **wrong})
