"""Limits say which time no transport of float32 can beat in a cell.

An encoding, and bounds by time or by layer, can. The formulas are our own arithmetic: bytes that
must arrive, links that lose, round trips that cannot be saved. `probe_cap` also says how much
faster than a sender with a fixed bound and probes a transport can be.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gradwire_lab.contest.measure import all_reduce_payload, header_ideal, push_payload
from gradwire_lab.scenario.network import Loss
from gradwire_lab.scenario.schema import Scenario

__all__ = [
    "limit",
    "payload",
    "probe_cap",
    "probe_passes",
    "probe_time",
    "push_ideal",
    "uplink_payload",
]

ROUND_TRIPS_OF_A_ROUND = 1.5
"""Round trips that one round of data, its end and its confirmation take beside the bytes."""


def payload(scenario: Scenario, size: int) -> float:
    """Return the bytes per direction through the busiest port for gradients of this size."""
    topology = scenario.topology
    if scenario.work.kind == "push":
        return push_payload(size, topology.workers)
    return all_reduce_payload(size, topology.workers, topology.servers)


def push_ideal(scenario: Scenario) -> float:
    """Return the seconds that the busiest port or uplink needs for all bytes with headers.

    Nothing is lost meanwhile.
    """
    size, rate = scenario.work.bytes, scenario.topology.ports.rate
    moved = payload(scenario, size)
    if scenario.topology.rates:
        moved = _uneven_limit(replace(scenario, loss=Loss()), size) * rate / 8
    ideal = header_ideal(moved, rate)
    spread = scenario.topology.spread
    if spread is None:
        return ideal
    return max(ideal, header_ideal(uplink_payload(scenario, size), spread.uplink.rate))


def uplink_payload(scenario: Scenario, size: int) -> float:
    """Return the bytes per direction that the busiest uplink must carry, whatever the algorithm.

    Pushes: those of all workers on other leaves than the server's go down to it. An all-reduce: at
    least that of as many hosts as there are leaves with workers, for each leaf may sum first
    (Patarasuk and Yuan, JPDC 69(2), 2009, with a leaf as one node: our reading), and leaves of
    servers alone may sum for them. A ring in rank order takes a little more than that, shards that
    all send to directly a multiple: see docs/lab.md.
    """
    spread, topology = scenario.topology.spread, scenario.topology
    if spread is None:
        return 0.0
    if scenario.work.kind != "push":
        leaves = {spread.of(n, topology.hosts) for n in range(topology.workers)}
        return all_reduce_payload(size, len(leaves), spread.count - len(leaves))
    home = spread.of(topology.workers, topology.hosts)
    strangers = [n for n in range(topology.workers) if spread.of(n, topology.hosts) != home]
    return push_payload(size, len(strangers))


def limit(scenario: Scenario, size: int, bound: float) -> float:
    """Return the least seconds of the work: (1 - p)·S over what the links let through.

    With loss on the workers' ways each worker's own link sends (1 - p)·S / (1 - L), and the
    server's port takes what arrives; with loss at the server's port that port carries the lost
    packets too. For an all-reduce each worker's way out is the one that loses; what servers help at
    most is counted, whoever goes over them. Loss in some steps of a training is left out: the limit
    is that of the others. Of rates that change it is the highest. Where there are leaves, their
    uplinks are a limit as well; a host's losses come before its leaf's uplink. Once a round's loss
    is over, what is left of it goes as if nothing were lost.

    Args:
        size: bytes of each worker's gradient.
        bound: share that need not arrive.
    """
    loss = scenario.loss
    lossy = _limit(scenario, size, bound)
    if not loss.any or loss.when != "rounds" or lossy <= loss.lasts_s:
        return lossy
    clean = _limit(replace(scenario, loss=Loss()), size, bound)
    return loss.lasts_s + (1.0 - loss.lasts_s / lossy) * clean


def _limit(scenario: Scenario, size: int, bound: float) -> float:
    spread, at_server = scenario.topology.spread, scenario.loss.at == "server"
    ports = _port_limit(scenario, size, bound)
    if spread is None:
        return ports
    crossing = (1.0 - bound) * uplink_payload(scenario, size) * 8 / spread.uplink.rate
    if at_server and scenario.work.kind == "push":
        crossing /= 1.0 - scenario.loss.rate
    return max(ports, crossing)


def _port_limit(scenario: Scenario, size: int, bound: float) -> float:
    if scenario.topology.rates:
        return (1.0 - bound) * _uneven_limit(scenario, size)
    rate: float = scenario.topology.ports.rate
    loss = scenario.loss
    if scenario.bandwidth.rates:
        rate = max(scenario.bandwidth.rates)
    wanted = (1.0 - bound) * size * 8 / rate
    workers = scenario.topology.workers
    lasting = loss.any and loss.when != "steps"
    shares = [1.0 - (loss.of_worker(n) if lasting else 0.0) for n in range(workers)]
    if scenario.work.kind == "push":
        if loss.at == "server":
            return wanted * workers / (1.0 - loss.rate)
        return max(wanted / min(shares), wanted * workers)
    through = min(shares) if loss.at != "server" else 1.0
    kept = 1.0 - loss.rate if lasting and loss.at != "workers" else 1.0
    return _all_reduce_limit(workers, through, scenario.topology.servers, kept) * wanted


def _uneven_limit(scenario: Scenario, size: int) -> float:
    """Return a lower bound (ours) of the seconds of a whole gradient over unlike ports.

    Everybody's gradient must leave its port, and the result reach it; n workers' all-reduce takes
    2·(n - 1) gradients' bytes in all (Patarasuk and Yuan, JPDC 69(2), 2009), over what all hosts
    send together. How the sums are best divided between such ports is not known here.
    """
    topology, loss = scenario.topology, scenario.loss
    workers = topology.workers
    lasting = loss.any and loss.when != "steps"
    rates = [float(topology.port(host).rate) for host in range(topology.hosts)]
    through = list(rates)
    for host in range(workers if lasting and loss.at != "server" else 0):
        through[host] *= 1.0 - loss.of_worker(host)
    slowest = size * 8 / min(through[:workers])
    if scenario.work.kind == "push":
        kept = 1.0 - loss.rate if lasting and loss.at == "server" else 1.0
        return max(slowest, workers * size * 8 / (rates[-1] * kept))
    return max(slowest, 2 * (workers - 1) * size * 8 / sum(through))


def _all_reduce_limit(workers: int, through: float, servers: int, kept: float) -> float:
    """Return the time of the best division of the sums, over that of one gradient.

    As Jiang et al. (OSDI 2020, section 4.1), but with links that lose; ours. If a part x of the
    gradient is summed by the servers, each worker sends x + c·(1 - x), c = 2·(n - 1)/n, of which
    the share `through` arrives, and each of k servers n·x/k, of which the share `kept` does.
    """
    ring = all_reduce_payload(1, workers)
    if not servers:
        return ring / through
    server = workers / servers / kept
    part = min(1.0, ring / (through * server + ring - 1.0))
    return max((ring - (ring - 1.0) * part) / through, server * part)


def probe_passes(loss: float, bound: float) -> int:
    """Return the passes over what is missing until the bound is kept: ceil(ln p / ln L)."""
    if loss <= bound:
        return 1
    return math.ceil(math.log(bound) / math.log(loss) - 1e-9)


def probe_time(scenario: Scenario, size: int, bound: float) -> float:
    """Return the seconds of an efficient sender that probes after each pass.

    They are those of its bytes, and a round trip for each pass.
    """
    worst = max(scenario.loss.of_worker(n) for n in range(scenario.topology.workers))
    passes = probe_passes(worst, bound)
    return limit(scenario, size, bound) + passes * scenario.topology.rtt_s


def probe_cap(scenario: Scenario, size: int, ours: float, theirs: float) -> float:
    """Return how much faster a transport with bound `ours` can be than a prober with `theirs`."""
    best = limit(scenario, size, ours) + ROUND_TRIPS_OF_A_ROUND * scenario.topology.rtt_s
    return probe_time(scenario, size, theirs) / best
