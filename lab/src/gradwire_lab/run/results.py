"""results.json holds all of a run: machine, kernel, numbers, raw samples and marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradwire_lab.contest.measure import environment
from gradwire_lab.run.build import build as build_here
from gradwire_lab.run.build import machine
from gradwire_lab.run.course import Outcome
from gradwire_lab.run.journal import fingerprint
from gradwire_lab.run.marks import Measured, judge, unjudged
from gradwire_lab.run.model import (
    FORMAT,
    KIND,
    CellResult,
    CellRun,
    Kernel,
    Record,
    Results,
    as_json,
)
from gradwire_lab.run.summary import summarize
from gradwire_lab.run.wires import losers
from gradwire_lab.scenario.load import Cell
from gradwire_lab.scenario.network import Topology
from gradwire_lab.scenario.reader import build

__all__ = ["document"]


def document(outcome: Outcome, command: str) -> Results:
    """Put everything that is known about an experiment together, as `results.json` has it.

    Marks are judged over all cells and seeds of the file. A cell that was not run, failed, or ran
    in another form leaves a mark open where it could change the result. The short form leaves all
    marks open, because its samples are too few. A cell's numbers are those
    of the seeds that did not fail, or of all seeds where all failed. Runs of another form of a cell
    get no limit, because a limit follows from the file as it is now.
    """
    experiment, first = outcome.experiment, outcome.experiment.first
    dates = sorted(record.date for record in outcome.records.values())
    cells, measured, others = [], [], []
    for cell in experiment.cells:
        records = [each for (name, _), each in outcome.records.items() if name == cell.name]
        form = fingerprint(cell, experiment.quick)
        same = all(each.scenario == form for each in records)
        if not same:
            others.append(cell.name)
        cells.append(_cell(cell, records, same))
        sound = {each.seed for each in records if each.run.error is None}
        summaries = {each.name: each for each in cells[-1].contestants} if sound else {}
        measured.append(Measured(cell, summaries, same and sound >= set(first.work.seeds)))
    marks = [judge(mark, measured) for mark in first.marks]
    if experiment.quick:
        marks = [unjudged(mark, "the short form has too few samples") for mark in marks]
    result = Results(
        kind=KIND,
        format=FORMAT,
        scenario=first.name,
        title=experiment.title,
        published=first.published,
        quick=experiment.quick,
        date=dates[-1],
        dates=(dates[0], dates[-1]),
        commits=sorted({each.commit for each in outcome.records.values() if each.commit}),
        command=command,
        **_makers(list(outcome.records.values())),
        kernel=_kernel(outcome),
        work=first.work,
        seeds=outcome.seeds,
        missing=outcome.missing,
        map=first.map,
        file=experiment.raw,
        left_out=dict(experiment.left_out),
        calibrations=outcome.calibrations,
        cells=cells,
        marks=marks,
        errors=outcome.errors,
        other_forms=others,
        wall_s=sum(record.took_s for record in outcome.records.values()),
    )
    return build(Results, as_json(result), "results")  # reports show what is written


def _makers(records: list[Record]) -> dict[str, Any]:
    """Name what made the runs: this gradwire and machine, or those that the journal names."""
    builds = sorted({each.gradwire for each in records})
    machines: list[dict[str, Any]] = []
    for each in records:
        if each.machine not in machines:
            machines.append(each.machine)
    here = builds == [build_here()] and machines == [machine()]
    return {
        "machine": environment() if here else machines[-1],
        "machines": machines,
        "gradwire": ", ".join(builds),
        "elsewhere": not here,
        "settings": {name: value for each in records for name, value in each.settings.items()},
    }


def _kernel(outcome: Outcome) -> Kernel:
    """Describe what made the network.

    TCP's algorithms are left out where another machine ran a cell, since they are this kernel's.
    """
    topologies = [cell.scenario.topology for cell in outcome.experiment.cells]
    wires = {run.link for run in outcome.runs.values() if run.link}
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    here = all(record.machine == machine() for record in outcome.records.values())
    return Kernel(
        offloads=sorted({"on" if each.ports.offloads else "off" for each in topologies}),
        topology=list(dict.fromkeys(each.words for each in topologies)),
        shaper=_shaper(topologies),
        loss=_losers(outcome),
        wires=sorted(wires) or ["veth pairs, no delay added"],
        congestion_controls=available.read_text().split() if here and available.exists() else [],
    )


def _losers(outcome: Outcome) -> list[str]:
    """Name what lost packets by chance in the cells that were run."""
    nftables, wires = False, set[str]()
    for cell in outcome.experiment.cells:
        runs = [run for (name, _), run in outcome.runs.items() if name == cell.name]
        if runs and cell.scenario.loss.any:
            by_kernel, by_wires = losers(cell.scenario)
            nftables = nftables or by_kernel
            wires |= {run.link for run in runs if run.link and by_wires}
    found = ["nftables, behind the port's rate"] if nftables else []
    found += [f"the hosts' wires ({wire}), packet by packet" for wire in sorted(wires)]
    return found or ["none"]


def _shaper(topologies: list[Topology]) -> str:
    kernel = "tbf on both directions of every port and uplink, drop-tail"
    if all(each.ecn is None for each in topologies):
        return kernel
    ours = "the lab's own queues towards hosts and on uplinks, which mark, tbf from hosts"
    return ours if all(each.ecn is not None for each in topologies) else f"{kernel}; or {ours}"


def _cell(cell: Cell, records: list[Record], limited: bool) -> CellResult:
    """Describe a cell's runs, and its contestants by the runs that count."""
    scenario = cell.scenario
    found = CellResult(
        cell.name,
        dict(cell.labels),
        scenario.topology,
        scenario.work,
        scenario.model,
        scenario.loss,
        scenario.rivals,
        contestants=[],
        runs=records,
    )
    counted: dict[int, CellRun] = {each.seed: each.run for each in found.counted}
    for each in scenario.contestants:
        summary = summarize(each, scenario, counted, limited=limited)
        if summary is not None:
            found.contestants.append(summary)
    return found
