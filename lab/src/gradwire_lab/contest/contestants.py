"""A contestant of a race is one way to move a buffer; two TCP baselines are here, too."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from gradwire_lab.network.addresses import ADDRESS_VARIABLE

if TYPE_CHECKING:  # torch's stubs lack torch.distributed.Store
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=120)
_READ_BYTES = 1 << 20
_LOWER_HALVES, _UPPER_HALVES = slice(0, None, 2), slice(1, None, 2)


class Contestant(Protocol):
    """A contestant is one way to move a buffer; every rank of a race has one instance."""

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Connect, before anything is timed.

        Args:
            rank: the rank of this process.
            world: number of ranks.
            store: shared by this contestant's ranks and nobody else.
        """

    def run_round(self, buffer: torch.Tensor) -> Mapping[str, Any] | None:
        """Move the buffer once: this is what is timed.

        Args:
            buffer: one-dimensional, float32, filled anew before each round.

        Returns:
            What is worth knowing about this round, as JSON, or None.
        """

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check the result of a round.

        Args:
            buffer: the buffer as `run_round` left it, or a part of it.
            inputs: the value that each rank's buffer was filled with.

        Raises:
            ValueError: it is not what it should be.
        """

    def report(self) -> dict[str, Any]:
        """Return whatever else is worth knowing since `setup`, as JSON."""

    def close(self) -> None:
        """Let go of everything."""


def as_bfloats(buffer: torch.Tensor) -> torch.Tensor:
    """Return the memory of a float32 buffer as bfloat16."""
    return buffer.view(torch.bfloat16)


def upper_halves(buffer: torch.Tensor) -> torch.Tensor:
    """Return the bfloat16 that were the upper halves of float32, as float32.

    Raises:
        ValueError: one that was a lower half, and 0 on all ranks, is not 0.
    """
    values = as_bfloats(buffer)
    if bool(values[_LOWER_HALVES].any()):
        raise ValueError("bfloat16: the sum of zeros is not 0 everywhere")
    return values[_UPPER_HALVES].float()


class GlooAllReduce:
    """This contestant is an all-reduce by PyTorch's Gloo over TCP."""

    _group: Any

    def __init__(
        self,
        timeout_s: float = _TIMEOUT.total_seconds(),
        half: bool = False,
        bfloats: bool = False,
    ) -> None:
        """Choose how it sums.

        Args:
            timeout_s: how long connecting or one sum may take.
            half: whether values travel and are summed as float16, as torch's
                ``fp16_compress_hook`` lets them.
            bfloats: whether the buffer's memory is taken as bfloat16, which are twice as many.
        """
        self._timeout = timedelta(seconds=timeout_s)
        self._half = half
        self._bfloats = bfloats

    def setup(self, rank: int, world: int, store: Store) -> None:
        """Connect to the other ranks over the interface in ``GLOO_SOCKET_IFNAME``."""
        self._group = dist.ProcessGroupGloo(store, rank, world, self._timeout)

    def run_round(self, buffer: torch.Tensor) -> None:
        """Sum the buffer over all ranks."""
        if not self._half:
            self._group.allreduce([as_bfloats(buffer) if self._bfloats else buffer]).wait()
            return
        short = buffer.to(torch.float16)
        self._group.allreduce([short]).wait()
        buffer.copy_(short)

    def verify(self, buffer: torch.Tensor, inputs: Mapping[int, float]) -> None:
        """Check that every element is the exact sum."""
        expected = sum(inputs.values())
        if self._bfloats:
            buffer = upper_halves(buffer)
        if not bool((buffer == expected).all()):
            raise ValueError(f"gloo: the sum is not {expected} everywhere")

    def report(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Leave the group."""
        del self._group


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
        """Make one connection from each worker to the server."""
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
        """Send the buffer, or on the server read as many bytes from every worker."""
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
        return {"congestion_control": _congestion_control_of(self._sockets[0])}

    def close(self) -> None:
        """Close the connections."""
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.close()


def use_congestion_control(endpoint: socket.socket, name: str) -> None:
    """Let a TCP socket use this congestion control.

    Raises:
        OSError: the kernel does not have it, or does not let this user choose it.
    """
    if name == _congestion_control_of(endpoint):
        return
    try:
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        raise OSError(
            error.errno, f"TCP congestion control {name!r} is not available: {error.strerror}"
        ) from error


def _congestion_control_of(endpoint: socket.socket) -> str:
    name = endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode()
