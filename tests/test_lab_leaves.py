"""Leaf and spine, on real namespaces: who shares an uplink, and what overflows there."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from gradwire_lab.contest.rivals import RivalStreams
from gradwire_lab.network import (
    NETWORK_B,
    LabUnavailable,
    Leaves,
    Network,
    PortStats,
    Preset,
    Wire,
)
from gradwire_lab.network.bursts import BurstTraffic
from gradwire_lab.network.presets import MAX_FRAME, Burst

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

# 4 hosts on 2 leaves, 2:1: both hosts of a leaf together fill its uplink twice.
UPLINK = replace(NETWORK_B, name="uplink")
TWO = Leaves(2, UPLINK)

LEAD = 0.8
"""Seconds that senders have to start, so that they send at the same time."""

# Sends datagrams of a full frame, so many in a train, from a moment to another to an address; one
# train at least.
SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
s.setsockopt(17, 103, 1472)
train, start, stop = bytes(1472 * int(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3])
time.sleep(max(0.0, start - time.monotonic()))
while True:
    s.sendto(train, (sys.argv[4], 9))
    if time.monotonic() >= stop:
        break
"""


def send(network: Network, pairs: list[tuple[int, int]], seconds: float = 0.0) -> None:
    """Datagrams from hosts to hosts, all at once; returns when nothing waits any more."""
    start = time.monotonic() + (LEAD if len(pairs) > 1 else 0.0)
    how = ["16" if seconds else "1", str(start), str(start + seconds)]
    senders: list[subprocess.Popen[bytes]] = [
        network.spawn(source, [sys.executable, "-c", SENDER, *how, network.discard_address(target)])
        for source, target in pairs
    ]
    for sender in senders:
        assert sender.wait(30) == 0
    drain(network)


def drain(network: Network) -> None:
    """Waits until no queue holds anything and no counter has moved for a while."""
    leaves = range(network.leaves.count) if network.leaves is not None else ()
    deadline = time.monotonic() + 10
    before: list[PortStats] = []
    while True:
        stats = [network.port_stats(host) for host in range(network.hosts)]
        stats += [network.uplink_stats(leaf) for leaf in leaves]
        waiting = sum(each.uplink.backlog + each.downlink.backlog for each in stats)
        if stats == before and waiting == 0:
            return
        assert time.monotonic() < deadline
        before = stats
        time.sleep(0.05)


def test_hosts_are_spread_in_rank_order() -> None:
    five = Leaves(3, UPLINK)
    assert [five.of(host, 5) for host in range(5)] == [0, 0, 1, 1, 2]
    assert five.sizes(5) == [2, 2, 1]
    assert Leaves(4, UPLINK).sizes(8) == [2, 2, 2, 2]
    with pytest.raises(ValueError, match="leaves=1"):
        Leaves(1, UPLINK)
    with pytest.raises(ValueError, match="leaves=3: 2 hosts"):
        Network(2, leaves=Leaves(3, UPLINK))


@pytest.mark.parametrize("wired", [False, True], ids=["veth", "wire"])
def test_a_packet_takes_the_way_over_the_spine_only_to_another_leaf(wired: bool) -> None:
    wires = {0: Wire(delay_s=0.001), 3: Wire(delay_s=0.001)} if wired else {}
    with Network(4, NETWORK_B, extra_hosts=1, leaves=TWO, wires=wires) as network:
        for source, target, way in [
            (0, 1, [0, 0, 0, 0]),  # up and down of leaf 0, up and down of leaf 1
            (0, 3, [1, 0, 0, 1]),
            (2, 1, [0, 1, 1, 0]),
            (4, 2, [0, 0, 0, 1]),  # cross traffic comes from the spine
        ]:
            before = [network.uplink_stats(leaf) for leaf in (0, 1)]
            arrived = network.port_stats(target).downlink.packets
            send(network, [(source, target)])
            deadline = time.monotonic() + 10
            while network.port_stats(target).downlink.packets == arrived:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            after = [network.uplink_stats(leaf) for leaf in (0, 1)]
            seen = [
                getattr(new, name).packets - getattr(old, name).packets
                for old, new in zip(before, after, strict=True)
                for name in ("uplink", "downlink")
            ]
            assert seen == way
            assert network.port_stats(target).downlink.packets == arrived + 1
        assert network.lost_packets() == 0
        with pytest.raises(IndexError, match="no leaf 2"):
            network.uplink_stats(2)
    with pytest.raises(LabUnavailable, match="closed"):
        network.uplink_stats(0)


def test_an_oversubscribed_uplink_overflows_and_no_port_does() -> None:
    with Network(4, NETWORK_B, leaves=TWO) as network:
        send(network, [(0, 2), (1, 3)], seconds=0.5)
        up = network.uplink_stats(0).uplink
        offered = sum(network.port_stats(host).uplink.packets for host in (0, 1))
        arrived = sum(network.port_stats(host).downlink.packets for host in (2, 3))
        assert up.drops > 0
        assert up.packets == arrived == offered - up.drops
        assert network.lost_packets() == up.drops
        queued = 3 * UPLINK.queue  # what waits, there and at both hosts, when they stop
        assert up.packets * MAX_FRAME < 1.1 * 0.5 * UPLINK.rate / 8 + queued
        assert all(network.port_stats(host).downlink.drops == 0 for host in range(4))
        assert network.uplink_stats(1).downlink.drops == 0  # it gets no more than the other sends
        before = network.uplink_stats(0).uplink.packets
        send(network, [(0, 1), (1, 0)], seconds=0.1)  # a leaf's own traffic meets no uplink
        assert network.uplink_stats(0).uplink.packets == before


def test_an_incast_over_the_spine_overflows_the_leafs_way_down() -> None:
    leaves = Leaves(3, UPLINK)
    with Network(6, NETWORK_B, leaves=leaves) as network:
        send(network, [(0, 4), (2, 5)], seconds=0.3)
        assert network.uplink_stats(2).downlink.drops > 0
        assert [network.uplink_stats(leaf).uplink.drops for leaf in range(3)] == [0, 0, 0]
        assert network.lost_packets() == network.uplink_stats(2).downlink.drops


def test_trains_bursts_and_rivals_cross_the_spine() -> None:
    ports = Preset("ports", 400_000_000, 128 << 10, 72 << 10, offloads=True)
    leaves = Leaves(2, replace(ports, name="uplink", rate=200_000_000))
    burst = Burst(rate=800e6, on=0.02, period=0.2)
    with (
        Network(4, ports, extra_hosts=2, leaves=leaves) as network,
        BurstTraffic(network, burst, target=1, source=4) as bursts,
        RivalStreams(network, 2, "cubic", target=3, source=5) as rivals,
    ):
        deadline = time.monotonic() + 20
        while len(bursts.records()) < 2 or not sum(count for _, count in rivals.read()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert network.uplink_stats(0).downlink.drops > 0
        assert network.port_stats(1).downlink.drops == 0
        assert network.uplink_stats(1).downlink.packets > 0


def test_a_lossy_host_loses_before_its_uplink() -> None:
    with Network(4, NETWORK_B, leaves=TWO) as network:
        network.set_loss([(0, "uplink", 1.0)])
        send(network, [(0, 2)])
        assert network.uplink_stats(0).uplink.packets == 0
        network.set_loss([(0, "uplink", 0.0), (2, "downlink", 1.0)])
        send(network, [(0, 2)])
        assert network.uplink_stats(0).uplink.packets == 1
        assert network.uplink_stats(1).downlink.packets == 1
