"""An all-reduce over servers by plain TCP shows a parameter server without gradwire."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire_lab.contest.congestion_control import choose_congestion_control
from gradwire_lab.network.addresses import ADDRESS_VARIABLE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["TcpOverServers"]

_TIMEOUT = 120.0
_NUMBER_BYTES = 4
_BLOCK = 16_384
"""Elements (64 KiB) that are summed and sent back at once, at least."""


@dataclass
class _Flow:
    """A flow counts the bytes of one connection's shard in one round."""

    connection: socket.socket
    sent: int = 0
    received: int = 0


class TcpOverServers:
    """In this contestant each server sums an equal shard of the workers' buffers.

    A block of the sum goes back as soon as all workers' parts of it are there, so pushes and pulls
    overlap.
    """

    def __init__(self, congestion_control: str, workers: int, elements: int) -> None:
        """Choose TCP's congestion control.

        Args:
            workers: how many of the ranks, the first ones, are workers.
        """
        self._elements = elements
        self._congestion_control = congestion_control
        self._workers = workers
        self._connections: list[socket.socket] = []
        self._index: int | None = None
        self._servers = 0
        self._parts: NDArray[np.float32] = np.empty((workers, 0), np.float32)
        self._sums: NDArray[np.float32] = np.empty(0, np.float32)

    def setup(self, rank: int, world: int, store: Store) -> None:
        self._servers = world - self._workers
        if rank >= self._workers:
            self._index = rank - self._workers
            shards = np.array_split(np.empty(self._elements, np.float32), self._servers)
            elements = len(shards[self._index])
            self._parts = np.zeros((self._workers, elements), np.float32)
            self._sums = np.zeros(elements, np.float32)
            self._connections = self._accept(store, self._index)
        else:
            for index in range(self._servers):
                host, port = store.get(f"server {index}").decode().split(":")
                connection = socket.create_connection((host, int(port)), _TIMEOUT)
                connection.sendall(rank.to_bytes(_NUMBER_BYTES, "big"))
                self._connections.append(connection)
        for connection in self._connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        choose_congestion_control(
            {connection.fileno() for connection in self._connections}, self._congestion_control
        )

    def _accept(self, store: Store, index: int) -> list[socket.socket]:
        found: dict[int, socket.socket] = {}
        address = os.environ[ADDRESS_VARIABLE]
        with socket.create_server((address, 0), backlog=self._workers) as listener:
            listener.settimeout(_TIMEOUT)
            store.set(f"server {index}", f"{address}:{listener.getsockname()[1]}")
            while len(found) < self._workers:
                connection = listener.accept()[0]
                connection.settimeout(_TIMEOUT)
                number = connection.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
                found[int.from_bytes(number, "big")] = connection
        return [found[rank] for rank in range(self._workers)]

    def run_round(self, buffer: torch.Tensor) -> None:
        if self._index is None:
            _exchange(self._connections, np.array_split(buffer.numpy(), self._servers))
            return
        _sum(self._connections, self._parts, self._sums)

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        if self._index is not None:
            return
        expected = sum(inputs[rank] for rank in range(self._workers))
        if not bool((buffer == expected).all()):
            raise ValueError(f"tcp: the sum is not {expected} everywhere")

    def report(self) -> dict[str, Any]:
        return {"congestion_control": self._congestion_control}

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def _exchange(connections: list[socket.socket], shards: list[NDArray[np.float32]]) -> None:
    """Push each shard to its server and read its sum into the same place.

    A server sums what all have sent, so no more comes back than this worker has sent.
    """
    with selectors.DefaultSelector() as selector:
        for connection, shard in zip(connections, shards, strict=True):
            if len(shard):
                place = shard.data.cast("B")
                both = selectors.EVENT_READ | selectors.EVENT_WRITE
                selector.register(connection, both, (_Flow(connection), place))
        while selector.get_map():
            for key, events in _ready(selector):
                flow, place = key.data
                if events & selectors.EVENT_WRITE:
                    flow.sent += flow.connection.send(place[flow.sent :])
                    if flow.sent == len(place):
                        selector.modify(flow.connection, selectors.EVENT_READ, key.data)
                if events & selectors.EVENT_READ:
                    flow.received += _read(flow.connection, place[flow.received :])
                    if flow.received == len(place):
                        selector.unregister(flow.connection)


def _sum(
    connections: list[socket.socket], parts: NDArray[np.float32], sums: NDArray[np.float32]
) -> None:
    """Read every worker's part into a row of `parts`; send each worker the sum in rank order."""
    out = sums.data.cast("B")
    places = [part.data.cast("B") for part in parts]
    flows = [_Flow(connection) for connection in connections]
    summed = 0  # elements whose sum is known
    with selectors.DefaultSelector() as selector:
        if len(sums):
            for number, flow in enumerate(flows):
                selector.register(flow.connection, selectors.EVENT_READ, number)
        while selector.get_map():
            for key, events in _ready(selector):
                flow, place = flows[key.data], places[key.data]
                if events & selectors.EVENT_READ:
                    flow.received += _read(flow.connection, place[flow.received :])
                if events & selectors.EVENT_WRITE:
                    flow.sent += flow.connection.send(out[flow.sent : summed * sums.itemsize])
            whole = min(flow.received for flow in flows) // sums.itemsize
            if whole >= min(summed + _BLOCK, len(sums)) and whole > summed:
                np.copyto(sums[summed:whole], parts[0, summed:whole])
                for part in parts[1:]:
                    sums[summed:whole] += part[summed:whole]
                summed = whole
            for number, flow in enumerate(flows):
                _wait_for(selector, flow, number, len(out), summed * sums.itemsize)


def _wait_for(
    selector: selectors.BaseSelector, flow: _Flow, number: int, size: int, ready: int
) -> None:
    """Watch a flow for data that its worker has yet to send, and for room to send it the sum."""
    wanted = (selectors.EVENT_READ if flow.received < size else 0) | (
        selectors.EVENT_WRITE if flow.sent < ready else 0
    )
    known = selector.get_map().get(flow.connection)
    if wanted == (known.events if known else 0):
        return
    if known:
        selector.unregister(flow.connection)
    if wanted:
        selector.register(flow.connection, wanted, number)


def _ready(selector: selectors.BaseSelector) -> list[tuple[selectors.SelectorKey, int]]:
    ready = selector.select(_TIMEOUT)
    if not ready:
        raise TimeoutError(f"tcp: nothing moved for {_TIMEOUT:g} s")
    return ready


def _read(connection: socket.socket, place: memoryview) -> int:
    count = connection.recv_into(place)
    if count == 0:
        raise ConnectionError("tcp: the other end closed its connection")
    return count
