"""Link: what one direction of a port does to packets, in virtual time."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from gradwire.transport.native import load_engine

if TYPE_CHECKING:
    from gradwire import _engine

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Link:
    """One direction of a port.

    Attributes:
        rate: Rate in bytes per second.
        delay: Delay in seconds, one way.
        queue: Size of the drop-tail queue in bytes.
        loss: Share of packets that the wire loses.
        loss_burst: Mean length of a run of losses in packets (Gilbert–Elliott), at least
            loss / (1 - loss); 1 for independent losses.
        reorder: Share of packets that are late.
        reorder_delay: Largest delay of these in seconds.
        duplicate: Share of packets that arrive twice.
        garbage: Share of packets that are followed by an invalid datagram.
        flip: Share of packets with flipped bits, as if the UDP checksum had not noticed.
        corrupt: Share of packets with flipped bits that the receiving host drops by the UDP
            checksum.
        ecn: Bytes in the queue above which arriving ECT packets are marked CE (RFC 3168); 0 for
            no marks.
        bleach: Whether the ECN field of all packets is cleared.
        drop_ect: Whether all ECT packets are lost.
        longest: Size in bytes above which datagrams (UDP payload) are lost silently; 0 for no
            limit.
        police_rate: Rate in bytes per second of a policer before the queue, which loses what
            exceeds it; 0 for none.
        police_burst: Bytes that the policer lets pass at once.

    Raises:
        ValueError: A value is negative or not finite.
    """

    rate: float = 125e6
    delay: float = 20e-6
    queue: int = 256 << 10
    loss: float = 0.0
    loss_burst: float = 1.0
    reorder: float = 0.0
    reorder_delay: float = 100e-6
    duplicate: float = 0.0
    garbage: float = 0.0
    flip: float = 0.0
    corrupt: float = 0.0
    ecn: int = 0
    bleach: bool = False
    drop_ect: bool = False
    longest: int = 0
    police_rate: float = 0.0
    police_burst: int = 64 << 10

    def __post_init__(self) -> None:
        """Refuses what is no number; the engine refuses what no port has."""
        for name, value in asdict(self).items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}; a finite number is needed")
            if value < 0:
                raise ValueError(f"{name} is {value}; it must not be negative")

    def core(self) -> _engine.Link:
        """Returns what the engine's fabric takes."""
        fields = asdict(self)
        made: _engine.Link = load_engine().Link(
            delay_ns=ns(fields.pop("delay")),
            reorder_delay_ns=ns(fields.pop("reorder_delay")),
            queue_bytes=fields.pop("queue"),
            ecn_bytes=fields.pop("ecn"),
            **fields,
        )
        return made


NETWORK_A = Link(rate=125e6, queue=256 << 10)
NETWORK_B = Link(rate=25e6, queue=64 << 10)


def ns(seconds: float) -> int:
    """Returns whole nanoseconds."""
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} seconds: a finite number is needed")
    return round(seconds * 1e9)
