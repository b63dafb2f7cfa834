"""`gradwire server`: a process that sums regions for the workers of a job (route "server").

It joins the job's store as endpoint workers + index, and needs no torch process group, no model and
no GPU. Once all have met it needs no store either: it serves until every worker has said goodbye,
or until its engine fails. A worker says goodbye at the end of its process, and not when it detaches
a module, since the next one is attached to the same engine.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from gradwire.core.environment import PREFIX, check_environment
from gradwire.core.errors import ConfigError, GradwireError, TransferError
from gradwire.core.settings import Settings

if TYPE_CHECKING:
    from gradwire.transport.notices import Notices
    from gradwire.transport.open_engine import OpenEngine

app = typer.Typer(add_completion=False)

RETRY_S = 0.2
"""Seconds between two attempts to reach the store."""

ATTEMPT_S = 2.0
"""Seconds for which the first attempt may stand still; each further one may for twice as long."""

POLL_S = 0.25
"""Seconds between two looks at what the engine knows of the workers."""

WHERE = ("route", "servers", "rendezvous_timeout")
"""The settings that say where the workers meet their servers, and for how long."""

Say = Callable[[str, str], None]
"""Says what happens: an event in a word, and its text."""


def open_store(address: str, timeout_s: float) -> Any:
    """Opens the job's store.

    Args:
        address: "host:port" of a TCPStore (torchrun's), an IPv6 address in brackets as in
            "[fd00::1]:29500"; or "file:///path".

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

    def connect(left_s: float) -> Any:
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=left_s),
        )

    return _in_time(connect, max(1.0, deadline - time.monotonic()), address)


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
        allowed = "expected host:port, [IPv6 address]:port, or file:///path"
        raise ConfigError.of("store", address, allowed)
    return host, int(port)


def _in_time(connect: Callable[[float], Any], timeout_s: float, address: str) -> Any:
    """Returns what `connect` returns, or raises GradwireError after the time-out.

    TCPStore waits without a limit for the first answer, which may never come: from a listener that
    is no store, or over a connection that was lost. So an attempt that stands still is left behind
    on a thread of its own, and a longer one begins.
    """
    from gradwire.transport.store import NoAnswerError, Worker

    deadline = time.monotonic() + timeout_s
    attempt_s = ATTEMPT_S
    failure: RuntimeError | None = None
    while (left_s := deadline - time.monotonic()) > 0.0:
        try:
            return Worker().ask(functools.partial(connect, left_s), min(attempt_s, left_s))
        except NoAnswerError:
            attempt_s *= 2.0
        except RuntimeError as error:
            failure = error
            time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    why = failure or "though somebody listens there"
    raise GradwireError(
        f"no store answers at {address} within {timeout_s:g} s{': ' if failure else ', '}{why}"
    ) from failure


def _check_file(address: str, path: Path) -> None:
    if not path.name or path.is_dir():
        raise ConfigError.of(
            "store", address, "expected the file of a FileStore, as in file:///path"
        )
    if not path.parent.is_dir():
        raise ConfigError.of("store", address, f"there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
        raise ConfigError.of("store", address, "this user may not write there")


def _wait_for_listener(
    address: str, host: str, port: int, deadline: float, timeout_s: float
) -> None:
    """Waits until somebody listens: TCPStore's own attempts outlast its time-out by seconds."""
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
    say: Say = lambda event, text: None,
) -> dict[str, float]:
    """Serves a group until all workers have said goodbye, or `stop` is set.

    The store is used until all have met. What becomes of it later changes nothing.

    Args:
        index: Index of this server, from 0.
        say: Gets what happens until all have met.

    Raises:
        ConfigError: An argument or a setting is impossible.
        RendezvousError: Ranks are absent or differ; the error names them.
        TransferError: The engine failed, by a dead peer or another plan, for instance.
    """
    from gradwire.live.publisher import publish
    from gradwire.transport.engine_state import engine_state
    from gradwire.transport.meeting import SupersededError
    from gradwire.transport.notices import Notices
    from gradwire.transport.open_engine import meet_servers, open_engine
    from gradwire.transport.store import identity_of

    check_place(workers, index, settings.server_count)
    identity = identity_of(store, settings.rendezvous_timeout)
    stop = stop or threading.Event()
    while True:
        meeting = meet_servers(store, group, settings, endpoint=workers + index, workers=workers)
        say("waiting", f"store found; {meeting.workers_here()} of {workers} workers are here")
        try:
            opened = open_engine(store, meeting, settings)
            break
        except SupersededError:  # the workers were started again before all were present
            continue
    opened.meeting.close()  # the store may be gone by the end
    notices = Notices(store, opened.session, workers + index, meeting.names)
    say("serving", f"server {index} serves {workers} workers")
    hide = publish(
        identity,
        lambda: engine_state(opened.engine, meeting.names, workers + index, group),
    )
    try:
        while not stop.wait(POLL_S):
            left = all(peer.left for peer in opened.engine.peers())
            notices.watch(opened.engine.refusal())
            # After that, for a failure comes before a goodbye.
            _check(opened, notices, workers, index)
            if left:
                break
        return dict(opened.engine.counters())
    finally:
        hide()
        opened.engine.close()


