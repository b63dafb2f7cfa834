"""The ground of the faults: a network, a fork server on each host, and jobs of forked processes."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradwire_lab.network.addresses import STORE_PORT
from gradwire_lab.network.network import LabUnavailable, Network
from gradwire_lab.network.presets import Preset

MEGABIT = 1_000_000
PORTS = Preset("faults", 40 * MEGABIT, 256 << 10, 72 << 10, offloads=True)
"""Ports on which a step of the jobs takes long enough to be struck in its midst."""

Message = dict[str, Any]

_START_S = 120.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # else each thread has 64 MiB that no limit takes from it
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(),
}


class GroundError(RuntimeError):
    """The ground itself does not do what is asked of it."""


@dataclass
class Process:
    """A process is one program on a host.

    Attributes:
        name: what it is called: "rank 2", "server 0".
        said: what it has told, in order; every message has an "event" and "at", a time.
        status: its exit status, negative for a signal; None while it lives.
        ended: when its channel closed.
    """

    name: str
    host: int
    pid: int
    channel: socket.socket
    said: list[Message] = field(default_factory=list)
    status: int | None = None
    ended: float | None = None
    _rest: bytes = b""

    def read(self) -> list[Message]:
        """Take what has come; returns new messages."""
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.ended = time.monotonic()
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        new = [json.loads(line) for line in lines]
        self.said += new
        return new

    def told(self, event: str) -> Message | None:
        """Return the first message of a kind; None where there is none."""
        return next((each for each in self.said if each["event"] == event), None)


class _ForkServer:
    """This is the parent's end of a fork server."""

    def __init__(self, network: Network, host: int) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_START_S)
        with theirs:
            self._process = network.spawn(
                host,
                [sys.executable, "-m", "gradwire_lab.faults.fork_server", str(theirs.fileno())],
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def ask(self, *descriptors: int, **asked: Any) -> int | None:
        try:
            socket.send_fds(self._channel, [json.dumps(asked).encode()], descriptors)
            answer = self._channel.recv(1 << 16)
        except OSError as error:
            raise GroundError(f"a fork server does not answer: {error}") from error
        if not answer:
            raise GroundError("a fork server has ended")
        found: int | None = json.loads(answer)
        return found

    def close(self) -> None:
        self._channel.close()


class Ground:
    """A ground is a network with a fork server on each host, for one job after another.

    Attributes:
        network: the hosts.
        store: where the store of a job listens: host and port.
    """

    def __init__(self, hosts: int, ports: Preset = PORTS) -> None:
        """Make the network and start the fork servers.

        Raises:
            LabUnavailable: this machine cannot make namespaces.
        """
        self.network = Network(hosts, ports)
        self._jobs = 0
        self._firewalls: set[int] = set()
        try:
            self._fork_servers = [_ForkServer(self.network, host) for host in range(hosts)]
            self._processes: list[Process] = []
            self.store = (self.network.address(0), STORE_PORT)
            self.start("store", 0, "store", host=self.store[0], port=self.store[1])
            self.await_event(_START_S, lambda process, said: said["event"] == "ready")
            self._store = self._processes.pop()
        except BaseException:
            self.close()
            raise

    def start(self, name: str, host: int, program: str, /, **config: Any) -> Process:
        """Fork a program on a host; what it tells is seen by `await_event`."""
        ours, theirs = socket.socketpair()
        with theirs:
            fork_server = self._fork_servers[host]
            pid = fork_server.ask(theirs.fileno(), ask="fork", program=program, config=config)
        assert pid is not None
        process = Process(name, host, pid, ours)
        self._processes.append(process)
        return process

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to a process, unless it has ended."""
        self._fork_servers[process.host].ask(ask="signal", pid=process.pid, number=number)

    def status(self, process: Process, seconds: float) -> int | None:
        """Wait for the end of a process; returns its status, None where it lives on."""
        if process.status is None:
            process.status = self._fork_servers[process.host].ask(
                ask="wait", pid=process.pid, seconds=seconds
            )
        return process.status

    def await_event(
        self, seconds: float, enough: Callable[[Process, Message], bool]
    ) -> tuple[Process, Message] | None:
        """Read what processes tell until a message is enough, all have ended, or time is over."""
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                if process.ended is None:
                    selector.register(process.channel, selectors.EVENT_READ, process)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    process = key.data
                    new = process.read()
                    if process.ended is not None:
                        selector.unregister(process.channel)
                    for said in new:
                        if enough(process, said):
                            return process, said
        return None

    def await_ends(self, seconds: float, processes: list[Process]) -> None:
        """Read what processes tell until these have closed their channels, or time is over."""
        until = time.monotonic() + seconds
        while any(each.ended is None for each in processes):
            if (left := until - time.monotonic()) <= 0:
                return
            self.await_event(min(left, 0.1), lambda process, said: False)

    @contextlib.contextmanager
    def job(self) -> Iterator[str]:
        """Surround one job; at its end its processes are killed and the network is whole.

        Yields:
            The prefix of its keys in the store.
        """
        self._jobs += 1
        try:
            yield f"job{self._jobs}"
        finally:
            for process in self._processes:
                self.signal(process, signal.SIGKILL)
                self.status(process, 60.0)
                process.channel.close()
            self._processes.clear()
            self.heal()

    def cut(self, host: int, *directions: str) -> None:
        """Lose all that crosses the link of a host; "uplink" is what comes from it."""
        self.network.set_loss([(host, each, 1.0) for each in directions])
        self._firewalls.discard(host)

    def refuse(self, host: int) -> None:
        """Have the kernel of a host refuse the datagrams that its programs send (EPERM)."""
        self.network.set_refusal(host, True)
        self._firewalls.add(host)

    def heal(self) -> None:
        """Let all links carry everything again."""
        hosts = range(self.network.hosts)
        self.network.set_loss([(h, each, 0.0) for h in hosts for each in ("uplink", "downlink")])
        for host in list(self._firewalls):
            self.network.set_refusal(host, False)
        self._firewalls.clear()

    def close(self) -> None:
        """End everything. May be called again."""
        for fork_server in getattr(self, "_fork_servers", []):
            fork_server.close()
        self.network.close()

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["Ground", "GroundError", "LabUnavailable", "Message", "Process"]
