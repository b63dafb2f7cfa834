"""Run the cells of the table on a ground."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gradwire.transport.meeting import LINGER_S
from gradwire.transport.open_engine import HURRIED_S
from gradwire_lab.faults.cells import FLAT, STRUCK_STEP, Cell, Shape
from gradwire_lab.faults.ground import Ground, Process
from gradwire_lab.faults.judge import Told, Verdict, judge

HOSTS = 3
ATTEMPTS = 3
"""How often a cell's job is run until its moment was not missed, as a busy machine has it."""
OLD_S = 0.5
"""Seconds in which the processes that are still there send to one that has begun anew."""


@dataclass(frozen=True)
class Patience:
    """How long the jobs of the table wait, in seconds.

    Attributes:
        peer_s: peer_timeout.
        meeting_s: rendezvous_timeout.
        slack_s: beyond a time-out until a rank has stopped.
        job_s: how long a job may take beside its fault.
    """

    peer_s: float = 1.0
    meeting_s: float = 5.0
    slack_s: float = 3.0
    job_s: float = 60.0


class Table:
    """A table runs cells, and keeps the result of jobs without a fault to compare with."""

    def __init__(self, ground: Ground, patience: Patience) -> None:
        """Run on this ground."""
        self._ground = ground
        self._patience = patience
        self._expected: dict[tuple[str, int], str] = {}

    def run(self, cell: Cell) -> Verdict:
        """Run a cell once."""
        expected = self.expected(cell.shape, cell.steps)
        for _ in range(ATTEMPTS):
            verdict = self._judged(cell, expected)
            if verdict is not None:
                return verdict
        return Verdict("neither", [f"phase {cell.phase} was not reached {ATTEMPTS} times"])

    def expected(self, shape: Shape, steps: int) -> str:
        """Return the fingerprint of a job without a fault."""
        key = shape.name, steps
        if key not in self._expected:
            calm = Cell("no fault", "all", "on", "", shape, culprit="", steps=steps, patience_s=10)
            with self._ground.job() as prefix:
                processes = self._start(calm, prefix)
                self._ground.await_ends(self._patience.job_s, processes)
                done = [each.told("done") for each in processes if each.name.startswith("rank")]
            replicas = {each["fingerprint"] if each else "" for each in done}
            if len(replicas) != 1 or "" in replicas:
                errors = [each.told("error") for each in processes]
                raise RuntimeError(f"{shape.name}: a job without a fault fails: {errors}")
            self._expected[key] = replicas.pop()
        return self._expected[key]

    def _start(self, cell: Cell, prefix: str) -> list[Process]:
        """Start a job with its fault to come."""
        pids: dict[str, int] = {}
        processes = []
        for name, host, program, config in self._programs(cell, prefix):
            options = config.get("strike", {}).get("options", {})
            if "pid" in options:
                options["pid"] = pids[cell.whom]
            process = self._ground.start(name, host, program, **config)
            pids[name] = process.pid
            processes.append(process)
        return processes

    def _programs(self, cell: Cell, prefix: str) -> Iterator[tuple[str, int, str, dict[str, Any]]]:
        """Yield the name, the host, the program and the configuration of each process."""
        ground, shape = self._ground, cell.shape
        settings: dict[str, Any] = {
            "peer_timeout": cell.patience_s or self._patience.peer_s,
            "rendezvous_timeout": self._patience.meeting_s,
            "timeout": self._patience.job_s,
            "hosts": False,
            **shape.settings,
            **cell.settings,
        }
        if not cell.meets:  # a busy machine may start ranks at very different times
            settings["rendezvous_timeout"] = self._patience.job_s
        world = len(shape.places)
        common = {"store": ground.store, "prefix": prefix, "world": world, "steps": cell.steps}
        by = cell.whom if cell.by is None else f"rank {cell.by}"
        names = [f"server {index}" for index in range(shape.servers)]
        # The victim comes first, since who strikes it has to know its process.
        names += sorted((f"rank {rank}" for rank in range(world)), key=lambda each: each == by)
        for name in names:
            kind, number = name.split()
            own = dict(settings)
            if name == cell.whom:
                own.update(cell.own)
            config: dict[str, Any] = {**common, "settings": own}
            if name == by:
                options = dict(cell.options)
                if by != cell.whom:
                    options["pid"] = 0  # known once it runs
                strike = {"phase": cell.phase, "step": STRUCK_STEP, "what": cell.what}
                config["strike"] = {**strike, "options": options}
            if kind == "server":
                host = HOSTS - 1
                config |= {"index": int(number), "workers": world}
                own["servers"] = shape.servers
            else:
                host = shape.places[int(number)]
                config |= {"rank": int(number)}
            yield name, host, kind, config

    def _again(self, cell: Cell, prefix: str, processes: list[Process]) -> list[Process]:
        """Start each process anew, the struck one first, while the others still send."""
        own = {each.name: each for each in processes}
        new = []
        programs = self._programs(replace(cell, phase=""), f"{prefix}/again")
        for name, host, program, config in sorted(programs, key=lambda each: each[0] != cell.whom):
            self._ground.signal(own[name], signal.SIGKILL)
            self._ground.status(own[name], 10.0)
            new.append(self._ground.start(name, host, program, **config))
            self._ground.await_event(OLD_S, lambda process, said: False)
        return new

    def _judged(self, cell: Cell, expected: str) -> Verdict | None:
        """Run a cell's job once; returns None where its moment was missed."""
        ground, job_s = self._ground, self._patience.job_s
        bound_s = self._bound(cell)
        with ground.job() as prefix:
            processes = self._start(cell, prefix)
            struck_at = time.monotonic()
            if cell.phase:
                struck = ground.await_event(job_s, lambda process, said: said["event"] == "struck")
                if struck is None:
                    errors = [each.told("error") for each in processes if each.told("error")]
                    if not errors:
                        return None
                    return Verdict("neither", [f"phase {cell.phase} was not reached: {errors}"])
                struck_at = struck[1]["at"]
                self._befall(cell, processes)
            if cell.again:
                processes = self._again(cell, prefix, processes)
            frozen = [e for e in processes if e.name == cell.whom and cell.what == "stop"]
            frozen = [] if cell.ground == "thaw" else frozen
            rest = [each for each in processes if each not in frozen]
            limit = max(bound_s, 10.0) + job_s
            ground.await_ends(limit, rest)
            for each in frozen:  # who wakes up has to learn that the job is over
                ground.signal(each, signal.SIGCONT)
            ground.await_ends(limit, frozen)
            told = [self._told(each, cell, struck_at) for each in processes]
        verdict = judge(cell, told, expected, bound_s)
        for one in told:
            if frozen and one.struck and one.status is None:
                verdict.faults.append(f"{one.name} does not end once it goes on")
        return verdict

    def _bound(self, cell: Cell) -> float:
        """Return the longest time from a fault until every rank has stopped."""
        peer_s = cell.patience_s or self._patience.peer_s
        meeting_s = float(cell.settings.get("rendezvous_timeout", self._patience.meeting_s))
        bound = {
            "peer_timeout": peer_s,
            # Those that have met wait for half as long again, or for those in a hurry; and rank 0
            # stays until the others have read why they do not meet.
            "rendezvous_timeout": max(1.5 * meeting_s + 1.0, meeting_s + HURRIED_S) + LINGER_S,
            "timeout": float(cell.settings.get("timeout", self._patience.job_s)),
        }[cell.bound]
        return bound + self._patience.slack_s

    def _befall(self, cell: Cell, processes: list[Process]) -> None:
        """Do what the ground does at a fault's moment, and undo it after its time."""
        ground = self._ground
        whom = next((each for each in processes if each.name == cell.whom), None)
        if whom is None:
            return
        if cell.ground == "cut":
            ground.cut(whom.host, "uplink", "downlink")
        elif cell.ground == "mute":
            ground.cut(whom.host, "uplink")
        elif cell.ground == "deaf":
            ground.cut(whom.host, "downlink")
        elif cell.ground == "refuse":
            ground.refuse(whom.host)
        elif cell.ground != "thaw":
            return
        if cell.lasts_s:
            ground.await_event(cell.lasts_s, lambda process, said: False)
            ground.heal()
            ground.signal(whom, signal.SIGCONT)

    def _told(self, process: Process, cell: Cell, struck_at: float) -> Told:
        errors = [said for said in process.said if said["event"] == "error"]
        done = process.told("done") or {}
        return Told(
            process.name,
            struck=process.name == cell.whom and not cell.again,
            replica=done.get("fingerprint", ""),
            errors=[re.sub(r"\s+", " ", f"{each['kind']}: {each['text']}") for each in errors],
            after_s=errors[0]["at"] - struck_at if errors else 0.0,
            status=self._ground.status(process, 10.0),
        )


__all__ = ["FLAT", "HOSTS", "Patience", "Table"]
