"""Which encoding the trials find, how soon, and what they spend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradwire.core.errors import ConfigError
from gradwire.core.plan import encoded_share
from gradwire.core.report import StepReport
from gradwire.policies.parts.trials import ALLOWANCE, BLOCK, SHARE, Trials
from gradwire.sim.job import Job

ENCODINGS = [("f32", 1.0), ("f16", 1.0), ("int8", 1.0)]
Times = Callable[[str, int], float]


@pytest.fixture(scope="module")
def report() -> StepReport:
    job = Job(2, {"a.weight": 1000}, "adaptive")
    job.step([np.ones(1000, np.float32)] * 2)
    return job.report


class Run:
    """Steps whose times a function gives; reports as a worker would have them."""

    def __init__(self, report: StepReport, times: Times) -> None:
        self.report, self.times = report, times
        self.trials = Trials(ENCODINGS)
        self.step, self.block_s = 0, 0.0
        self.seen: list[str] = []
        self.on_trial = 0

    def go(self, steps: int, **report: Any) -> list[str]:
        """Returns the encodings of some more steps."""
        for _ in range(steps):
            sent = self.step % BLOCK == 1
            block_s = self.block_s if sent and self.block_s else None
            self.block_s = 0.0 if sent else self.block_s
            encoding, kept = self.trials.encoding
            self.on_trial += self.trials.running != self.trials.current
            self.block_s += self.times(encoding, self.step)
            agreed = replace(self.report.agreed, step=self.step, block_s=block_s)
            given = {"encoded_share": encoded_share(encoding, kept), **report}
            self.trials.observe(replace(self.report, step=self.step, agreed=agreed, **given))
            self.seen.append(encoding)
            self.step += 1
        return self.seen[-steps:]


def of(f32: float, f16: float, int8: float) -> Times:
    times = {"f32": f32, "f16": f16, "int8": int8}
    return lambda encoding, step: times[encoding]


@pytest.mark.parametrize(
    ("times", "best"),
    [
        (of(1.0, 1.2, 1.1), "f32"),  # where the processor is what limits
        (of(1.0, 0.98, 0.98), "f32"),  # too little to give up exact sums for
        (of(1.0, 0.9, 0.95), "f16"),
        (of(1.0, 0.9, 0.88), "f16"),
        (of(1.0, 0.6, 0.4), "int8"),
        (of(1.0, 1.1, 0.8), "int8"),
    ],
)
def test_the_encoding_of_the_shortest_steps_is_found_within_a_hundred(
    report: StepReport, times: Times, best: str
) -> None:
    run = Run(report, times)
    assert set(run.go(10)) == {"f32"}  # nothing is tried before its own time is known
    run.go(84)
    assert set(run.go(300)) == {best}
    assert run.on_trial <= 24


@pytest.mark.parametrize("seed", range(5))
def test_noise_costs_no_more_than_two_per_cent_of_the_steps(report: StepReport, seed: int) -> None:
    chance = np.random.default_rng(seed)
    mean = {"f32": 1.0, "f16": 0.99, "int8": 1.01}
    run = Run(report, lambda encoding, step: mean[encoding] * float(chance.lognormal(0.0, 0.2)))
    run.go(5000)
    assert run.on_trial <= SHARE * 5000 + ALLOWANCE
    assert run.on_trial > 100  # and it has looked again


def test_it_looks_again_when_the_network_changes(report: StepReport) -> None:
    calm, busy = of(1.0, 1.02, 1.01), of(4.0, 2.2, 2.0)
    run = Run(report, lambda encoding, step: (calm if step < 400 else busy)(encoding, step))
    assert run.go(400)[-1] == "f32"
    run.go(100)
    assert run.go(500).count("int8") >= 488  # but for a trial that waited for its allowance
    run.times = calm
    run.go(300)  # by now the allowance is low
    assert run.go(500).count("f32") >= 476
    assert run.on_trial <= SHARE * run.step + ALLOWANCE


def test_a_network_that_changes_all_the_time_has_no_more_trials(report: StepReport) -> None:
    networks = of(1.0, 1.1, 1.1), of(4.0, 2.2, 1.2)
    run = Run(report, lambda encoding, step: networks[step // 60 % 2](encoding, step))
    run.go(6000)
    assert run.on_trial <= SHARE * 6000 + ALLOWANCE


def test_a_start_that_is_slow_of_itself_is_not_held_against_exact_sums(report: StepReport) -> None:
    """A job finds its rate within forty steps, whatever it sends meanwhile."""
    steady = of(1.0, 1.02, 1.03)
    run = Run(report, lambda encoding, step: steady(encoding, step) + 3.0 * 0.9**step)
    run.go(150)
    assert set(run.go(200)) == {"f32"}


def test_pauses_count_in_no_encoding(report: StepReport) -> None:
    steady = of(1.0, 0.8, 0.9)
    run = Run(report, lambda encoding, step: steady(encoding, step) + 60.0 * (step % 50 == 37))
    run.go(200)
    assert set(run.go(200)) == {"f16"}


def test_an_exact_step_says_nothing_of_an_encoding(report: StepReport) -> None:
    run = Run(report, of(1.0, 0.8, 0.9))
    run.go(150)
    assert run.trials.encoding == ("f16", 1.0)
    run.times = lambda encoding, step: 3.0
    assert set(run.go(200, encoded_share=1.0)) <= {"f16"}  # all flushed, which is no change


def test_what_was_measured_survives_a_restart(report: StepReport) -> None:
    run = Run(report, of(1.0, 0.8, 0.9))
    run.go(14)
    assert run.trials.running != run.trials.current
    other = Trials(ENCODINGS)
    other.load_state_dict(run.trials.state_dict())
    assert other.state_dict() == run.trials.state_dict()
    assert other.encoding == ("f32", 1.0)
    run.trials = other  # the trial that was interrupted is begun again
    run.go(150)
    assert set(run.go(100)) == {"f16"}


def test_a_state_with_stronger_encodings_goes_on_with_those_that_are_left() -> None:
    saved = Trials([*ENCODINGS, ("topk", 0.125)], 3, 3).state_dict()
    trials = Trials(ENCODINGS)
    trials.load_state_dict({**saved, "times": {0: [1.0], 3: [0.5]}})
    assert trials.encoding == ("int8", 1.0)
    assert trials.untried == [0, 1]
    assert trials.times == {0: [1.0]}


@pytest.mark.parametrize(
    "wrong",
    [{"current": 4}, {"untried": [0]}, {"times": {7: [1.0]}}, {"allowance": 1e9}, {"untried": "f"}],
)
def test_a_damaged_state_is_refused(wrong: dict[str, object]) -> None:
    trials = Trials(ENCODINGS)
    with pytest.raises(ConfigError):
        trials.load_state_dict({**trials.state_dict(), **wrong})
