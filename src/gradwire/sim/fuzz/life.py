"""Life: everything about one drawn job, as plain values that can be cut smaller."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

SIZES = ("workers", "servers", "elements", "steps", "lanes")
"""What a cut can make smaller."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: Name in `faults.KINDS`.
        at: Its start in seconds; negative for the whole life.
        length: Its duration in seconds; infinity for one that stays.
        host: The host; negative for all hosts. Counted round where a life has fewer.
        peer: The other host, likewise.
        direction: Direction of the host's port, "up" or "down".
        amount: What its kind says.
    """

    kind: str
    at: float = -1.0
    length: float = float("inf")
    host: int = -1
    peer: int = -1
    direction: str = "down"
    amount: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Says it in one line."""
        where = "all hosts" if self.host < 0 else f"host {self.host} {self.direction}"
        peer = f", peer {self.peer}" if self.peer >= 0 else ""
        when = "always" if self.at < 0 else f"at {self.at:.6f} s for {self.length:.6g} s"
        amount = " ".join(f"{each:.6g}" for each in self.amount)
        return f"{self.kind} {amount}: {where}{peer}, {when}"


@dataclass(frozen=True)
class Life:
    """A job and what happens to it; a pure function of its seed, and of a cut.

    Attributes:
        seed: The seed.
        shape: "transfers" for ops of the engine, or "training" for steps of a policy.
        workers: Number of workers.
        servers: Number of servers; 0 for the route over the workers themselves.
        elements: Elements of each op, or of all tensors.
        steps: Ops in each lane, or training steps.
        lanes: Lanes, or buckets.
        datagram: Largest UDP payload in bytes.
        rate: Rate of each port in bytes per second.
        delay: Delay of each direction of a port in seconds.
        queue: Bytes of each port's queue.
        peer_timeout: Seconds of silence until a peer counts as dead.
        ping: Seconds between pings.
        timeout: Seconds until an op counts as failed.
        apart: Seconds from one step to the next.
        skew: Largest number of seconds by which workers begin a step apart.
        whole_trains: Whether queues and losses treat a train as one packet.
        leave: Whether each worker leaves as soon as it has its results.
        again: Whether the launcher starts the job again after it has failed.
        options: Of the plan, or of the policy.
        faults: What goes wrong.
    """

    seed: int
    shape: str
    workers: int
    servers: int
    elements: int
    steps: int
    lanes: int
    datagram: int = 1472
    rate: float = 125e6
    delay: float = 20e-6
    queue: int = 256 << 10
    peer_timeout: float = 2.0
    ping: float = 0.4
    timeout: float = 120.0
    apart: float = 0.0
    skew: float = 0.0
    whole_trains: bool = False
    leave: bool = False
    again: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.workers + self.servers

    @property
    def patience(self) -> float:
        """Seconds after which its ops fail; few where a rank takes no part, so that lives end."""
        return 3.0 if self.of_kind("absent") else self.timeout

    def of_kind(self, *kinds: str) -> list[Fault]:
        """The faults of these kinds."""
        return [fault for fault in self.faults if fault.kind in kinds]

    def __str__(self) -> str:
        """Says it in some lines."""
        head = (
            f"{self.shape}: {self.workers} workers, {self.servers} servers, {self.steps} steps of "
            f"{self.lanes} x {self.elements} elements, datagrams of {self.datagram} bytes, "
            f"{self.rate:.4g} bytes/s, {self.delay * 1e6:.4g} us, queues of {self.queue} bytes, "
            f"peer_timeout={self.peer_timeout:g}, timeout={self.timeout:g}, "
            f"apart={self.apart:.4g}, skew={self.skew:.4g}"
            f"{', whole trains' * self.whole_trains}{', leave' * self.leave}"
            f"{', again' * self.again}"
        )
        return "\n".join([head, f"  {self.options}", *(f"  {fault}" for fault in self.faults)])


@dataclass(frozen=True)
class Cut:
    """What of a life is left, as the options of `gradwire sim fuzz` say it.

    Attributes:
        keep: Indices of the faults that stay; None for all.
        sizes: The sizes that differ, by their names in `SIZES`.
        plain: Names of options that are left out, and of "apart", "skew", "whole_trains", "leave"
            and "again".
    """

    keep: tuple[int, ...] | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    plain: tuple[str, ...] = ()

    def of(self, life: Life) -> Life:
        """Returns what is left of a life."""
        faults = life.faults
        if self.keep is not None:
            faults = tuple(faults[index] for index in self.keep if index < len(faults))
        options = {name: value for name, value in life.options.items() if name not in self.plain}
        fields: dict[str, Any] = {
            name: type(getattr(life, name))() for name in self.plain if name not in life.options
        }
        fields |= dict(self.sizes)
        return replace(life, faults=faults, options=options, **fields)

    def __str__(self) -> str:
        """Says it as options of the command."""
        words = []
        if self.keep is not None:
            words.append(f"--keep {','.join(map(str, self.keep)) or 'none'}")
        if self.sizes:
            words.append("--sizes " + ",".join(f"{name}={value}" for name, value in self.sizes))
        if self.plain:
            words.append(f"--plain {','.join(self.plain)}")
        return " ".join(words)
