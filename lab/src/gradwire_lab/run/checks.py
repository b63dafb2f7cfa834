"""Checks before a scenario runs are for rights, memory, and a rate that the machine reaches."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gradwire_lab.contest.interrupts import uninterrupted
from gradwire_lab.contest.rivals import RivalStreams, goodput
from gradwire_lab.network.network import Network, probe
from gradwire_lab.network.presets import MAX_FRAME
from gradwire_lab.network.wire import Wire
from gradwire_lab.run.model import Calibration
from gradwire_lab.run.shares import carried, crossing_flows
from gradwire_lab.run.wires import wires_of
from gradwire_lab.scenario.load import Cell, Experiment
from gradwire_lab.scenario.network import Topology
from gradwire_lab.scenario.reader import ScenarioError
from gradwire_lab.scenario.schema import Scenario

__all__ = ["calibrate", "check", "fastest"]

HOST_BYTES = 280_000_000
"""Memory that a rank takes before its buffers: Python, torch and the engine."""

BUFFERS = 4
"""How many copies of a worker's gradient one contestant may hold."""

ENOUGH = 0.85
"""Share of a rate's payload that must get through; with less the machine is too slow for it."""

QUICK_ENOUGH = 0.25
"""The same for the short form, which only shows that things work, on a busy machine too."""

TRAINS = 262_144
"""Bytes of a queue that the trains of several TCP flows fit into."""

_PAYLOAD = 1448 / MAX_FRAME
"""Share of a full frame that TCP with time stamps carries as payload."""

_SECONDS = 0.8
_ATTEMPTS = 3


def check(experiment: Experiment, cells: Iterable[Cell] | None = None) -> None:
    """Check rights, memory and parts, without running anything.

    Args:
        cells: those that are to run; all if not given.

    Raises:
        ScenarioError: one sentence that says what is missing.
    """
    path = experiment.path
    chosen = list(experiment.cells if cells is None else cells)
    with uninterrupted():
        reason = probe()
    if reason is not None:
        raise ScenarioError(f"{path}: {reason}; root or an unprivileged user namespace is needed")
    for part, wanting in (("wired", _needs_wires), ("lossy", _needs_packet_filter)):
        first = next((cell for cell in chosen if wanting(cell.scenario)), None)
        if first is None:
            continue
        with uninterrupted():
            reason = probe(**{part: True})
        if reason is not None:
            raise ScenarioError(f"{path}: cell {first.name}: {reason}")
    available = _available_memory()
    for cell in chosen:
        for place, name in cell.scenario.congestion_controls.items():
            if not has_congestion_control(name):
                raise ScenarioError(f"{path}: {place}={name!r}: this kernel does not have it")
        needed = memory_needed(cell.scenario)
        if needed > available:
            raise ScenarioError(
                f"{path}: cell {cell.name}: {cell.scenario.topology.hosts} hosts need about "
                f"{needed / 1e9:.1f} GB of memory; {available / 1e9:.1f} GB are free here"
            )


def _needs_wires(scenario: Scenario) -> bool:
    return bool(scenario.topology.ecn or wires_of(scenario))


def _needs_packet_filter(scenario: Scenario) -> bool:
    """Return whether links lose packets, or are cut, that have no wires of the lab's own."""
    cut = {fault.host for fault in scenario.faults if fault.kind == "cut"}
    losing = set(range(scenario.topology.hosts)) if scenario.loss.any else cut
    return bool(losing - set(wires_of(scenario))) and not scenario.topology.ecn


def memory_needed(scenario: Scenario) -> int:
    """Estimate the bytes of memory that a cell's ranks take."""
    work, model = scenario.work, scenario.model
    size = work.bytes
    if work.kind == "training":
        size = 4 * (model.layers * 12 * model.width**2 + (256 + model.context) * model.width)
    contestants = len(scenario.contestants)
    each = HOST_BYTES + size * (1 + BUFFERS * contestants)
    return scenario.topology.hosts * each


def has_congestion_control(name: str) -> bool:
    """Return whether the kernel has it, perhaps after loading a module."""
    with socket.socket() as endpoint:
        try:
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            return error.errno != errno.ENOENT
    return True


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def fastest(scenario: Scenario) -> Topology:
    """Return a cell's topology at its highest rate, with queues that TCP's trains fit into.

    Through shorter queues TCP gets less, which says nothing about the machine.
    """
    topology = scenario.topology
    most = max((topology.ports.rate, *scenario.bandwidth.rates))
    if most != topology.ports.rate:
        topology = replace(topology, rate=most)
    if topology.queues:
        long_enough = tuple(max(queue, TRAINS) for queue in topology.queues)
        topology = replace(topology, queues=long_enough)
    elif topology.ports.queue < TRAINS:
        topology = replace(topology, queue=TRAINS)
    if topology.spread is not None and topology.spread.uplink.queue < TRAINS:
        topology = replace(topology, uplink_queue=TRAINS)
    return topology


def calibrate(scenario: Scenario, name: str, enough: float = ENOUGH) -> Calibration:
    """Fill the ports and uplinks that the work uses with TCP for a moment; see what gets through.

    Args:
        scenario: the scenario of one cell. Its wires carry, but delay nothing, and loss and cross
            traffic take no part.
        name: the name of the file and the cell, for the error.
        enough: share of the payload that must get through.

    Raises:
        ScenarioError: the machine does not reach the rate.
    """
    topology = fastest(scenario)
    scenario = replace(scenario, topology=topology)
    hosts = topology.hosts
    if scenario.work.kind == "push":
        flows = [(0, hosts - 1)]
    else:
        flows = crossing_flows(topology)
    wanted = carried(topology, flows) * _PAYLOAD
    reached = 0.0
    for _ in range(_ATTEMPTS):
        reached = max(reached, _attempt(scenario, flows))
        if reached >= enough * wanted:
            return Calibration(topology.ports.name, hosts, wanted, reached)
    raise ScenarioError(
        f"{name}: topology.rate={topology.ports.rate:g}: {len(flows)} ports at once carried "
        f"{reached / 1e6:.0f} of {wanted / 1e6:.0f} Mbit/s on this machine ({topology.words}); a "
        "lower rate is allowed"
    )


def _attempt(scenario: Scenario, flows: list[tuple[int, int]]) -> float:
    with contextlib.ExitStack() as stack:
        with uninterrupted():
            network = Network(
                scenario.topology.hosts,
                scenario.topology.ports,
                ports=scenario.topology.odd_ports,
                leaves=scenario.topology.spread,
                ecn=scenario.topology.ecn or 0,
                wires=dict.fromkeys(wires_of(scenario), Wire()),
            )
            stack.enter_context(network)
            streams = [
                stack.enter_context(RivalStreams(network, 2, "cubic", target=to, source=source))
                for source, to in flows
            ]
        deadline = time.monotonic() + 10.0
        while not all(each.sending() for each in streams):
            if time.monotonic() > deadline:
                return 0.0
            time.sleep(0.05)
        begun = time.monotonic() + 0.1
        time.sleep(_SECONDS + 0.1)
        span = [(begun, begun + _SECONDS)]
        return sum(8 * (goodput(each.read(), span) or 0.0) for each in streams)
