"""A cell of pushes or all-reduces is a race on the cell's ground."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

from gradwire_lab.contest.race import Entry, Race, Round
from gradwire_lab.contest.serving import route_settings
from gradwire_lab.run.ground import Ground
from gradwire_lab.run.limits import push_ideal
from gradwire_lab.run.model import CellRun, Track
from gradwire_lab.run.tail import tune
from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.schema import Scenario

__all__ = ["entry_of", "run_transfers"]

Progress = Callable[[str, int], None]
MARGIN_S = 10.0
"""Seconds beyond a round's limit until its ranks are given up, so a transport reports first."""


def entry_of(each: Contestant, scenario: Scenario) -> Entry:
    """Return a contestant as a race takes it."""
    push = scenario.work.kind == "push"
    if each.transport == "tcp" and push:
        return Entry(
            each.name,
            "gradwire_lab.contest.tcp_push:TcpPush",
            {"congestion_control": each.congestion_control},
        )
    if each.transport != "gradwire":
        factory = {
            "gloo": "gradwire_lab.contest.gloo:GlooOver",
            "tcp": "gradwire_lab.contest.tcp_servers:TcpOverServers",
        }[each.transport]
        options: dict[str, Any] = {
            "congestion_control": each.congestion_control,
            "workers": scenario.topology.workers,
        }
        if each.transport == "gloo":
            options["timeout_s"] = round_limit(scenario)
        else:
            options["elements"] = scenario.work.bytes // 4
        return Entry(each.name, factory, options)
    settings = {"timeout": round_limit(scenario), **each.options}
    if push:
        options = {
            "bound": each.loosest_bound("push"),
            "spend": each.spend if each.bound else "nothing",
            "schedule": schedule_of(each, scenario),
            "control": each.control,
            "options": settings,
            "group": each.name,
        }
        return Entry(each.name, "gradwire_lab.contest.gradwire_push:GradwirePush", options)
    options = {
        "policy": each.policy,
        "options": {**settings, **route_settings(scenario.topology.servers)},
        "elements": scenario.work.bytes // 4,
        "layers": scenario.work.layers,
        "group": each.name,
    }
    return Entry(each.name, "gradwire_lab.run.policy_all_reduce:PolicyAllReduce", options)


def round_limit(scenario: Scenario) -> float:
    """Return the seconds that a round may take: what the file allows, after its loss has ended."""
    loss = scenario.loss
    return scenario.work.round_limit_s + (loss.lasts_s if loss.any else 0.0)


def schedule_of(each: Contestant, scenario: Scenario) -> list[tuple[float, float]]:
    """Return when which share is enough, for pushes that close by time; nothing for others."""
    if each.enough is None:
        return []
    late = each.late * push_ideal(scenario)
    return [(0.0, 1.0), (late, each.enough), (late + each.slack_s, 0.0)]


def run_transfers(
    scenario: Scenario, seed: int, ground: Ground, run: CellRun, progress: Progress
) -> None:
    """Race all contestants of a cell; their samples are in `run` when all are done.

    Raises:
        RankError: a rank failed, or took longer than a round may.
    """
    work = scenario.work
    entries = [entry_of(each, scenario) for each in scenario.contestants]
    race = Race(
        ground.network,
        entries,
        work.bytes,
        env={"GRADWIRE_SEED": str(seed)},
        round_seconds=round_limit(scenario) + MARGIN_S,
        pause=work.compute_s,
    )
    ground.victim = race.signal
    with contextlib.ExitStack() as stack:
        stack.push(race.__exit__)
        ground.start()
        if scenario.tail.ratio:
            run.facts["tail"] = tune(scenario, ground, race)
        results = race.run(
            work.rounds,
            block=work.block,
            warm_up=work.warm_up,
            bursts=ground.traffic[0] if ground.traffic else None,
            progress=progress,
            around=ground.around,
            around_turn=ground.turn,
            rotate=True,
            turns=ground.next_turns,
        )
        reports = race.reports()
    for name, rounds in results.items():
        track = track_of(rounds, reports[name], work.compute_s)
        track.wire_bytes, track.wire_rounds = ground.wire.get(name, (0, 0))
        run.tracks[name] = track


def track_of(rounds: list[Round], reports: list[dict[str, Any]], compute_s: float = 0.0) -> Track:
    """Turn a contestant's rounds into samples; `compute_s` seconds of computation precede each."""
    spans = [(one.start, one.start + one.seconds) for one in rounds]
    track = Track(spans=spans, reports=reports)
    layers: dict[str, list[float]] = {}
    for one in rounds:
        track.add(one.start, one.seconds, [each for each in one.details if each], layers)
    track.layers = {name: statistics.fmean(shares) for name, shares in layers.items()}
    track.job_s = sum(track.seconds) + compute_s * len(rounds)
    return track
