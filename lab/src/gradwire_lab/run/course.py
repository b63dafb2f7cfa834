"""A run goes seed by seed and cell by cell; each cell is in the journal before the next begins."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire_lab.contest.measure import processor_time, softnet_drops
from gradwire_lab.contest.ranks import RankError
from gradwire_lab.network.network import LabUnavailable
from gradwire_lab.run.agenda import Agenda, Key, duration, time_left
from gradwire_lab.run.build import build, commit
from gradwire_lab.run.checks import ENOUGH, QUICK_ENOUGH, calibrate, fastest
from gradwire_lab.run.ground import open_ground
from gradwire_lab.run.journal import Journal, fingerprint
from gradwire_lab.run.model import Calibration, CellRun, Record
from gradwire_lab.run.training import run_training
from gradwire_lab.run.transfers import run_transfers
from gradwire_lab.run.wires import wires_of
from gradwire_lab.scenario.load import Cell, Experiment
from gradwire_lab.scenario.reader import ScenarioError

__all__ = ["Audience", "CodeChanged", "Outcome", "done", "outcome_of", "run"]


class CodeChanged(ScenarioError):
    """The code on the disk changed after the run began, so its cells could not be compared."""


class Audience:
    """An audience follows a run's progress; this one ignores it."""

    def stage(self, text: str) -> None:
        """A new stage has begun."""

    def tick(self, contestant: str, done: int) -> None:
        """A contestant has done so many rounds of the cell."""


@dataclass
class Outcome:
    """An outcome holds the runs that there are of an experiment.

    Attributes:
        experiment: what was to be done.
        calibrations: what the machine carries, one for each kind of network.
        records: the records by cell name and seed, in the order of the file.
    """

    experiment: Experiment
    calibrations: list[Calibration]
    records: dict[Key, Record]

    @property
    def runs(self) -> dict[Key, CellRun]:
        return {key: record.run for key, record in self.records.items()}

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.records})

    @property
    def missing(self) -> int:
        """Count the runs of the file that are missing or failed."""
        wanted = Agenda(self.experiment.cells, self.experiment.first.work.seeds)
        return len(wanted.due(done(self.records)))

    @property
    def errors(self) -> list[str]:
        return [
            f"{name}, seed {seed}: {run.error}"
            for (name, seed), run in self.runs.items()
            if run.error
        ]


def done(records: dict[Key, Record]) -> dict[Key, Record]:
    """Return the records that did not fail, and need not run again."""
    return {key: record for key, record in records.items() if record.run.error is None}


def outcome_of(experiment: Experiment, journal: Journal) -> Outcome:
    """Return all that a journal has of an experiment, whichever cells and seeds were asked for."""
    order = {cell.name: number for number, cell in enumerate(experiment.cells)}
    records = journal.known(experiment.cells, experiment.quick)
    # Some runs in experiments/results/dblp_round were calibrated on their cells' own networks.
    networks = {
        (topology.ports.name, topology.hosts)
        for cell in experiment.cells
        for topology in (fastest(cell.scenario), cell.scenario.topology)
    }
    newest = {
        (each.network, each.hosts, each.wanted): each
        for each in journal.calibrations
        if (each.network, each.hosts) in networks
    }
    return Outcome(
        experiment,
        list(newest.values()),
        dict(sorted(records.items(), key=lambda item: (order[item[0][0]], item[0][1]))),
    )


def run(
    experiment: Experiment,
    due: Sequence[tuple[Cell, int]],
    journal: Journal,
    audience: Audience,
) -> None:
    """Run cells and seeds one after another; those that fail are in the journal, too.

    Raises:
        ScenarioError: the machine does not reach a rate; nothing has run then.
        LabUnavailable: this machine cannot make the networks.
        CodeChanged: gradwire was changed meanwhile; the cell under way is not kept.
    """
    _check_code(experiment, journal)
    _calibrate(experiment, [cell for cell, _ in due], journal, audience)
    numbers = {cell.name: number for number, cell in enumerate(experiment.cells, 1)}
    for place, (cell, seed) in enumerate(due):
        known = done(journal.known(experiment.cells, experiment.quick))
        took = {key: record.took_s for key, record in known.items()}
        left = time_left([(each.name, number) for each, number in due[place:]], took)
        audience.stage(
            f"cell {numbers[cell.name]} of {len(experiment.cells)}, seed {seed}: {cell.name}"
            + ("" if left is None else f" (about {duration(left)} left)")
        )
        record = _run_cell(cell, seed, experiment.quick, journal, audience)
        _check_code(experiment, journal)
        journal.add(record)


def _check_code(experiment: Experiment, journal: Journal) -> None:
    if (now := build()) != journal.here[0]:
        raise CodeChanged(
            f"{experiment.path}: gradwire was changed while this ran ({journal.here[0]} is {now} "
            "now): the rest would be another's; the same command runs all of it with the new one"
        )


def _calibrate(
    experiment: Experiment, cells: Sequence[Cell], journal: Journal, audience: Audience
) -> None:
    known = set()
    enough = QUICK_ENOUGH if experiment.quick else ENOUGH
    for cell in cells:
        topology, kind = fastest(cell.scenario), cell.scenario.work.kind
        wired = frozenset(wires_of(cell.scenario))
        ports = tuple(map(topology.port, range(topology.hosts)))
        key = (ports, topology.spread, topology.ecn, kind, wired)
        if key not in known:
            known.add(key)
            audience.stage(f"calibrating: {topology.ports.name}, {topology.words}")
            where = f"{experiment.path}: cell {cell.name}"
            journal.add_calibration(calibrate(cell.scenario, where, enough))


def _run_cell(cell: Cell, seed: int, quick: bool, journal: Journal, audience: Audience) -> Record:
    gradwire, machine, settings = journal.here
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    load, began, before = os.getloadavg()[0], time.monotonic(), processor_time()
    samples = measure(cell, seed, audience)
    return Record(
        cell=cell.name,
        seed=seed,
        scenario=fingerprint(cell, quick),
        date=date,
        took_s=time.monotonic() - began,
        gradwire=gradwire,
        commit=commit(),
        machine=machine,
        settings=settings,
        load=load,
        stolen=processor_time().stolen_since(before),
        run=samples,
    )


def measure(cell: Cell, seed: int, audience: Audience) -> CellRun:
    """Run one cell with one seed; what fails is in the result's `error`."""
    result = CellRun(time.monotonic())
    before = softnet_drops()
    work = run_training if cell.scenario.work.kind == "training" else run_transfers
    try:
        with open_ground(cell.scenario, seed) as ground:
            result.link = ground.network.wires_by
            try:
                work(cell.scenario, seed, ground, result, audience.tick)
            except (RankError, LabUnavailable) as error:
                result.error = str(error)
            # Ctrl-C skips these: its samples are not kept, and the network may no longer answer.
            result.events = ground.events
            result.lossy = ground.lossy
            result.bursts = ground.bursts_sent()
            result.rivals = ground.rivals_read()
            result.lost = ground.network.lost_packets()
            result.marked = ground.marked_packets()
            result.wire_failures = ground.wire_failures()
    except (RankError, LabUnavailable) as error:
        result.error = result.error or str(error)
    result.softnet_drops = softnet_drops() - before
    return result
