"""Lives of ops: what the engine is asked for by all workers, in lanes and steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from gradwire import _engine
from gradwire.sim.fabric import Fabric
from gradwire.sim.fuzz.faults import DEADLY
from gradwire.sim.fuzz.judge import (
    LINGER,
    PATIENCE,
    Course,
    Errors,
    Verdict,
    Wrong,
    check_errors,
    network,
    unheard,
)
from gradwire.sim.fuzz.life import Life

SESSION = 2
"""Session tag of a job that is started again."""


def plan_of(life: Life, **changes: Any) -> _engine.Plan:
    """Makes the plan of a life's ops."""
    options = {name: value for name, value in life.options.items() if name != "critical"}
    elements = life.elements
    regions, at = [], 0
    for share, bound in options.pop("regions", [(1.0, 0.0)]):
        end = round(share * elements)
        if end > at:
            regions.append((at, end - at, bound))
            at = end
    if (shares := options.pop("shards", None)) is not None:
        edges = np.cumsum(shares[: life.workers])
        cuts = np.round(edges / max(edges[-1], 1e-9) * elements).astype(int)
        cuts[-1] = elements
        options["shards"] = np.diff(cuts, prepend=0).tolist()
    return _engine.Plan(elements=elements, regions=regions, **{**options, **changes})


class Asked:
    """The ops that are asked for of one fabric."""

    def __init__(self, life: Life, fabric: Fabric, course: Course) -> None:
        self.life = life
        self.fabric = fabric
        self.course = course
        self.plan = plan_of(life)
        self.ops: list[tuple[int, int, int]] = []  # worker, op, lane
        self.began: dict[tuple[int, int, int], float] = {}
        chunks = _engine.chunk_grid(self.plan, life.datagram, life.servers or life.workers)
        self._chunks = len(chunks[0])

    def ask(self, worker: int, steps: int, start: float) -> None:
        """Asks for all ops of a worker, from a time on."""
        life = self.life
        chance = random.Random(life.seed * 64 + worker)
        absent = any(f.host % life.workers == worker for f in life.of_kind("absent"))
        differs = any(f.host % life.workers == worker for f in life.of_kind("differ"))
        late = sum(f.amount[0] for f in life.of_kind("late") if f.host % life.workers == worker)
        own = self.plan
        if differs:
            own = plan_of(life, seed=life.options.get("seed", 0) ^ 1)
        for step in range(steps):
            start += life.apart + chance.random() * life.skew + (late if step == 0 else 0.0)
            if absent and step == steps - 1:
                break
            lanes = list(range(life.lanes))
            chance.shuffle(lanes)
            for lane in lanes:
                self._ask(chance, worker, step, lane, own, start)

    def _ask(
        self,
        chance: random.Random,
        worker: int,
        op: int,
        lane: int,
        plan: _engine.Plan,
        at: float,
    ) -> None:
        life = self.life
        numbers = np.random.default_rng([life.seed, worker, op, lane])
        classes = life.options.get("order") == "priority" and (worker + life.seed) % 3
        self.fabric.start(
            worker,
            op,
            plan,
            numbers.standard_normal(life.elements, dtype=np.float32),
            lane=lane,
            step=op,
            critical=[
                chance.randrange(self._chunks) for _ in range(life.options.get("critical", 0))
            ],
            priorities=numbers.integers(0, 4 * classes, self._chunks, np.uint8)
            if classes
            else None,
            stats=numbers.standard_normal(8).tolist(),
            timeout=life.patience,
            at=at,
        )
        self.ops.append((worker, op, lane))
        self.began[worker, op, lane] = at

    def over(self) -> bool:
        """Whether all ops are done but those of workers that are out."""
        out = self.course.out()
        return all(
            worker in out or self.fabric.completion(worker, op, lane=lane) is not None
            for worker, op, lane in self.ops
        )

    def errors(self) -> Errors:
        """The errors so far; raises `Wrong` where a living worker still waits."""
        found: Errors = []
        for worker, op, lane in self.ops:
            done = self.fabric.completion(worker, op, lane=lane)
            if done is None:
                if worker in self.course.dead | self.course.paused:
                    continue
                raise Wrong(
                    "stall",
                    f"rank {worker}, op {op} of lane {lane}, begun at "
                    f"{self.began[worker, op, lane]:.3f} s: not done at {self.fabric.now:.3f} s",
                )
            if not done.ok:
                if done.step != op:
                    raise Wrong("nameless", f"step {done.step} in place of {op}: {done.error}")
                found.append((worker, done, self.fabric.finished_at(worker, op, lane=lane)))
        return found


