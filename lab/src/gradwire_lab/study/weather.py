"""A scenario's weather is what it makes of a network, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.core.agreed import Phase, Summary
from gradwire.policies.parts.phases import PhaseDetector, RateWatch
from gradwire.sim.job import Job
from gradwire_lab.study.scenarios import Scenario

__all__ = ["PhaseWatch", "Weather"]

UNLUCKY = 1
"""The worker that bears all of an uneven loss."""


class PhaseWatch:
    """A phase watch gives the phase of training as gradwire's detector sees it, for any arm.

    So bursts meet the same rounds, whether the arm has phases or not.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._detector = PhaseDetector()
        self._rates = RateWatch()

    @property
    def phase(self) -> Phase:
        return self._detector.phase

    def observe(self, round_number: int, gradients: Sequence[NDArray[np.float32]]) -> None:
        squares = [float(np.dot(each, each)) for each in gradients]
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._detector.observe(
            Summary(
                round_number,
                fresh_norm=float(np.sqrt(np.mean(squares))),
                nonfinite=not np.isfinite(squares).all(),
                falling=self._rates.observe(rates),
            )
        )


class Weather:
    """A weather sets a job's links before each round."""

    def __init__(self, scenario: Scenario, job: Job, seed: Sequence[int]) -> None:
        self._scenario = scenario
        self._job = job
        self._chance = np.random.default_rng(list(seed))
        self.loss = 0.0  # the loss of this round

    def before_round(self, phase: Phase) -> None:
        """Let the computation pass and the network be as this round finds it."""
        scenario = self._scenario
        drawn = bool(self._chance.random() < scenario.share)
        loss = float(self._chance.choice(scenario.losses)) if scenario.losses else 0.0
        if not drawn or scenario.when not in ("always", phase):
            loss = 0.0
        self._job.compute(scenario.compute_s)
        if loss == self.loss:
            return
        self.loss = loss
        world = self._job.world
        for worker in range(world):
            share = loss
            if scenario.uneven:
                share = world * loss if worker == UNLUCKY else 0.0
            link = replace(scenario.link, loss=share, loss_burst=scenario.run)
            self._job.fabric.set_link(worker, "up", link)
