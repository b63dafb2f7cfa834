"""Trials measure a wire of the lab on this machine: its round trips, and the rate it carries."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass

from gradwire_lab.contest.measure import percentile
from gradwire_lab.network.bursts import BurstTraffic
from gradwire_lab.network.helper import helper_command
from gradwire_lab.network.network import LabUnavailable, Network
from gradwire_lab.network.presets import KIB, Burst, Preset
from gradwire_lab.network.wire import Wire, WireStats

_FILL = 0.97
"""Offered share of the port's rate: below it, so that no queue grows."""

_START_SECONDS = 20.0
_SETTLE_SECONDS = 0.3
_CARRIED = 0.9
_LOST = 0.001
_LATE_SECONDS = 0.001


def round_trips(
    network: Network, source: int, target: int, count: int, interval: float = 0.001
) -> list[float | None]:
    """Return the round-trip times of small datagrams between two hosts, one at a time.

    Args:
        interval: seconds between an answer and the next question.

    Returns:
        Seconds; None for a datagram that was lost.
    """
    server = network.spawn(
        target,
        helper_command("network.echo", "serve", bare=True),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        if not server.stdout.readline():
            raise LabUnavailable(f"the echo on host {target} does not start")
        client = network.spawn(
            source,
            helper_command("network.echo", network.address(target), count, interval, bare=True),
            stdout=subprocess.PIPE,
            text=True,
        )
        output, _ = client.communicate()
        if client.returncode != 0:
            raise LabUnavailable(f"the echo on host {source} ended with {client.returncode}")
        times: list[float | None] = json.loads(output)
        return times
    finally:
        server.kill()
        server.communicate()


@dataclass(frozen=True)
class DelayError:
    """These numbers show how far round trips over a wire are from those asked for.

    Attributes:
        delay_s: the delay of each direction, as set.
        count: round trips measured.
        plain_s: median round trip without the wire, in seconds.
        median_s: how much longer than that and twice the delay they took: the median.
        p99_s: the 99th percentile. What the hosts' own wake-ups take is part of both.
        late_s: how long after it was due a frame came out of the wire, on average.
        max_late_s: the same at worst.
    """

    delay_s: float
    count: int
    plain_s: float
    median_s: float
    p99_s: float
    late_s: float
    max_late_s: float


def delay_error(delay_s: float, count: int = 500) -> DelayError:
    """Measure round trips over one wire and without it, on a network that is otherwise quiet."""
    with Network(2) as network:
        plain = _answered(round_trips(network, 0, 1, count))
    with Network(2, wires={0: Wire(delay_s)}) as network:
        times = _answered(round_trips(network, 0, 1, count))
        stats = network.wire_stats(0).values()
    base = percentile(plain, 50)
    errors = [seconds - 2 * delay_s - base for seconds in times]
    return DelayError(
        delay_s,
        len(errors),
        base,
        percentile(errors, 50),
        percentile(errors, 99),
        sum(way.mean_late_s for way in stats) / len(stats),
        max(way.max_late_s for way in stats),
    )


def _answered(times: list[float | None]) -> list[float]:
    return [seconds for seconds in times if seconds is not None]


@dataclass(frozen=True)
class WireLoad:
    """These numbers show what a wire did with full packets in both directions at once.

    Attributes:
        rate: the rate of the ports, in bits per second.
        delay_s: the delay of each direction.
        offloads: whether trains passed whole.
        carried: bits per second that came out, the lesser of both directions.
        lost: share of the packets that the lab failed to carry, the greater.
        mean_late_s: how long after they were due frames came out, the greater of both means.
        cpu: share of one processor that the wire took.
        limit: what this rate is too much for: "wire" if more than 1 in 1,000 packets were lost or
            frames were more than 1 ms late on average, "machine" if less than 0.9 of the rate went
            onto the wire at all; None for neither.
    """

    rate: int
    delay_s: float
    offloads: bool
    carried: float
    lost: float
    mean_late_s: float
    cpu: float
    limit: str | None


def wire_load(
    rate: int, delay_s: float, *, offloads: bool = False, seconds: float = 2.0
) -> WireLoad:
    """Send 0.97 of a rate over one wire in both directions.

    Args:
        rate: the rate of the ports, in bits per second.
    """
    bucket = 72 * KIB if offloads else 8 * KIB
    preset = Preset("trial", rate, 256 * KIB, bucket, offloads)
    # The bursts leave no pause; a sender that starts late joins in.
    burst = Burst(_FILL * rate, on=0.5, period=0.5)
    with (
        Network(2, preset, wires={0: Wire(delay_s)}) as network,
        BurstTraffic(network, burst, source=0, target=1),
        BurstTraffic(network, burst, source=1, target=0),
    ):
        deadline = time.monotonic() + _START_SECONDS
        while not all(way.delivered for way in network.wire_stats(0).values()):
            if time.monotonic() > deadline:
                raise LabUnavailable("the senders of the trial do not start")
            time.sleep(0.05)
        time.sleep(_SETTLE_SECONDS)
        before, started = network.wire_stats(0), time.monotonic()
        time.sleep(seconds)
        after, ended = network.wire_stats(0), time.monotonic()
    ways = [_Way(before[name], after[name], ended - started) for name in after]
    carried = min(way.carried for way in ways)
    lost = max(way.lost for way in ways)
    late = max(way.mean_late for way in ways)
    limit = "machine" if carried < _CARRIED * rate else None
    if lost > _LOST or late > _LATE_SECONDS:
        limit = "wire"
    return WireLoad(rate, delay_s, offloads, carried, lost, late, ways[0].cpu, limit)


class _Way:
    """A way is one direction of a wire between two looks at its statistics."""

    def __init__(self, before: WireStats, after: WireStats, seconds: float) -> None:
        packets = after.packets - before.packets
        delivered = after.delivered - before.delivered
        failed = after.dropped_memory + after.overrun - before.dropped_memory - before.overrun
        bytes_each = (after.bytes - before.bytes) / max(1, packets)
        self.carried = delivered * bytes_each * 8 / seconds
        self.lost = failed / max(1, packets + failed)
        late = after.mean_late_s * after.frames - before.mean_late_s * before.frames
        self.mean_late = late / max(1, after.frames - before.frames)
        self.cpu = (after.cpu_s - before.cpu_s) / seconds
