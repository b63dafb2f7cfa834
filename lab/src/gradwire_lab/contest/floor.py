"""The floor contestant sends and receives the bytes of an all-reduce over UDP, and sums nothing.

It uses the system calls of gradwire (UDP_SEGMENT, UDP_GRO) without acknowledgements, order or
retransmission, so no transport over UDP in user space can take less.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradwire_lab.network.addresses import ADDRESS_VARIABLE

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

_UDP_SEGMENT, _UDP_GRO = 103, 104
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_HEADERS, _CHUNK_HEADER = 28, 32
_LONGEST_TRAIN = 65_000
_RECEIVED_AT_ONCE = 4
_BLOCKED_SECONDS = 50e-6
_QUIET_SECONDS = 0.05
_UNSHAPED_WINDOW = 4 << 20


class Floor:
    """In this contestant each rank sends its shards and results to all others in trains.

    A rank stays at most a window of bytes ahead of what it has received. All ranks send and receive
    alike, so that takes the place of acknowledgements and keeps queues from overflowing.
    """

    def __init__(self, queue: int = 0, mtu: int = 1500) -> None:
        """Choose window and datagrams.

        Args:
            queue: bytes of a port's queue, which hold the windows of all peers; 0 where ports have
                no rate.
            mtu: bytes of the longest IP packet.
        """
        self._datagram = mtu - _HEADERS
        self._queue = queue
        self._peers: list[tuple[str, int]] = []
        self._counts = {"packets_sent": 0, "send_calls": 0, "receive_calls": 0, "wakeups": 0}
        self._lost = 0

    def setup(self, rank: int, world: int, store: Store) -> None:
        self._window = self._queue // (world - 1) or _UNSHAPED_WINDOW
        train = min(_LONGEST_TRAIN, self._window // 4) // self._datagram
        self._train = max(1, train) * self._datagram
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        for forced, plain, size in (
            (_SO_SNDBUFFORCE, socket.SO_SNDBUF, 4 << 20),
            (_SO_RCVBUFFORCE, socket.SO_RCVBUF, 16 << 20),
        ):
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, forced, size)
            except PermissionError:
                self._socket.setsockopt(socket.SOL_SOCKET, plain, size)
        self._socket.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, self._datagram)
        self._socket.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        self._socket.bind((os.environ[ADDRESS_VARIABLE], 0))
        host, port = self._socket.getsockname()
        store.set(f"floor{rank}", f"{host}:{port}")
        for peer in (other % world for other in range(rank + 1, rank + world)):
            there, number = store.get(f"floor{peer}").decode().split(":")
            self._peers.append((there, int(number)))
        self._poll = select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)
        self._received = bytearray(1 << 16)

    def run_round(self, buffer: torch.Tensor) -> Mapping[str, Any]:
        size = buffer.numel() * buffer.element_size()
        shard = -(-size // (len(self._peers) + 1))
        datagrams = 2 * -(-shard // (self._datagram - _CHUNK_HEADER))
        each = datagrams * self._datagram
        everything = each * len(self._peers)
        bytes_there = memoryview(bytes(self._train))
        sent, received, offset = 0, 0, 0
        turn = 0
        while sent < everything or received < everything:
            if sent < everything and sent - received < self._window:
                train = min(self._train, each - offset)
                if not self._send(bytes_there[:train], self._peers[turn]):
                    time.sleep(_BLOCKED_SECONDS)
                    continue
                sent += train
                turn += 1
                if turn == len(self._peers):
                    turn, offset = 0, offset + train
                most = _RECEIVED_AT_ONCE
            else:
                most = 1 << 30
            before = received
            received += self._receive(most)
            stuck = received == before and received < everything
            if stuck and most > _RECEIVED_AT_ONCE and not self._wait():
                self._lost += everything - received
                break
        self._counts["packets_sent"] += datagrams * len(self._peers)
        return {}

    def _send(self, train: memoryview, peer: tuple[str, int]) -> bool:
        self._counts["send_calls"] += 1
        try:
            self._socket.sendto(train, peer)
        except BlockingIOError:
            return False
        return True

    def _receive(self, most: int) -> int:
        total = 0
        for _ in range(most):
            self._counts["receive_calls"] += 1
            try:
                total += self._socket.recv_into(self._received)
            except BlockingIOError:
                break
        return total

    def _wait(self) -> bool:
        self._counts["wakeups"] += 1
        return bool(self._poll.poll(_QUIET_SECONDS))

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check nothing, because nothing is summed."""

    def report(self) -> dict[str, Any]:
        return {"engine": dict(self._counts), "lost": self._lost}

    def close(self) -> None:
        self._poll.close()
        self._socket.close()
