"""What a life is judged by: the right result on all replicas, or an error on all in time.

The fabric checks its invariants at every event. At the end no living rank may wait any more. An
error needs a fault that explains it: it has the cause of one, names one of its hosts, and its step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from gradwire import _engine
from gradwire.sim.fabric import BrokenInvariantError, Fabric, Link
from gradwire.sim.fuzz.faults import DEADLY, EVERYWHERE, KINDS, Ports, span
from gradwire.sim.fuzz.life import Fault, Life

Errors = list[tuple[int, "_engine.Completion", float]]
PATIENCE = 0.7
"""Share of the peer time-out for which hosts may be silent and no error follows."""
MEETING = (0.3, 20.0)
"""Seconds before the first op and the first fault, at least and at most: endpoints meet before, as
those of a real job do. A peer that has never answered is not missed before the op's time-out."""
LINGER = 0.1
"""Share of the peer time-out for which who leaves waits for peers that say nothing."""
MOST_EVENTS = 8_000_000
"""Events of a life; more are a storm."""


class Wrong(Exception):
    """A life is not as it should be.

    Attributes:
        kind: One word for it.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class Verdict:
    """What became of a life.

    Attributes:
        outcome: "done" for the right results, "error" for errors that faults explain, or one word
            for what is wrong.
        text: What is wrong, or "".
        causes: How many ranks had an error, by cause.
        events: Number of simulated events.
        seconds: Virtual seconds.
    """

    outcome: str = "done"
    text: str = ""
    causes: Counter[str] = field(default_factory=Counter)
    events: int = 0
    seconds: float = 0.0

    @property
    def wrong(self) -> bool:
        """Whether something is wrong."""
        return self.outcome not in ("done", "error")


def judge(life: Life) -> Verdict:
    """Runs a life to its end."""
    from gradwire.sim.fuzz import training, transfers

    verdict = Verdict()
    try:
        (transfers if life.shape == "transfers" else training).live(life, verdict)
    except Wrong as wrong:
        verdict.outcome, verdict.text = wrong.kind, str(wrong)
    except BrokenInvariantError as error:
        verdict.outcome, verdict.text = "invariant", str(error)
    return verdict


def network(life: Life) -> tuple[Fabric, Ports]:
    """Makes the fabric of a life, with the faults that last from its start."""
    base = Link(rate=life.rate, delay=life.delay, queue=life.queue)
    for fault in life.of_kind(*EVERYWHERE):
        port = KINDS[fault.kind].port
        assert port is not None
        base = port(base, fault)
    options: dict[str, float] = {}
    for fault in life.of_kind("busy"):
        names = ("host_delay", "host_jitter", "send_time")
        options |= dict(zip(names, fault.amount, strict=True))
    buffers = [round(fault.amount[0]) for fault in life.of_kind("buffer")]
    fabric = Fabric(
        life.workers,
        servers=life.servers,
        seed=life.seed,
        link=base,
        whole_trains=life.whole_trains,
        datagram_bytes=life.datagram,
        peer_timeout=life.peer_timeout,
        ping_interval=life.ping,
        receive_buffer=max(min([1 << 20, *buffers]), 2 * life.datagram),
        memory_limit=memory(life),
        most_events=MOST_EVENTS,
        **options,  # type: ignore[arg-type]
    )
    always = [
        fault
        for fault in life.faults
        if fault.at < 0 and KINDS[fault.kind].port and fault.kind not in EVERYWHERE
    ]
    for fault in life.of_kind("drift"):
        fabric.set_clock(fault.host % life.hosts, fault.amount[0])
    ports = Ports(fabric, base, always)
    return fabric, ports


def memory(life: Life) -> int:
    """The memory limit of each endpoint."""
    from gradwire.sim.fuzz.transfers import plan_of

    if life.shape != "transfers" or not life.of_kind("memory"):
        return 1 << 31
    least = _engine.least_memory_limit(plan_of(life), life.datagram, life.workers, life.servers)
    share = min(fault.amount[0] for fault in life.of_kind("memory"))
    return int(least * share * (3.6 * life.lanes if life.lanes > 1 else 1))


class Course:
    """Lets the faults of a life begin and end at their times while its fabric runs."""

    def __init__(self, life: Life, fabric: Fabric, ports: Ports) -> None:
        self.life = life
        self.fabric = fabric
        fabric.run(MEETING[0], until_done=False)
        while not fabric.met and fabric.now < MEETING[1]:
            fabric.run(fabric.now * 1.1, until_done=False)
        self.start = fabric.now
        self.met = fabric.met
        self.dead: set[int] = set()
        self.paused: set[int] = set()
        self.began: dict[Fault, float] = {}
        self.leaving: dict[int, float] = {}
        self.left: dict[int, float] = {}
        self._ports = ports
        self._cuts: Counter[tuple[int, int]] = Counter()  # several faults may cut one way
        self._due: list[tuple[float, int, bool, Fault]] = []
        for number, fault in enumerate(life.faults):
            self._start_with(number, fault)
        self._due.sort()

    def _start_with(self, number: int, fault: Fault) -> None:
        if fault.kind in ("cross", "tcp"):
            self._traffic(fault)
        elif fault.at >= 0:
            at = self.start + fault.at
            self._due.append((at, 2 * number, True, fault))
            if fault.length != float("inf"):
                self._due.append((at + fault.length, 2 * number + 1, False, fault))

    def _traffic(self, fault: Fault) -> None:
        host = fault.host % self.life.hosts
        if fault.kind == "tcp":
            end = self.start + fault.at + max(fault.length, 1e-3)
            self.fabric.tcp_flow(
                host, start=self.start + fault.at, end=end, round_trip=fault.amount[0]
            )
            return
        self.fabric.cross_traffic(
            host,
            rate=fault.amount[0] * self.life.rate,
            length=fault.length,
            start=self.start + fault.at,
            direction="up" if fault.direction == "up" else "down",
            train=round(fault.amount[1]),
        )

    def out(self) -> set[int]:
        """The hosts that are dead, or frozen with nothing to come that wakes them."""
        wakes = {fault.host % self.life.hosts for _, _, begins, fault in self._due if not begins}
        return self.dead | (self.paused - wakes)

    def next_fault(self) -> float:
        """When a fault begins or ends next; infinity for never."""
        return self._due[0][0] if self._due else float("inf")

    def run(self, until: float, *, until_done: bool = True) -> bool:
        """Runs until a time or until all ops are done, whatever happens meanwhile.

        Args:
            until: Seconds since the start.
            until_done: Whether to stop when all ops are done.

        Returns:
            Whether all ops of living workers are done.
        """
        while True:
            stop = min(until, self.next_fault())
            before = self.fabric.now
            if self.fabric.run(max(stop, before), until_done=until_done, check=False) and (
                until_done
            ):
                return True
            if self.fabric.now < stop:  # a check failed, or no event is left
                self.fabric.check()
                if not until_done and stop < until:
                    self.fabric.run(stop, until_done=False)
            if stop >= until and self.next_fault() > until:
                return False
            _, _, begins, fault = self._due.pop(0)
            self._change(fault, begins)

    def calm(self) -> None:
        """Ends all that goes on, as when a network is mended."""
        for _, _, begins, fault in self._due:
            if not begins:
                self._change(fault, False)
        for fault in self.began:
            if fault.length == float("inf"):
                self._change(fault, False)
        self._due.clear()

    def _cut(self, source: int, destination: int, begins: bool) -> None:
        self._cuts[source, destination] += 1 if begins else -1
        self.fabric.cut(source, destination, self._cuts[source, destination] > 0)

    def _change(self, fault: Fault, begins: bool) -> None:
        if begins:
            self.began[fault] = self.fabric.now
        elif fault not in self.began:
            return
        if KINDS[fault.kind].port:
            (self._ports.begin if begins else self._ports.end)(fault)
            return
        life, fabric = self.life, self.fabric
        host = fault.host % life.hosts
        peer = fault.peer % life.hosts
        match fault.kind:
            case "jump":
                if begins:
                    fabric.jump_clock(host, fault.amount[0])
            case "freeze" | "hang" | "suspend" if host not in self.dead:
                if begins:
                    self.paused.add(host)
                    fabric.pause(host)
                else:
                    self.paused.discard(host)
                    fabric.resume(host, clock_stood=fault.kind == "suspend")
            case "partition" | "sever" if host != peer:
                self._cut(host, peer, begins)
                self._cut(peer, host, begins)
            case "oneway" | "mute" if host != peer:
                self._cut(host, peer, begins)
            case "isolate" | "outage":
                for other in range(life.hosts):
                    if other != host:
                        self._cut(host, other, begins)
                        self._cut(other, host, begins)
            case "kill":
                if begins:
                    self.dead.add(host)
                    fabric.kill(host)
            case "quit":
                if begins and host not in self.dead:
                    fabric.close(host, linger=life.peer_timeout * LINGER)


def explained(life: Life, course: Course) -> tuple[set[str], set[int], bool]:
    """What errors a life may end in.

    Returns:
        Causes, the hosts that errors may name, and whether all kinds of error are allowed.
    """
    longest, pairs = unheard(life, course.fabric)
    causes: set[str] = set()
    hosts: set[int] = set()
    silent = longest
    for fault in life.faults:
        kind = KINDS[fault.kind]
        causes |= kind.causes
        if kind.silent:
            silent += fault.amount[0] if fault.kind == "jump" else fault.length
        if kind.causes or kind.silent:
            hosts.add(fault.host % life.hosts)
            if fault.kind in ("partition", "sever", "oneway", "mute"):
                hosts.add(fault.peer % life.hosts)
    if silent > PATIENCE * life.peer_timeout:
        causes |= {"silence"}
        hosts |= pairs
    for host, began in course.leaving.items():
        if course.left.get(host, began) - began > PATIENCE * life.peer_timeout:
            causes |= {"left"}  # it stayed for as long as it may
            hosts.add(host)
    if causes & {"silence"} and not course.met:
        causes |= {"timeout"}  # who has never answered is not missed before
    if life.of_kind("memory") and life.lanes > 1:
        causes |= {"memory"}
    return causes, hosts, "any" in causes


def unheard(life: Life, fabric: Fabric) -> tuple[float, set[int]]:
    """How long hosts heard nothing of each other since the wire lost it all.

    Returns:
        The most seconds, and the hosts of all pairs that this can have kept apart, where a clock
        that jumps makes a silence longer.
    """
    longest, hosts = 0.0, set()
    jumped: defaultdict[int, float] = defaultdict(float)
    for fault in life.of_kind("jump"):
        jumped[fault.host % life.hosts] += fault.amount[0]
    for source in range(life.hosts):
        for destination in range(life.hosts):
            seconds = fabric.unheard(source, destination)
            longest = max(longest, seconds)
            if seconds and seconds + jumped[destination] > PATIENCE * life.peer_timeout:
                hosts |= {source, destination}
    return longest, hosts


def check_errors(life: Life, course: Course, errors: Errors) -> None:
    """Judges errors: each a rank, its completion, and when it had it."""
    causes, hosts, anything = explained(life, course)
    jumped = sum(fault.amount[0] for fault in life.of_kind("jump"))
    for rank, done, when in errors:
        where = f"rank {rank} at {when:.3f} s: {done.error}"
        if anything:
            continue
        if done.error_cause not in causes:
            raise Wrong("unprovoked", f"cause {done.error_cause!r}, {where}")
        if done.error_cause == "timeout" and jumped > PATIENCE * life.patience:
            continue  # by its own clock a rank has waited for the others
        named = done.error_rank
        if named >= life.workers and done.error_cause == "timeout":
            continue  # workers know of their server alone, and that it lacks something
        if named >= 0 and named not in hosts and done.error_cause not in ("memory", "plan"):
            raise Wrong("blamed", f"rank {named} is not at fault, {where}")
    deadly = [when for fault, when in course.began.items() if fault.kind in DEADLY]
    if not errors or not deadly or anything:
        return
    first = min(when for _, _, when in errors)
    last_rank, last_done, last = max(errors, key=lambda each: each[2])
    late = sum(min(f.length, 5 * life.peer_timeout) for f in life.faults if KINDS[f.kind].silent)
    allowed = max(first, *deadly) + 2.5 * life.peer_timeout + late + 2 * span(life)
    if last_done.error_cause == "silence" and last > allowed:
        raise Wrong(
            "late",
            f"rank {last_rank} had its error at {last:.3f} s, the first at "
            f"{first:.3f} s: {last_done.error}",
        )
