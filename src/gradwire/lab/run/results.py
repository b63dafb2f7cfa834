"""The JSON of a run: machine, kernel, numbers, raw samples, marks."""

from __future__ import annotations

import datetime
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire.lab.measure import environment
from gradwire.lab.run.course import Outcome
from gradwire.lab.run.marks import Measured, judge
from gradwire.lab.run.samples import CellRun, Track
from gradwire.lab.run.summary import summarize
from gradwire.lab.scenario.load import Cell
from gradwire.lab.scenario.network import Topology
from gradwire.telemetry import finite

__all__ = ["FORMAT", "KIND", "document"]

FORMAT = 1
KIND = "gradwire lab"


def document(outcome: Outcome, command: str) -> dict[str, Any]:
    """Everything that is known about a run, as JSON; non-finite numbers become null."""
    experiment, first = outcome.experiment, outcome.experiment.first
    cells, measured = [], []
    for cell in experiment.cells:
        runs = {seed: run for (name, seed), run in outcome.runs.items() if name == cell.name}
        entry = _cell(cell, runs)
        cells.append(entry)
        known = {each["name"]: each for each in entry["contestants"]}
        measured.append(Measured(cell, known))
    result: dict[str, Any] = finite(
        {
            "kind": KIND,
            "format": FORMAT,
            "scenario": first.name,
            "title": first.title,
            "published": first.published,
            "quick": experiment.quick,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": command,
            "machine": environment(),
            "kernel": _kernel(outcome),
            "work": asdict(first.work),
            "map": asdict(first.map),
            "file": dict(experiment.raw),
            "left_out": dict(experiment.left_out),
            "calibrations": [asdict(each) for each in outcome.calibrations],
            "cells": cells,
            "marks": [judge(mark, measured) for mark in first.marks],
            "errors": outcome.errors,
            "wall_s": time.monotonic() - outcome.began,
        }
    )
    return result


def _kernel(outcome: Outcome) -> dict[str, Any]:
    """What made the network: the same for all contestants."""
    topologies = [cell.scenario.topology for cell in outcome.experiment.cells]
    wires = {run.link for run in outcome.runs.values() if run.link}
    veths = any(run.link is None for run in outcome.runs.values())
    loss = [*(["nftables, behind the port's rate"] if veths else [])]
    loss += [f"the hosts' wires ({wire}), packet by packet" for wire in sorted(wires)]
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    if not any(cell.scenario.loss.any for cell in outcome.experiment.cells):
        loss = ["none"]
    return {
        "offloads": sorted({"on" if each.ports.offloads else "off" for each in topologies}),
        "topology": list(dict.fromkeys(each.words for each in topologies)),
        "shaper": _shaper(topologies),
        "loss": loss,
        "wires": sorted(wires) or ["veth pairs, no delay added"],
        "congestion_controls": available.read_text().split() if available.exists() else [],
    }


def _shaper(topologies: list[Topology]) -> str:
    kernel = "tbf on both directions of every port and uplink, drop-tail"
    if all(each.ecn is None for each in topologies):
        return kernel
    ours = "the lab's own queues towards hosts and on uplinks, which mark, tbf from hosts"
    return ours if all(each.ecn is not None for each in topologies) else f"{kernel}; or {ours}"


def _cell(cell: Cell, runs: dict[int, CellRun]) -> dict[str, Any]:
    scenario = cell.scenario
    contestants = []
    for each in scenario.contestants:
        summary = summarize(each, scenario, runs)
        if summary is None:
            continue
        tracks = [
            {"seed": seed, **_track(run.tracks[each.name], run.origin)}
            for seed, run in runs.items()
            if each.name in run.tracks
        ]
        contestants.append(
            {"name": each.name, "transport": each.transport, **summary, "tracks": tracks}
        )
    ports, spread = scenario.topology.ports, scenario.topology.spread
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
        "loss": asdict(scenario.loss),
        "rivals": asdict(scenario.rivals),
        "contestants": contestants,
        "runs": [
            {
                "seed": seed,
                "error": run.error,
                "lost_packets": run.lost,
                "marked_packets": run.marked,
                "softnet_drops": run.softnet_drops,
                "wire_failures": run.wire_failures,
                "bursts": [
                    {"start": each.start - run.origin, "stop": each.stop - run.origin}
                    for each in run.bursts
                ],
                "lossy": [
                    {"start": start - run.origin, "stop": stop - run.origin}
                    for start, stop in run.lossy
                ],
                "events": [{"at": each.at - run.origin, "what": each.what} for each in run.events],
                "facts": run.facts,
            }
            for seed, run in runs.items()
        ],
    }


def _track(track: Track, origin: float) -> dict[str, Any]:
    fields = asdict(track)
    fields["starts"] = [start - origin for start in track.starts]
    del fields["spans"], fields["reports"]
    return fields