def _check(opened: OpenEngine, notices: Notices, workers: int, index: int) -> None:
    failure = opened.engine.failure()
    if failure is None:
        return
    who = f"server {index}"
    text = failure.text if failure.text.startswith(who) else f"{who}: {failure.text}"
    if failure.cause == "silence" and failure.rank == workers + index:
        text += "; or all workers were killed"  # which looks the same from here
    at_fault, why = notices.explain(opened.engine, failure.rank, failure.cause)
    raise TransferError(text + why, rank=at_fault, cause=failure.cause)


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
        str | None,
        typer.Option(
            help="host:port of the job's store (an IPv6 host in brackets), or file:///path; else "
            "MASTER_ADDR:MASTER_PORT"
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="number of workers (ranks); else WORLD_SIZE")
    ] = None,
    index: Annotated[int, typer.Option(help="which of the servers this is, from 0")] = 0,
    servers: Annotated[
        int | None, typer.Option(help="number of servers; else GRADWIRE_SERVERS, else 1")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="network interface or own address; else GRADWIRE_INTERFACE")
    ] = None,
    port: Annotated[
        str | None,
        typer.Option(
            help="UDP port, or a range as in 29600-29700; 0 for any free one; else GRADWIRE_PORT, "
            "else 0"
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            help="engine threads, as many as the workers have; else GRADWIRE_CORES, else 1"
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
    WORLD_SIZE, as torchrun sets them. The exit status is 0 when all workers have said goodbye, as
    each does at the end of its process, 2 for an impossible option, 1 when the job fails, and 130
    or 143 when SIGINT or SIGTERM ends it before. Of an impossible setting it tells the workers, if
    it knows where they are, for which it waits as long as for any others.
    """
    from gradwire.policies.registry import all_names

    say = functools.partial(_say, as_json)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    options = {
        "route": "server",
        "servers": servers,
        "interface": interface,
        "port": port,
        "rendezvous_timeout": timeout,
        "dscp": dscp,
        "cores": cores,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        try:
            check_environment(all_names())
            settings = Settings.build(given)  # the rest comes from the environment
        except ConfigError as error:
            say("failed", str(error), error=True)
            _tell_workers(error, given, store, workers, index, say)
            raise typer.Exit(2) from error
        # What is given and wrong comes before what is missing.
        check_place(1 if workers is None else workers, index, settings.server_count)
        address = _store_of_environment() if store is None else store
        count = _workers_of_environment() if workers is None else workers
        check_place(count, index, settings.server_count)
        say("looking", f"looking for the store at {address}")
        counters = serve(
            open_store(address, settings.rendezvous_timeout),
            workers=count,
            index=index,
            settings=settings,
            say=say,
        )
    except (ConfigError, GradwireError) as error:
        say("failed", str(error), error=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    except StoppedError as error:
        say("stopped", f"server {index} was stopped by {error.signal.name}", error=True)
        raise typer.Exit(128 + error.signal) from error
    say("done", f"server {index} is done: all workers have said goodbye", counters=counters)


def _tell_workers(
    error: ConfigError,
    given: Mapping[str, object],
    store: str | None,
    workers: int | None,
    index: int,
    say: Say,
) -> None:
    """Tells the workers why this server cannot take part, since they would wait for it.

    It waits for the store and for the workers as long as a server would. Where it does not know
    where they are, or how many, it returns at once.
    """
    from gradwire.transport.open_engine import meet_servers

    where = {name: given[name] for name in WHERE if name in given}
    variables = {f"{PREFIX}{name.upper()}" for name in WHERE[1:]} & os.environ.keys()
    try:
        settings = Settings.build(where, environment={name: os.environ[name] for name in variables})
        address = _store_of_environment() if store is None else store
        count = _workers_of_environment() if workers is None else workers
        check_place(count, index, settings.server_count)
        wait_s = settings.rendezvous_timeout
        say("telling", f"telling the workers, which wait for this server, within {wait_s:g} s")
        meeting = meet_servers(
            open_store(address, wait_s),
            "world",
            settings,
            endpoint=count + index,
            workers=count,
        )
    except (ConfigError, GradwireError):
        return
    meeting.tell_failure(error, wait_s)


class StoppedError(KeyboardInterrupt):
    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.signal = number


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise StoppedError(signal.Signals(number))


def _store_of_environment() -> str:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise ConfigError.about(
            "no store",
            "give --store host:port, or set MASTER_ADDR and MASTER_PORT",
            setting="store",
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
    line = f"gradwire server: {text}"
    if as_json:
        line = json.dumps({"event": event, "message": text, **more})
    print(line, file=sys.stderr if error and not as_json else sys.stdout, flush=True)
