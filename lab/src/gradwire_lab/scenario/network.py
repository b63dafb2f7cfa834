"""A scenario's network has hosts and ports, and faults, loss and cross traffic."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_lab.network.addresses import MAX_HOSTS
from gradwire_lab.network.leaves import Leaves
from gradwire_lab.network.loss_runs import runs_possible, shortest_run
from gradwire_lab.network.presets import MAX_FRAME, NETWORKS, Burst, Preset
from gradwire_lab.scenario.reader import MISSING, ScenarioError, key

__all__ = [
    "Bandwidth",
    "Bursts",
    "Fault",
    "Loss",
    "Rivals",
    "Topology",
]

_BUCKET_SECONDS = 0.3e-3
"""Depth of a token bucket as network B has it: what a busy machine's late timer may miss."""

_FASTEST = 3e10
"""Highest rate in bit/s, since the kernel's token bucket takes bytes per second in 32 bits."""

_FAULT_S = 1.0
"""Seconds that a fault lasts if its length is not given."""

CONGESTION_CONTROLS = ("reno", "cubic", "bbr", "dctcp")
"""TCP's congestion controls; dctcp only where the switches mark and the kernel has it."""


@dataclass(frozen=True)
class Topology:
    """A topology has hosts on one switch, or on leaves under one spine.

    Both directions of every port and uplink are shaped, and drop-tail.
    """

    preset: str = key(
        "A", "standard network that gives what is not named here", choices=[*NETWORKS]
    )
    workers: int = key(4, "hosts that hold gradients", low=1, high=MAX_HOSTS)
    servers: int = key(
        0,
        "hosts that sum for the workers, 1 for pushes; without, gradwire is sharded over the "
        "workers",
        low=0,
        high=MAX_HOSTS,
    )
    rate: float | None = key(None, "of every port, bit/s", low=1e6, high=_FASTEST)
    queue: int | None = key(None, "drop-tail queue of every port, bytes", low=3028, high=1 << 30)
    rates: tuple[float, ...] = key(
        (),
        "instead, of each host's port, workers first, then servers, bit/s",
        low=1e6,
        high=_FASTEST,
    )
    queues: tuple[int, ...] = key(
        (), "instead, of each host's port, likewise, bytes", low=3028, high=1 << 30
    )
    offloads: bool | None = key(None, "whether trains of packets pass whole, for everybody")
    leaves: int = key(
        1,
        "switches that the hosts share in rank order; from 2 on each has an uplink to one spine",
        low=1,
        high=MAX_HOSTS,
    )
    uplink_rate: float | None = key(
        None,
        "of every leaf's uplink, bit/s; none: what the ports of the fullest leaf carry together",
        low=1e6,
        high=_FASTEST,
    )
    uplink_queue: int | None = key(
        None,
        "drop-tail queue of every uplink, bytes; none: that of the ports",
        low=3028,
        high=1 << 30,
    )
    ecn: int | None = key(
        None,
        "ECT packets that find more than so much in a switch's queue are marked CE, bytes; none: "
        "no queue marks",
        low=MAX_FRAME,
    )
    rtt_s: float = key(
        0.0, "added round-trip time between any two workers or servers, s", low=0.0, high=2.0
    )
    jitter_s: float = key(0.0, "at most added to each packet's way, random, s", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        if self.jitter_s and not self.rtt_s:
            raise ScenarioError(
                f"jitter_s={self.jitter_s!r} with rtt_s=0: jitter needs a delay; give rtt_s"
            )
        if self.leaves > self.hosts:
            raise ScenarioError(
                f"leaves={self.leaves!r} for {self.hosts} hosts: 1 to {self.hosts} are allowed"
            )
        for name, single in (("rates", self.rate), ("queues", self.queue)):
            values = getattr(self, name)
            if values and len(values) != self.hosts:
                raise ScenarioError(
                    f"{name}={list(values)!r}: one for each of {self.hosts} hosts is allowed"
                )
            if values and single is not None:
                raise ScenarioError(
                    f"{name}={list(values)!r} beside {name[:-1]}={single!r}: give one of both"
                )
        for name in ("uplink_rate", "uplink_queue"):
            value = getattr(self, name)
            if value is not None and self.leaves == 1:
                raise ScenarioError(
                    f"{name}={value!r} with leaves=1: one switch has no uplinks; give 2 leaves or "
                    "more"
                )
        queues = [self.port(host).queue for host in range(self.hosts)]
        queues += [self.spread.uplink.queue] if self.spread else []
        if self.ecn is not None and self.ecn >= min(queues):
            raise ScenarioError(
                f"ecn={self.ecn!r} with a queue of {min(queues)} bytes: less than the queue is "
                "allowed"
            )
        if self.spread is not None and self.spread.uplink.rate > _FASTEST:
            raise ScenarioError(
                f"uplink_rate: none, and the ports of a leaf carry {self.spread.uplink.rate:g} "
                f"bit/s; give one of {_FASTEST:g} at most"
            )

    @property
    def hosts(self) -> int:
        return self.workers + self.servers

    @property
    def ports(self) -> Preset:
        """Return how ports are shaped; where they differ, the highest rate and longest queue."""
        rate = round(max(self.rates)) if self.rates else None
        return self._shaped(rate, max(self.queues) if self.queues else None)

    def port(self, host: int) -> Preset:
        """Return how one host's port is shaped."""
        rate = round(self.rates[host]) if self.rates else None
        return self._shaped(rate, self.queues[host] if self.queues else None)

    @property
    def odd_ports(self) -> dict[int, Preset]:
        """Return those that are not as `ports`, by host."""
        each = {host: self.port(host) for host in range(self.hosts)}
        return {host: port for host, port in each.items() if port != self.ports}

    def _shaped(self, rate: int | None, queue: int | None) -> Preset:
        base = NETWORKS[self.preset]
        if rate is None:
            rate = base.rate if self.rate is None else round(self.rate)
        if queue is None:
            queue = base.queue if self.queue is None else self.queue
        offloads = base.offloads if self.offloads is None else self.offloads
        if (rate, queue, offloads) == (base.rate, base.queue, base.offloads):
            return base
        return _preset(rate, queue, offloads)

    @property
    def spread(self) -> Leaves | None:
        """Return the leaves and how their uplinks are shaped; None for one switch."""
        if self.leaves == 1:
            return None
        ports = self.ports
        rate = self._leaf_rate() if self.uplink_rate is None else round(self.uplink_rate)
        queue = ports.queue if self.uplink_queue is None else self.uplink_queue
        return Leaves(self.leaves, _preset(rate, queue, ports.offloads))

    def _leaf_rate(self) -> int:
        """Return what the ports of a leaf carry together, of the leaf where that is most."""
        leaves = Leaves(self.leaves, self.ports)  # the rate of the uplinks does not matter here
        rates = [0] * self.leaves
        for host in range(self.hosts):
            rates[leaves.of(host, self.hosts)] += self.port(host).rate
        return max(rates)

    @property
    def words(self) -> str:
        """Return what is built, for people."""
        spread = self.spread
        marks = "" if self.ecn is None else f", marks above {self.ecn / 1024:.3g} KiB"
        hosts = f"{self.hosts} hosts"
        if self.servers:
            hosts += f" ({self.servers} server{'s' if self.servers > 1 else ''})"
        if self.odd_ports:
            names = [self.port(host).name for host in range(self.hosts)]
            hosts += f", ports of {'; '.join(dict.fromkeys(names))}"
        if spread is None:
            return f"{hosts} on one switch{marks}"
        over = self._leaf_rate() / spread.uplink.rate
        return (
            f"{hosts} on {spread.count} leaves under one spine, uplinks of "
            f"{spread.uplink.name} ({over:.3g}:1){marks}"
        )


def _preset(rate: int, queue: int, offloads: bool) -> Preset:
    depth = round(rate * _BUCKET_SECONDS / 8)
    smallest = NETWORKS["A" if offloads else "B"].bucket
    name = f"{rate / 1e6:g} Mbit/s, {queue / 1024:g} KiB"
    return Preset(name, rate, queue, max(depth, smallest), offloads)


@dataclass(frozen=True)
class Loss:
    """Loss is the packets that links lose by chance, behind their rate and queue."""

    rate: float = key(0.0, "share of the packets lost", low=0.0, high=0.99)
    per_worker: tuple[float, ...] = key(
        (), "a share for each worker instead, first worker first", low=0.0, high=0.99
    )
    run: float = key(
        1.0,
        "mean length of a run of losses, packets (1: independent; else Gilbert–Elliott)",
        low=1.0,
        high=1e6,
    )
    at: str = key(
        "workers",
        "which way loses: from the workers, to the servers, or from every host",
        choices=["workers", "server", "everywhere"],
    )
    when: str = key(
        "always",
        "always; in the timed rounds only: connections are warmed up without; or in some steps",
        choices=["always", "rounds", "steps"],
    )
    steps: tuple[int, ...] = key((), "of training, with when='steps': those that lose", low=0)
    lasts_s: float = key(
        10.0,
        "longest that a round's loss lasts (of a training step: its computation included), s; "
        "who is not done then goes on without",
        above=0.0,
        high=86_400.0,
    )

    def __post_init__(self) -> None:
        if (self.when == "steps") != bool(self.steps):
            raise ScenarioError(
                f"steps={list(self.steps)!r} with when={self.when!r}: when='steps' names steps, "
                "and nothing else does"
            )
        if self.per_worker and (self.rate or self.at == "server"):
            raise ScenarioError(
                f"per_worker={list(self.per_worker)!r} with rate={self.rate!r} and at={self.at!r}: "
                "the workers' own shares take the place of rate, and the server's way has none"
            )
        for share in (self.rate, *self.per_worker):
            if self.run > 1 and not runs_possible(share, self.run):
                raise ScenarioError(
                    f"run={self.run!r} with a share of {share!r}: runs of "
                    f"{shortest_run(share):.3g} packets and more are allowed"
                )

    @property
    def any(self) -> bool:
        """Return whether anything is lost."""
        return self.rate > 0 or any(self.per_worker)

    def of_worker(self, worker: int) -> float:
        """Return the share that a worker's way loses."""
        return self.per_worker[worker] if self.per_worker else self.rate


@dataclass(frozen=True)
class Bursts:
    """Bursts are cross traffic in UDP that comes and goes, from hosts of its own."""

    rate: float = key(
        MISSING, "while it is on, of all sources together, bit/s", above=0.0, high=1e11
    )
    on_s: float = key(MISSING, "how long a burst lasts, s", above=0.0, high=86_400.0)
    period_s: float = key(MISSING, "from one start to the next, s", above=0.0, high=86_400.0)
    phase_s: float = key(0.0, "from the origin to the first start, s", low=0.0, high=86_400.0)
    target: int = key(0, "host whose port is hit", low=0)
    sources: int = key(1, "hosts that send at once: more than one is an incast", low=1, high=32)

    def __post_init__(self) -> None:
        if self.on_s > self.period_s:
            raise ScenarioError(
                f"on_s={self.on_s!r}: no longer than period_s={self.period_s!r} is allowed"
            )
        if self.phase_s >= self.period_s:
            raise ScenarioError(
                f"phase_s={self.phase_s!r}: less than period_s={self.period_s!r} is allowed"
            )

    @property
    def each(self) -> Burst:
        """Return what one source sends."""
        return Burst(self.rate / self.sources, self.on_s, self.period_s, self.phase_s)


@dataclass(frozen=True)
class Rivals:
    """Rivals are TCP streams that take all they can get, from one host of their own."""

    streams: int = key(0, "how many", low=0, high=256)
    congestion_control: str = key("cubic", "theirs", choices=CONGESTION_CONTROLS)
    target: int = key(0, "host whose port they share", low=0)


@dataclass(frozen=True)
class Fault:
    """A fault is something that fails in each contestant's first turn."""

    kind: str = key(
        MISSING,
        "freeze: the host's rank stands still; cut: its link carries nothing; kill: its "
        "process dies, which ends the cell",
        choices=["freeze", "cut", "kill"],
    )
    host: int = key(MISSING, "which", low=0)
    at_s: float = key(
        MISSING,
        "after the start of each contestant's first timed round or step, s",
        low=0.0,
        high=86_400.0,
    )
    for_s: float | None = key(
        None, "how long, s; 1 where it is left out; a kill has no end", above=0.0, high=25.0
    )

    def __post_init__(self) -> None:
        if self.kind == "kill" and self.for_s is not None:
            raise ScenarioError(
                f"for_s={self.for_s!r}: what is killed does not come back; allowed with freeze and "
                "cut"
            )

    @property
    def lasts_s(self) -> float:
        """Return how long a freeze or a cut lasts, s."""
        return _FAULT_S if self.for_s is None else self.for_s


@dataclass(frozen=True)
class Bandwidth:
    """A bandwidth is a rate of the ports that changes."""

    rates: tuple[float, ...] = key(
        (),
        "of every port, bit/s, in turn; each contestant's turn begins with the same one",
        low=1e6,
        high=_FASTEST,
    )
    every_s: float = key(60.0, "that each lasts, s", above=0.0, high=86_400.0)
