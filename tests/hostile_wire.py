"""Those who read and write what travels between the ranks of a job, for `hostile_job.py`.

`attacks` is somebody beside a rank, who reads what leaves its host and sends datagrams to the other
one. `tampers` is somebody between the hosts, who hands on what they send each other, and alters
the payloads of chunks.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import select
import socket
import struct
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADDRESSES = ("10.0.0.1", "10.0.0.2")
FOREIGN = ("10.0.0.3", "203.0.113.7")
"""Addresses of no rank: one of the same network, one of another."""
DATAGRAM = 1472
LONG = (9_000, 65_507)
"""Bytes of the oversized datagrams: more than a datagram of the engine, at most UDP's."""
TAG_BYTES = 16
HEADERS_END = 44
"""Where the payload of a chunk begins, which the tag of `auth="session"` does not cover."""
CHUNKS = {1: "push", 2: "pull"}
"""Kinds of datagrams that are chunks."""
KINDS = ("alone", "attacked", "elsewhere")
EVERY_S = 0.001
DISCARD = 9
TTL, ENGINES_TTL = 63, 64
ALL = 3
"""ETH_P_ALL"""
ATTACH_FILTER = 26
"""SO_ATTACH_FILTER"""
LOAD_BYTE, LOAD_WORD, JUMP_EQUAL, RETURN = 0x30, 0x20, 0x15, 0x06
"""Instructions of a classic BPF filter."""
PACKET_TYPE = 0xFFFFF004
"""Where a filter finds a packet's direction (SKF_AD_OFF + SKF_AD_PKTTYPE)."""
VOLLEY = 40
"""Datagrams that are made at a time; they are sent more than once where a turn comes late."""
SOME, EVERYTHING = 1 << 17, 1 << 24
"""Bytes of the buffers of those who read some datagrams, and of those who hand on all."""
FROM_ELSEWHERE = 8
"""One in so many comes from a foreign address."""
LIBC = ctypes.CDLL(None)


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


@dataclass(frozen=True)
class Made:
    """A datagram to send, and the address that it seems to come from."""

    payload: bytes
    source: str


class Volley:
    """Datagrams to a rank, which one call sends."""

    def __init__(self, made: list[Made], to: str, ports: tuple[int, int]) -> None:
        there = socket.inet_aton(to)
        self.packets = packets = []
        for each in made:
            udp = struct.pack("!HHHH", *ports, 8 + len(each.payload), 0)
            # The kernel fills in length, number and checksum of the IP header.
            head = struct.pack("!BBHHHBBH", 0x45, 0, 0, 0, 0, TTL, socket.IPPROTO_UDP, 0)
            packets.append(head + socket.inet_aton(each.source) + there + udp + each.payload)
        self.name = struct.pack("=HH", socket.AF_INET, 0) + there + bytes(8)
        self.vectors = (Vector * len(packets))(*(Vector(each, len(each)) for each in packets))
        self.messages = (Message * len(packets))(
            *(Message(self.name, 16, ctypes.pointer(each), 1) for each in self.vectors)
        )

    def send(self, raw: socket.socket, flags: int = socket.MSG_DONTWAIT) -> int:
        """How many have gone."""
        sent = LIBC.sendmmsg(raw.fileno(), self.messages, len(self.messages), flags)
        return max(0, int(sent))


def raw_socket() -> socket.socket:
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    return raw


class Ear:
    """Hears the datagrams that a rank sends through an interface. The hostile ones' own, which have
    another TTL, stay in the kernel, where they cost least."""

    def __init__(self, interface: str, direction: int, buffer: int) -> None:
        self.ports = (0, 0)
        self.wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
        wanted = ((LOAD_WORD, PACKET_TYPE, direction), (LOAD_BYTE, 8, ENGINES_TTL),
                  (LOAD_BYTE, 9, socket.IPPROTO_UDP))  # fmt: skip
        code = b""
        for left, (load, at, value) in zip((4, 2, 0), wanted, strict=True):
            code += struct.pack("=HBBI", load, 0, 0, at)
            code += struct.pack("=HBBI", JUMP_EQUAL, 0, left + 1, value)
        code += struct.pack("=HBBI", RETURN, 0, 0, 1 << 16) + struct.pack("=HBBI", RETURN, 0, 0, 0)
        memory = ctypes.create_string_buffer(code)
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(memory))
        self.wire.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.wire.bind((interface, ALL))
        self.wire.setblocking(False)

    def trains(self) -> list[bytes]:
        """What has come since the last call."""
        heard = []
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = self.wire.recv(1 << 16)
                self.ports = struct.unpack_from("!HH", packet, 20)
                heard.append(packet[28:])
        return heard


def datagrams(train: bytes) -> list[bytes]:
    return [train[at : at + DATAGRAM] for at in range(0, len(train), DATAGRAM)]


