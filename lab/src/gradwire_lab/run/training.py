"""In a training cell the same ranks train every contestant, in turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradwire_lab.contest.measure import percentile
from gradwire_lab.contest.ranks import Ranks
from gradwire_lab.contest.serving import route_settings
from gradwire_lab.network.addresses import STORE_PORT
from gradwire_lab.network.bursts import phase_of
from gradwire_lab.network.clock import sleep_until
from gradwire_lab.run.ground import Ground
from gradwire_lab.run.model import CellRun, Track
from gradwire_lab.run.transfers import Progress, round_limit
from gradwire_lab.scenario.schema import Scenario
from gradwire_lab.scenario.work import turn_length
from gradwire_lab.training import crew
from gradwire_lab.training.block import Block, Step, join

__all__ = ["run_training", "segments"]

_READY_SECONDS = 180.0
_CLOSE_SECONDS = 30.0
_LEAD_SECONDS = 0.02
_STEP_SECONDS = 2.0
"""Seconds of a step beside its computation; one step of a turn may take as long as a round."""
_QUIET_STEPS, _TRIALS = 6, 2
_SHARED = ("batch", "learning_rate", "context", "width", "layers", "heads")
"""What a scenario's model sets of a recipe."""
_SHORTEST_S = 1e-4
"""The least seconds of a stretched computation, since 0 would not stretch it."""


def segments(
    first: int, steps: int, losing: tuple[int, ...], begin: int = 0
) -> Iterator[tuple[int, bool]]:
    """Cut a turn where a step loses packets: how many steps, and whether they lose.

    Args:
        first: number of the turn's first step.
        losing: numbers of the steps in which links lose packets.
        begin: cut before this step of the turn, too.
    """
    count = 0
    for number in range(first, first + steps):
        if count and number == first + begin:
            yield count, False
            count = 0
        if number in losing:
            if count:
                yield count, False
            yield 1, True
            count = 0
        else:
            count += 1
    if count:
        yield count, False


def run_training(
    scenario: Scenario, seed: int, ground: Ground, run: CellRun, progress: Progress
) -> None:
    """Train every contestant of a cell; their samples go to `run`."""
    work = scenario.work
    with crew.start(
        ground.network.spawn,
        "gradwire_lab.run.training_worker",
        [_config(scenario, seed, ground, rank) for rank in range(scenario.topology.hosts)],
        scenario.topology.workers,
        env={"GRADWIRE_SEED": str(seed)},
    ) as ranks:
        run.facts = ranks.gather(time.monotonic() + _READY_SECONDS)[0]
        course = _Course(scenario, ground, ranks, run, progress)
        ground.victim = ranks.signal
        course.set_pace()
        ground.start()
        done = 0
        while done < work.rounds:
            steps = turn_length(work, work.rounds - done)
            course.all_turns(done, steps)
            done += steps
        course.close()


def _config(scenario: Scenario, seed: int, ground: Ground, rank: int) -> dict[str, Any]:
    model = scenario.model
    settings = {"timeout": round_limit(scenario), **route_settings(scenario.topology.servers)}
    return {
        "contestants": [
            {**asdict(each), "options": {**settings, **each.options}}
            if each.transport == "gradwire"
            else asdict(each)
            for each in scenario.contestants
        ],
        "model": asdict(model),
        "recipe": {
            "ranks": scenario.topology.workers,
            "seed": seed,
            **{name: getattr(model, name) for name in _SHARED},
        },
        "steps": scenario.work.rounds,
        "trials": _TRIALS * _QUIET_STEPS if model.communication_share else 0,
        "rank": rank,
        "store_host": ground.network.address(0),
        "store_port": STORE_PORT,
    }


