"""There are two standard networks, with bursts that belong to them."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
ETHERNET_MTU, ETHERNET_HEADER = 1500, 14


@dataclass(frozen=True)
class Preset:
    """A preset says how every port of a network is shaped, in both directions.

    Attributes:
        name: what tables call this network.
        rate: the rate of a port, in bits per second, Ethernet headers counted; 0 for ports that are
            not shaped at all, whose queues count nothing.
        queue: drop-tail queue of a port, in bytes.
        bucket: depth of the token bucket that makes the rate, in bytes. A packet train longer
            than this is cut into packets before it is queued.
        offloads: whether trains (GSO, TSO, USO, GRO) pass the network whole.
        udp_trains: whether trains of UDP do, too; most clouds' network cards cut them (TSO without
            USO).
        fast_hosts: whether the hosts are faster than the ports: their own way out is no bottleneck.
        mtu: bytes of the longest IP packet.
    """

    name: str
    rate: int
    queue: int
    bucket: int
    offloads: bool
    udp_trains: bool = True
    fast_hosts: bool = False
    mtu: int = ETHERNET_MTU

    def __post_init__(self) -> None:
        if self.rate < 0 or self.queue <= 0:
            raise ValueError(f"network {self.name}: the queue must be positive, the rate 0 or more")
        frame = self.mtu + ETHERNET_HEADER
        if self.bucket < frame:
            raise ValueError(f"network {self.name}: bucket must hold a frame of {frame} bytes")
        if self.offloads and self.bucket < MAX_TRAIN:
            raise ValueError(
                f"network {self.name}: with offloads the bucket must hold a train of "
                f"{MAX_TRAIN} bytes"
            )


MAX_FRAME = ETHERNET_MTU + ETHERNET_HEADER
"""Bytes of the longest Ethernet frame."""

MAX_TRAIN = 70_000
"""Bytes of the longest train as a queue counts it: 64 KiB and 46 sets of headers."""

# The bucket is what an idle port may send at once, beside the queue. It also has to bridge the
# wake-ups that the kernel's timer misses on a busy machine, because tokens beyond it are lost. A
# takes the smallest bucket through which a train passes whole (0.6 ms). B takes one that is small
# against its queue and shorter than a train (0.3 ms), because its ports cut trains.
NETWORK_A = Preset("A", 1_000_000_000, 256 * KIB, 72 * KIB, offloads=True)
NETWORK_B = Preset("B", 200_000_000, 64 * KIB, 8 * KIB, offloads=False)
NETWORKS = {preset.name: preset for preset in (NETWORK_A, NETWORK_B)}


@dataclass(frozen=True)
class Burst:
    """A burst is cross traffic that comes and goes.

    Attributes:
        rate: while it is on, in bits per second, Ethernet headers counted.
        on: seconds that it lasts.
        period: seconds from one start to the next.
        phase: seconds from the origin to the first start.
    """

    rate: float
    on: float
    period: float
    phase: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError("burst: rate must be positive")
        if not 0 < self.on <= self.period:
            raise ValueError("burst: on must be positive and no longer than period")


BURSTS_A = Burst(rate=4e9, on=0.010, period=0.200)
BURSTS_B = Burst(rate=800e6, on=0.040, period=0.400)
BURSTS = {"A": BURSTS_A, "B": BURSTS_B}
