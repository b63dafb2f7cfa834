"""Real processes for end-to-end tests: one per rank, joined by a torch process group over gloo.

A test hands a module-level function of its own file to `Ranks.run`; every rank calls it with
(rank, world, **arguments) and returns something picklable. The processes outlive the call, so that
one start serves many tests; they are forked from a server that has torch imported already.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch._dynamo", "pytest", "gradwire.training.attach"])


class Failed:
    """How a rank's call failed: the exception's type name and text."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.text = str(error)
        self.trace = traceback.format_exc()

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


class Gone:
    """The rank's process has ended, or says nothing (frozen)."""

    def __repr__(self) -> str:
        return "gone"


def free_port(kind: int = socket.SOCK_STREAM, *, following: int = 0) -> int:
    """A port that is free, as those that follow it are. None of them is given to a connection,
    whose ports the kernel takes from a range above, or to another process of these tests while
    this one lives."""
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if above < 10_000:  # nearly all ports are in that range
        above = 60_000
    while True:
        first = random.SystemRandom().randrange(5_000, above - following)
        with contextlib.ExitStack() as holders:
            try:
                for port in range(first, first + following + 1):
                    with socket.socket(socket.AF_INET, kind) as probe:
                        probe.bind(("", port))
                    holder = holders.enter_context(socket.socket(socket.AF_UNIX))
                    holder.bind(f"\0gradwire-tests/{port}")
            except OSError:
                continue
            _held.append(holders.pop_all())
            return first


_held: list[contextlib.ExitStack] = []
"""Names that tell other processes which ports are given away; they go with this process."""


class Ranks:
    """`world` processes, with this one's environment and what is given.

    With group=False they have no process group, only MASTER_* set.
    """

    def __init__(self, world: int, *, group: bool = True, **environment: str) -> None:
        self.world = world
        self.port = free_port()
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            variables = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                **environment,
            }
            process = context.Process(
                target=_serve, args=(rank, world, theirs, variables, group), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def run(
        self,
        function: Callable[..., Any],
        *,
        timeout: float = 150.0,
        per_rank: Sequence[dict[str, Any]] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Calls the function on every rank; returns their results, raises what every rank says of
        itself if one failed."""
        outcomes = self.outcomes(function, timeout=timeout, per_rank=per_rank, **arguments)
        if any(isinstance(outcome, (Failed, Gone)) for outcome in outcomes):
            raise AssertionError("\n".join(map(_told, range(self.world), outcomes)))
        return outcomes

    def outcomes(
        self,
        function: Callable[..., Any],
        *,
        timeout: float = 150.0,
        per_rank: Sequence[dict[str, Any]] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Like run, with Failed and Gone among the results."""
        self.start(function, per_rank=per_rank, **arguments)
        return self.collect(timeout)

    def start(
        self,
        function: Callable[..., Any],
        *,
        per_rank: Sequence[dict[str, Any]] | None = None,
        **arguments: Any,
    ) -> None:
        """Starts the function on every rank; `collect` fetches the results."""
        path = sys.modules[function.__module__].__file__
        for rank, end in enumerate(self._ends):
            more = per_rank[rank] if per_rank else {}
            with contextlib.suppress(OSError):
                end.send((path, function.__qualname__, {**arguments, **more}))

    def collect(self, timeout: float = 150.0, *, ranks: Sequence[int] | None = None) -> list[Any]:
        """The results by rank (of all, or of these); Gone for ranks that have ended, or say nothing
        by the time-out."""
        deadline = time.monotonic() + timeout
        results: list[Any] = []
        for end in self._ends if ranks is None else [self._ends[rank] for rank in ranks]:
            try:
                there = end.poll(max(0.0, deadline - time.monotonic()))
                results.append(end.recv() if there else Gone())
            except (EOFError, OSError):
                results.append(Gone())
        return results

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(None)
        deadline = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _told(rank: int, outcome: Any) -> str:
    trace = f"\n{outcome.trace}" if isinstance(outcome, Failed) else ""
    return f"rank {rank}: {outcome!r:.300}{trace}"


def _serve(rank: int, world: int, end: Connection, variables: dict[str, str], group: bool) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()  # of the server, which has what was set as it started
    os.environ.update(variables)
    torch.set_num_threads(1)
    gc.freeze()  # as conftest.py does
    if group:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    modules: dict[str, ModuleType] = {}
    while (job := end.recv()) is not None:
        path, name, arguments = job
        try:
            function = getattr(_load(modules, path), name)
            result = function(rank, world, **arguments)
        except BaseException as error:  # the test looks at it
            result = Failed(error)
        end.send(result)
    if group:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _load(modules: dict[str, ModuleType], path: str) -> ModuleType:
    if path not in modules:
        spec = importlib.util.spec_from_file_location("job_" + os.path.basename(path)[:-3], path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        modules[path] = module
    return modules[path]
