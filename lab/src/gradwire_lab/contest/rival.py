"""This program is one end of competing TCP streams; it uses the standard library only.

Arguments: "receive" ADDRESS, or "send" ADDRESS STREAMS CONGESTION_CONTROL. The receiving end prints
its port, then every INTERVAL seconds a line of JSON with the moment and the bytes read since the
line before. Both run until they are killed.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import sys
import time

INTERVAL = 0.05
PORT = 29600
_CHUNK = bytes(1 << 16)
_PATIENCE = 10.0


def receive(address: str) -> None:
    listener = socket.create_server((address, PORT), backlog=256)
    listener.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    scratch = bytearray(1 << 18)
    read, due = 0, time.monotonic() + INTERVAL
    while True:
        for key, _ in selector.select(max(0.0, due - time.monotonic())):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
                continue
            assert isinstance(key.fileobj, socket.socket)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                read += key.fileobj.recv_into(scratch)
        now = time.monotonic()
        if now >= due:
            print(json.dumps({"at": now, "bytes": read}), flush=True)
            read, due = 0, now + INTERVAL


def connect(address: str, congestion_control: str) -> socket.socket:
    """Connect with a congestion control, once the other end listens."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            stream = socket.create_connection((address, PORT), timeout=_PATIENCE)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    stream.setblocking(False)
    return stream


def send(address: str, streams: int, congestion_control: str) -> None:
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        selector.register(connect(address, congestion_control), selectors.EVENT_WRITE)
    while True:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            try:
                key.fileobj.send(_CHUNK)
            except BlockingIOError:
                continue
            except ConnectionError:
                return  # the receiver was killed first


if __name__ == "__main__":
    # Ctrl-C is for the parent, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), sys.argv[4])
