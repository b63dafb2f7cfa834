"""Hosts may be on leaf switches under one spine, whose uplinks they share."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_lab.network.presets import Preset

__all__ = ["Leaves"]


@dataclass(frozen=True)
class Leaves:
    """Leaves are two tiers of switches in place of one switch.

    Attributes:
        count: leaves, each with an uplink to the one spine.
        uplink: the preset of every uplink, in both directions.
    """

    count: int
    uplink: Preset

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"leaves={self.count}: 2 and more are allowed; one is a single switch")

    def of(self, host: int, hosts: int) -> int:
        """Return the leaf that a host is on: in rank order, as many on each as can be.

        Args:
            hosts: how many there are, those for cross traffic left out, which are on the spine.
        """
        return host * self.count // hosts

    def sizes(self, hosts: int) -> list[int]:
        """Return how many hosts are on each leaf."""
        places = [self.of(host, hosts) for host in range(hosts)]
        return [places.count(leaf) for leaf in range(self.count)]
