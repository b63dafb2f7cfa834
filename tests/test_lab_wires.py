"""The wires of the lab's hosts, on real TAP devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from statistics import median

import pytest

from gradwire_lab.bench.wire_trial import round_trips, wire_load
from gradwire_lab.network import NETWORK_A, NETWORK_B, LabUnavailable, Network, Preset, Wire
from lab_processes import ENVIRONMENT, own_and_kill

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("wires")]

SLACK = 0.015
"""Seconds that a busy machine may add to a median round trip."""

# Sends so many datagrams, in trains of so many, one train each millisecond, to an address.
SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 103, 1472)
count, train = int(sys.argv[1]), int(sys.argv[2])
for _ in range(count // train):
    s.sendto(bytes(1472 * train), (sys.argv[3], 9))
    time.sleep(0.001)
"""

# Sends 3 MB over TCP from one host to another; both print the SHA-256 of it.
TCP_SERVER = """
import hashlib, socket
s = socket.create_server(("", 5001)); print("bound", flush=True)
c, _ = s.accept(); h = hashlib.sha256()
while data := c.recv(1 << 16): h.update(data)
print(h.hexdigest())
"""
TCP_CLIENT = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(3_000_000)
c = socket.create_connection((sys.argv[1], 5001)); c.sendall(data); c.close()
print(hashlib.sha256(data).hexdigest())
"""


def roomy(preset: Preset) -> Preset:
    """With queues that hold all that a test sends, should a busy machine hand it on late."""
    return replace(preset, queue=32 << 20)


def rtt(network: Network, count: int = 20) -> tuple[float, float]:
    """Least and median round trip from host 0 to host 1."""
    times = [seconds for seconds in round_trips(network, 0, 1, count) if seconds is not None]
    assert len(times) == count
    return min(times), median(times)


def counted(network: Network) -> tuple[int, int]:
    """How many packets came to the wire of host 0, and how many it has not yet carried or lost."""
    ways = network.wire_stats(0).values()
    came = sum(way.packets for way in ways)
    return came, came - sum(way.delivered + way.dropped_loss + way.dropped_queue for way in ways)


def send(network: Network, source: int, count: int, train: int = 1) -> None:
    target = network.discard_address(1 - source)
    command = [sys.executable, "-c", SENDER, str(count), str(train), target]
    assert network.spawn(source, command).wait() == 0
    deadline, before = time.monotonic() + 10, (-1, 0)
    while (now := counted(network)) != before or now[1]:
        assert time.monotonic() < deadline, now
        before = now
        time.sleep(0.2)


def test_round_trips_take_what_was_asked_for() -> None:
    with Network(2, NETWORK_B, wires={0: Wire(delay_s=0.010)}) as network:
        assert network.wires_by == "TAP pairs"
        least, usual = rtt(network)
        assert 0.020 <= least <= usual < 0.020 + SLACK
        network.set_wire(0, Wire(delay_s=0.030), directions=["uplink"])
        least, usual = rtt(network)
        assert 0.040 <= least <= usual < 0.040 + SLACK
        stats = network.wire_stats(0)["uplink"]
        assert stats.packets == stats.delivered == 40
        assert stats.mean_late_s < 0.005
    with Network(2, wires=dict.fromkeys((0, 1), Wire(delay_s=0.005))) as network:
        least, usual = rtt(network)
        assert 0.020 <= least <= usual < 0.020 + SLACK
    with Network(2) as network:
        assert network.wires_by is None
        assert rtt(network)[1] < SLACK


def test_losses_have_their_share_in_the_direction_asked_for() -> None:
    with Network(2, roomy(NETWORK_B), wires={0: Wire()}) as network:
        network.set_wire(0, Wire(loss=0.25, loss_burst=4), directions=["uplink"])
        for source in (0, 1):
            send(network, source, 2000, train=10)
        stats = network.wire_stats(0)
        up, down = stats["uplink"], stats["downlink"]
        assert up.packets == down.packets == down.delivered == 2000
        assert 350 < up.dropped_loss < 650
        assert up.delivered == 2000 - up.dropped_loss
        assert up.overrun == up.dropped_memory == 0
        assert network.port_stats(1).downlink.packets == up.delivered
        assert network.lost_packets() == up.dropped_loss


def test_trains_pass_whole_and_are_lost_packet_by_packet() -> None:
    with Network(2, roomy(NETWORK_A), wires=dict.fromkeys((0, 1), Wire())) as network:
        send(network, 0, 2000, train=40)
        stats = network.wire_stats(0)["uplink"]
        assert (stats.packets, stats.delivered) == (2000, 2000)
        if network.wires_by == "TAP pairs":
            assert stats.frames == 50
        assert network.lost_packets() == 0
        network.set_wire(0, Wire(loss=0.1))
        send(network, 0, 4000, train=40)
        stats = network.wire_stats(0)["uplink"]
        assert 250 < stats.dropped_loss < 550
        assert network.lost_packets() == stats.dropped_loss


@pytest.mark.parametrize("preset", [NETWORK_A, NETWORK_B], ids=["A", "B"])
def test_tcp_gets_its_bytes_through_delay_and_loss(preset: Preset) -> None:
    with Network(2, preset, wires={0: Wire(delay_s=0.001, loss=0.01)}) as network:
        server = network.spawn(
            1, [sys.executable, "-c", TCP_SERVER], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "bound\n"
        client = network.spawn(
            0,
            [sys.executable, "-c", TCP_CLIENT, network.address(1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        sent, received = client.communicate(timeout=60)[0], server.communicate(timeout=60)[0]
        assert sent == received != ""
        assert network.wire_stats(0)["uplink"].dropped_loss > 0


def test_a_cut_wire_is_silent_until_it_heals() -> None:
    with Network(2, wires={0: Wire(delay_s=0.002)}) as network:
        network.set_wire(0, Wire(delay_s=0.002, loss=1))
        assert round_trips(network, 0, 1, 1) == [None]
        assert network.wire_stats(0)["uplink"].dropped_loss == 1
        network.set_wire(0, Wire(delay_s=0.002))
        assert rtt(network)[0] >= 0.004


def test_a_rate_holds_and_changes() -> None:
    with Network(2, NETWORK_B, wires={0: Wire()}) as network:
        for rate in (20_000_000, 40_000_000):
            network.set_wire(0, Wire(rate=rate, queue=15_000))
            before, start = network.wire_stats(0)["uplink"], time.monotonic()
            send(network, 0, 4000, train=20)  # faster than it can leave
            seconds = time.monotonic() - start
            after = network.wire_stats(0)["uplink"]
            carried = (after.delivered - before.delivered) * 1514 * 8
            assert after.dropped_queue > before.dropped_queue
            assert carried < rate * seconds + 2 * 15_000 * 8
            assert after.max_queue_bytes <= 15_000


def test_a_wire_carries_a_low_rate_both_ways() -> None:
    deadline = time.monotonic() + 30  # a machine that stops for a while carries nothing meanwhile
    while (
        load := wire_load(20_000_000, 0.010, seconds=0.5)
    ).carried < 0.5 * load.rate or load.lost:
        assert time.monotonic() < deadline, load
    assert 0 < load.cpu < 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="runs are at least 9 packets"):
        Wire(loss=0.9, loss_burst=3)
    for wrong in (
        *({"delay_s": -1.0}, {"jitter_s": 61.0}, {"rate": 5}, {"rate": 10**9, "queue": 1}),
        *({"loss": 2.0}, {"loss_burst": 0.5}),
    ):
        with pytest.raises(ValueError, match=f"wire: {list(wrong)[-1]} is"):
            Wire(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hosts are 0 to 1"):
        Network(2, wires={2: Wire()})
    with Network(2, wires={0: Wire()}) as network:
        with pytest.raises(ValueError, match="sideways"):
            network.set_wire(0, Wire(), directions=["sideways"])
        with pytest.raises(ValueError, match="without a wire"):
            network.set_wire(1, Wire())
        with pytest.raises(IndexError):
            network.wire_stats(2)
    with pytest.raises(LabUnavailable, match="closed"):
        network.wire_stats(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a device")
def test_without_tap_devices_the_lab_says_so() -> None:
    program = (
        "from gradwire_lab.network import LabUnavailable, Network, Wire\n"
        "try: Network(1, wires={0: Wire()})\n"
        "except LabUnavailable as error: print(error)\n"
        "Network(1).close()"
    )
    hidden = 'mount -t tmpfs none /dev/net && exec "$@"'
    asked = subprocess.run(
        ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert "/dev/net/tun: No such file" in asked.stdout, asked.stderr
    assert asked.returncode == 0


# Prints the processes it started and a host's namespace, then waits to be killed.
OWNER = """
import os, time
from pathlib import Path
from gradwire_lab.network import Network, Wire
network = Network(2, wires={0: Wire(delay_s=0.001)})
keeper = network.pid
helpers = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
process = network.spawn(0, ["sleep", "1000"])
print(keeper, process.pid, *helpers, flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    own_and_kill([sys.executable, "-c", OWNER], 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests show it already")
def test_it_works_in_a_user_namespace() -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv to give powers up")
    # What an ordinary user has where everybody may open /dev/net/tun.
    drop = [setpriv, "--bounding-set=-all,+setfcap", "--inh-caps=-all"]
    own_and_kill([*drop, sys.executable, "-c", OWNER], 3)
