"""Which hosts of a scenario need wires of the lab's own, and what those do.

A veth pair delays nothing; nftables lose independently, and a train whole. All else is the wires'
(`gradwire.lab.wire`): delay, jitter, runs of losses, and loss of single packets out of trains.
"""

from __future__ import annotations

from gradwire.lab.scenario.schema import Scenario
from gradwire.lab.wire import Wire

__all__ = ["WIRES_IN_A_ROUND_TRIP", "lossy", "wires_of"]

WIRES_IN_A_ROUND_TRIP = 4


def wires_of(scenario: Scenario) -> dict[int, Wire]:
    """The wires of the hosts that take part, before anything is lost; none where veths will do."""
    topology, loss = scenario.topology, scenario.loss
    needed = topology.rtt_s or loss.run > 1 or (loss.any and topology.ports.offloads)
    if not needed:
        return {}
    wire = Wire(delay_s=topology.rtt_s / WIRES_IN_A_ROUND_TRIP, jitter_s=topology.jitter_s)
    return dict.fromkeys(range(topology.hosts), wire)


def lossy(scenario: Scenario, share: float) -> Wire:
    """A wire of the scenario that loses this share, 1 for one that is cut."""
    topology, run = scenario.topology, scenario.loss.run
    return Wire(
        delay_s=topology.rtt_s / WIRES_IN_A_ROUND_TRIP,
        jitter_s=topology.jitter_s,
        loss=share,
        loss_burst=run if run > 1 and 0 < share < 1 else 0.0,
    )
