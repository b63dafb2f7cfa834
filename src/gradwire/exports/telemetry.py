"""Telemetry: what becomes of the report of each step, and what that costs.

The report file gets its line before the step ends, so that it holds every step that training goes
on from. Each exporter has a thread and a queue, so that a library that is slow, or waits for a
disk or a server, holds up no step.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence

from gradwire.core.begin import begin
from gradwire.core.errors import ConfigError
from gradwire.core.report import ReportWriter, StepReport
from gradwire.core.settings import Settings
from gradwire.exports.exporter import Exporter, Record
from gradwire.exports.opentelemetry import OpenTelemetry
from gradwire.exports.prometheus import Prometheus
from gradwire.exports.tensorboard import TensorBoard
from gradwire.exports.wandb import WandB

WAITING = 1024
"""The most steps that wait for an exporter; further ones are left out."""
CLOSE_S = 5.0
"""How long the end of training waits for an exporter, in seconds."""

KINDS: dict[str, Callable[[str], Exporter]] = {
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "wandb": lambda _: WandB(),
    "opentelemetry": lambda _: OpenTelemetry(),
}


class Telemetry:
    """The report file and the exporters of one attachment.

    Args:
        file: The report file; None for none.
        exporters: The exporters, which are closed with it.
    """

    def __init__(self, file: ReportWriter | None, exporters: Sequence[Exporter] = ()) -> None:
        self._file = file
        self._file_s = 0.0
        self._lines = [_Line(each) for each in exporters]
        # Whoever trains need not detach, so what waits is written as the process ends, too.
        self._close = weakref.finalize(self, _close, file, self._lines)

    @property
    def cpu_s(self) -> float:
        """Processor time that the file and the exporters have taken so far, in seconds."""
        return self._file_s + sum(line.cpu_s for line in self._lines)

    def write(self, report: StepReport) -> None:
        """Hands a step's report on; raises nothing."""
        if self._file is not None:
            began = time.thread_time()
            self._file.write(report)
            self._file_s += time.thread_time() - began
        if self._lines:
            record = Record(report, time.time(), self.cpu_s)
            for line in self._lines:
                line.put(record)

    def close(self) -> None:
        """Closes the file and the exporters, for whose threads it waits some seconds at most."""
        self._close()


def _close(file: ReportWriter | None, lines: Sequence[_Line]) -> None:
    if file is not None:
        file.close()
    for line in lines:
        line.end()
    until = time.monotonic() + CLOSE_S
    for line in lines:
        line.wait(until - time.monotonic())


class _Line:
    """The queue and the thread of one exporter.

    Attributes:
        cpu_s: Processor time that the thread has taken, in seconds.
    """

    def __init__(self, exporter: Exporter) -> None:
        self.cpu_s = 0.0
        self._exporter = exporter
        self._waiting: queue.Queue[Record | None] = queue.Queue(WAITING + 1)  # None comes last
        self._left_out = False
        self._stopped = False
        self._thread = begin(self._run, "gradwire-export")

    def put(self, record: Record) -> None:
        """Queues a record, unless too many wait."""
        if self._stopped:
            return
        if self._waiting.qsize() < WAITING:
            self._waiting.put(record)
        elif not self._left_out:
            self._left_out = True
            self._warn(f"leaves out steps, because {WAITING} wait for it")

    def end(self) -> None:
        """Has the thread end once it has written what waits."""
        if not self._stopped:
            self._waiting.put(None)

    def wait(self, timeout_s: float) -> None:
        """Waits for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(max(timeout_s, 0.0))

    def _run(self) -> None:
        try:
            while (record := self._waiting.get()) is not None:
                self._exporter.write(record)
                self.cpu_s = time.thread_time()
        except Exception as error:  # whatever a library raises must not end training
            self._stopped = True
            self._warn(f"stops: {error!r}")
        try:
            self._exporter.close()
        except Exception as error:
            self._warn(f"cannot be closed: {error!r}")

    def _warn(self, what: str) -> None:
        warnings.warn(
            f"gradwire's export to {type(self._exporter).__name__} {what}",
            RuntimeWarning,
            stacklevel=2,
        )


def open_telemetry(settings: Settings, rank: int, *, first: bool) -> Telemetry | None:
    """Opens the report file and the exporters that the settings name.

    Args:
        settings: The settings.
        rank: This rank in the job.
        first: Whether this rank writes what does not hold "{rank}".

    Returns:
        What the steps' reports go to; None where they go nowhere.

    Raises:
        ConfigError: A file or an exporter cannot be opened; nothing stays open then.
    """
    file = ReportWriter.open(settings.report, rank, first)
    exporters: list[Exporter] = []
    try:
        for each in settings.export or ():
            if isinstance(each, Exporter):
                exporters.append(each)
            elif not isinstance(each, str):
                raise AssertionError(f"{each!r} is no exporter")
            elif first or "{rank}" in each:
                exporters.append(_open(each.replace("{rank}", str(rank))))
    except BaseException:
        for opened in exporters:
            opened.close()
        if file is not None:
            file.close()
        raise
    written = file if file is not None and file.path is not None else None
    return Telemetry(written, exporters) if written or exporters else None


def _open(text: str) -> Exporter:
    kind, _, target = text.partition(":")
    try:
        return KINDS[kind](target)
    except OSError as error:
        raise ConfigError.of("export", text, f"cannot be opened: {error}") from error
