"""The demo runs on a lab network, or on loopback where none can be made."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gradwire_lab.contest.interrupts import uninterrupted
from gradwire_lab.demo.scenario import Scenario
from gradwire_lab.network import BURSTS, NETWORKS, Burst, BurstTraffic, Network, Preset, Wire, probe
from gradwire_lab.network.addresses import STORE_PORT

FORCE_LOOPBACK = "GRADWIRE_DEMO_LOOPBACK"
"""Environment variable that, if set, forbids the demo to try namespaces."""

_LOOPBACK = "127.0.0.1"


class Ground:
    """A ground is what ranks run on: a lab network, or this machine's loopback.

    Attributes:
        preset: how the ports are shaped; None without a network.
        burst: the rhythm of the cross traffic; None without.
        traffic: the cross traffic, once started.
        reason: why there is no network; None if there is one.
        store: address and port for torch's store on rank 0.
        parent: the process with which a rank must end by itself; 0 if it is killed anyway.
    """

    def __init__(self, network: Network | None, reason: str | None = None) -> None:
        self._network = network
        self.reason = reason
        self.preset: Preset | None = None
        self.burst: Burst | None = None
        self.traffic: BurstTraffic | None = None
        self.parent = os.getpid()
        if network is None:
            with socket.create_server((_LOOPBACK, 0)) as free:
                self.store = (_LOOPBACK, int(free.getsockname()[1]))
            return
        self.parent, self.preset = 0, network.preset
        self.store = (network.address(0), STORE_PORT)
        if network.extra_hosts:
            self.burst = BURSTS[network.preset.name]

    def spawn(
        self, rank: int, command: Sequence[str], /, *, env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a rank's program, with options of `subprocess.Popen`."""
        if self._network is not None:
            return self._network.spawn(rank, command, env=env, **options)
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **env}
        return subprocess.Popen(command, env=env, **options)

    def start_bursts(self) -> None:
        if self._network is not None and self.burst is not None:
            with uninterrupted():
                self.traffic = BurstTraffic(self._network, self.burst)

    def dropped(self) -> int:
        return 0 if self._network is None else self._network.lost_packets()


@contextmanager
def open_ground(scenario: Scenario) -> Iterator[Ground]:
    """Make the network; where that cannot be done, take loopback and keep the reason.

    Args:
        scenario: which network, and how many hosts.
    """
    reason = why_not(scenario)
    if reason is not None:
        yield Ground(None, reason)
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
        hosted = Ground(lab)
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
