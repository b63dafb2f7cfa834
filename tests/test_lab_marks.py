"""Networks whose switches mark (ECN), on real namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gradwire_lab.network import NETWORK_B, Leaves, Network, Wire
from gradwire_lab.network.presets import MAX_FRAME

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.usefixtures("wires")]

KIB = 1024
ECN = 16 * KIB
LEAD = 0.8
"""Seconds that a sender has to start."""

# Counts what arrives on port 5000 by the two bits of its ECN field until nothing has for half a
# second.
RECEIVER = """
import json, socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
s.bind(("", 5000))
print("bound", flush=True)
s.settimeout(10)
seen = [0] * 4
try:
    while True:
        _, extra, _, _ = s.recvmsg(2048, 64)
        s.settimeout(0.5)
        (tos,) = [data[0] for level, kind, data in extra if (level, kind) == (0, 1)]
        seen[tos & 3] += 1
except TimeoutError:
    pass
print(json.dumps(seen))
"""

# Sends datagrams with this TOS from a moment to another, a train of 8 at a time, to an address.
SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, int(sys.argv[1]))
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
s.setsockopt(17, 103, 1472)
start, stop = float(sys.argv[2]), float(sys.argv[3])
time.sleep(max(0.0, start - time.monotonic()))
while time.monotonic() < stop:
    s.sendto(bytes(1472 * 8), (sys.argv[4], 5000))
"""

# Moves so many bytes over TCP to an address. Of TCP_INFO both print whether ECN was negotiated
# (tcpi_options, bit 3), and the sender tcpi_delivered_ce.
TCP_SERVER = """
import json, socket, struct
s = socket.create_server(("", 5001)); print("bound", flush=True)
c, _ = s.accept()
while c.recv(1 << 16): pass
info = c.getsockopt(6, 11, 256)
print(json.dumps({"ecn": bool(info[5] & 8)}))
"""
TCP_CLIENT = """
import json, socket, struct, sys
c = socket.create_connection((sys.argv[1], 5001))
c.setsockopt(6, 13, sys.argv[2].encode())
c.sendall(bytes(int(sys.argv[3])))
c.shutdown(1)
c.recv(1)
info = c.getsockopt(6, 11, 256)
print(json.dumps({
    "ecn": bool(info[5] & 8),
    "delivered_ce": struct.unpack_from("I", info, 196)[0],
}))
"""


