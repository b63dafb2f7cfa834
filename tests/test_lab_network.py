"""The lab's network, on real namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab.network import (
    BURSTS_A,
    NETWORK_A,
    NETWORK_B,
    Burst,
    BurstTraffic,
    LabUnavailable,
    Network,
    Preset,
)
from gradwire_lab.network.wire import Wire
from lab_processes import ENVIRONMENT, alive, own_and_kill, wait_until_dead

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespaces")]


# Counts what arrives on port 5000 until nothing has for half a second; UDP_GRO, so that a train
# that is still one is seen as one.
RECEIVER = """
import json, socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 104, 1)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
s.bind(("", 5000))
print("bound", flush=True)
s.settimeout(5)
size = longest = 0
first = last = None
try:
    while True:
        n = len(s.recv(1 << 16))
        last = time.monotonic()
        first = first or last
        s.settimeout(0.5)
        size += n
        longest = max(longest, n)
except TimeoutError:
    pass
print(json.dumps({"packets": size // 1472, "longest": longest, "seconds": last - first}))
"""

# Sends trains of so many packets for so many seconds to an address: arguments in this order.
SENDER = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 103, 1472)
train = bytes(1472 * int(sys.argv[1]))
stop = time.monotonic() + float(sys.argv[2])
while True:
    s.sendto(train, (sys.argv[3], 5000))
    if time.monotonic() >= stop:
        break
"""


class Hosts:
    """A network with what the tests do on it."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def receive(self, host: int) -> Callable[[], dict[str, Any]]:
        """Start a receiver; the result waits for it and gives what it counted."""
        process = self.network.spawn(
            host, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "bound\n"

        def result() -> dict[str, Any]:
            output, _ = process.communicate(timeout=30)
            counted: dict[str, Any] = json.loads(output)
            return counted

        return result

    def send(
        self, host: int, target: int, packets: int = 1, seconds: float = 0.0
    ) -> subprocess.Popen[Any]:
        address = self.network.address(target)
        return self.network.spawn(
            host, [sys.executable, "-c", SENDER, str(packets), str(seconds), address]
        )


@pytest.fixture(params=[NETWORK_A, NETWORK_B], ids=["A", "B"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Network(3, request.param) as network:
        yield Hosts(network)


def test_a_port_has_its_rate(hosts: Hosts) -> None:
    """Never more, and, when the machine lets the sender fill it, no less."""
    preset, deadline, best = hosts.network.preset, time.monotonic() + 60, 0.0
    while best < 0.6 * preset.rate:
        assert time.monotonic() < deadline, best
        sender = hosts.send(0, 1, packets=20, seconds=0.5)
        seen: list[tuple[float, float, int]] = []  # read not before, not after, and the bytes
        while sender.poll() is None:
            before, stats = time.monotonic(), hosts.network.port_stats(1)
            seen.append((before, time.monotonic(), stats.downlink.packets * 1514))
            time.sleep(0.005)
        for early, (asked, _, first) in enumerate(seen):
            for _, told_again, last in seen[early + 1 :]:
                bits = (last - first) * 8
                assert bits < 1.05 * preset.rate * (told_again - asked) + 8 * preset.bucket + 12_112
                if told_again - asked >= 0.02:
                    best = max(best, bits / (told_again - asked))
                    break


def test_incast_overflows_the_port_and_is_counted(hosts: Hosts) -> None:
    result = hosts.receive(2)
    senders = [hosts.send(host, 2, packets=20, seconds=1.0) for host in (0, 1)]
    for sender in senders:
        sender.wait()
    received = result()["packets"]
    stats = [hosts.network.port_stats(host) for host in range(3)]
    offered = stats[0].uplink.packets + stats[1].uplink.packets
    assert stats[2].downlink.drops > 0
    assert stats[2].downlink.backlog == 0
    assert stats[2].downlink.packets >= received > 0
    assert hosts.network.lost_packets() == offered - stats[2].downlink.packets > 0


def test_a_train_arrives_whole_only_with_offloads(hosts: Hosts) -> None:
    result = hosts.receive(1)
    hosts.send(0, 1, packets=40).wait()
    counted = result()
    assert counted["packets"] == 40
    assert counted["longest"] == (40 if hosts.network.preset.offloads else 1) * 1472


def test_the_switch_sends_packets_nowhere_else(hosts: Hosts) -> None:
    result = hosts.receive(1)
    hosts.send(0, 1).wait()
    assert result()["packets"] == 1
    assert hosts.network.port_stats(1).downlink.packets == 1
    assert hosts.network.port_stats(2).downlink.packets == 0
    assert hosts.network.lost_packets() == 0


def test_tcp_uses_the_congestion_control_asked_for() -> None:
    server = (
        "import socket; s = socket.create_server(('', 5001)); print('bound', flush=True); "
        "c, _ = s.accept(); print(c.getsockopt(6, 13, 16)); c.recv(1)"
    )
    client = (
        "import socket, sys; c = socket.create_connection((sys.argv[1], 5001)); "
        "print(c.getsockopt(6, 13, 16))"
    )
    for name in ("cubic", "reno"):
        with Network(2, congestion_control=name) as network:
            listening = network.spawn(
                1, [sys.executable, "-c", server], stdout=subprocess.PIPE, text=True
            )
            assert listening.stdout is not None
            assert listening.stdout.readline() == "bound\n"
            connecting = network.spawn(
                0,
                [sys.executable, "-c", client, network.address(1)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert name in connecting.communicate(timeout=10)[0]
            assert name in listening.communicate(timeout=10)[0]
    with pytest.raises(LabUnavailable):
        Network(1, congestion_control="nonesuch")


def test_bursts_follow_the_plan_and_fill_the_queue() -> None:
    """On a busy machine some come late, and then short; none comes early or is left out."""
    deadline = time.monotonic() + 60
    with Network(1, NETWORK_A, extra_hosts=1) as network:
        origin = time.monotonic() + 2.0  # the sender is there by then
        with BurstTraffic(network, BURSTS_A, origin=origin) as bursts:
            late: list[float] = []
            punctual = whole = 0
            while punctual < 5 or whole == 0:
                assert time.monotonic() < deadline, late
                time.sleep(0.2)
                records = bursts.records()
                late = [
                    record.start - origin - number * BURSTS_A.period
                    for number, record in enumerate(records)
                ]
                punctual = sum(each < 0.05 for each in late)
                whole = sum(record.bytes > 0.8 * record.planned for record in records)
            assert min(late) >= 0
            assert all(record.bytes < 1.05 * record.planned for record in records)
        assert network.port_stats(0).downlink.drops > 0
        assert network.port_stats(1).uplink.drops == 0
        assert network.lost_packets() > 0


def test_bursts_can_be_met_at_the_same_phase() -> None:
    burst = Burst(rate=1e6, on=0.001, period=0.1, phase=0.03)
    with Network(1, extra_hosts=1) as network, BurstTraffic(network, burst, origin=100.0) as bursts:
        assert bursts.next_phase(after=0.0) == pytest.approx(100.03)
        assert bursts.next_phase(0.05, after=100.09) == pytest.approx(100.18)
        with pytest.raises(IndexError):
            BurstTraffic(network, burst, target=2)
    with Network(1) as network, pytest.raises(ValueError, match="extra host"):
        BurstTraffic(network, burst)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts"):
        Network(0)
    with pytest.raises(ValueError, match="train"):
        Preset("short", 10**9, 1 << 18, 3000, offloads=True)
    with pytest.raises(ValueError, match="rate"):
        Preset("slow", -1, 1 << 18, 1 << 17, offloads=True)
    with pytest.raises(ValueError, match="burst"):
        Burst(rate=1e9, on=0.2, period=0.1)
    with Network(1) as network:
        with pytest.raises(IndexError):
            network.spawn(1, ["true"])
        with pytest.raises(IndexError):
            network.port_stats(-1)
        assert network.spawn(0, ["/nonexistent"], stderr=subprocess.DEVNULL).wait() != 0
    with pytest.raises(LabUnavailable, match="closed"):
        network.port_stats(0)


def _namespaces_in_use() -> set[str]:
    spaces = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and alive(int(folder.name)):
            try:
                spaces.add(os.readlink(folder / "ns" / "net"))
            except OSError:
                continue
    return spaces


# A program that leaves a child of another session behind and prints both process ids.
LEAVER = "setsid sleep 1000 & echo $! $$ $(readlink /proc/self/ns/net); exec sleep 1000"


def test_nothing_is_left_when_the_network_is_closed() -> None:
    with Network(2) as network:
        process = network.spawn(1, ["sh", "-c", LEAVER], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        child, parent, namespace = process.stdout.readline().split()
        assert namespace in _namespaces_in_use()
    wait_until_dead([int(child), int(parent)])
    assert namespace not in _namespaces_in_use()
    process.stdout.close()


# Prints the process ids of everything it started, then waits to be killed.
OWNER = f"""
import subprocess, sys, threading, time
from gradwire_lab.network import BURSTS_A, BurstTraffic, Network
network = Network(2, extra_hosts=1)
bursts = BurstTraffic(network, BURSTS_A)
pids = [network.pid, bursts.pid]
def start():
    process = network.spawn(1, ["sh", "-c", {LEAVER!r}], stdout=subprocess.PIPE, text=True)
    pids.extend(int(text) for text in process.stdout.readline().split()[:2])
start()
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(0.2)
assert network.port_stats(0).uplink.drops == 0
print(*pids, flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    own_and_kill([sys.executable, "-c", OWNER], 6)


def _drop(user: int, capabilities: str) -> list[str]:
    """The start of a command line that becomes a user with no capabilities but these."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv to become an ordinary user")
    return [
        *(setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups"),
        *(f"--bounding-set={capabilities}", "--inh-caps=-all"),
    ]


# The second stands in for the first where Python is installed in root's home: it has nothing but
# what the kernel wants of a uid 0 that maps itself into a user namespace.
@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests show it already")
@pytest.mark.parametrize(
    ("user", "capabilities"),
    [(65534, "-all"), (0, "-all,+setfcap")],
    ids=["nobody", "root without powers"],
)
def test_an_ordinary_user_can_do_it_too(user: int, capabilities: str) -> None:
    drop = _drop(user, capabilities)
    asked = subprocess.run(
        [*drop, sys.executable, "-c", "from gradwire_lab.network import probe; print(probe())"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    if "Permission denied" in asked.stderr or "ModuleNotFoundError" in asked.stderr:
        pytest.skip("this user may not read the Python or the package under test")
    assert not asked.returncode, asked.stderr
    if asked.stdout.strip() != "None":
        pytest.skip(asked.stdout.strip())
    own_and_kill([*drop, sys.executable, "-c", OWNER], 6)


SENDS_LONG = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
if len(sys.argv) == 2:
    sock.bind((sys.argv[1], 7))
    sock.settimeout(20)
    print("ready", flush=True)
    print(len(sock.recv(1 << 16)))
else:
    sock.sendto(bytes(8972), (sys.argv[1], 7))
"""


def test_a_network_carries_packets_of_its_mtu() -> None:
    preset = Preset("long", 0, 1 << 24, 72 * 1024, offloads=True, mtu=9000)
    with Network(2, preset) as network:
        program = [sys.executable, "-c", SENDS_LONG, network.address(1)]
        receiver = network.spawn(1, program, stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        assert network.spawn(0, [*program, "send"]).wait(20) == 0
        assert receiver.stdout.readline() == "8972\n"
    with pytest.raises(ValueError, match="9000"):
        Network(2, preset, wires={0: Wire()})
