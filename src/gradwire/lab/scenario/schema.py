"""A scenario: what is moved over which network, who takes part, and what it must show."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gradwire.errors import ConfigError
from gradwire.lab.scenario.network import (
    CONGESTION_CONTROLS,
    Bandwidth,
    Bursts,
    Fault,
    Loss,
    Rivals,
    Topology,
)
from gradwire.lab.scenario.reader import MISSING, ScenarioError, key
from gradwire.plans import SPENDS

__all__ = ["HOOKS", "LIMIT", "QUANTITIES", "Contestant", "Mark", "Model", "Scenario", "Work"]

HOOKS = ("none", "fp16", "powersgd", "topk")
THIRDS = ("early", "mid", "late", "never")
TRANSPORTS = {
    "push": ("tcp", "gradwire"),
    "all_reduce": ("gloo", "gradwire"),
    "training": ("gloo", "gradwire"),
}
"""Which transports take part in which kind of work."""

LIMIT = "limit"
"""In a mark: the physical limit of the cell in place of a contestant."""

QUANTITIES = (
    "time_median",
    "time_mean",
    "time_p99",
    "time_max",
    "throughput",
    "steps_per_s",
    "job_time",
    "rival_goodput",
    "final_loss",
)


@dataclass(frozen=True)
class Work:
    """What is moved, and how often."""

    kind: str = key(
        MISSING,
        "push: every worker sends to one server; all_reduce: all get the sum; training: DDP",
        choices=[*TRANSPORTS],
    )
    bytes: int = key(4_000_000, "of each worker's buffer (not for training)", low=4, high=1 << 32)
    layers: int = key(8, "equal parts of the buffer that a policy sees as layers", low=1, high=512)
    rounds: int = key(20, "timed rounds, or steps of training, of each contestant", low=1)
    block: int = key(10, "rounds of one contestant before the next has its turn", low=1)
    warm_up: int = key(2, "rounds at the start of each turn that are not timed", low=0)
    seeds: tuple[int, ...] = key((0,), "the whole is done again for each", low=0)
    round_limit_s: float = key(60.0, "a round that takes longer ends the cell, s", above=0.0)

    def __post_init__(self) -> None:
        if self.bytes % 4:
            raise ScenarioError(f"bytes={self.bytes!r}: a multiple of 4 (float32) is allowed")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ScenarioError(f"seeds={list(self.seeds)!r}: one or more different numbers")


@dataclass(frozen=True)
class Model:
    """What training trains: a character-level transformer, as the demo does."""

    width: int = key(128, "of the residual stream", low=8, high=4096)
    layers: int = key(2, "blocks", low=1, high=64)
    heads: int = key(4, "of each attention; they divide the width", low=1, high=64)
    context: int = key(64, "characters seen at once", low=2, high=1024)
    batch: int = key(4, "samples of each rank and step", low=1, high=1024)
    learning_rate: float = key(1e-3, "of AdamW", above=0.0)
    overlap: bool = key(False, "several buckets, sent while the backward pass goes on")
    bucket_mb: float = key(1.0, "size of a bucket when they overlap, MB", above=0.0)
    compute_s: float = key(
        0.0,
        "a step's computation is stretched to so long, as an accelerator's would be, s",
        low=0.0,
    )
    target_loss: float = key(0.0, "held-out loss to time; 0: none", low=0.0)
    communication_share: float = key(
        0.0,
        "stretch it so that communication is this share of the first contestant's quiet step; "
        "0: do not",
        low=0.0,
        high=0.95,
    )

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ScenarioError(f"heads={self.heads!r}: a divisor of width={self.width} is allowed")
        if self.compute_s and self.communication_share:
            raise ScenarioError(
                f"communication_share={self.communication_share!r} beside compute_s: one of them"
            )


@dataclass(frozen=True)
class Contestant:
    """One way to carry the gradients."""

    name: str = key(MISSING, "what tables call it")
    transport: str = key(MISSING, "what carries the bytes", choices=["tcp", "gloo", "gradwire"])
    congestion_control: str = key("cubic", "of tcp and gloo", choices=CONGESTION_CONTROLS)
    hook: str = key("none", "of gloo in training: DDP's communication hook", choices=HOOKS)
    policy: str = key("reliable", "of gradwire, except for pushes")
    options: dict[str, Any] = key(
        {}, "of gradwire: options of the policy, and common settings as for gradwire.attach"
    )
    bound: float = key(0.0, "of gradwire's pushes", low=0.0, high=0.99)
    control: str = key(
        "stream",
        "of gradwire's pushes: packet by packet, or in the papers' passes of probe and bitmap",
        choices=["stream", "probe"],
    )
    spend: str = key("anything", "of gradwire's pushes: what may be given up", choices=SPENDS)
    enough: float | None = key(
        None, "of gradwire's pushes: this share closes them once they are late", above=0.0, high=1.0
    )
    late: float = key(1.5, "with enough: when a push is late, × the header ideal", above=0.0)
    slack_s: float = key(
        0.03, "with enough: from then until it closes with what there is, s", low=0.0
    )
    tolerant: tuple[str, ...] = key(
        (),
        "of gradwire in training: all workers vote for the tolerant phase in these thirds, and for "
        "the critical one in the others (never: in all); none: the policy decides",
        choices=THIRDS,
    )
    optional: bool = key(False, "leave it out where this gradwire lacks one of its options")

    def __post_init__(self) -> None:
        if not self.name or self.name == LIMIT:
            raise ScenarioError(f"name={self.name!r}: a name other than {LIMIT!r}")
        if self.transport == "gradwire" and self.hook != "none":
            raise ScenarioError(
                f"hook={self.hook!r} with transport='gradwire': it is a hook itself"
            )
        if self.transport != "gradwire" and (self.options or self.bound or self.enough):
            raise ScenarioError(
                f"transport={self.transport!r} with options, bound or enough: those are gradwire's"
            )
        if self.tolerant and self.transport != "gradwire":
            raise ScenarioError(f"tolerant={list(self.tolerant)!r}: only gradwire has phases")

    def check_options(self, kind: str) -> None:
        """Whether this gradwire takes the options.

        Raises:
            ConfigError: names the option and what is allowed.
        """
        if self.transport != "gradwire":
            return
        from gradwire.configure import configure
        from gradwire.plans import TransferPlan
        from gradwire.settings import Settings

        known = {field.name for field in dataclasses.fields(TransferPlan)}
        if self.control != "stream" and "control" not in known:
            raise ConfigError(f"control={self.control!r}: this gradwire has only 'stream'")
        if kind == "push":
            Settings.build({"route": "server", "servers": 1, **self.options}, environment={})
        else:
            configure(self.policy, self.options, environment={})


@dataclass(frozen=True)
class Mark:
    """Something that the scenario must show: a quantity, beside another one."""

    text: str = key(MISSING, "what is wanted, in words")
    contestant: str = key(MISSING, "whose quantity")
    quantity: str = key("time_median", "which", choices=QUANTITIES)
    over: tuple[str, ...] = key(
        (), 'contestants that it is divided by, or ["limit"]; none: the quantity itself'
    )
    pick: str = key(
        "best", "which of several in `over`: the best, or the worst", choices=["best", "worst"]
    )
    inverse: bool = key(False, "the other one divided by it: the speed-up, where it is a time")
    over_cell: dict[str, Any] = key(
        {}, "divide by the same contestant's in this cell: axis = label"
    )
    where: dict[str, Any] = key({}, "only in cells with these labels: axis = [labels]")
    at_most: float | None = key(None, "the quotient wanted")
    at_least: float | None = key(None, "the quotient wanted")
    share_of_cap: float | None = key(
        None, "at least this share of what the round-trip and byte formulas allow over fixed bounds"
    )
    plus_rtts: float = key(0.0, "round-trip times allowed beside at_most × the limit", low=0.0)
    scope: str = key(
        "every",
        "of which cells: every one, their mean, or the one largest",
        choices=["every", "mean", "max"],
    )

    def __post_init__(self) -> None:
        wanted = [self.at_most, self.at_least, self.share_of_cap]
        if sum(value is not None for value in wanted) != 1:
            raise ScenarioError("one of at_most, at_least and share_of_cap is wanted")
        if self.plus_rtts and self.over != (LIMIT,):
            raise ScenarioError(f'plus_rtts={self.plus_rtts!r}: only with over=["limit"]')


@dataclass(frozen=True)
class Tail:
    """Cross traffic tuned, before anything is measured, for the tail that a contestant shows."""

    ratio: float = key(
        0.0, "wanted of the 99th percentile over the median; 0: do not tune", low=0.0
    )
    contestant: str = key("", "who shows it")
    rounds: int = key(60, "of each attempt", low=5)
    tries: int = key(6, "attempts: the bursts' length is halved between", low=1, high=20)


@dataclass(frozen=True)
class Map:
    """A map of a grid: each cell's tail over the quiet median."""

    rows: str = key("", "axis of the rows; none: no map")
    columns: str = key("", "axis of the columns")
    quiet: str = key("", "label on the axis of the rows of the cells without bursts")


