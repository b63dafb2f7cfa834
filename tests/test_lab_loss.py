"""Loss, cuts and changed rates on the lab's links, and competing streams; on real namespaces."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire_lab.contest.rivals import RivalStreams, goodput
from gradwire_lab.network import NETWORK_A, NETWORK_B, Network
from gradwire_lab.run.ground import open_ground
from test_lab_journal import small

pytestmark = [pytest.mark.slow, pytest.mark.netns]

PACKETS = 2000

# Counts the datagrams that come until nothing has for half a second.
RECEIVER = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try: s.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE: root has it
except OSError: s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
s.bind(("0.0.0.0", 5000))
print("ready", flush=True)
count, patience = 0, 20.0
while True:
    s.settimeout(patience)
    try:
        s.recv(2000)
    except TimeoutError:
        break
    count, patience = count + 1, 0.5
print(count, flush=True)
"""

SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    s.sendto(bytes(100), (sys.argv[1], 5000))
    if number % 20 == 0:
        time.sleep(0.002)
"""


@pytest.fixture(scope="module")
def network(namespaces: None) -> Iterator[Network]:
    with Network(3, NETWORK_B, extra_hosts=1) as made:
        yield made


@pytest.fixture(autouse=True)
def _whole(network: Network) -> Iterator[None]:
    yield
    network.set_loss(
        (host, direction, 0.0) for host in range(3) for direction in ("uplink", "downlink")
    )


def arrived(network: Network, source: int, target: int) -> int:
    """How many of PACKETS datagrams from one host to another come."""
    receiver = network.spawn(
        target, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    command = [sys.executable, "-c", SENDER, network.address(target), str(PACKETS)]
    assert network.spawn(source, command).wait(60) == 0
    return int(receiver.communicate(timeout=60)[0])


def test_a_link_loses_the_share_that_it_was_told_to(network: Network) -> None:
    network.set_loss([(0, "uplink", 0.3)])
    # Five standard deviations of a binomial with n = 2000, p = 0.7 are 103.
    assert abs(arrived(network, 0, 1) - 0.7 * PACKETS) < 110
    network.set_loss([(0, "uplink", 0.0), (1, "downlink", 0.9)])
    assert abs(arrived(network, 0, 1) - 0.1 * PACKETS) < 70


def test_only_the_named_way_loses(network: Network) -> None:
    network.set_loss([(0, "uplink", 0.9), (1, "downlink", 0.9)])
    assert arrived(network, 1, 0) == PACKETS
    assert arrived(network, 2, 0) == PACKETS


def test_a_cut_link_carries_nothing_and_heals(network: Network) -> None:
    network.set_loss([(2, "downlink", 1.0)])
    command = [sys.executable, "-c", SENDER, network.address(2), "50"]
    before = network.port_stats(2).downlink.packets
    assert network.spawn(0, command).wait(30) == 0
    assert network.port_stats(2).downlink.packets - before >= 50  # lost behind the queue
    network.set_loss([(2, "downlink", 0.0)])
    assert arrived(network, 0, 2) == PACKETS


def test_impossible_losses_are_refused(network: Network) -> None:
    with pytest.raises(ValueError, match="loss of 2"):
        network.set_loss([(0, "uplink", 2.0)])
    with pytest.raises(ValueError, match="'sideways'"):
        network.set_loss([(0, "sideways", 0.1)])
    with pytest.raises(IndexError):
        network.set_loss([(9, "uplink", 0.1)])
    with pytest.raises(ValueError, match="rate=0"):
        network.set_rate(0, 0)


def test_a_port_may_be_slower_than_the_others() -> None:
    slow = replace(NETWORK_B, name="slow", rate=30_000_000, queue=20_000)
    rates = {}
    with Network(2, NETWORK_B, ports={1: slow}, extra_hosts=1) as made:
        for target in (0, 1):
            with RivalStreams(made, 3, "cubic", target=target, source=2) as rivals:
                time.sleep(0.5)
                begun = time.monotonic()
                time.sleep(1.0)
                rates[target] = 8 * (goodput(rivals.read(), [(begun, time.monotonic())]) or 0.0)
            assert made.port_stats(1).downlink.backlog <= slow.queue
    assert 15e6 < rates[1] < 31e6
    assert rates[0] > 1.5 * rates[1]
    with pytest.raises(ValueError, match="ports: hosts are 0 to 1"):
        Network(2, NETWORK_B, ports={2: slow})
    with pytest.raises(ValueError, match="offloads are on or off for all"):
        Network(2, NETWORK_B, ports={1: NETWORK_A})


def test_rivals_fill_the_port_at_its_rate_of_the_moment(network: Network) -> None:
    with RivalStreams(network, 3, "cubic", target=0, source=3) as rivals:
        rates = []
        for rate in (200_000_000, 50_000_000):
            network.set_rate(0, rate)
            time.sleep(1.0)
            begun = time.monotonic()
            time.sleep(1.0)
            rates.append(8 * (goodput(rivals.read(), [(begun, time.monotonic())]) or 0.0))
    network.set_rate(0, NETWORK_B.rate)
    assert rates[0] < 200e6
    assert rates[1] < 51e6
    # A busy machine may carry less than the port; but more than the slow one.
    assert rates[1] > 30e6
    assert rates[0] > 1.5 * rates[1]


@pytest.mark.usefixtures("namespaces")
def test_loss_begins_when_the_rivals_streams_send(tmp_path: Path) -> None:
    """The SYN-ACKs of four streams would hardly come through this loss, nor what asks for data."""
    more = "[rivals]\nstreams = 4\ntarget = 1\n[loss]\nrate = 0.95\n[work]"
    with open_ground(small(tmp_path, ("[work]", more)).first, 0) as ground:
        ground.start()
        assert sum(count for _, count in ground.rivals_read()) > 0
