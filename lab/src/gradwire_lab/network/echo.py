"""This program measures round trips of small datagrams.

With the argument `serve` it answers for ever, and prints a line once it listens. With ADDRESS COUNT
INTERVAL it writes a JSON list of round-trip times in seconds, null for those lost. Datagrams are
one at a time, INTERVAL seconds apart.
"""

from __future__ import annotations

import json
import socket
import sys
import time

PORT = 29500
PATIENCE_SECONDS = 1.0


def serve() -> None:
    """Send everything back."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("", PORT))
    print("listening", flush=True)
    while True:
        data, sender = server.recvfrom(2048)
        server.sendto(data, sender)


def ask(address: str, count: int, interval: float) -> list[float | None]:
    """Measure so many round trips."""
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect((address, PORT))
    client.settimeout(PATIENCE_SECONDS)
    times: list[float | None] = []
    for number in range(count):
        question = number.to_bytes(8, "little")
        start = time.perf_counter()
        client.send(question)
        try:
            # It answers an earlier question, which was given up.
            while client.recv(2048) != question:
                pass
            times.append(time.perf_counter() - start)
        except TimeoutError:
            times.append(None)
        time.sleep(interval)
    return times


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        print(json.dumps(ask(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
