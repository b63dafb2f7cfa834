"""Datagrams as an endpoint would send them, for tests that forge some (engine/wire/packet.h)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gradwire import _engine

VERSION = _engine.PROTOCOL_VERSION
LANES = 4096
SESSION = 1
PUSH, OPEN, PROBE = 1, 3, 10
HEADER = struct.Struct("<BBHIIIIIHH")
PREFIX = struct.Struct("<I")
ACK = struct.Struct("<BBHI6IBBH2I")

SPENDS = ("nothing", "late", "lost", "anything")
PULLS = ("exact", "committed", "none", "lossy")
CONTROLS = ("stream", "probe")
ENCODINGS = ("f32", "f16", "bf16", "int8", "topk", "half")


def packet(
    kind: int,
    source: int,
    number: int,
    op: int,
    chunk: int,
    payload: bytes = b"",
    *,
    lane: int = 0,
) -> bytes:
    """A reliable packet; `chunk`: of a push or pull, else the part of a message."""
    op_id = op * LANES + lane
    return HEADER.pack(VERSION, kind, source, SESSION, number, 0, op_id, chunk, 1, 0) + payload


def ack(source: int, largest: int, *, delay_us: int = 0, queue_us: int = 0, share: int = 0,
        credit: int = 0) -> bytes:  # fmt: skip
    """An ACK that acknowledges `largest` and the 63 packets before it."""
    return ACK.pack(VERSION, 16, source, SESSION, largest, 0, credit, delay_us, queue_us, share,
                    1, 255, 0, 0, 0) + b"\xff" * 8  # fmt: skip


def part_bytes(datagram_bytes: int = 1472) -> int:
    """How much of a message travels in one datagram."""
    return datagram_bytes - HEADER.size - PREFIX.size


def part(total: int, datagram_bytes: int = 1472) -> bytes:
    """The payload of one part of a message that is said to be `total` bytes long."""
    return PREFIX.pack(total) + bytes(part_bytes(datagram_bytes))


def serialized(
    elements: int,
    regions: Sequence[tuple[int, int, float]],
    *,
    spend: str = "nothing",
    pull: str = "exact",
    pull_bound: float = 0.0,
    control: str = "stream",
    encoding: str = "f32",
    kept: float = 1.0,
) -> bytes:
    """A plan as it travels to servers; what is not asked for is as in `_engine.Plan`."""
    words = (SPENDS.index(spend), 0, 0, PULLS.index(pull), CONTROLS.index(control))
    out = struct.pack("<QQdd5BBdB", elements, 0, 1.0, pull_bound, *words,
                      ENCODINGS.index(encoding), kept, 0)  # fmt: skip
    out += struct.pack("<IBBqdI", 1, 0, 1, 0, 1.0, len(regions))
    return out + b"".join(struct.pack("<Qd", length, bound) for _, length, bound in regions)


def open_to_server(
    elements: int, regions: Sequence[tuple[int, int, float]], **options: object
) -> bytes:
    """The OPEN of an op of step 0, without critical chunks."""
    made = serialized(elements, regions, **options)  # type: ignore[arg-type]
    of = _engine.Plan(elements=elements, regions=regions, **options)  # type: ignore[arg-type]
    head = struct.pack("<QQQ8dII", of.hash, 0, elements, *[0.0] * 8, len(made), 0)
    return head + made


def in_parts(
    message: bytes, source: int, op: int, number: int, datagram_bytes: int = 1472, lane: int = 0
) -> list[bytes]:
    """The packets of an OPEN, of numbers from `number` on."""
    size = part_bytes(datagram_bytes)
    bodies = [message[at : at + size] for at in range(0, len(message), size)]
    return [
        packet(OPEN, source, number + at, op, at, PREFIX.pack(len(message)) + body, lane=lane)
        for at, body in enumerate(bodies)
    ]
