"""HostLink connects the ranks of one host: messages over Unix sockets, values in shared memory.

The ranks of a host share a loopback, hence the abstract Unix sockets of its network namespace. The
lowest rank of a host leads it and listens. Every other rank of the host connects to it and proves
itself by a token, which the ranks exchanged in their meeting. Who reads the store has the token, so
processes of other users are not let in, since what is unpickled here may run code. Memory is
anonymous (memfd) and is handed over through the sockets, so it needs no name, no /dev/shm, and goes
with the processes. A process that dies closes its socket, which the others notice at once.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import mmap
import os
import pickle
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire.core.begin import begin
from gradwire.live.address import owner_of

log = logging.getLogger("gradwire")

TOKEN_BYTES = 32
_LENGTH = struct.Struct("!I")
_PLACE = struct.Struct("!I")
GREETING_BYTES = TOKEN_BYTES + _PLACE.size

BACKLOG = 4096
"""Connections that may wait to be accepted, unless the kernel (somaxconn) allows fewer."""

POLL_S = 0.25
"""Seconds of a wait within a host after which it looks whether there is still reason to wait."""

TRIAL = 1.5
"""What the memory holds by which a host's ranks try whether they can share any."""

RETRY_S = 0.02
"""Seconds between two attempts to connect to a listener whose queue is full."""

LOOK_S = 0.25
"""Seconds between two looks at whether ranks of this host are stopped."""

Stop = Callable[[], bool]
"""Returns whether a wait is in vain."""

Take = Callable[[int, Any, int | None], None]
"""Takes a message: the sender's place on the host, the message, and the memory that came along."""


