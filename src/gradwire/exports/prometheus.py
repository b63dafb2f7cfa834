"""Prometheus: the figures of the last step and totals, at a port or in a file of node_exporter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from gradwire.core.errors import ConfigError
from gradwire.core.report import StepReport
from gradwire.exports.exporter import Record, library
from gradwire.exports.figures import FIGURES, Figure

LABELS = ("rank", "attachment", "policy")

TOTALS = {
    "steps": Figure("Steps", lambda r: 1.0),
    "sent_bytes": Figure("UDP payload sent, in bytes", lambda r: r.bytes),
    "sent_packets": Figure("Datagrams sent", lambda r: r.packets),
    "retransmissions": Figure("Datagrams sent again", lambda r: r.retransmissions),
    "elements": Figure("Elements of this worker's gradients", lambda r: r.elements),
    "lost_elements": Figure(
        "Elements of them that did not count", lambda r: (1.0 - r.delivered) * r.elements
    ),
    "comm_seconds": Figure("Seconds from first buckets to last results", lambda r: r.comm_s),
    "exposed_seconds": Figure(
        "Seconds in which nothing was left to compute and a step waited", lambda r: r.exposed_s
    ),
    "period_seconds": Figure("Seconds of steps, computation included", lambda r: r.period_s),
    "critical_steps": Figure("Steps in a critical phase", FIGURES["critical"].of),
    "guarded_steps": Figure("Steps in which the guard acted", lambda r: float(bool(r.guard))),
    "exceeded_regions": Figure(
        "Regions that lost more than their bound", lambda r: len(r.exceeded)
    ),
}
"""Counters by their name between "gradwire_" and "_total"."""

FILE_S = 5.0
"""A file is written at most this often, in seconds."""


def _gauge(figure: str) -> str:
    """Returns the metric of a figure; Prometheus writes out units."""
    stem = figure.removesuffix("_s")
    return f"gradwire_step_{stem}{'' if stem == figure else '_seconds'}"


class Prometheus:
    """Offers metrics `gradwire_…` with the labels rank, attachment and policy.

    A port answers a scrape with what is known then, so it costs nothing while nobody asks. A file
    is replaced as a whole, at most every five seconds, and stays when the job ends. Attachments of
    one process may share either.

    Args:
        target: A port, "ADDRESS:PORT", or the name of a file that ends with ".prom". A port may be
            a sum, as in "9400+3". Without an address it is open on this host alone (127.0.0.1).

    Raises:
        ConfigError: The library is not installed, the target is neither, the port is taken, or the
            file cannot be written.
    """

    def __init__(self, target: str | int) -> None:
        self._client = library("prometheus_client", "prometheus")
        self.labels: tuple[str, ...] | None = None
        self.report: StepReport | None = None
        self.totals = dict.fromkeys(TOTALS, 0.0)
        self.telemetry_s = 0.0
        self._page = _Page.join(self, str(target), self._client)

    def write(self, record: Record) -> None:
        """Takes a step's figures, and adds them to the totals."""
        report = record.report
        self.labels = (str(report.rank), str(report.attachment), report.policy)
        for name, total in TOTALS.items():
            self.totals[name] += total.of(report)
        self.telemetry_s = record.telemetry_s
        self.report = report
        self._page.refresh()

    def close(self) -> None:
        """Takes its metrics away, and closes the port with the last attachment."""
        self._page.leave(self)


class _Page:
    """The metrics of all attachments of this process at one port or in one file."""

    _pages: ClassVar[dict[str, _Page]] = {}
    _mutex = threading.Lock()

    def __init__(self, target: str, client: Any) -> None:
        self._target = target
        self._families = client.metrics_core
        self._members: list[Prometheus] = []
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._write: Callable[[], None] = lambda: None
        self._server: Any = None
        self._written = time.monotonic()
        try:
            if target.endswith(".prom"):
                self._write = lambda: client.write_to_textfile(target, registry)
                self._write()
            else:
                address, port = _place(target)
                server, _ = client.start_http_server(port, address, registry)
                self._server = server
        except OSError as error:
            raise ConfigError.of("export", f"prometheus:{target}", f"{error}") from error

    @classmethod
    def join(cls, member: Prometheus, target: str, client: Any) -> _Page:
        """Returns the page of a target with one more member."""
        with cls._mutex:
            page = cls._pages.get(target) or cls(target, client)
            cls._pages[target] = page
            page._members = [*page._members, member]
            return page

    def leave(self, member: Prometheus) -> None:
        """Lets a member go; a file is written with its last figures before."""
        with self._mutex:
            if member not in self._members:
                return
            try:
                self._write()
            finally:
                self._members = [each for each in self._members if each is not member]
                if not self._members:
                    del self._pages[self._target]
                    if self._server is not None:
                        self._server.shutdown()
                        self._server.server_close()

    def refresh(self) -> None:
        """Writes the file, if it is one and is due."""
        now = time.monotonic()
        if now - self._written >= FILE_S:
            self._written = now
            self._write()

    def collect(self) -> Iterator[Any]:
        """Yields the metrics for the library."""
        members = [(each, each.report, each.labels) for each in self._members]
        known = [(each, report, labels) for each, report, labels in members if report and labels]
        for name, figure in FIGURES.items():
            gauge = self._families.GaugeMetricFamily(_gauge(name), figure.meaning, labels=LABELS)
            for _, report, labels in known:
                gauge.add_metric(labels, figure.of(report))
            yield gauge
        for name, figure in TOTALS.items():
            yield self._total(
                name,
                figure.meaning,
                [(labels, each.totals[name]) for each, _, labels in known],
            )
        spent = [(labels, each.telemetry_s) for each, _, labels in known]
        yield self._total(
            "telemetry_cpu_seconds", "Processor time of exporters and report files", spent
        )
        used = [(labels, time.process_time()) for labels, _ in spent]
        yield self._total("process_cpu_seconds", "Processor time of the process", used)

    def _total(self, name: str, meaning: str, values: list[tuple[tuple[str, ...], float]]) -> Any:
        counter = self._families.CounterMetricFamily(f"gradwire_{name}", meaning, labels=LABELS)
        for labels, value in values:
            counter.add_metric(labels, value)
        return counter


def _place(target: str) -> tuple[str, int]:
    """Returns the address and the port of a target; raises ConfigError where it is none."""
    address, _, port = target.rpartition(":")
    parts = port.split("+")
    number = sum(map(int, parts)) if all(part.strip().isdecimal() for part in parts) else -1
    if not 0 <= number <= 65535:
        raise ConfigError.of(
            "export",
            f"prometheus:{target}",
            "a port from 0 to 65535, ADDRESS:PORT, or the name of a file that ends with .prom",
        )
    return address.strip("[]") or "127.0.0.1", number
