"""What a process of a job offers of its state: `publish` its engines, `Steps` of its attachments.

One thread waits for readers, so that nothing happens while nobody looks. A reader connects, sends
a line of JSON (`{"since": {…}, "steps": 40}`) and gets the state as JSON. Only processes of the
same user, and root's, get an answer. What cannot be offered never keeps a job from running.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import operator
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gradwire import __version__
from gradwire.core.begin import begin
from gradwire.core.report import RegionReport, StepReport, finite
from gradwire.live.address import FORMAT, Address, owner_of

log = logging.getLogger("gradwire")

KEPT = 128
"""How many steps of an attachment are kept for readers; most who look now and then miss none."""
COUNTED = 16
"""One step in so many is timed, because to read a clock costs as much as to keep a step."""
MOST_REGIONS = 128
"""How many regions of a step are offered at most: those that lost most."""
PATIENCE_S = 1.0
"""How long a reader may take to ask, and to read what it gets."""

_FIELDS = (
    *("step", "phase", "encoding", "delivered", "bound", "guard", "period_s", "comm_s", "push_s"),
    *("pull_s", "exposed_s", "bytes", "packets", "retransmissions"),
)
STEP_KEYS = (*_FIELDS, "at", "loss", "lost")
"""What a row of a step holds."""
_fields_of = operator.attrgetter(*_FIELDS)


class Steps:
    """The last steps of one attachment, for readers."""

    _ids = itertools.count()

    def __init__(self, policy: str, ranks: Sequence[int], number: int) -> None:
        self._about = {"policy": policy, "ranks": list(ranks), "number": number}
        self.id = str(next(Steps._ids))
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self._noted = 0
        with _mutex:
            _attachments.add(self)

    def note(self, report: StepReport) -> None:
        """Keeps of a step what readers are shown; the rest of its report is let go."""
        if _server is None:
            return
        self._noted += 1
        if self._noted % COUNTED:
            self._keep(report)
            return
        before = time.thread_time_ns()
        began = time.thread_time_ns()  # what lies between is the clock's own time
        self._keep(report)
        _cost.steps_ns += COUNTED * max(0, time.thread_time_ns() - 2 * began + before)

    def _keep(self, report: StepReport) -> None:
        regions = report.regions if report.delivered < 1.0 else ()
        # The number stands with the row, since a reader may come at any moment.
        row = (time.time(), report.agreed.loss, regions, _fields_of(report))
        self._kept.append((self._noted, *row))

    def end(self) -> None:
        """Shows readers these steps no more: the attachment has gone."""
        with _mutex:
            _attachments.discard(self)

    def state(self, known: int, most: int) -> dict[str, Any]:
        """Returns what a reader gets that has so many steps, and wants so many at most."""
        kept = list(self._kept)
        new = [row for number, *row in kept if number > known]
        return {
            **self._about,
            "id": self.id,
            "noted": kept[-1][0] if kept else 0,
            "keys": STEP_KEYS,
            "steps": [_row(*row) for row in new[max(0, len(new) - most) :]],
        }


def publish(job: str, engine: Callable[[], dict[str, Any]]) -> Callable[[], None]:
    """Offers the state of an engine until the returned function is called.

    Args:
        job: The job, in hexadecimal digits.
        engine: Returns its state, as JSON takes it; it is called on a thread of its own.

    Returns:
        Ends it; to be called in any case, and more than once without harm.
    """
    global _server
    with _mutex:
        _engines.append(engine)
        if _server is None:
            try:
                _server = _Server(job)
            except (OSError, RuntimeError) as error:  # forbidden sockets; no thread left
                log.info("gradwire top cannot show this process: %s", error)
    return lambda: _withdraw(engine)


def _withdraw(engine: Callable[[], dict[str, Any]]) -> None:
    global _server
    with _mutex:
        if engine in _engines:
            _engines.remove(engine)
        ended, _server = (None, _server) if _engines else (_server, None)
    if ended is not None:
        ended.close()


class _Cost:
    """The processor time that all this takes of the job's threads, in nanoseconds."""

    steps_ns = 0
    readers_ns = 0


class _Server:
    def __init__(self, job: str) -> None:
        own = f"{os.getpid():x}-{secrets.token_hex(4)}"  # containers have the same process ids
        self._about = {
            "form": FORMAT,
            "gradwire": __version__,
            "job": job,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "script": _script(sys.argv[0]),
            "started": time.time(),
        }
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._closing = False
        try:
            self._socket.bind(Address(job, own, os.geteuid()).name)
            self._socket.listen(8)
            self._thread = begin(self._run, "gradwire-live")
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Ends the thread, once it has given an answer that it has begun."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes it
        if self._thread is not threading.current_thread():
            self._thread.join(3 * PATIENCE_S)
        self._socket.close()

    def leave_to_parent(self) -> None:
        """Closes a forked child's copy, without which the parent's socket would outlive it."""
        self._socket.close()

    def _run(self) -> None:
        counted = 0
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._closing:
                    time.sleep(PATIENCE_S)  # such as too many open files
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE_S)
                self._answer(connection)
            _cost.readers_ns += time.thread_time_ns() - counted
            counted = time.thread_time_ns()

    def _answer(self, connection: socket.socket) -> None:
        if owner_of(connection).uid not in (os.geteuid(), 0):
            return
        asked = b""
        while not asked.endswith(b"\n") and (part := connection.recv(1 << 12)):
            asked += part
        try:
            state = self._state(**json.loads(asked))
        except Exception as error:  # a reader's fault, or an engine that closes at this moment
            state = {"form": FORMAT, "error": repr(error)}
        try:
            text = json.dumps(state, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(finite(state), allow_nan=False, separators=(",", ":"))
        connection.sendall(text.encode())

    def _state(self, since: dict[str, int], steps: int) -> dict[str, Any]:
        with _mutex:
            engines = list(_engines)
            attachments = sorted(_attachments, key=lambda each: int(each.id))
        return {
            **self._about,
            "at": time.time(),
            "clock": time.monotonic(),
            "processor_s": time.process_time(),
            "keeping_s": _cost.steps_ns / 1e9,
            "answering_s": _cost.readers_ns / 1e9,
            "engines": [engine() for engine in engines],
            "attachments": [each.state(since.get(each.id, 0), steps) for each in attachments],
        }


def _script(path: str) -> str:
    """Returns the name of what was started, which for `python -m` is that of a folder."""
    folder, name = os.path.split(path)
    return os.path.basename(folder) if name == "__main__.py" else name


def _row(
    at: float, loss: float | None, regions: Sequence[RegionReport], fields: tuple[Any, ...]
) -> list[Any]:
    """Returns a step as readers get it, by STEP_KEYS; of a loss that is not finite they get a word.

    Of the regions it has the share that each one lost.
    """
    each = ((region.name, round(1.0 - region.delivered, 5)) for region in regions)
    lost = [pair for pair in each if pair[1] > 0]
    if len(lost) > MOST_REGIONS:
        lost = sorted(lost, key=lambda pair: -pair[1])[:MOST_REGIONS]
    told = loss if loss is None or math.isfinite(loss) else "not finite"
    return [*fields, at, told, dict(lost)]


_mutex = threading.Lock()
_server: _Server | None = None
_engines: list[Callable[[], dict[str, Any]]] = []
_attachments: weakref.WeakSet[Steps] = weakref.WeakSet()
_cost = _Cost()


def _after_fork_in_child() -> None:
    """Makes a forked child offer nothing: engines and thread exist only in the parent."""
    global _mutex, _server
    _mutex = threading.Lock()
    _engines.clear()
    left, _server = _server, None
    if left is not None:
        left.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)
