"""The course of a run: seed by seed, cell by cell."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gradwire.lab.measure import softnet_drops
from gradwire.lab.network import LabUnavailable
from gradwire.lab.ranks import RankError
from gradwire.lab.run.checks import ENOUGH, QUICK_ENOUGH, Calibration, calibrate
from gradwire.lab.run.ground import open_ground
from gradwire.lab.run.samples import CellRun
from gradwire.lab.run.training import run_training
from gradwire.lab.run.transfers import run_transfers
from gradwire.lab.run.wires import wires_of
from gradwire.lab.scenario.load import Cell, Experiment

__all__ = ["Audience", "Outcome", "run"]


class Audience:
    """Hears how a run gets on; this one does nothing with it."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def tick(self, contestant: str, done: int) -> None:
        """A contestant has done so many rounds of the cell."""


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        experiment: what was to be done.
        began: in seconds of ``time.monotonic()``.
        calibrations: what the machine carries, one for each kind of network.
        runs: by cell name and seed, in the order in which they ran.
    """

    experiment: Experiment
    began: float
    calibrations: list[Calibration] = field(default_factory=list)
    runs: dict[tuple[str, int], CellRun] = field(default_factory=dict)

    @property
    def errors(self) -> list[str]:
        """What failed, a line each."""
        return [
            f"{name}, seed {seed}: {run.error}"
            for (name, seed), run in self.runs.items()
            if run.error
        ]


def run(experiment: Experiment, audience: Audience) -> Outcome:
    """Run every cell for every seed; a cell that fails is told in the outcome.

    Raises:
        ScenarioError: the machine does not reach a rate; nothing has run then.
    """
    outcome = Outcome(experiment, time.monotonic())
    known = set()
    enough = QUICK_ENOUGH if experiment.quick else ENOUGH
    for cell in experiment.cells:
        topology, kind = cell.scenario.topology, cell.scenario.work.kind
        wired = frozenset(wires_of(cell.scenario))
        key = (topology.ports, topology.hosts, topology.spread, topology.ecn, kind, wired)
        if key not in known:
            known.add(key)
            audience.stage(f"calibrating: {topology.ports.name}, {topology.words}")
            where = f"{experiment.path}: cell {cell.name}"
            outcome.calibrations.append(calibrate(cell.scenario, where, enough))
    for seed in experiment.first.work.seeds:
        for number, cell in enumerate(experiment.cells, 1):
            audience.stage(f"cell {number} of {len(experiment.cells)}, seed {seed}: {cell.name}")
            outcome.runs[cell.name, seed] = _run_cell(cell, seed, audience)
    return outcome


def _run_cell(cell: Cell, seed: int, audience: Audience) -> CellRun:
    result = CellRun(time.monotonic())
    before = softnet_drops()
    work = run_training if cell.scenario.work.kind == "training" else run_transfers
    try:
        with open_ground(cell.scenario, seed) as ground:
            result.link = ground.network.wires_by
            try:
                work(cell.scenario, seed, ground, result, audience.tick)
            finally:
                result.events = ground.events
                result.lossy = ground.lossy
                result.bursts = ground.bursts_sent()
                result.rivals = ground.rivals_read()
                result.lost = ground.network.lost_packets()
                result.marked = ground.marked_packets()
                result.wire_failures = ground.wire_failures()
    except (RankError, LabUnavailable) as error:
        result.error = str(error)
    result.softnet_drops = softnet_drops() - before
    return result
