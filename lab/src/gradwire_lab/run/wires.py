"""Some hosts of a scenario need the lab's own wires instead of veth pairs.

A veth pair has no delay, and nftables lose packets independently, and trains as a whole. The lab's
wires (`gradwire_lab.network.wire`) have delay and jitter, and lose packets in runs, and single
packets out of trains.
"""

from __future__ import annotations

from dataclasses import replace

from gradwire_lab.network.wire import Wire
from gradwire_lab.scenario.schema import Scenario

__all__ = ["losers", "lossy", "wires_of"]


def wires_of(scenario: Scenario) -> dict[int, Wire]:
    """Return the wires of a scenario's hosts before anything is lost; none where veth pairs do.

    A round trip between two hosts with wires crosses four of them, and a packet's way two. Where
    all traffic goes to one server (pushes) and only delay is wanted, all of it is on the server's
    wire, which costs half the processor time.
    """
    topology, loss = scenario.topology, scenario.loss
    losing = loss.run > 1 or (loss.any and topology.ports.offloads)
    if topology.rtt_s and scenario.work.kind == "push" and not losing:
        wire = Wire(delay_s=topology.rtt_s / 2, jitter_s=topology.jitter_s)
        return {topology.workers: wire}
    if not (topology.rtt_s or losing):
        return {}
    wire = Wire(delay_s=topology.rtt_s / 4, jitter_s=topology.jitter_s / 2)
    return dict.fromkeys(range(topology.hosts), wire)


def losers(scenario: Scenario) -> tuple[bool, bool]:
    """Return whether nftables lose a scenario's packets by chance, and whether wires do."""
    topology, loss = scenario.topology, scenario.loss
    hosts = range(topology.workers) if loss.at == "workers" else range(topology.hosts)
    if loss.at == "server":
        hosts = hosts[topology.workers :]
    losing = [host for host in hosts if host >= topology.workers or loss.of_worker(host)]
    wired = range(topology.hosts) if topology.ecn else wires_of(scenario)
    return any(host not in wired for host in losing), any(host in wired for host in losing)


def lossy(wire: Wire, scenario: Scenario, share: float) -> Wire:
    """Return the same wire with this share of loss; 1 cuts it."""
    run = scenario.loss.run
    return replace(wire, loss=share, loss_burst=run if run > 1 and 0 < share < 1 else 0.0)
