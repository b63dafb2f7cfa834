"""`gradwire server`: a process that sums regions for the workers of a job (route "server").

It joins the job's store as endpoint workers + index, serves until all workers have left, and
needs no torch process group, no model and no GPU.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.settings import Settings, check_environment

__all__ = ["app", "serve"]

app = typer.Typer(add_completion=False)

RETRY_S = 0.2
"""Seconds between two attempts to reach the store."""


def open_store(address: str, timeout_s: float) -> Any:
    """Opens the job's store.

    Args:
        address: "host:port" of a TCPStore (torchrun's), an IPv6 address in brackets as in
            "[fd00::1]:29500"; or "file:///path".
        timeout_s: Seconds to wait for an answer.

    Returns:
        The store.

    Raises:
        ConfigError: The address has another form, or the file cannot be used.
        GradwireError: Nobody answers in time.
    """
    # torch.distributed exports these names, too, but type checkers do not see them there.
    from torch._C._distributed_c10d import FileStore, TCPStore

    if address.startswith("file://"):
        path = address.removeprefix("file://")
        _check_file(address, Path(path))  # FileStore itself would retry for five minutes
        return FileStore(path, -1)
    host, port = _host_and_port(address)
    deadline = time.monotonic() + timeout_s
    _wait_for_listener(address, host, port, deadline, timeout_s)
    left = max(1.0, deadline - time.monotonic())

    def connect() -> Any:
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=left),
        )

    return _in_time(connect, left, address)


def _host_and_port(address: str) -> tuple[str, int]:
    """Splits "host:port"; raises ConfigError for another form.

    The port follows the last colon, so MASTER_ADDR:MASTER_PORT is valid for an IPv6 address, too.
    """
    host, _, port = address.rpartition(":")
    right = bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if ":" in host or host.startswith("["):
        host = host.removeprefix("[").removesuffix("]")
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            right = False
    if not right:
        allowed = "host:port, [IPv6 address]:port, or file:///path"
        raise ConfigError.of("store", address, allowed)
    return host, int(port)


def _in_time(connect: Callable[[], Any], timeout_s: float, address: str) -> Any:
    """Returns what `connect` returns, or raises GradwireError after the time-out.

    A thread that does not end is left behind, because TCPStore waits without a limit for the first
    answer of a listener that is no store.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(connect())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="gradwire-store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise GradwireError(
            f"no store answers at {address} within {timeout_s:g} s, though somebody listens there"
        )
    if isinstance(found[0], RuntimeError):
        raise GradwireError(f"no store answers at {address}: {found[0]}") from found[0]
    return found[0]