@dataclass(frozen=True)
class Scenario:
    """One scenario, or one cell of it."""

    name: str = key(MISSING, "of the scenario: the file's name without .toml")
    title: str = key(MISSING, "a line for the page")
    work: Work = key(MISSING, "what is moved")
    contestants: tuple[Contestant, ...] = key(MISSING, "who takes part")
    published: str = key("", "what the papers say, for the page")
    topology: Topology = key(Topology(), "the network")
    model: Model = key(Model(), "of training")
    loss: Loss = key(Loss(), "packets lost by chance")
    bursts: tuple[Bursts, ...] = key((), "cross traffic that comes and goes")
    rivals: Rivals = key(Rivals(), "competing TCP streams")
    faults: tuple[Fault, ...] = key((), "frozen, killed and cut hosts")
    bandwidth: Bandwidth = key(Bandwidth(), "rates that change")
    tail: Tail = key(Tail(), "cross traffic tuned for a tail")
    map: Map = key(Map(), "a map of the grid on the page")
    marks: tuple[Mark, ...] = key((), "what it must show")

    def __post_init__(self) -> None:
        names = [each.name for each in self.contestants]
        if not names or len(set(names)) != len(names):
            raise ScenarioError(f"contestants: one or more with different names, not {names!r}")
        kind = self.work.kind
        if (kind == "push") != (self.topology.servers == 1):
            raise ScenarioError(
                f"topology.servers={self.topology.servers}: work.kind='push' takes 1, others 0"
            )
        if kind != "push" and self.topology.workers < 2:
            raise ScenarioError(f"topology.workers=1: work.kind={kind!r} takes 2 or more")
        for each in self.contestants:
            self._check_contestant(each)
        if self.tail.ratio:
            self._check_tail(names)
        self._check_hosts()
        self._check_loss()

    def check_marks(self) -> None:
        """Whether every mark's contestants take part.

        Raises:
            ScenarioError: names one that does not.
        """
        names = [each.name for each in self.contestants]
        for mark in self.marks:
            for name in (mark.contestant, *mark.over):
                if name not in (*names, LIMIT):
                    raise ScenarioError(
                        f"marks: contestant {name!r} takes no part; those that do: {names}"
                    )

    def _check_contestant(self, each: Contestant) -> None:
        kind = self.work.kind
        if each.transport not in TRANSPORTS[kind]:
            allowed = ", ".join(map(repr, TRANSPORTS[kind]))
            raise ScenarioError(
                f"contestants: {each.name}: transport={each.transport!r}: with work.kind={kind!r} "
                f"allowed are {allowed}"
            )
        if each.hook != "none" and kind != "training":
            raise ScenarioError(
                f"contestants: {each.name}: hook={each.hook!r}: only work.kind='training' has hooks"
            )
        if each.tolerant and kind != "training":
            raise ScenarioError(
                f"contestants: {each.name}: tolerant={list(each.tolerant)!r}: only "
                "work.kind='training' has thirds"
            )
        if kind != "push" and (each.bound or each.enough or each.control != "stream"):
            raise ScenarioError(
                f"contestants: {each.name}: bound, enough and control are for pushes; others take "
                "a policy and its options"
            )
        try:
            each.check_options(kind)
        except ConfigError as error:
            if not each.optional:
                raise ScenarioError(f"contestants: {each.name}: options: {error}") from None

    def _check_tail(self, names: list[str]) -> None:
        if self.tail.contestant not in names:
            raise ScenarioError(
                f"tail.contestant={self.tail.contestant!r}: takes no part; those that do: {names}"
            )
        if self.work.kind == "training" or len(self.bursts) != 1:
            raise ScenarioError(
                f"tail.ratio={self.tail.ratio!r}: takes one entry in bursts, whose length is "
                "tuned, and no training"
            )

    def _check_hosts(self) -> None:
        hosts = self.topology.hosts
        places = [
            *(("bursts.target", each.target) for each in self.bursts),
            *(("faults.host", each.host) for each in self.faults),
            ("rivals.target", self.rivals.target),
        ]
        for name, host in places:
            if host >= hosts:
                raise ScenarioError(f"{name}={host!r}: a host from 0 to {hosts - 1} is allowed")
        fault_kinds = [each.kind for each in self.faults]
        if "kill" in fault_kinds and len(self.contestants) > 1:
            raise ScenarioError("faults: kill ends the cell: one contestant is allowed with it")

    def _check_loss(self) -> None:
        if self.loss.per_worker and len(self.loss.per_worker) != self.topology.workers:
            raise ScenarioError(
                f"loss.per_worker: {len(self.loss.per_worker)} shares for "
                f"{self.topology.workers} workers; as many are wanted"
            )
        if (self.loss.when == "steps") > (self.work.kind == "training"):
            raise ScenarioError("loss.when='steps': only work.kind='training' has steps")
        if (self.loss.when == "rounds") and self.work.kind == "training":
            raise ScenarioError("loss.when='rounds': with work.kind='training' use 'steps'")
        if self.loss.at == "server" and not self.topology.servers:
            raise ScenarioError("loss.at='server': the topology has no server")

    @property
    def extra_hosts(self) -> int:
        """Hosts for cross traffic and rivals."""
        return sum(each.sources for each in self.bursts) + bool(self.rivals.streams)
