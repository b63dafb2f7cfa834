"""A push over TCP is a contestant: each worker sends its buffer to one host."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from gradwire_lab.contest.congestion_control import congestion_control_of, use_congestion_control
from gradwire_lab.network.addresses import ADDRESS_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=120)


_READ_BYTES = 1 << 20


class TcpPush:
    """In this contestant all workers send to the last rank at once, each over a connection.

    The server reads into one scratch buffer and sums nothing: this is the lower bound of what TCP
    takes to bring the bytes there.
    """

    def __init__(self, congestion_control: str | None = None) -> None:
        """Choose TCP's congestion control; None keeps the host's."""
        self._congestion_control = congestion_control
        self._sockets: list[socket.socket] = []
        self._server = False
        self._received = bytearray()

    def setup(self, rank: int, world: int, store: Store) -> None:
        self._server = rank == world - 1
        if self._server:
            with socket.create_server((os.environ[ADDRESS_VARIABLE], 0), backlog=world) as listener:
                host, port = listener.getsockname()
                store.set("server", f"{host}:{port}")
                self._sockets = [listener.accept()[0] for _ in range(world - 1)]
            self._received = bytearray(_READ_BYTES)
        else:
            host, port = store.get("server").decode().split(":")
            self._sockets = [socket.create_connection((host, int(port)))]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Connecting sets the route's algorithm, so this comes after it.
            if self._congestion_control is not None:
                use_congestion_control(connection, self._congestion_control)

    def run_round(self, buffer: torch.Tensor) -> None:
        size = buffer.numel() * buffer.element_size()
        if self._server:
            self._read_from_all(size)
        else:
            self._sockets[0].sendall(buffer.numpy().data.cast("B"))

    def _read_from_all(self, size: int) -> None:
        left = {connection.fileno(): size for connection in self._sockets}
        with selectors.DefaultSelector() as selector:
            for connection in self._sockets:
                selector.register(connection, selectors.EVENT_READ, connection)
            while left:
                for key, _ in selector.select(_TIMEOUT.total_seconds()):
                    count = key.data.recv_into(self._received)
                    if count == 0:
                        raise ConnectionError("a worker closed its connection")
                    left[key.fd] -= count
                    if left[key.fd] == 0:
                        del left[key.fd]
                        selector.unregister(key.fileobj)

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check nothing, because TCP counted the bytes."""

    def report(self) -> dict[str, Any]:
        """Return the congestion control that the connections really use."""
        return {"congestion_control": congestion_control_of(self._sockets[0])}

    def close(self) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.close()