def hosts_of(identities: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Groups ranks by host."""
    hosts: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def memory_of_rows(rows: int, elements: int) -> int:
    """Makes shared memory for rows of float32, all zero; returns its file descriptor."""
    memory = os.memfd_create("gradwire", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, rows * elements * 4)
    except BaseException:
        os.close(memory)
        raise
    return memory


def check_memory() -> None:
    """Raises OSError where the kernel refuses shared memory to this process."""
    memory = memory_of_rows(1, 1)
    try:
        map_rows(memory, 1, 1)[:] = TRIAL
    finally:
        os.close(memory)


def map_rows(memory: int, rows: int, elements: int) -> NDArray[np.float32]:
    """Maps shared memory as float32 [rows, elements].

    The memory stays as long as the array does, also where the descriptor is closed.
    """
    mapped = mmap.mmap(memory, rows * elements * 4)
    return np.frombuffer(mapped, np.float32).reshape(rows, elements)


class _Greeting:
    """What has come of the greeting of a connection: the token, and a place."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self.came = b""

    def read(self) -> bool:
        """Reads what is there; returns whether nothing is to come after it."""
        try:
            part = self.link.recv(GREETING_BYTES - len(self.came))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.came += part
        return not part or len(self.came) == GREETING_BYTES


class Listener:
    """Accepts the connections of the other ranks of a host; its leader has one.

    Attributes:
        address: What the others `connect` to, and the token that they prove themselves by, as text.
    """

    def __init__(self) -> None:
        name = secrets.token_hex(8)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self.address = f"{name}/{self._token.hex()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_abstract(name))
            self._socket.listen(BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def accept(
        self, places: Iterable[int], timeout_s: float, stop: Stop = lambda: False
    ) -> HostLink:
        """Waits until the ranks at these places of the host have connected, or the time is up.

        A process that connects and sends no greeting, or a wrong one, delays no other one.

        Args:
            stop: Whether to give up before; it is asked every POLL_S at most.

        Returns:
            The connections of those that came, which may be fewer.
        """
        missing = set(places)
        links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as ready:
            ready.register(self._socket, selectors.EVENT_READ)
            try:
                while missing and (left_s := deadline - time.monotonic()) > 0.0:
                    came = ready.select(min(left_s, POLL_S))
                    if not came and stop():
                        break
                    for key, _ in came:
                        if key.data is None:
                            self._accept_one(ready)
                        elif key.data.read():
                            ready.unregister(key.fileobj)
                            place = self._place_in(key.data.came)
                            if place in missing:
                                missing.discard(place)
                                links[place] = key.data.link
                                links[place].setblocking(True)
                            else:
                                key.data.link.close()
            except BaseException:
                for link in links.values():
                    link.close()
                raise
            finally:
                for key in list(ready.get_map().values()):
                    if key.data is not None:
                        key.data.link.close()
        return HostLink(links)

    def _accept_one(self, ready: selectors.BaseSelector) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has gone again
            link, _ = self._socket.accept()
            if owner_of(link).uid != os.geteuid():
                link.close()
                return
            ready.register(link, selectors.EVENT_READ, _Greeting(link))

    def close(self) -> None:
        self._socket.close()

    def _place_in(self, greeting: bytes) -> int:
        """Returns the place in a whole greeting with the right token, -1 in any other one."""
        if len(greeting) < GREETING_BYTES or not hmac.compare_digest(
            greeting[:TOKEN_BYTES], self._token
        ):
            return -1
        (place,) = _PLACE.unpack(greeting[TOKEN_BYTES:])
        return int(place)


def connect(address: str, place: int, timeout_s: float) -> HostLink:
    """Connects the rank at a place of its host with the host's leader, which is at place 0."""
    name, token = address.split("/")
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _reach(link, _abstract(name), timeout_s)
        if (user := owner_of(link).uid) != os.geteuid():
            raise PermissionError(f"it is of user {user}, not {os.geteuid()}")
        link.sendall(bytes.fromhex(token) + _PLACE.pack(place))
        link.settimeout(None)
    except BaseException:
        link.close()
        raise
    return HostLink({0: link})


def _reach(link: socket.socket, address: str, timeout_s: float) -> None:
    """Connects a socket; waits where the listener's queue is full."""
    deadline = time.monotonic() + timeout_s
    link.settimeout(timeout_s)
    while True:
        try:
            link.connect(address)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)


class HostLink:
    """The connections of one rank with others of its host; messages may be sent by any thread.

    Messages are pickled. Only processes that knew the token are connected.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        self._sending = {place: threading.Lock() for place in sockets}
        self._processes = {place: owner_of(link).pid for place, link in sockets.items()}
        self._stopped_s: dict[int, float] = {}  # by place
        self._looked_at = time.monotonic()
        _links.add(self)

    @property
    def places(self) -> list[int]:
        return sorted(self._sockets)

    def listen(self, take: Take, gone: Callable[[int], None]) -> None:
        """Calls `take` with each message, and `gone` with the place of a rank that has left.

        Both are bound methods, which are held weakly. Each connection has a thread of its own.
        """
        for place, link in self._sockets.items():
            called = weakref.WeakMethod(take), weakref.WeakMethod(gone)
            begin(functools.partial(_listen, place, link, *called), f"gradwire-host-{place}")

    def send(self, message: object, places: Iterable[int] | None = None, memory: int = -1) -> None:
        """Sends a message; a rank that has left is passed over, since `gone` is called for it.

        Args:
            memory: The file descriptor of memory that goes with it, -1 for none.
        """
        payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        header = _LENGTH.pack(len(payload))
        for place in self.places if places is None else places:
            with contextlib.suppress(OSError), self._sending[place]:
                if memory < 0:
                    self._sockets[place].sendall(header + payload)
                else:
                    socket.send_fds(self._sockets[place], [header], [memory])
                    self._sockets[place].sendall(payload)

    def stopped(self, places: Iterable[int]) -> dict[int, float]:
        """Returns for how many seconds ranks have been stopped, by a signal or a debugger.

        A stopped process keeps its connections, so nothing else tells. One thread at a time looks,
        every LOOK_S. A longer time between two looks counts as two of them, since whatever stopped
        the others may have stopped this process, too.

        Args:
            places: Those to look at.
        """
        now = time.monotonic()
        since_s = min(now - self._looked_at, 2 * LOOK_S)
        before, self._looked_at = self._stopped_s, now
        self._stopped_s = {
            place: before[place] + since_s if place in before else 0.0
            for place in places
            if _is_stopped(self._processes[place])
        }
        return self._stopped_s

    def offer_trial(self) -> None:
        """Hands memory to the others, which `take_trial`."""
        memory = memory_of_rows(1, 1)
        try:
            map_rows(memory, 1, 1)[:] = TRIAL
            for link in self._sockets.values():
                socket.send_fds(link, [b"\0"], [memory])
        finally:
            os.close(memory)

    def take_trial(self, timeout_s: float, stop: Stop) -> None:
        """Takes the memory that the leader offers, and reads it; before `listen`.

        Args:
            stop: Whether to give up before; it is asked every POLL_S at most.

        Raises:
            EOFError: `stop` said so, or the leader has closed the connection.
            OSError: The kernel refuses the memory; or none came in time.
        """
        link = self._sockets[0]
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as ready:
            ready.register(link, selectors.EVENT_READ)
            while not ready.select(POLL_S):
                if stop():
                    raise EOFError
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no shared memory came within {timeout_s:g} s")
        sign, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if not sign:
            raise EOFError
        if not descriptors:
            raise OSError("shared memory came without its file descriptor")
        try:
            value = float(map_rows(descriptors[0], 1, 1)[0, 0])
        finally:
            os.close(descriptors[0])
        if value != TRIAL:
            raise OSError("what another rank writes to shared memory does not come here")

    def close(self) -> None:
        """Ends the connections, which the others notice. Idempotent."""
        for link in self._sockets.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)  # ends the thread that listens, too
            link.close()

    def leave_to_parent(self) -> None:
        """Closes a forked child's copies, which would hide that the parent has died."""
        for link in self._sockets.values():
            link.close()


def _listen(
    place: int,
    link: socket.socket,
    take: weakref.WeakMethod[Take],
    gone: weakref.WeakMethod[Callable[[int], None]],
) -> None:
    try:
        while True:
            message, memory = _receive(link)
            taker = take()
            if taker is None:
                return
            taker(place, message, memory)
            del taker, message
    except Exception as error:  # a connection that nobody reads any more has ended
        if not isinstance(error, (OSError, EOFError)):
            log.exception("a message of the rank at place %d of this host cannot be read", place)
        leaver = gone()
        if leaver is not None:
            leaver(place)


def _receive(link: socket.socket) -> tuple[Any, int | None]:
    header, memory = b"", None
    while len(header) < _LENGTH.size:
        part, descriptors, _, _ = socket.recv_fds(link, _LENGTH.size - len(header), 1)
        if not part:
            raise EOFError
        header += part
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            memory = descriptor
    try:
        return pickle.loads(_exactly(link, _LENGTH.unpack(header)[0])), memory
    except BaseException:
        if memory is not None:
            os.close(memory)
        raise


def _exactly(link: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = link.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _is_stopped(process: int) -> bool:
    """Returns whether a process is stopped; False where that is not known."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(") ")[2][:1] in ("T", "t")


def _abstract(name: str) -> str:
    """Returns the address of a socket that has no file and is known in its network namespace."""
    return f"\0gradwire-{name}"


def _after_fork_in_child() -> None:
    for link in list(_links):
        link.leave_to_parent()


_links: weakref.WeakSet[HostLink] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork_in_child)
