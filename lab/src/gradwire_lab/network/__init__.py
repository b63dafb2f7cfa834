"""A lab network on one machine has hosts, switches, queues and bursts."""

from gradwire_lab.network.bursts import BurstRecord, BurstTraffic
from gradwire_lab.network.leaves import Leaves
from gradwire_lab.network.network import LabUnavailable, Network, probe
from gradwire_lab.network.presets import (
    BURSTS,
    BURSTS_A,
    BURSTS_B,
    NETWORK_A,
    NETWORK_B,
    NETWORKS,
    Burst,
    Preset,
)
from gradwire_lab.network.stats import PortStats, QueueStats
from gradwire_lab.network.wire import Wire, WireStats

__all__ = [
    "BURSTS",
    "BURSTS_A",
    "BURSTS_B",
    "NETWORKS",
    "NETWORK_A",
    "NETWORK_B",
    "Burst",
    "BurstRecord",
    "BurstTraffic",
    "LabUnavailable",
    "Leaves",
    "Network",
    "PortStats",
    "Preset",
    "QueueStats",
    "Wire",
    "WireStats",
    "probe",
]