def listen(network: Network, host: int, program: str) -> subprocess.Popen[str]:
    process = network.spawn(
        host, [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "bound\n"
    return process


def told(process: subprocess.Popen[str]) -> Any:
    return json.loads(process.communicate(timeout=30)[0])


def flood(network: Network, sources: list[int], target: int, ecn: int, seconds: float) -> None:
    """Send from several hosts at once, as fast as their ports take it."""
    start = time.monotonic() + LEAD
    times, address = [str(start), str(start + seconds)], network.address(target)
    senders = [
        network.spawn(host, [sys.executable, "-c", SENDER, str(ecn), *times, address])
        for host in sources
    ]
    for sender in senders:
        assert sender.wait(30) == 0


def send(network: Network, sources: list[int], target: int, ecn: int, seconds: float) -> list[int]:
    """Datagrams from several hosts at once; how many arrived with which ECN field."""
    receiver = listen(network, target, RECEIVER)
    flood(network, sources, target, ecn, seconds)
    seen: list[int] = told(receiver)
    return seen


@pytest.fixture(params=[None, Leaves(2, NETWORK_B)], ids=["one switch", "leaves"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with Network(4, NETWORK_B, leaves=request.param, ecn=ECN) as made:
        yield made


def test_an_incast_is_marked_if_it_says_it_may_be(network: Network) -> None:
    seen = send(network, [0, 1], 2, ecn=2, seconds=0.3)
    downlink = network.port_stats(2).downlink
    marked = downlink.marked
    if network.leaves is not None:  # the way leads over two more queues, from leaf to leaf
        marked += network.uplink_stats(0).uplink.marked + network.uplink_stats(1).downlink.marked
    assert seen[1] == seen[0] == 0
    assert 0 < seen[3] <= marked
    assert seen[2] > 0  # the first found the queue short
    assert downlink.packets >= sum(seen)  # the receiver is no faster than the machine
    sent = sum(network.port_stats(host).uplink.packets for host in (0, 1))
    assert network.lost_packets() == sent - downlink.packets
    assert downlink.backlog == 0

    plain = send(network, [0, 1], 2, ecn=0, seconds=0.3)
    assert plain[1] == plain[2] == plain[3] == 0
    assert network.port_stats(2).downlink.marked == downlink.marked


def test_the_queue_that_marks_has_the_ports_rate_and_length(network: Network) -> None:
    def busy(seconds: float, sources: list[int]) -> tuple[list[int], float]:
        before = network.port_stats(2).downlink.bytes
        seen = send(network, sources, 2, ecn=1, seconds=seconds)
        return seen, (network.port_stats(2).downlink.bytes - before) * 8 / seconds

    seen, rate = busy(0.4, [0, 1, 3])
    assert seen[1] > 0
    assert seen[3] > 0
    assert rate < 1.1 * NETWORK_B.rate + NETWORK_B.queue * 8 / 0.4
    network.set_rate(2, 20_000_000)  # which a busy machine, too, sends more than
    seen, rate = busy(0.6, [0, 1])
    assert rate < 1.2 * 20_000_000 + NETWORK_B.queue * 8 / 0.6
    assert seen[3] > 0  # the threshold stays
    stats = network.port_stats(2).downlink
    assert stats.drops > 0
    assert stats.bytes == stats.packets * MAX_FRAME
    assert network.wire_stats(2)["downlink"].max_queue_bytes <= NETWORK_B.queue
    assert network.wire_stats(2)["downlink"].marked == stats.marked


def test_tcp_asks_for_marks_and_heeds_them() -> None:
    drops = {}
    for ecn in (ECN, 0):
        with Network(2, NETWORK_B, ecn=ecn) as made:
            made.set_rate(1, 50_000_000)
            server = listen(made, 1, TCP_SERVER)
            client = made.spawn(
                0,
                [sys.executable, "-c", TCP_CLIENT, made.address(1), "cubic", "4000000"],
                stdout=subprocess.PIPE,
                text=True,
            )
            sent, received = told(client), told(server)
            stats = made.port_stats(1).downlink
            assert sent["ecn"] == received["ecn"] == bool(ecn)
            assert (sent["delivered_ce"] > 0) == (stats.marked > 0) == bool(ecn)
            drops[ecn] = stats.drops
    assert drops[ECN] < drops[0]  # none, but for a machine that is late


def test_marks_go_together_with_delay_and_loss() -> None:
    delayed = Wire(delay_s=0.005)
    with Network(3, NETWORK_B, ecn=ECN, wires={2: delayed}) as made:
        assert made.wires.keys() == {0, 1, 2}
        seen = send(made, [0, 1], 2, ecn=2, seconds=0.3)
        assert seen[3] > 0
        made.set_wire(2, replace(delayed, loss=1.0), directions=["downlink"])
        before = made.port_stats(2).downlink
        receiver = listen(made, 2, RECEIVER.replace("settimeout(10)", "settimeout(2)"))
        flood(made, [0, 1], 2, 2, 0.1)
        assert told(receiver) == [0, 0, 0, 0]
        after = made.port_stats(2).downlink
        assert after.packets > before.packets  # behind rate and queue, as everywhere
        with pytest.raises(ValueError, match="rate"):
            made.set_wire(2, Wire(rate=1_000_000))


def test_impossible_thresholds_are_named() -> None:
    with pytest.raises(ValueError, match="ecn=65536: 1 to 65535"):
        Network(2, NETWORK_B, ecn=64 * KIB)
    short = Leaves(2, replace(NETWORK_B, queue=8 * KIB))
    with pytest.raises(ValueError, match="ecn=16384: 1 to 8191"):
        Network(2, NETWORK_B, ecn=ECN, leaves=short)
    with pytest.raises(ValueError, match="with ecn they have the ports' rates"):
        Network(2, NETWORK_B, ecn=ECN, wires={0: Wire(rate=1_000_000)})
    with (
        Network(2, NETWORK_B, leaves=Leaves(2, NETWORK_B)) as made,
        pytest.raises(ValueError, match="veth"),
    ):
        made.uplink_wire_stats(0)
    with pytest.raises(ValueError, match="wire: ecn is 9"):
        Wire(ecn=9)
