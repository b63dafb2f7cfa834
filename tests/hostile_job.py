"""A job that trains while somebody on its wire sends hostile datagrams, for tests and by hand.

    python tests/hostile_job.py [--auth session|whole|none|key] [--policy NAME] [--rate N] …

Two ranks on hosts of their own train; beside each rank somebody reads what leaves the host, and
sends datagrams to the other one in the rank's name: old ones once more, changed, cut, lengthened
and made up. Three kinds of blocks of steps take turns: left alone, under attack, and with as many
datagrams for a port that discards them, which shows what sending them costs on this machine. The
line that is printed has the ratios of their times, and whether the replicas are those of a job left
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from ddp_jobs import batch, fingerprint, model, wrap
from host_ranks import Builder, HostRanks

ADDRESSES = ("10.0.0.1", "10.0.0.2")
DATAGRAM = 1472
KEY = "5a" * 32
HEADERS_END = 44
"""Where the payload of a chunk begins, which the tag of `auth="session"` does not cover."""
EVERY_S = 0.001
WARM = 3
"""Steps at the start of a block that are not timed."""
LOOK = 10
"""Steps by which the hostile ones see what travels."""
KINDS = ("alone", "attacked", "elsewhere")
DISCARD = 9
TTL, ENGINES_TTL = 63, 64
ALL = 3
"""ETH_P_ALL"""
VOLLEY = 40
"""Datagrams of a kind; they are sent more than once where a turn comes late."""
LIBC = ctypes.CDLL(None)


def two_hosts(network: Builder) -> None:
    network.cable(0, 1, "eth0")
    for host, address in enumerate(ADDRESSES):
        network.address(host, "eth0", address, 24)
        network.neighbour(host, "eth0", ADDRESSES[1 - host], 1 - host)


def hosts() -> HostRanks:
    """Ranks 0 and 1 train, and 2 and 3 are the hostile ones beside them."""
    names = ("a", "b", "x", "y")
    return HostRanks(two_hosts, places=(0, 1, 0, 1), names=names, GLOO_SOCKET_IFNAME="eth0")


def lives(rank: int, world: int, place: str, rate: int, **job: Any) -> dict[str, Any]:
    if rank < 2:
        try:
            return trains(rank, Path(place), **job)
        finally:  # the hostile ones end with the job, also where it fails
            (Path(place) / "over").touch()
    return attacks(rank - 2, Path(place), rate, payloads=job["auth"] != "session")


# ------------------------------------------------------------------------------------------- a job


def trains(
    rank: int, place: Path, *, auth: str, blocks: int, steps: int, width: int, **options: Any
) -> dict[str, Any]:
    """Trains in blocks of each kind in turn."""
    store = dist.FileStore(str(place / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    given = {"key": KEY} if auth == "key" else {"auth": auth}
    ddp = wrap(model(width=width))
    attachment = gradwire.attach(ddp, datagram=DATAGRAM, interface="eth0", **given, **options)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    least, before = 1.0, 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(LOOK):
        learn(ddp, optimizer, batch(rank, step))
    while not all((place / f"ready{host}").exists() for host in range(2)):
        time.sleep(0.01)
    for block in range(blocks):
        kind = KINDS[block % 3]
        dist.barrier()
        if rank == 0:
            for each in KINDS:
                (place / each).unlink(missing_ok=True)
            (place / kind).touch()
        dist.barrier()
        for step in range(steps):
            began = time.perf_counter()
            learn(ddp, optimizer, batch(rank, LOOK + block * steps + step))
            if step >= WARM:
                times[kind].append(time.perf_counter() - began)
            report = attachment.report()
            least = min(least, report.delivered + report.bound)
        if block == 2:
            before = resident()
    grown = resident() - before
    attachment.detach()
    dist.barrier()
    dist.destroy_process_group()
    return {
        "replica": fingerprint(ddp),
        "times": times,
        "least": least,
        "grown": grown,
        "step": report.step,
    }


def learn(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> None:
    optimizer.zero_grad()
    ddp(data).square().mean().backward()
    optimizer.step()


def resident() -> int:
    """Bytes of memory that this process has."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


# ------------------------------------------------------------------------------- the hostile one


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_char_p), ("length", ctypes.c_size_t))


