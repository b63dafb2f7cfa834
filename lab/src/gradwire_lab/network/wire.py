"""A wire between a host and its switch delays and loses packets, in one direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire_lab.network.loss_runs import runs_possible, shortest_run
from gradwire_lab.network.presets import KIB

LONGEST_SECONDS = 60.0


@dataclass(frozen=True)
class Wire:
    """A wire is one direction of a host's link, behind the port's own rate and queue.

    Attributes:
        delay_s: seconds that a packet travels. A round trip between two hosts crosses four wires.
        jitter_s: up to so many seconds longer, uniformly.
        keep_order: whether jitter lets no packet overtake another.
        rate: the rate of the wire itself, in bits per second, Ethernet headers counted; 0 for none.
        queue: drop-tail queue before that rate, in bytes.
        ecn: occupancy of that queue, in bytes, above which ECT packets are marked CE as they come
            (RFC 3168, section 5; the threshold of RFC 8257, section 3.1); 0: none are.
        loss: share of the packets lost, behind rate and queue; 1 is a wire that is cut.
        loss_burst: mean length of a run of losses (Gilbert–Elliott, losing nothing in the good
            state and everything in the bad one); 0 for losses that know nothing of each other.

    A train that passes whole is lost, and finds room in the queue, packet by packet.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    keep_order: bool = True
    rate: int = 0
    queue: int = 256 * KIB
    ecn: int = 0
    loss: float = 0.0
    loss_burst: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s"):
            value = getattr(self, name)
            if not 0.0 <= value <= LONGEST_SECONDS:
                raise ValueError(f"wire: {name} is {value}; allowed are 0 to {LONGEST_SECONDS:g}")
        if self.rate != 0 and self.rate < 8000:
            raise ValueError(
                f"wire: rate is {self.rate}; allowed are 8000 and more, and 0 for none"
            )
        if self.rate and self.queue < 2 * KIB:
            raise ValueError(f"wire: queue is {self.queue}; allowed are {2 * KIB} bytes and more")
        if self.ecn and not (self.rate and 0 < self.ecn < self.queue):
            raise ValueError(
                f"wire: ecn is {self.ecn}; allowed are 1 to {self.queue - 1} bytes with a rate, "
                "and 0 for none"
            )
        if not 0.0 <= self.loss <= 1.0:
            raise ValueError(f"wire: loss is {self.loss}; a share is in [0, 1]")
        if self.loss_burst != 0.0 and not 1.0 <= self.loss_burst < math.inf:
            raise ValueError(
                f"wire: loss_burst is {self.loss_burst}; allowed are 1 and more, and 0 for "
                "independent losses"
            )
        if self.loss_burst and self.loss < 1.0 and not runs_possible(self.loss, self.loss_burst):
            raise ValueError(
                f"wire: loss_burst is {self.loss_burst}; with loss {self.loss} runs are at least "
                f"{shortest_run(self.loss):.3g} packets long"
            )


@dataclass(frozen=True)
class WireStats:
    """These are the counters of one direction of a wire; a train counts as its packets.

    Attributes:
        packets: the packets handed to it.
        bytes: the bytes of these, Ethernet headers counted.
        delivered: the packets that came out.
        frames: the same, a train that passed whole counting as one.
        dropped_queue: the packets that found no room in its queue.
        marked: the packets that left with CE because of what waited in its queue.
        dropped_loss: the packets that its loss took.
        dropped_memory: the packets that it could not hold, a failure of the lab.
        overrun: frames lost because the lab was late: its own failure.
        max_queue_bytes: the longest its queue was.
        mean_late_s: how long after it was due a frame came out, on average.
        max_late_s: the same at worst.
        cpu_s: seconds of processor time that the link has taken, for both directions.
    """

    packets: int
    bytes: int
    delivered: int
    frames: int
    dropped_queue: int
    marked: int
    dropped_loss: int
    dropped_memory: int
    overrun: int
    max_queue_bytes: int
    mean_late_s: float
    max_late_s: float
    cpu_s: float


def wire_stats(counters: dict[str, int]) -> WireStats:
    """Make it from the engine's counters (`_link.TapLink.counters`) and `overrun`."""
    return WireStats(
        **{
            name: counters[name]
            for name in (
                *("packets", "bytes", "delivered", "frames", "dropped_queue", "marked"),
                *("dropped_loss", "dropped_memory", "max_queue_bytes"),
            )
        },
        overrun=counters["overrun"] + counters["refused"],
        mean_late_s=counters["total_lateness_ns"] * 1e-9 / max(1, counters["frames"]),
        max_late_s=counters["max_lateness_ns"] * 1e-9,
        cpu_s=counters["cpu_ns"] * 1e-9,
    )
