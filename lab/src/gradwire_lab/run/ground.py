"""The ground of a cell is its network, and everything that goes wrong in it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from gradwire_lab.contest.interrupts import uninterrupted
from gradwire_lab.contest.rivals import RivalStreams
from gradwire_lab.network.bursts import BurstRecord, BurstTraffic
from gradwire_lab.network.network import LabUnavailable, Network
from gradwire_lab.run.faults import Faults
from gradwire_lab.run.model import Event
from gradwire_lab.run.wires import lossy, wires_of
from gradwire_lab.scenario.network import Fault
from gradwire_lab.scenario.schema import Scenario

__all__ = ["Ground", "open_ground"]

_LEAD_SECONDS = 0.5
_START_SECONDS = 10.0
_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 0.3
"""Seconds that rivals have to find their share before the first round."""


@dataclass
class Ground:
    """A ground holds a cell's network and what disturbs it.

    Attributes:
        network: hosts and switch.
        scenario: the cell's.
        traffic: cross traffic, one sender for each source; started by `start`.
        rivals: competing streams; likewise.
        events: what was done to the network so far.
        faults: begin in each contestant's first turn, whose start is given by who runs the rounds.
        lossy: spans in which links lost packets on purpose: from, to, in ``time.monotonic()``.
        victim: sends a signal to a rank; set by whoever starts the ranks.
        wire: the bytes that all workers and servers sent in a contestant's rounds, as their ports
            count them, and the number of these rounds; see `counting`.
    """

    network: Network
    scenario: Scenario
    traffic: list[BurstTraffic] = field(default_factory=list)
    rivals: RivalStreams | None = None
    events: list[Event] = field(default_factory=list)
    lossy: list[tuple[float, float]] = field(default_factory=list)
    victim: Callable[[int, int], None] | None = None
    wire: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._cut: set[int] = set()
        self._shares: dict[tuple[int, str], float] = {}
        self._losing = False
        self._turns = 0  # turns that each contestant has begun
        self._rate = 0  # the ports' rate now, where it changes
        self._sent: list[BurstRecord] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._timers: list[threading.Timer] = []
        self.faults = Faults(self.scenario.faults, self._apply, self.events)

    def start(self) -> None:
        """Let loss, cross traffic and rivals begin: the contestants are ready."""
        self.burst()
        with uninterrupted():
            wanted = self.scenario.rivals
            if wanted.streams:
                self.rivals = self._stack.enter_context(
                    RivalStreams(
                        self.network,
                        wanted.streams,
                        wanted.congestion_control,
                        target=wanted.target,
                        source=self.scenario.topology.hosts + len(self.traffic),
                    )
                )
        if self.rivals is not None:
            self._await(self.rivals.sending, _START_SECONDS, "the rivals' streams do not send")
        if self.scenario.loss.any and self.scenario.loss.when == "always":
            self._lose(True)
        if self.rivals is not None:
            time.sleep(_SETTLE_SECONDS)

    def _await(self, begun: Callable[[], bool], seconds: float, trouble: str) -> None:
        """Wait until something has begun: on a busy machine it starts late.

        Raises:
            LabUnavailable: it has not, after so long.
        """
        deadline = time.monotonic() + seconds
        while not begun():
            if time.monotonic() > deadline:
                raise LabUnavailable(f"{trouble}: the machine is too slow")
            time.sleep(_POLL_SECONDS)

    def burst(self, on_s: float | None = None) -> None:
        """Let the cross traffic begin, anew if there is some.

        Args:
            on_s: how long each burst lasts; what the scenario says if not given.
        """
        for traffic in self.traffic:
            self._sent += traffic.records()
            traffic.close()
        self.traffic.clear()
        source = self.scenario.topology.hosts
        origin = time.monotonic() + _LEAD_SECONDS
        with uninterrupted():
            for bursts in self.scenario.bursts:
                each = bursts.each if on_s is None else replace(bursts.each, on=on_s)
                for _ in range(bursts.sources):
                    traffic = BurstTraffic(
                        self.network, each, target=bursts.target, source=source, origin=origin
                    )
                    self.traffic.append(self._stack.enter_context(traffic))
                    source += 1
        for traffic in self.traffic:
            due = traffic.origin + traffic.burst.phase + traffic.burst.period
            seconds = due + _START_SECONDS - time.monotonic()
            self._await(traffic.sending, seconds, "a burst sender does not send")

    def next_turns(self) -> None:
        """Prepare the contestants' next turns; where the rate changes, they begin at another one.

        Raises:
            LabUnavailable: a port's rate cannot be set.
        """
        self._turns += 1
        self._set_rate(0)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Let the rate change by the clock while the block, one contestant's turn, lasts.

        Raises:
            LabUnavailable: a port's rate could not be set.
        """
        if not self.scenario.bandwidth.rates:
            yield
            return
        over, failed = threading.Event(), list[LabUnavailable]()
        self._set_rate(0)
        changer = threading.Thread(target=self._change_rates, args=(over, failed), daemon=True)
        changer.start()
        try:
            yield
        finally:
            over.set()
            changer.join()
        if failed:
            raise failed[0]
        self._set_rate(0)  # the next turn's warm-up has the first rate

    def _change_rates(self, over: threading.Event, failed: list[LabUnavailable]) -> None:
        begun, number = time.monotonic(), 1
        every = self.scenario.bandwidth.every_s
        while not over.wait(begun + number * every - time.monotonic()):
            try:
                self._set_rate(number)
            except LabUnavailable as error:
                failed.append(error)
                return
            number += 1

    def _set_rate(self, number: int) -> None:
        """Give all ports the rate of this number, counted from that at which turns begin."""
        rates = self.scenario.bandwidth.rates
        if not rates:
            return
        rate = round(rates[(self._turns - 1 + number) % len(rates)])
        if rate == self._rate:
            return
        for host in range(self.scenario.topology.hosts):
            self.network.set_rate(host, rate)
        self._rate = rate
        self.events.append(Event(time.monotonic(), f"rate {rate / 1e6:g} Mbit/s"))

    @contextlib.contextmanager
    def around(self, contestant: str) -> Iterator[None]:
        """Surround each timed round with its loss, and the first one with faults."""
        self.faults.begin(contestant)
        with self.losing(self.scenario.loss.when == "rounds"):
            yield

    @contextlib.contextmanager
    def turn(self, contestant: str, rounds: int) -> Iterator[None]:
        """Surround the timed rounds of a turn: change rates, count bytes, end faults.

        Raises:
            LabUnavailable: a port's rate could not be set, or a fault not be brought about.
        """
        with self.changing(), self.counting(contestant, rounds), self.faults.turn(contestant):
            yield

    @contextlib.contextmanager
    def counting(self, contestant: str, rounds: int) -> Iterator[None]:
        """Add to `wire` the bytes that are sent in a turn of so many rounds.

        Headers, repeats and ACKs count, also the ACKs of rivals' streams into one of these hosts;
        packets that a host's own queue drops do not.
        """
        before = self._sent_bytes()
        yield
        total, count = self.wire.get(contestant, (0, 0))
        self.wire[contestant] = (total + self._sent_bytes() - before, count + rounds)

    def _sent_bytes(self) -> int:
        hosts = range(self.scenario.topology.hosts)
        queues = [self.network.port_stats(host).uplink for host in hosts]
        return sum(queue.bytes + queue.backlog for queue in queues)

    @contextlib.contextmanager
    def losing(self, on: bool) -> Iterator[None]:
        """Let the links lose while the block lasts, but no longer than the scenario says."""
        loss = self.scenario.loss
        if not on or not loss.any:
            yield
            return
        self._lose(True)
        begun = time.monotonic()
        relief = self._later(loss.lasts_s, lambda: self._lose(False))
        try:
            yield
            self._lose(False)  # an error or Ctrl-C removes the network instead
        finally:
            relief.cancel()
            self.lossy.append((begun, min(time.monotonic(), begun + loss.lasts_s)))

    def bursts_sent(self) -> list[BurstRecord]:
        """Return all bursts of all sources so far."""
        return self._sent + [each for traffic in self.traffic for each in traffic.records()]

    def rivals_read(self) -> list[tuple[float, int]]:
        """Return what the rivals got so far; see `RivalStreams.read`."""
        return [] if self.rivals is None else self.rivals.read()

    def wire_failures(self) -> int:
        """Count the packets that the lab's own wires lost so far without being asked to."""
        network = self.network
        links = [network.wire_stats(host) for host in network.wires]
        if network.ecn and network.leaves is not None:
            links += [network.uplink_wire_stats(leaf) for leaf in range(network.leaves.count)]
        return sum(each.overrun + each.dropped_memory for link in links for each in link.values())

    def marked_packets(self) -> int:
        """Count the packets that switches marked CE so far; one marked twice counts twice."""
        network = self.network
        if not network.ecn:
            return 0
        ports = [network.port_stats(host) for host in range(network.hosts)]
        if network.leaves is not None:
            ports += [network.uplink_stats(leaf) for leaf in range(network.leaves.count)]
        return sum(port.uplink.marked + port.downlink.marked for port in ports)

    def close(self) -> None:
        self._over.set()
        self.faults.stop()
        for timer in self._timers:
            timer.cancel()
        self._stack.close()

    def _later(self, seconds: float, action: Callable[[], Any]) -> threading.Timer:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()
        return timer

    def _lose(self, on: bool) -> None:
        with self._lock:
            if self._losing == on or self._over.is_set():
                return
            self._losing = on
            self._write_losses()

    def _write_losses(self) -> None:
        """Set the links' losses to what is due now; the caller holds the lock."""
        kernel = []
        for host in range(self.scenario.topology.hosts):
            for direction in ("uplink", "downlink"):
                share = 1.0 if host in self._cut else self._share(host, direction)
                if self._shares.get((host, direction), 0.0) == share:
                    continue
                self._shares[host, direction] = share
                if host in self.network.wires:
                    wire = lossy(self.network.wires[host], self.scenario, share)
                    self.network.set_wire(host, wire, directions=[direction])
                else:
                    kernel.append((host, direction, share))
        if kernel:
            self.network.set_loss(kernel)

    def _share(self, host: int, direction: str) -> float:
        topology, loss = self.scenario.topology, self.scenario.loss
        if not self._losing:
            return 0.0
        worker = host < topology.workers
        if loss.at == "server":
            return 0.0 if worker or direction == "uplink" else loss.rate
        if direction == "downlink":
            return 0.0
        if worker:
            return loss.of_worker(host)
        return loss.rate if loss.at == "everywhere" else 0.0

    def _apply(self, fault: Fault, on: bool) -> None:
        """Begin a fault, or end it.

        Raises:
            LabUnavailable: the kernel cannot cut the link.
        """
        if fault.kind == "cut":
            self._set_cut(fault.host, on)
        elif self.victim is not None:
            begins = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            self.victim(fault.host, begins if on else signal.SIGCONT)

    def _set_cut(self, host: int, on: bool) -> None:
        with self._lock:
            (self._cut.add if on else self._cut.discard)(host)
            self._write_losses()


@contextlib.contextmanager
def open_ground(scenario: Scenario, seed: int) -> Iterator[Ground]:
    """Make a cell's network, which is removed with everything in it at the end.

    Raises:
        LabUnavailable: this machine cannot make it; the message says why.
    """
    topology = scenario.topology
    with uninterrupted():
        network = Network(
            topology.hosts,
            topology.ports,
            ports=topology.odd_ports,
            extra_hosts=scenario.extra_hosts,
            leaves=topology.spread,
            ecn=topology.ecn or 0,
            wires=wires_of(scenario),
            wire_seed=seed,
        )
    with network:
        ground = Ground(network, scenario)
        try:
            yield ground
        finally:
            ground.close()
