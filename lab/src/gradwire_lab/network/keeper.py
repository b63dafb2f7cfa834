"""The keeper process makes a network's namespaces, holds them, and cleans up behind them.

Its arguments are the descriptor of a socket to the owner, and the owner's process id. The first
message is the plan. When the owner closes the socket or dies, however it dies, every process on
the hosts is killed and this one ends; the namespaces have no names and go with it.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from gradwire_lab.network.channel import MAX_MESSAGE
from gradwire_lab.network.kernel import CLONE_NEWNET, enter_user_namespace, unshare
from gradwire_lab.network.leaves import Leaves
from gradwire_lab.network.presets import Preset
from gradwire_lab.network.tap import TapUnavailable
from gradwire_lab.network.wire import Wire


def make_namespace() -> int | None:
    """Enter a new network namespace, in a user namespace of its own where that is needed.

    Returns:
        A descriptor of the user namespace, or None if the process may do without one.

    Raises:
        OSError: neither is allowed.
    """
    try:
        unshare(CLONE_NEWNET)
        return None
    except PermissionError:
        enter_user_namespace()
        return os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def explain(error: BaseException) -> str:
    """Say in a line why no network could be made."""
    if isinstance(error, ImportError):
        return f"{error}: type pip install ./lab in a checkout of gradwire"
    if isinstance(error, TapUnavailable):
        return str(error)
    text = f"no network namespaces here: {error}"
    restricted = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    denied = isinstance(error, PermissionError) or getattr(error, "code", 0) == errno.EPERM
    if denied and restricted.exists() and restricted.read_text().strip() == "1":
        text += " (kernel.apparmor_restrict_unprivileged_userns is 1)"
    return text


def serve(channel: socket.socket, owner: int, topology: Any) -> None:
    """Answer the owner's questions until it is gone."""
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(os.pidfd_open(owner), select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if ready != {channel.fileno()}:
            return
        message = channel.recv(MAX_MESSAGE)
        if not message:
            return
        request = json.loads(message)
        ask = request["ask"]
        try:
            answer = obey(request, topology)
        except Exception as error:  # the owner raises it, whatever it is
            answer = {"error": f"{ask}: {error}"}
        channel.send(json.dumps(answer).encode())


def obey(request: dict[str, Any], topology: Any) -> dict[str, Any]:
    """Do one thing that the owner asks for, with the arguments that it names."""
    asks = {
        "port statistics": topology.port_stats,
        "uplink statistics": topology.switches.uplink_stats,
        "uplink wire statistics": topology.switches.wire_stats,
        "wire statistics": topology.wires.stats,
        "loss": topology.set_loss,
        "refusal": topology.set_refusal,
        "rate": topology.set_rate,
        "wire": topology.set_wire,
    }
    return asks[request.pop("ask")](**request) or {}


def make_plan(request: dict[str, Any]) -> Any:
    """Return the plan as the owner sent it."""
    from gradwire_lab.network.topology import Plan

    preset, leaves = Preset(**request.pop("preset")), request.pop("leaves")
    if leaves is not None:
        leaves = Leaves(leaves["count"], Preset(**leaves["uplink"]))
    wires = {int(host): Wire(**wire) for host, wire in request.pop("wires").items()}
    ports = {int(host): Preset(**port) for host, port in request.pop("ports").items()}
    return Plan(**request, preset=preset, leaves=leaves, wires=wires, ports=ports)


def main(arguments: list[str]) -> None:
    """Build what the owner asks for and keep it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, which ends this process
    channel = socket.socket(fileno=int(arguments[0]))
    owner = int(arguments[1])
    message = channel.recv(MAX_MESSAGE)
    if not message:
        return
    request = json.loads(message)
    try:
        user = make_namespace()
        from gradwire_lab.network.topology import Topology  # the import may fail: it needs pyroute2

        topology = Topology(make_plan(request))
    except Exception as error:
        channel.send(json.dumps({"error": explain(error)}).encode())
        return
    descriptors = [host.namespace for host in topology.hosts] + ([] if user is None else [user])
    try:
        built = {"user_namespace": user is not None, "wires_by": topology.wires.carrier}
        answer = json.dumps(built).encode()
        socket.send_fds(channel, [answer], descriptors)
        serve(channel, owner, topology)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner has ended
    finally:
        topology.close()


if __name__ == "__main__":
    main(sys.argv[1:])
