"""These are the system calls of namespaces that Python before 3.12 does not offer."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces.

    Raises:
        OSError: the kernel or its policy does not allow it.
    """
    _check(_libc.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    """Move this process into the namespace behind an open descriptor.

    Raises:
        OSError: not a namespace of that kind, or not allowed.
    """
    _check(_libc.setns(descriptor, kind), "setns")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
        parent: process id of the parent, which may have died already.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def open_network_namespace() -> int:
    """Open the network namespace of this process; returns the descriptor."""
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter_user_namespace() -> None:
    """Become the owner of new namespaces without being root.

    The ids stay what they are, so programs started in it are as unprivileged as the caller.

    Raises:
        OSError: user namespaces are switched off, or the process has several threads.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | CLONE_NEWNET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