class Message(ctypes.Structure):
    """A `struct mmsghdr`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(Vector)),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_uint64),  # with padding
        ("sent", ctypes.c_uint),
    )


class Volley:
    """Datagrams in the name of a rank, which one call sends."""

    def __init__(self, payloads: list[bytes], source: int, ports: tuple[int, int]) -> None:
        own, other = (socket.inet_aton(ADDRESSES[host]) for host in (source, 1 - source))
        self.packets = packets = []
        for payload in payloads:
            udp = struct.pack("!HHHH", *ports, 8 + len(payload), 0)
            # The kernel fills in length, number and checksum of the IP header.
            head = struct.pack("!BBHHHBBH", 0x45, 0, 0, 0, 0, TTL, socket.IPPROTO_UDP, 0)
            packets.append(head + own + other + udp + payload)
        self.name = struct.pack("=HH", socket.AF_INET, 0) + other + bytes(8)
        self.vectors = (Vector * len(packets))(*(Vector(each, len(each)) for each in packets))
        self.messages = (Message * len(packets))(
            *(Message(self.name, 16, ctypes.pointer(each), 1) for each in self.vectors)
        )

    def send(self, raw: socket.socket) -> int:
        count = len(self.messages)
        sent = LIBC.sendmmsg(raw.fileno(), self.messages, count, socket.MSG_DONTWAIT)
        return max(0, int(sent))


class Ear:
    """Hears the datagrams that leave a host but for its own, whose TTL tells them."""

    def __init__(self) -> None:
        self.ports = (0, 0)
        self.latest: deque[bytes] = deque(maxlen=4)
        self._wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL))
        self._wire.bind(("eth0", ALL))
        self._wire.setblocking(False)

    def listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet, (_, _, direction, *_) = self._wire.recvfrom(1 << 16)
                ours = packet[8:10] != bytes([ENGINES_TTL, socket.IPPROTO_UDP])
                if direction == socket.PACKET_OUTGOING and not ours:
                    self.ports = struct.unpack_from("!HH", packet, 20)
                    self.latest.append(packet[28:])

    def datagrams(self) -> list[bytes]:
        """Those of the latest trains."""
        return [
            train[at : at + DATAGRAM]
            for train in self.latest
            for at in range(0, len(train), DATAGRAM)
        ]


def attacks(host: int, place: Path, rate: int, *, payloads: bool) -> dict[str, Any]:
    """Sends so many datagrams a second to the other host where the file of the block says so."""
    chance, sent, ear = random.Random(host), 0, Ear()
    discard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    discard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
    discard.bind((ADDRESSES[host], DISCARD))
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    old: list[bytes] = []
    due = time.monotonic()
    while not (place / "over").exists():
        ear.listen()
        new = ear.datagrams()
        if new:
            (place / f"ready{host}").touch()
        now = time.monotonic()
        kind = next((each for each in KINDS if (place / each).exists()), KINDS[0])
        if kind == KINDS[0] or not new:
            due = now
        elif (count := min(int((now - due) * rate), 400)) > VOLLEY:
            made_up = [hostile(chance.choice((old, new)) or new, chance, payloads)
                       for _ in range(VOLLEY)] * (count // VOLLEY)  # fmt: skip
            ports = ear.ports if kind == "attacked" else (DISCARD, DISCARD)
            gone = Volley(made_up, host, ports).send(raw)
            sent += gone if kind == "attacked" else 0
            due = max(due + count / rate, now - 0.1)
            old = chance.sample(old + new, min(len(old + new), 500))
        time.sleep(EVERY_S)
    return {"sent": sent}


def hostile(kept: list[bytes], chance: random.Random, payloads: bool) -> bytes:
    new = bytearray(chance.choice(kept))
    how = chance.randrange(5)
    if how == 1:
        header = not payloads or chance.randrange(2)
        end = min(len(new), HEADERS_END) if header else len(new)
        new[chance.randrange(end)] ^= 1 << chance.randrange(8)
    elif how == 2:
        del new[chance.randrange(len(new)) :]
    elif how == 3:
        new += bytes(chance.randrange(1, 40))
        del new[DATAGRAM:]
    elif how == 4:
        return chance.randbytes(chance.randrange(1, DATAGRAM))
    return bytes(new)


# ---------------------------------------------------------------------------------------- by hand


def outcome(ranks: HostRanks, *, rate: int, timeout: float = 150.0, **job: Any) -> dict[str, Any]:
    """What has become of a job under attack."""
    with tempfile.TemporaryDirectory() as place:
        first, second, *others = ranks.run(lives, timeout=timeout, place=place, rate=rate, **job)
    alone, attacked, elsewhere = (median(first["times"][kind]) for kind in KINDS)
    return {
        "replica": first["replica"],
        "identical": first["replica"] == second["replica"],
        "least": min(first["least"], second["least"]),
        "grown": max(first["grown"], second["grown"]),
        "steps": first["step"] + 1,
        "sent": sum(each["sent"] for each in others),
        "alone_ms": 1e3 * alone,
        "attacked": attacked / alone,
        "elsewhere": elsewhere / alone,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--auth", default="whole", choices=("session", "whole", "key", "none"))
    parser.add_argument("--policy", default="reliable")
    parser.add_argument("--rate", type=int, default=20_000, help="datagrams a second at each rank")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=2000)
    asked = vars(parser.parse_args())
    rate = asked.pop("rate")
    with hosts() as ranks:
        attacked = outcome(ranks, rate=rate, timeout=3600, **asked)
        alone = outcome(ranks, rate=0, timeout=3600, **asked)
    attacked["undisturbed"] = attacked.pop("replica") == alone["replica"]
    print(json.dumps({**asked, "rate": rate, **attacked, "cores": os.cpu_count()}))
    return 0 if attacked["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
