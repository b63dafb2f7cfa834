"""The demo runs on a lab network, or on loopback where none can be made."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from gradwire_lab.contest.interrupts import uninterrupted
from gradwire_lab.demo.scenario import Scenario
from gradwire_lab.network import BURSTS, NETWORKS, Burst, BurstTraffic, Network, Preset, Wire, probe
from gradwire_lab.network.addresses import STORE_PORT

FORCE_LOOPBACK = "GRADWIRE_DEMO_LOOPBACK"
"""Environment variable that, if set, forbids the demo to try namespaces."""

_LOOPBACK = "127.0.0.1"


class Ground(Protocol):
    """A ground is what ranks run on.

    Attributes:
        preset: how the ports are shaped; None without a network.
        burst: the rhythm of the cross traffic; None without.
        traffic: the cross traffic, once started.
        reason: why there is no network; None if there is one.
        store: address and port for torch's store on rank 0.
    """

    preset: Preset | None
    burst: Burst | None
    traffic: BurstTraffic | None
    reason: str | None
    store: tuple[str, int]

    def spawn(
        self, rank: int, command: Sequence[str], /, *, env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a rank's program, with options of `subprocess.Popen`."""

    @property
    def parent(self) -> int:
        """Return the process with which a rank must end by itself; 0 if it is killed anyway."""

    def start_bursts(self) -> None:
        """Let the cross traffic begin, where there is any."""

    def dropped(self) -> int:
        """Return the packets lost in the network so far, cross traffic included."""


class _Hosts:
    """This ground is a lab network, with a burst sender where something bursts."""

    reason: str | None = None
    parent = 0

    def __init__(self, network: Network) -> None:
        self._network = network
        self.preset: Preset | None = network.preset
        self.burst: Burst | None = BURSTS[network.preset.name] if network.extra_hosts else None
        self.traffic: BurstTraffic | None = None
        self.store = (network.address(0), STORE_PORT)

    def spawn(
        self, rank: int, command: Sequence[str], /, *, env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        return self._network.spawn(rank, command, env=env, **options)

    def start_bursts(self) -> None:
        if self.burst is not None:
            with uninterrupted():
                self.traffic = BurstTraffic(self._network, self.burst)

    def dropped(self) -> int:
        return self._network.lost_packets()


class _Loopback:
    """This ground has all ranks on this machine's loopback."""

    preset: Preset | None = None
    burst: Burst | None = None
    traffic: BurstTraffic | None = None

    def __init__(self, reason: str) -> None:
        self.reason: str | None = reason
        with socket.create_server((_LOOPBACK, 0)) as free:
            self.store: tuple[str, int] = (_LOOPBACK, free.getsockname()[1])

    @property
    def parent(self) -> int:
        return os.getpid()

    def spawn(
        self, rank: int, command: Sequence[str], /, *, env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env}
        return subprocess.Popen(command, env=env, **options)

    def start_bursts(self) -> None:
        """Nothing bursts on loopback."""

    def dropped(self) -> int:
        return 0


@contextmanager
def open_ground(scenario: Scenario) -> Iterator[Ground]:
    """Make the network; where that cannot be done, take loopback and keep the reason.

    Args:
        scenario: which network, and how many hosts.
    """
    reason = why_not(scenario)
    if reason is not None:
        yield _Loopback(reason)
        return
    wire = Wire(delay_s=scenario.round_trip_s / 4, loss=1.0 - (1.0 - scenario.loss) ** 0.5)
    with uninterrupted():
        lab = Network(
            scenario.ranks,
            NETWORKS[scenario.network],
            extra_hosts=0 if scenario.far else 1,
            wires=dict.fromkeys(range(scenario.ranks), wire) if scenario.far else None,
        )
    with lab:
        hosted = _Hosts(lab)
        try:
            yield hosted
        finally:
            if hosted.traffic is not None:
                hosted.traffic.close()


def why_not(scenario: Scenario) -> str | None:
    """Return why the network of a scenario cannot be made here; None if it can."""
    if os.environ.get(FORCE_LOOPBACK):
        return f"no network namespaces here: {FORCE_LOOPBACK} is set"
    with uninterrupted():
        return probe(wired=scenario.far)
