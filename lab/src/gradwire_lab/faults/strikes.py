"""A strike is what befalls a process at one moment of its life, by its own hand."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_SO_NO_CHECK = 11
_M_MMAP_THRESHOLD = -3
_libc = ctypes.CDLL(None, use_errno=True)

Tell = Callable[..., None]


@dataclass
class Strike:
    """A strike waits for its moment, and comes once.

    Attributes:
        phase: where in the life of its process; "" for never.
        step: in which step.
        what: one of `STRIKES`.
        options: its arguments.
    """

    phase: str = ""
    step: int = 0
    what: str = "tell"
    options: dict[str, Any] | None = None
    _due: bool = True

    @staticmethod
    def of(config: dict[str, Any]) -> Strike:
        """Return the strike of a program's configuration."""
        return Strike(**config.get("strike", {}))

    def at(self, phase: str, step: int, tell: Tell) -> None:
        """Strike if this is the moment; tells so before."""
        beside = phase in ("attach", "attached", "before", "serving", "detach")
        if not self._due or phase != self.phase or not (beside or step == self.step):
            return
        self._due = False
        tell("struck", phase=phase, step=step)
        STRIKES[self.what](**(self.options or {}))


def kill(pid: int = 0) -> None:
    """Kill a process; this one where none is named."""
    os.kill(pid or os.getpid(), signal.SIGKILL)


def stop(pid: int = 0) -> None:
    """Freeze a process; this one where none is named."""
    os.kill(pid or os.getpid(), signal.SIGSTOP)


def leave(status: int) -> None:
    """End the interpreter in an orderly way, wherever it is."""
    sys.exit(status)


def sleep(seconds: float) -> None:
    """Compute for long."""
    time.sleep(seconds)


def use_up_descriptors() -> None:
    """Leave this process no further descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, most))
    try:
        while True:
            held.append(os.dup(2))
    except OSError:
        _kept.append(held)


_kept: list[object] = []


def use_up_memory(least: int = 0) -> None:
    """Leave this process no further memory of the system's.

    Args:
        least: bytes from which on an allocation needs such memory, and does not get what others
            have freed; 0 for what the C library does.
    """
    if least:
        _libc.mallopt(_M_MMAP_THRESHOLD, least)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def fork(pid_kept: bool = False) -> None:
    """Fork a child that tries to train on, as careless code does, and wait for its end."""
    child = os.fork()
    if child == 0:
        if pid_kept:
            time.sleep(3600.0)
        os._exit(0)
    if not pid_kept:
        os.waitpid(child, 0)


def engine_socket() -> socket.socket | None:
    """Return a copy of the UDP socket of this process, the engine's; None where it has none."""
    numbers = {line.split()[9] for line in Path("/proc/self/net/udp").read_text().splitlines()[1:]}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in numbers:
            return socket.socket(fileno=os.dup(int(name)))
    return None


def shrink_buffers() -> None:
    """Give the engine's socket the smallest buffers that the kernel has."""
    with _engine() as opened:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            opened.setsockopt(socket.SOL_SOCKET, option, 1)


def refuse_trains() -> None:
    """Have the kernel refuse trains: it segments none whose checksums it shall not make."""
    with _engine() as opened:
        opened.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)


def _engine() -> socket.socket:
    found = engine_socket()
    if found is None:
        raise RuntimeError("this process has no engine")
    return found


def fill_disk(folder: str, size: int) -> None:
    """Put a file system of some bytes at a folder, for this process alone; it goes with it."""
    for call, done in (
        ("unshare", _libc.unshare(_CLONE_NEWNS)),
        ("private", _libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)),
        ("mount", _libc.mount(b"none", folder.encode(), b"tmpfs", 0, f"size={size}".encode())),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


STRIKES: dict[str, Callable[..., None]] = {
    "tell": lambda pid=0: None,  # the ground does the rest
    "kill": kill,
    "stop": stop,
    "leave": leave,
    "sleep": sleep,
    "use_up_descriptors": use_up_descriptors,
    "use_up_memory": use_up_memory,
    "fork": fork,
    "shrink_buffers": shrink_buffers,
    "refuse_trains": refuse_trains,
    "fill_disk": fill_disk,
}
"""What can befall a process, by name."""
