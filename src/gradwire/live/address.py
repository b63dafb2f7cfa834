"""Where a process offers its state: an abstract Unix socket, whose name says whose it is.

Such a socket has no file. So nothing is left of a process that was killed, no folder has to be
made, and the length of paths is of no concern. Who may read is checked by the user of the process
at the other end, which the kernel knows.
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gradwire.core.errors import GradwireError

FORMAT = 1
"""The number of the form of the state; a reader reads that of its own version."""

_NAME = re.compile(r"gradwire-live/(\d+)/(\d+)/([0-9a-f]{1,32})/([0-9a-f-]{1,32})")
_LIST = Path("/proc/net/unix")


@dataclass(frozen=True)
class Address:
    """The socket of one process of a job.

    Attributes:
        job: The job, the same for all its processes on all hosts, in hexadecimal digits.
        own: What no other process of the job has, of the same digits and "-".
        form: The number of the form of its state.
    """

    job: str
    own: str
    uid: int
    form: int = FORMAT

    @property
    def name(self) -> bytes:
        """The socket's name, as `bind` and `connect` take it."""
        return f"\0gradwire-live/{self.form}/{self.uid}/{self.job}/{self.own}".encode()


def addresses() -> list[Address]:
    """Returns the sockets of all jobs in this network namespace, of whatever user."""
    try:
        listed = _LIST.read_text("utf-8", "replace")
    except OSError as error:
        raise GradwireError(f"jobs cannot be found, because {_LIST}: {error.strerror}") from error
    found = set()
    for line in listed.splitlines():
        match = _NAME.fullmatch(line.rpartition(" @")[2])
        if match:
            form, uid, job, own = match.groups()
            found.add(Address(job, own, int(uid), int(form)))
    return sorted(found, key=lambda each: (each.job, each.own))


class Owner(NamedTuple):
    """The process at the other end of a Unix socket.

    Attributes:
        pid: Its number; 0 where it is in a PID namespace of its own.
        uid: Its user.
        gid: Its group.
    """

    pid: int
    uid: int
    gid: int


def owner_of(connection: socket.socket) -> Owner:
    """Returns the process at the other end of a Unix socket, as the kernel knows it."""
    layout = struct.Struct("iII")
    held = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    return Owner(*layout.unpack(held))
