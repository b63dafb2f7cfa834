"""A test network on one machine: hosts, a switch, queues, bursts, and the baselines on it."""

from gradwire.lab.bursts import BurstRecord, BurstTraffic, windows
from gradwire.lab.leaves import Leaves
from gradwire.lab.network import LabUnavailable, Network, probe
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
from gradwire.lab.stats import PortStats, QueueStats
from gradwire.lab.wire import Wire, WireStats

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
    "windows",
]
