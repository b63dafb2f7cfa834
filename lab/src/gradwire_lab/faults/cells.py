"""The cells of the table: what befalls whom in which phase, and what is to become of the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Fate = Literal["on", "stop", "either"]
"""What becomes of a job: it goes on with the right result, or every rank stops with an error."""

WORKER = ("before", "attach", "forward", "backward", "push", "turn", "pull", "optimizer", "detach")
"""The phases of a worker's life: before it attaches, while the ranks meet, in a step, at the end.

"push", "turn" and "pull" are the moments when it has sent a quarter, three fifths and nearly all of
a step's bytes."""
SERVER = ("attach", "forward", "push", "turn", "pull", "optimizer", "detach")
STRUCK_STEP = 2
PORT = 29_700
THREAD_S = 5.0
"""Seconds in which a process without memory learns that a thread cannot begin."""


@dataclass(frozen=True)
class Shape:
    """A shape is the processes of a job and where they are.

    Attributes:
        places: the host of each rank.
        servers: how many servers there are, on the last host.
        settings: settings of all of them.
    """

    name: str
    places: tuple[int, ...]
    servers: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


FLAT = Shape("3 ranks", (0, 1, 2))
HOSTS = Shape("2 hosts of 2 ranks", (0, 0, 1, 1), settings={"hosts": True})
SERVED = Shape("2 ranks, a server", (0, 1), 1, {"route": "server", "servers": 1})


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        fault: what happens, for the table.
        whom: whom it befalls: "rank 2", "server 0", or a link's host.
        fate: what is to become of the job.
        phase: when it happens.
        by: the rank that notices the moment; that of `whom` if not given.
        what: what the struck process does to itself, of `gradwire_lab.faults.strikes`.
        options: arguments of that.
        ground: what the ground does at the moment: "cut", "deaf", "mute", "refuse", "thaw".
        lasts_s: how long that lasts; 0 for good.
        says: what the error of every rank has to hold, beside the culprit and the step.
        culprit: whom every error has to name; `whom` if not given, "" for nobody.
        patience_s: peer_timeout of the job where it is not the table's.
        settings: further settings of all ranks.
        own: further settings of the struck rank.
        bound: what bounds the time until all have stopped: a setting's name.
        status: exit status of the struck process, where it matters.
        again: whether all processes then die one after another, and each starts anew at once, with
            the port that it had.
    """

    fault: str
    whom: str
    fate: Fate
    phase: str = "push"
    shape: Shape = FLAT
    by: int | None = None
    what: str = "tell"
    options: dict[str, Any] = field(default_factory=dict)
    ground: str = ""
    lasts_s: float = 0.0
    says: tuple[str, ...] = ()
    culprit: str | None = None
    patience_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    bound: str = "peer_timeout"
    status: int | None = None
    steps: int = 4
    again: bool = False

    @property
    def name(self) -> str:
        """What the cell is called."""
        return f"{self.fault}, {self.whom}, {self.phase}"

    @property
    def meets(self) -> bool:
        """Whether the fault comes before the ranks have met."""
        return self.phase in ("before", "attach")


def processes() -> Iterator[Cell]:
    """Yield deaths and freezes of each kind of process in each phase."""
    for what, fault in (("kill", "kill -9"), ("stop", "SIGSTOP")):
        for role, shape, whom in (
            ("worker", FLAT, "rank 2"),
            ("leader", HOSTS, "rank 2"),
            ("follower", HOSTS, "rank 3"),
        ):
            for phase in WORKER:
                # A follower has no engine: its leader notices how far a step is.
                seen = role == "follower" and phase in ("push", "turn", "pull")
                if role == "follower" and phase in ("attach", "turn", "pull"):
                    continue
                # Others may still need what it sent last.
                fate: Fate = "either" if phase == "detach" else "stop"
                cell = Cell(f"{fault} of a {role}", whom, fate, phase, shape, what=what)
                if phase in ("before", "attach"):
                    cell = replace(cell, bound="rendezvous_timeout")
                yield replace(cell, by=2) if seen else cell
        for phase in SERVER:
            fate = "either" if phase == "detach" else "stop"
            by = None if phase == "attach" else 0
            bound = "rendezvous_timeout" if phase == "attach" else "peer_timeout"
            yield Cell(
                f"{fault} of a server", "server 0", fate, phase, SERVED, by, what, bound=bound
            )


def links() -> Iterator[Cell]:
    """Yield links that are cut and healed, and firewalls of one direction."""
    for seconds in (1.0, 10.0, 60.0):
        patient = Cell(
            f"link cut for {seconds:g} s, peer_timeout above it",
            "rank 2",
            "on",
            ground="cut",
            lasts_s=seconds,
            patience_s=seconds * 1.2 + 8.0,
            settings={"timeout": 2.0 * seconds + 60.0},
        )
        yield patient
        if seconds > 1.0:
            yield replace(
                patient,
                fault=f"link cut for {seconds:g} s, peer_timeout below it",
                fate="stop",
                patience_s=0.0,
                settings={},
            )
    for ground, fault, says in (
        ("refuse", "firewall refuses what a host sends (EPERM)", ("Operation not permitted",)),
        ("mute", "network drops what a host sends", ()),
        ("deaf", "network drops what a host is sent", ()),
    ):
        yield Cell(fault, "rank 2", "stop", ground=ground, says=says)
    yield Cell(
        "firewall refuses what a host sends (EPERM), of two ranks",
        "rank 1",
        "stop",
        ground="refuse",
        shape=Shape("2 ranks", (0, 1)),
        says=("Operation not permitted",),
    )
    yield Cell(
        "firewall refuses what a host sends (EPERM), of a leader",
        "rank 2",
        "stop",
        ground="refuse",
        shape=HOSTS,
        says=("Operation not permitted",),
    )
    yield Cell(
        "firewall refuses what a host sends (EPERM), of a server",
        "server 0",
        "stop",
        ground="refuse",
        shape=SERVED,
        by=0,
        says=("Operation not permitted",),
    )
    yield Cell(
        "firewall refuses for a moment (EPERM)",
        "rank 2",
        "on",
        ground="refuse",
        lasts_s=0.5,
        patience_s=10.0,
    )
    for whom, shape in (("rank 2", FLAT), ("rank 2", HOSTS)):
        of = "" if shape is FLAT else ", of a leader"
        yield Cell(
            f'firewall refuses what a host sends (EPERM){of}, on_failure="host"',
            whom,
            "on",
            ground="refuse",
            shape=shape,
            settings={"on_failure": "host"},
        )
    yield Cell(
        'firewall refuses for some seconds (EPERM), on_failure="host"',
        "rank 2",
        "on",
        ground="refuse",
        lasts_s=3.0,
        settings={"on_failure": "host"},
        steps=12,
    )


def hosts() -> Iterator[Cell]:
    """Yield what hosts and programs do to a job beside dying."""
    yield Cell(
        "frozen for half a second",
        "rank 2",
        "on",
        what="stop",
        ground="thaw",
        lasts_s=0.5,
        patience_s=10.0,
    )
    yield Cell("late to attach", "rank 2", "on", "before", what="sleep", options={"seconds": 2.0})
    yield Cell(
        "later to attach than rendezvous_timeout",
        "rank 2",
        "stop",
        "before",
        what="sleep",
        options={"seconds": 8.0},
        bound="rendezvous_timeout",
        settings={"rendezvous_timeout": 3.0},
    )
    yield Cell(
        "computes for longer than peer_timeout",
        "rank 2",
        "on",
        "forward",
        what="sleep",
        options={"seconds": 3.0},
    )
    yield Cell(
        "computes for longer than timeout",
        "rank 2",
        "stop",
        "forward",
        what="sleep",
        options={"seconds": 6.0},
        settings={"timeout": 2.0},
        bound="timeout",
    )
    yield Cell("fork after attach", "rank 2", "on", "forward", what="fork")
    for role, shape, whom, phase in (
        ("worker", FLAT, "rank 2", "forward"),
        ("worker", FLAT, "rank 2", "backward"),
        ("worker", FLAT, "rank 2", "optimizer"),
        ("leader", HOSTS, "rank 2", "backward"),
        ("follower", HOSTS, "rank 3", "backward"),
    ):
        yield Cell(
            f"interpreter exit of a {role}",
            whom,
            "stop",
            phase,
            shape,
            what="leave",
            options={"status": 3},
            status=3,
        )
    yield Cell(
        "no descriptor left, before attach",
        "rank 2",
        "stop",
        "before",
        what="use_up_descriptors",
        bound="rendezvous_timeout",
    )
    yield Cell("no descriptor left, in training", "rank 2", "on", what="use_up_descriptors")
    yield Cell(
        "full disk under report=",
        "rank 0",
        "on",
        "before",
        what="fill_disk",
        options={"folder": "/mnt", "size": 4096},
        own={"report": "/mnt/steps.jsonl"},
        steps=8,
    )
    yield Cell(
        "no memory left in a server's engine",
        "server 0",
        "either",  # what it holds already may do
        "serving",
        SERVED,
        what="use_up_memory",
        says=("bad_alloc",),
    )
    yield Cell(
        "no memory left in a server's engine, not even what was freed",
        "server 0",
        "either",
        "serving",
        SERVED,
        what="use_up_memory",
        options={"least": 4096},
        patience_s=THREAD_S,
        says=("bad_alloc",),
    )
    for phase in ("attached", "forward", "push"):
        yield Cell("no memory left for a worker", "rank 2", "either", phase, what="use_up_memory")
        yield Cell(
            "no memory left for a worker, not even what was freed",
            "rank 2",
            "either",
            phase,
            what="use_up_memory",
            options={"least": 4096},
            patience_s=THREAD_S,
        )
    for whom, shape in (("rank 2", FLAT), ("server 0", SERVED)):
        yield Cell(
            "all begin anew on the same ports after a kill -9",
            whom,
            "on",
            by=None if shape is FLAT else 0,
            shape=shape,
            what="kill",
            again=True,
            patience_s=10.0,
            settings={"port": PORT},
        )
    yield Cell("buffers at the kernel's minimum", "rank 2", "on", "attached", what="shrink_buffers")
    yield Cell("GSO refused in mid-run", "rank 2", "on", what="refuse_trains")
    for ranks in (8, 16):
        places = tuple(rank % 3 for rank in range(ranks))
        yield Cell(
            f"{ranks} ranks on this machine",
            "all",
            "on",
            "",
            Shape(f"{ranks} ranks", places, settings={"hosts": False}),
            culprit="",
            steps=3,
            patience_s=10.0,
        )


def every() -> list[Cell]:
    """Return all cells whose job is of one life, in the order of the table."""
    return [*processes(), *links(), *hosts()]
