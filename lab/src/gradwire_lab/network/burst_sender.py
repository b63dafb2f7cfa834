"""This program on a cross-traffic host sends bursts until it is killed.

Its arguments are ADDRESS and SCHEDULE, a JSON object. It writes a line of JSON for each burst.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time

from gradwire_lab.network.clock import sleep_until

SOL_UDP = 17
UDP_SEGMENT = 103

PAYLOAD = 1472
"""Bytes of UDP payload that fill a packet."""

FRAME = 1514
"""Bytes of that packet with its Ethernet header."""

MAX_PACKETS = 44
"""Packets of the longest train: a datagram may have 65,507 bytes before it is cut."""

TRAIN_SECONDS = 125e-6
"""Seconds of sending at the rate that one train carries."""

GRACE_SECONDS = 0.010
"""Seconds that a burst may last longer if it was held up (ours)."""

DISCARD_PORT = 9


def open_socket(address: str) -> socket.socket:
    """Return a socket whose datagrams the kernel cuts into packets."""
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.setsockopt(SOL_UDP, UDP_SEGMENT, PAYLOAD)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    sender.setblocking(False)
    sender.connect((address, DISCARD_PORT))
    return sender


def send_burst(sender: socket.socket, rate: float, start: float, stop: float) -> int:
    """Send at a rate, in bits per second, from start to stop; returns the bytes on the wire.

    What a late wake-up missed is sent at once: the source is as inelastic as the machine allows.
    So short bursts are sent whole on a busy machine, too; a machine that cannot send at this rate
    ends soon after its time all the same.
    """
    longest = min(TRAIN_SECONDS, stop - start)
    packets = max(1, min(MAX_PACKETS, round(rate * longest / 8 / FRAME)))
    train = bytes(packets * PAYLOAD)
    gap = packets * FRAME * 8 / rate
    trains = max(1, round((stop - start) / gap))
    sent = 0
    sleep_until(start)
    last = time.monotonic() + (stop - start) + GRACE_SECONDS
    for number in range(trains):
        sleep_until(start + number * gap)
        if time.monotonic() > last:
            break
        with contextlib.suppress(BlockingIOError):
            sender.send(train)
            sent += packets * FRAME
    return sent


def main(arguments: list[str]) -> None:
    """Send bursts for ever."""
    # Ctrl-C is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # only root may raise a priority
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    schedule = json.loads(arguments[1])
    sender = open_socket(arguments[0])
    start = schedule["origin"] + schedule["phase"]
    missed = max(0.0, time.monotonic() - start)
    start += -(-missed // schedule["period"]) * schedule["period"]
    while True:
        sleep_until(start)
        begun = time.monotonic()
        sent = send_burst(sender, schedule["rate"], start, start + schedule["on"])
        record = {
            "start": begun,
            "stop": time.monotonic(),
            "bytes": sent,
            "planned": int(schedule["rate"] * schedule["on"] / 8),
        }
        print(json.dumps(record), flush=True)
        start += schedule["period"]


if __name__ == "__main__":
    main(sys.argv[1:])
