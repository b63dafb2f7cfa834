"""A test network on one machine: hosts, a switch, queues, bursts, and the baselines on it."""

from gradwire.lab.network import LabUnavailable, Network, PortStats, QueueStats, probe
from gradwire.lab.presets import (
    BURSTS,
    BURSTS_A,
    BURSTS_B,
    NETWORK_A,
    NETWORK_B,
    NETWORKS,
    Burst,
    Preset,
)

__all__ = [
    "BURSTS",
    "BURSTS_A",
    "BURSTS_B",
    "NETWORKS",
    "NETWORK_A",
    "NETWORK_B",
    "Burst",
    "LabUnavailable",
    "Network",
    "PortStats",
    "Preset",
    "QueueStats",
    "probe",
]