def _check_file(address: str, path: Path) -> None:
    """Raises ConfigError unless the file of a store can be read and written."""
    if not path.name or path.is_dir():
        raise ConfigError.of("store", address, "the file of a FileStore, as in file:///path")
    if not path.parent.is_dir():
        raise ConfigError.of("store", address, f"there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
        raise ConfigError.of("store", address, "this user may not write there")


def _wait_for_listener(
    address: str, host: str, port: int, deadline: float, timeout_s: float
) -> None:
    """Waits until somebody listens, since TCPStore's own attempts outlast its time-out by seconds.

    Raises:
        GradwireError: The deadline has passed.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(0.05, left)):
                return
        except (OSError, UnicodeError) as error:  # UnicodeError: the text cannot be a host's name
            if time.monotonic() + RETRY_S >= deadline:
                raise GradwireError(
                    f"no store answers at {address} within {timeout_s:g} s: {error}"
                ) from error
        time.sleep(RETRY_S)


def serve(
    store: Any,
    *,
    workers: int,
    index: int,
    settings: Settings,
    stop: threading.Event | None = None,
    group: str = "world",
) -> dict[str, float]:
    """Serves a group until all workers have left, or `stop` is set.

    Args:
        store: The job's store.
        workers: Number of workers.
        index: Index of this server, from 0.
        settings: The settings.
        stop: An event that ends the server.
        group: Name of the group.

    Returns:
        The engine's counters.

    Raises:
        ConfigError: An argument or a setting is impossible.
        RendezvousError: Ranks are absent or differ; the error names them.
        TransferError: The engine failed, by a dead peer or another plan, for instance.
    """
    from gradwire.transport.open_engine import meet_servers, open_engine
    from gradwire.transport.rendezvous import SupersededError

    check_place(workers, index, settings.server_count)
    stop = stop or threading.Event()
    while True:
        meeting = meet_servers(store, group, settings, endpoint=workers + index, workers=workers)
        try:
            opened = open_engine(store, meeting, settings)
            break
        except SupersededError:  # the workers were started again before all were present
            continue
    try:
        while not stop.wait(0.25):
            failure = opened.engine.failure()
            try:
                left = opened.meeting.all_finished()
            except Exception:  # the store ended with the job, which may have failed
                left = not failure
            if left:
                break
            if failure:
                raise TransferError(
                    f"server {index}: {failure.text}", rank=failure.rank, cause=failure.cause
                )
        return dict(opened.engine.counters())
    finally:
        opened.engine.close()
        opened.meeting.close()


def check_place(workers: int, index: int, servers: int) -> None:
    """Checks that a job of these sizes has a server of this index; raises ConfigError if not."""
    if workers < 1:
        raise ConfigError.of("workers", workers, "1 or more")
    if not 0 <= index < servers:
        raise ConfigError.of(
            "index", index, "from 0 to servers - 1", beside=f"with servers={servers}"
        )


@app.command()
def server(
    store: Annotated[
        str,
        typer.Option(
            help="host:port of the job's store (an IPv6 host in brackets), or file:///path"
        ),
    ] = "",
    workers: Annotated[int, typer.Option(help="number of workers (ranks)")] = 0,
    index: Annotated[int, typer.Option(help="which of the servers this is, from 0")] = 0,
    servers: Annotated[
        int | None, typer.Option(help="number of servers; else GRADWIRE_SERVERS, else 1")
    ] = None,
    interface: Annotated[
        str, typer.Option(help="network interface or own address; else GRADWIRE_INTERFACE")
    ] = "",
    port: Annotated[
        str | None,
        typer.Option(
            help="UDP port, or a range as in 29600-29700; 0 for any free one; else GRADWIRE_PORT, "
            "else 0"
        ),
    ] = None,
    dscp: Annotated[
        int | None,
        typer.Option(help="DSCP of its datagrams, 0 to 63; else GRADWIRE_DSCP, else 0"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="seconds to wait for the store, and then for the workers; else "
            "GRADWIRE_RENDEZVOUS_TIMEOUT, else 60"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines")] = False,
) -> None:
    """Sum gradients for the workers of one job (route="server").

    Without --store the job is found by MASTER_ADDR and MASTER_PORT, without --workers by
    WORLD_SIZE, as torchrun sets them. The exit status is 0 when the workers have left or a signal
    stops the server, 2 for an impossible option, 1 when the job fails.
    """
    from gradwire.policies.registry import all_names

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does
    try:
        check_environment(all_names())
        options = {
            "route": "server",
            "servers": servers,
            "interface": interface or None,
            "port": port,
            "rendezvous_timeout": timeout,
            "dscp": dscp,
        }
        given = {name: value for name, value in options.items() if value is not None}
        settings = Settings.build(given)  # the rest comes from the environment
        address = store or _store_of_environment()
        count = workers or _workers_of_environment()
        check_place(count, index, settings.server_count)
        _say(as_json, "waiting", f"server {index} waits for {count} workers at {address}")
        counters = serve(
            open_store(address, settings.rendezvous_timeout),
            workers=count,
            index=index,
            settings=settings,
        )
    except (ConfigError, GradwireError) as error:
        _say(as_json, "failed", str(error), error=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    except KeyboardInterrupt:
        _say(as_json, "stopped", f"server {index} was stopped by a signal")
        return
    _say(as_json, "done", f"server {index} is done", counters=counters)


def _store_of_environment() -> str:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigError.about(
            "no store",
            "give --store host:port, or set MASTER_ADDR and MASTER_PORT",
            setting="store",
            value=None,
        )
    return f"{host}:{port}"


def _workers_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not (text.isascii() and text.isdigit()):
        raise ConfigError.about(
            "workers",
            f"give --workers, or set WORLD_SIZE (now {text!r})",
            setting="workers",
            value=text,
        )
    return int(text)


def _say(as_json: bool, event: str, text: str, *, error: bool = False, **more: object) -> None:
    line = json.dumps({"event": event, "message": text, **more}) if as_json else text
    print(line, file=sys.stderr if error and not as_json else sys.stdout, flush=True)
