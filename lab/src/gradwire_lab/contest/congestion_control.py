"""TCP's congestion control is chosen for the sockets of a contestant."""

from __future__ import annotations

import os
import socket


def use_congestion_control(endpoint: socket.socket, name: str) -> None:
    """Let a TCP socket use this congestion control.

    Raises:
        OSError: the kernel does not have it, or does not let this user choose it.
    """
    if name == congestion_control_of(endpoint):
        return
    try:
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        raise OSError(
            error.errno, f"TCP congestion control {name!r} is not available: {error.strerror}"
        ) from error


def congestion_control_of(endpoint: socket.socket) -> str:
    name = endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0].decode()


def open_sockets() -> set[int]:
    """Return the descriptors of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
        except OSError:
            continue
    return found


def choose_congestion_control(descriptors: set[int], name: str) -> int:
    """Set TCP's congestion control on those sockets that are TCP; return how many they are.

    Raises:
        OSError: the kernel does not have it, or does not let this user choose it.
    """
    chosen = 0
    for descriptor in descriptors:
        with socket.socket(fileno=os.dup(descriptor)) as endpoint:
            if endpoint.family != socket.AF_INET or endpoint.type != socket.SOCK_STREAM:
                continue
            use_congestion_control(endpoint, name)
            chosen += 1
    return chosen
