"""A kernel that refuses system calls, as containers' seccomp profiles and SELinux have it do."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
NUMBER, FIRST_ARGUMENT = 0, 16
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
FILTER = 2

CALLS = {
    "x86_64": {"memfd_create": 319, "socket": 41},
    "aarch64": {"memfd_create": 279, "socket": 198},
}.get(platform.machine(), {})
"""The numbers of system calls; empty on a machine for which none are known."""


def refuse(call: str, first: int | None = None) -> None:
    """Makes a system call of this thread, and of those that it starts, fail with EACCES for good.

    With `first` only calls with this first argument do.
    """
    conditions = [(NUMBER, CALLS[call])]
    if first is not None:
        conditions.append((FIRST_ARGUMENT, first))
    program = []
    for index, (offset, value) in enumerate(conditions):
        to_the_end = 2 * (len(conditions) - 1 - index) + 1
        program += [(LOAD, 0, 0, offset), (JUMP_IF_EQUAL, 0, to_the_end, value)]
    program += [(RETURN, 0, 0, ERROR | errno.EACCES), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, FILTER, filters)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl{arguments[:2]}")
