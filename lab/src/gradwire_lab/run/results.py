"""results.json holds all of a run: machine, kernel, numbers, raw samples and marks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire.core.report import finite
from gradwire_lab.contest.measure import environment
from gradwire_lab.run.build import build, machine
from gradwire_lab.run.course import Outcome
from gradwire_lab.run.journal import Record, fingerprint
from gradwire_lab.run.marks import Measured, judge, unjudged
from gradwire_lab.run.samples import CellRun, Track
from gradwire_lab.run.summary import summarize
from gradwire_lab.run.wires import losers
from gradwire_lab.scenario.load import Cell
from gradwire_lab.scenario.network import Topology

__all__ = ["FORMAT", "KIND", "document"]

FORMAT = 1
KIND = "gradwire lab"


def document(outcome: Outcome, command: str) -> dict[str, Any]:
    """Put everything that is known about an experiment into JSON; non-finite numbers become null.

    Marks are judged over all cells and seeds of the file. A cell that was not run, failed, or ran
    in another form leaves a mark open where it could change the result. The short form leaves all
    marks open, because its samples are too few. A cell's numbers are those
    of the seeds that did not fail, or of all seeds where all failed. Runs of another form of a cell
    get no limit, because a limit follows from the file as it is now.

    Args:
        outcome: the runs.
        command: the command that made them.
    """
    experiment, first = outcome.experiment, outcome.experiment.first
    dates = sorted(record.date for record in outcome.records.values())
    cells, measured, others = [], [], []
    for cell in experiment.cells:
        records = {
            seed: each for (name, seed), each in outcome.records.items() if name == cell.name
        }
        form = fingerprint(cell, experiment.quick)
        same = all(each.scenario == form for each in records.values())
        if not same:
            others.append(cell.name)
        sound = {seed: each.run for seed, each in records.items() if each.run.error is None}
        counted = sound or {seed: each.run for seed, each in records.items()}
        entry = _cell(cell, records, counted, same)
        cells.append(entry)
        summaries = {each["name"]: each for each in entry["contestants"]} if sound else {}
        complete = same and set(first.work.seeds) <= sound.keys()
        measured.append(Measured(cell, summaries, complete))
    marks = [judge(mark, measured) for mark in first.marks]
    if experiment.quick:
        marks = [unjudged(mark, "the short form has too few samples") for mark in marks]
    result: dict[str, Any] = finite(
        {
            "kind": KIND,
            "format": FORMAT,
            "scenario": first.name,
            "title": experiment.title,
            "published": first.published,
            "quick": experiment.quick,
            "date": dates[-1],
            "dates": [dates[0], dates[-1]],
            "commits": sorted({each.commit for each in outcome.records.values() if each.commit}),
            "command": command,
            **_makers(list(outcome.records.values())),
            "kernel": _kernel(outcome),
            "work": asdict(first.work),
            "seeds": outcome.seeds,
            "missing": outcome.missing,
            "map": asdict(first.map),
            "file": dict(experiment.raw),
            "left_out": dict(experiment.left_out),
            "calibrations": [asdict(each) for each in outcome.calibrations],
            "cells": cells,
            "marks": marks,
            "errors": outcome.errors,
            "other_forms": others,
            "wall_s": sum(record.took_s for record in outcome.records.values()),
        }
    )
    return result


def _makers(records: list[Record]) -> dict[str, Any]:
    """Name what made the runs: this gradwire and machine, or those that the journal names."""
    builds = sorted({each.gradwire for each in records})
    machines: list[dict[str, Any]] = []
    for each in records:
        if each.machine not in machines:
            machines.append(each.machine)
    here = builds == [build()] and machines == [machine()]
    return {
        "machine": environment() if here else machines[-1],
        "machines": machines,
        "gradwire": ", ".join(builds),
        "elsewhere": not here,
        "settings": {name: value for each in records for name, value in each.settings.items()},
    }


def _kernel(outcome: Outcome) -> dict[str, Any]:
    """Describe what made the network, which was the same for all contestants.

    TCP's algorithms are left out where another machine ran a cell, since they are this kernel's.
    """
    topologies = [cell.scenario.topology for cell in outcome.experiment.cells]
    wires = {run.link for run in outcome.runs.values() if run.link}
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    here = all(record.machine == machine() for record in outcome.records.values())
    return {
        "offloads": sorted({"on" if each.ports.offloads else "off" for each in topologies}),
        "topology": list(dict.fromkeys(each.words for each in topologies)),
        "shaper": _shaper(topologies),
        "loss": _losers(outcome),
        "wires": sorted(wires) or ["veth pairs, no delay added"],
        "congestion_controls": available.read_text().split() if here and available.exists() else [],
    }


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


def _summaries(cell: Cell, runs: dict[int, CellRun], limited: bool) -> dict[str, dict[str, Any]]:
    found = {
        each.name: summarize(each, cell.scenario, runs, limited=limited)
        for each in cell.scenario.contestants
    }
    return {name: summary for name, summary in found.items() if summary is not None}


def _cell(
    cell: Cell, records: dict[int, Record], counted: dict[int, CellRun], limited: bool
) -> dict[str, Any]:
    """Describe a cell's runs, and its contestants by the runs that count."""
    scenario = cell.scenario
    transports = {each.name: each.transport for each in scenario.contestants}
    contestants = []
    for name, summary in _summaries(cell, counted, limited).items():
        tracks = [
            {"seed": seed, **_track(run.tracks[name], run.origin)}
            for seed, run in counted.items()
            if name in run.tracks
        ]
        contestants.append(
            {"name": name, "transport": transports[name], **summary, "tracks": tracks}
        )
    ports, spread = scenario.topology.ports, scenario.topology.spread
    made = [(seed, record, record.run) for seed, record in records.items()]
    return {
        "name": cell.name,
        "labels": dict(cell.labels),
        "workers": scenario.topology.workers,
        "servers": scenario.topology.servers,
        "ports": asdict(ports),
        "topology": scenario.topology.words,
        "ecn": scenario.topology.ecn,
        "uplinks": None if spread is None else asdict(spread.uplink),
        "rtt_s": scenario.topology.rtt_s,
        "bytes": scenario.work.bytes,
        "communication_share": scenario.model.communication_share,
        "loss": asdict(scenario.loss),
        "rivals": asdict(scenario.rivals),
        "contestants": contestants,
        "runs": [
            {
                "seed": seed,
                "date": record.date,
                "took_s": record.took_s,
                "commit": record.commit,
                "load": record.load,
                "stolen": record.stolen,
                "error": run.error,
                "lost_packets": run.lost,
                "marked_packets": run.marked,
                "softnet_drops": run.softnet_drops,
                "wire_failures": run.wire_failures,
                "bursts": [
                    {
                        "start": each.start - run.origin,
                        "stop": each.stop - run.origin,
                        "bytes": each.bytes,
                        "planned": each.planned,
                    }
                    for each in run.bursts
                ],
                "lossy": [
                    {"start": start - run.origin, "stop": stop - run.origin}
                    for start, stop in run.lossy
                ],
                "events": [{"at": each.at - run.origin, "what": each.what} for each in run.events],
                "facts": run.facts,
            }
            for seed, record, run in made
        ],
    }


def _track(track: Track, origin: float) -> dict[str, Any]:
    fields = asdict(track)
    fields["starts"] = [start - origin for start in track.starts]
    del fields["spans"], fields["reports"]
    return fields