class _Course:
    """A course runs the turns of one cell."""

    def __init__(
        self, scenario: Scenario, ground: Ground, ranks: Ranks, run: CellRun, progress: Progress
    ) -> None:
        self._scenario = scenario
        self._ground = ground
        self._ranks = ranks
        self._run = run
        self._progress = progress
        self._compute_s = scenario.model.compute_s
        self._shares: dict[str, dict[str, list[float]]] = {}
        self._turns = 0  # rounds of turns; each begins at another phase of the bursts
        for each in scenario.contestants:
            run.tracks[each.name] = Track()
            self._shares[each.name] = {}

    def set_pace(self) -> None:
        """Stretch computation until communication has the share that is asked for.

        The first steps, on a quiet network, show how long the first contestant communicates, and
        what else a step takes besides its computation; this counts as computation, too. It is
        measured twice, because ranks that compute all the time delay each other's transfers. The
        other contestants do these steps as well, so that all have trained alike.
        """
        share = self._scenario.model.communication_share
        if not share:
            return
        comm, rest = math.inf, 0.0
        for _ in range(_TRIALS):
            blocks = [
                self._block(each.name, _QUIET_STEPS, False) for each in self._scenario.contestants
            ]
            comm = min(comm, _median([step.comm for step in join(blocks[0], 0, 0.0)]))
            rest = _median(self._rest(blocks[0]))
            self._compute_s = max(_SHORTEST_S, comm * (1 - share) / share - rest)
        self._run.facts["compute_s"] = self._compute_s

    def _rest(self, block: Block) -> list[float]:
        """Return the seconds of each step in which it neither communicates nor computes.

        Where those two overlap, or computation was not stretched, it is the time after both.
        """
        if self._compute_s and not self._scenario.model.overlap:
            steps = join(block, 0, 0.0)
            return [max(0.0, step.took - step.comm - self._compute_s) for step in steps]
        return [
            max(view["ended"] for view in views) - max(view["end"] for view in views)
            for views in zip(*block.ranks, strict=True)
        ]

    def all_turns(self, done: int, steps: int) -> None:
        """Give every contestant a turn, from their step number `done` on."""
        self._ground.next_turns()
        for each in self._scenario.contestants:
            self._settle()  # the clocks of the turn have not started
            with self._ground.changing(), self._ground.faults.turn(each.name):
                self._turn(each.name, done, steps)
        self._turns += 1

    def _settle(self) -> None:
        """Wait until a turn's phase of the bursts is about to begin."""
        if self._ground.traffic:
            traffic = self._ground.traffic[0]
            start = time.monotonic() + _LEAD_SECONDS
            start = traffic.next_phase(phase_of(self._turns, traffic.burst), after=start)
            sleep_until(start - _LEAD_SECONDS)

    def _turn(self, name: str, done: int, steps: int) -> None:
        """Give one contestant a turn, from its step number `done` on."""
        track = self._run.tracks[name]
        loss, warm_up = self._scenario.loss, self._scenario.work.warm_up
        steps_so_far = 0
        begin = warm_up if self._scenario.faults else 0
        parts = list(segments(done, steps, loss.steps if loss.when == "steps" else (), begin))
        for place, (count, losing) in enumerate(parts):
            last = place == len(parts) - 1
            timed = steps_so_far >= begin
            with self._ground.counting(name, count), self._ground.losing(losing):
                block = self._block(name, count, last, timed=timed)
            found = join(block, 0, 0.0)
            for index, step in enumerate(found):
                if losing or steps_so_far + index >= warm_up:
                    _keep(track, self._shares[name], step, block, index)
            kept = 0 if losing else max(0, warm_up - steps_so_far)
            if kept < count:
                track.spans.append((found[kept].start, found[-1].start + found[-1].comm))
            steps_so_far += count
        track.wire_bytes, track.wire_rounds = self._ground.wire[name]
        if block.validation is not None:
            track.losses.append((done + steps, track.job_s, block.validation))
        self._progress(name, done + steps)

    def _block(self, name: str, steps: int, validate: bool, timed: bool = False) -> Block:
        start = time.monotonic() + _LEAD_SECONDS
        if timed:
            self._ground.faults.begin(name, start)
        each = self._compute_s + _STEP_SECONDS
        limit = each * steps + round_limit(self._scenario) + _CLOSE_SECONDS
        return crew.train(
            self._ranks,
            name,
            steps,
            start,
            start + limit,
            trainees=self._scenario.topology.workers,
            compute_s=self._compute_s,
            validate=validate,
        )

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        answers = self._ranks.ask({"command": "fingerprints"}, deadline)
        answers = answers[: self._scenario.topology.workers]
        for name, track in self._run.tracks.items():
            track.fingerprints = [answer[name] for answer in answers]
            track.layers = {
                region: statistics.fmean(shares) for region, shares in self._shares[name].items()
            }
        self._ranks.ask({"command": "close"}, time.monotonic() + _CLOSE_SECONDS)


def _median(seconds: Sequence[float]) -> float:
    """Return the median of the later half, since the first steps open connections."""
    return percentile(seconds[len(seconds) // 2 :], 50)


def _keep(
    track: Track, shares: dict[str, list[float]], step: Step, block: Block, index: int
) -> None:
    """Add one timed step of a turn to a track, and its shares delivered by region."""
    views = [views[index] for views in block.ranks]
    track.add(step.start, step.comm, views if views[0]["bytes"] is not None else [], shares)
    track.job_s += step.took
    if step.critical is not None:
        track.critical.append(step.critical)
