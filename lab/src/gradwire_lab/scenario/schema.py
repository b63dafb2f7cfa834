"""A scenario says what is moved over which network, who takes part, and what it must show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire_lab.network.addresses import MAX_HOSTS
from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.mark import LIMIT, Map, Mark
from gradwire_lab.scenario.network import Bandwidth, Bursts, Fault, Loss, Rivals, Topology
from gradwire_lab.scenario.options import check_one_engine
from gradwire_lab.scenario.reader import MISSING, ScenarioError, key
from gradwire_lab.scenario.work import Model, Work

__all__ = ["Cell", "Scenario", "Tail"]


@dataclass(frozen=True)
class Tail:
    """A tail is what cross traffic is tuned for before anything is measured."""

    ratio: float = key(
        0.0, "99th percentile over median to tune the bursts for; 0: none", low=0.0, high=1000.0
    )
    contestant: str = key("", "who shows it")
    rounds: int = key(60, "of each attempt", low=5, high=1_000_000)
    tries: int = key(
        6,
        "attempts: the bursts get twice as long until they are too long; then halfway",
        low=1,
        high=20,
    )

    def __post_init__(self) -> None:
        if 0.0 < self.ratio <= 1.0:
            raise ScenarioError(
                f"ratio={self.ratio!r}: above 1 is allowed, for no 99th percentile is below the "
                "median, or 0: do not tune"
            )


@dataclass(frozen=True)
class Scenario:
    """This is a scenario, or one cell of it."""

    name: str = key(MISSING, "of the scenario: the file's name without .toml", line=True)
    title: str = key(MISSING, "a line for the page", line=True)
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
        if kind == "push" and self.topology.servers != 1:
            raise ScenarioError(
                f"topology.servers={self.topology.servers}: work.kind='push' takes 1"
            )
        if kind != "push" and self.topology.workers < 2:
            raise ScenarioError(f"topology.workers=1: work.kind={kind!r} takes 2 or more")
        if kind != "training" and self.model != Model():
            raise ScenarioError(f"model: with work.kind={kind!r} none is trained; leave it out")
        for each in self.contestants:
            each.check(self.work, self.model, self.topology.servers)
        if kind == "training":
            ours = [each for each in self.contestants if each.transport == "gradwire"]
            check_one_engine({each.name: each.options for each in ours})
        if self.tail.ratio:
            self._check_tail(names)
        if self.topology.rates and self.bandwidth.rates:
            raise ScenarioError(
                f"bandwidth.rates={list(self.bandwidth.rates)!r} beside topology.rates: they "
                "change all ports alike; give one of both"
            )
        self._check_hosts()
        self._check_loss()
        self._check_dctcp()

    def check_name(self, stem: str) -> None:
        """Check that it has its file's name."""
        if self.name != stem:
            raise ScenarioError(f"name={self.name!r}: must be {stem!r}")

    def check_marks(self) -> None:
        """Check that all contestants of the marks, and of the loss to time, take part.

        Raises:
            ScenarioError: names one who does not.
        """
        names = [each.name for each in self.contestants]
        if self.model.target_of not in ("", *names):
            raise ScenarioError(
                f"model.target_of={self.model.target_of!r}: takes no part; those that do: {names}"
            )
        for place, mark in enumerate(self.marks):
            for name in (mark.contestant, *mark.over):
                if name not in (*names, LIMIT):
                    raise ScenarioError(
                        f"marks[{place}]: contestant {name!r} takes no part; those that do: {names}"
                    )

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
        if hosts + self.extra_hosts > MAX_HOSTS:
            raise ScenarioError(
                f"topology: {hosts} hosts and {self.extra_hosts} for bursts and rivals: "
                f"{MAX_HOSTS} at most are allowed"
            )
        fault_kinds = [each.kind for each in self.faults]
        if "kill" in fault_kinds and len(self.contestants) > 1:
            raise ScenarioError("faults: kill ends the cell: one contestant is allowed with it")

    @property
    def congestion_controls(self) -> dict[str, str]:
        """Return those of TCP that take part, by the key that asks for each."""
        asked = {
            f"contestants: {each.name}: congestion_control": each.congestion_control
            for each in self.contestants
            if each.transport != "gradwire"
        }
        if self.rivals.streams:
            asked["rivals.congestion_control"] = self.rivals.congestion_control
        return asked

    def _check_dctcp(self) -> None:
        for place, name in self.congestion_controls.items():
            if name == "dctcp" and self.topology.ecn is None:
                raise ScenarioError(f"{place}='dctcp': it needs switches that mark; give ecn")

    def _check_loss(self) -> None:
        if self.loss.per_worker and len(self.loss.per_worker) != self.topology.workers:
            raise ScenarioError(
                f"loss.per_worker: {len(self.loss.per_worker)} shares for "
                f"{self.topology.workers} workers; as many are needed"
            )
        if (self.loss.when == "steps") > (self.work.kind == "training"):
            raise ScenarioError("loss.when='steps': only work.kind='training' has steps")
        late = [step for step in self.loss.steps if step >= self.work.rounds]
        if late:
            raise ScenarioError(
                f"loss.steps={late}: of work.rounds={self.work.rounds} steps, 0 to "
                f"{self.work.rounds - 1} are allowed"
            )
        if (self.loss.when == "rounds") and self.work.kind == "training":
            raise ScenarioError("loss.when='rounds': with work.kind='training' use 'steps'")
        if self.loss.at == "server" and not self.topology.servers:
            raise ScenarioError("loss.at='server': the topology has no server")
        gloo = [each.name for each in self.contestants if each.transport == "gloo"]
        if self.loss.at == "server" and gloo:
            raise ScenarioError(
                f"loss.at='server' with contestant {gloo[0]!r}: gloo crosses no server's port and "
                "would lose nothing; 'workers' and 'everywhere' are allowed"
            )

    @property
    def extra_hosts(self) -> int:
        """Return the hosts for cross traffic and rivals."""
        return sum(each.sources for each in self.bursts) + bool(self.rivals.streams)


@dataclass(frozen=True)
class Cell:
    """A cell is one point of a scenario's grid.

    Attributes:
        labels: the label of each axis, by the axis' name.
        scenario: with this cell's values; the contestants that this gradwire lacks left out.
    """

    labels: Mapping[str, str]
    scenario: Scenario

    @property
    def name(self) -> str:
        return ", ".join(self.labels.values()) or "the only cell"