def live(life: Life, verdict: Verdict) -> None:
    """Runs a life of ops; raises `Wrong` or BrokenInvariantError."""
    fabric, ports = network(life)
    course = Course(life, fabric, ports)
    asked = Asked(life, fabric, course)
    for worker in range(life.workers):
        asked.ask(worker, life.steps, course.start)
    try:
        _to_the_end(life, course, asked)
        fabric.check()
        errors = asked.errors()
        check_errors(life, course, errors)
        verdict.causes.update(done.error_cause for _, done, _ in errors)
        if errors:
            verdict.outcome = "error"
            if life.again and not life.of_kind("flip", "differ", "absent", "quit"):
                _again(life, course, fabric)
    finally:
        verdict.events, verdict.seconds = fabric.events, fabric.now


def _to_the_end(life: Life, course: Course, asked: Asked) -> None:
    """Until no op is open; workers may leave as soon as they are done."""
    fabric = course.fabric
    last = max(asked.began.values(), default=0.0) + life.timeout + 4 * life.peer_timeout
    if not life.leave or set(course.life.faults) & set(life.of_kind(*DEADLY)):
        while not course.run(min(last, fabric.now + life.peer_timeout)):
            if fabric.now >= last or asked.over():
                return
        return
    left: set[int] = set()
    gone: set[int] = set()
    own: dict[int, list[tuple[int, int]]] = {worker: [] for worker in range(life.workers)}
    for worker, op, lane in asked.ops:
        own[worker].append((op, lane))
    while len(gone) < life.workers and fabric.now < last:
        pace = 1e-4 if not left else life.peer_timeout / 200
        course.run(fabric.now + max(pace, fabric.now / 200), until_done=False)
        for worker in range(life.workers):
            if worker in course.paused:
                continue
            if worker not in left and all(
                fabric.completion(worker, op, lane=lane) for op, lane in own[worker]
            ):
                left.add(worker)
                course.leaving[worker] = fabric.now
                fabric.close(worker, linger=life.peer_timeout * LINGER)
            elif worker in left and worker not in gone and fabric.closed(worker):
                gone.add(worker)
                course.left[worker] = fabric.now
                fabric.kill(worker)
    if missing := left - gone:
        raise Wrong("stall", f"ranks {sorted(missing)} have not left at {fabric.now:.3f} s")


def _again(life: Life, course: Course, fabric: Fabric) -> None:
    """The network is mended, and the launcher starts the job again: one step must succeed."""
    course.calm()
    course.dead.clear()
    asked = Asked(life, fabric, course)
    chance = random.Random(life.seed)
    hosts = list(range(life.hosts))
    chance.shuffle(hosts)
    for host in hosts:
        fabric.run(fabric.now + chance.random() * 0.1, until_done=False)
        fabric.restart(host, SESSION)
        if host < life.workers:
            asked.ask(host, 1, fabric.now)
    course.run(fabric.now + life.timeout)
    fabric.check()
    lost = unheard(life, fabric)[0] > PATIENCE * life.peer_timeout
    for rank, done, _ in asked.errors():
        if lost and done.error_cause == "silence":
            continue
        raise Wrong("again", f"rank {rank}, started again: {done.error}")