# ------------------------------------------------------------------------------------ beside a rank


def attacks(host: int, place: Path, rate: int, *, payloads: bool) -> dict[str, Any]:
    """Sends so many datagrams a second to the other host where the file of the block says so. To
    the port that discards them go as many a second as have gone to the rank, which are fewer than
    asked where the machine is busy."""
    chance, raw = random.Random(host), raw_socket()
    ear = Ear("eth0", socket.PACKET_OUTGOING, SOME)
    discard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    discard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
    discard.bind((ADDRESSES[host], DISCARD))
    sent: Counter[str] = Counter()
    seconds = dict.fromkeys(KINDS, EVERY_S)
    told = 0
    latest: deque[bytes] = deque(maxlen=4)
    old: list[bytes] = []
    due = before = time.monotonic()
    while not (place / "over").exists():
        latest.extend(ear.trains())
        new = [each for train in latest for each in datagrams(train)]
        if new:
            (place / f"ready{host}").touch()
        now = time.monotonic()
        kind = next((each for each in KINDS if (place / each).exists()), KINDS[0])
        seconds[kind] += now - before
        if kind != "attacked" and told != sent["all"]:
            told = sent["all"]
            (place / f"sent{host}").write_text(str(told), encoding="ascii")
        before = now
        pace = rate if kind == "attacked" else sent["all"] / seconds["attacked"]
        if kind == KINDS[0] or not new:
            due = now
        elif (count := min(int((now - due) * pace), 400)) > VOLLEY:
            made = volley(old, new, host, chance, payloads)
            ports = ear.ports if kind == "attacked" else (DISCARD, DISCARD)
            shots = Volley(made, ADDRESSES[1 - host], ports)
            for _ in range(count // VOLLEY):
                gone = made[: shots.send(raw)]
                if kind == "elsewhere":
                    sent["discarded"] += len(gone)
                else:
                    sent["all"] += len(gone)
                    sent["oversized"] += sum(len(each.payload) > DATAGRAM for each in gone)
                    sent["foreign"] += sum(each.source in FOREIGN for each in gone)
            due = max(due + count / pace, now - 0.1)
            old = chance.sample(old + new, min(len(old + new), 500))
        time.sleep(EVERY_S)
    return {"sent": dict(sent), "seconds": seconds}


def sent_by_all(place: Path) -> int:
    """The hostile datagrams of the blocks that are over."""
    return sum(int(each.read_text(encoding="ascii") or 0) for each in place.glob("sent*"))


def volley(
    old: list[bytes], new: list[bytes], host: int, chance: random.Random, payloads: bool
) -> list[Made]:
    made = [hostile(chance.choice((old, new)) or new, chance, payloads) for _ in range(VOLLEY)]
    made[chance.randrange(VOLLEY)] = oversized(new, chance)
    return [
        Made(each, ADDRESSES[host] if chance.randrange(FROM_ELSEWHERE) else chance.choice(FOREIGN))
        for each in made
    ]


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


def oversized(kept: list[bytes], chance: random.Random) -> bytes:
    """A datagram that goes on after its end, or one that is made up."""
    begin = chance.choice((chance.choice(kept), b""))
    return begin + chance.randbytes(chance.randint(*LONG) - len(begin))


# ----------------------------------------------------------------------------------- between hosts


def tampers(place: Path, how: str, share: float, *, races: bool) -> dict[str, Any]:
    """Hands on what the hosts send each other, with a share of the chunks altered. `races`: the
    true one comes right behind, as from somebody who sends and cannot take anything away."""
    chance, raw = random.Random(7), raw_socket()
    altered: Counter[str] = Counter()
    ears = [Ear(f"eth{host}", socket.PACKET_HOST, EVERYTHING) for host in range(2)]
    for host in range(2):
        (place / f"ready{host}").touch()
    while not all((place / f"over{host}").exists() for host in range(2)):
        select.select([each.wire for each in ears], [], [], 0.05)
        for host, ear in enumerate(ears):
            for train in ear.trains():
                made = []
                for each in datagrams(train):
                    kind = CHUNKS.get(each[TAG_BYTES + 1], "")
                    hit = kind and len(each) > HEADERS_END and chance.random() < share
                    if hit:
                        altered[kind] += 1
                        made.append(Made(alter(each, how, chance), ADDRESSES[host]))
                    if races or not hit:
                        made.append(Made(each, ADDRESSES[host]))
                Volley(made, ADDRESSES[1 - host], ear.ports).send(raw, 0)
    return {"altered": dict(altered)}


def alter(chunk: bytes, how: str, chance: random.Random) -> bytes:
    if how == "ones":
        return chunk[:HEADERS_END] + b"\xff" * (len(chunk) - HEADERS_END)
    new = bytearray(chunk)
    new[chance.randrange(HEADERS_END, len(new))] ^= 1 << chance.randrange(8)
    return bytes(new)
