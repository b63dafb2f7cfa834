"""OpenTelemetry: one span a step."""

from __future__ import annotations

from typing import Any

from gradwire import __version__
from gradwire.exports.exporter import Record, library
from gradwire.exports.figures import figures


class OpenTelemetry:
    """Makes a span "gradwire step" of each step's communication, with its figures as attributes.

    A span "gradwire exposed" within it is the part in which nothing was left to compute. Where the
    spans go is decided by the provider that the script or its launcher has set up.

    Args:
        tracer: The tracer; None for the one that the global provider gives to "gradwire".

    Raises:
        ConfigError: The library is not installed.
    """

    def __init__(self, tracer: Any = None) -> None:
        self._trace = library("opentelemetry.trace", "opentelemetry")
        self._tracer = tracer or self._trace.get_tracer("gradwire", __version__)

    def write(self, record: Record) -> None:
        """Makes the spans of a step, which has ended."""
        report, ended = record.report, int(record.ended * 1e9)
        attributes = {name.replace("/", "."): value for name, value in figures(report).items()}
        whole = self._tracer.start_span(
            "gradwire step",
            start_time=ended - int(report.comm_s * 1e9),
            attributes={
                **attributes,
                "gradwire.step": report.step,
                "gradwire.rank": report.rank,
                "gradwire.policy": report.policy,
                "gradwire.phase": report.phase,
                "gradwire.retransmissions": report.retransmissions,
            },
        )
        exposed = self._tracer.start_span(
            "gradwire exposed",
            context=self._trace.set_span_in_context(whole),
            start_time=ended - int(report.exposed_s * 1e9),
        )
        exposed.end(ended)
        whole.end(ended)

    def close(self) -> None:
        """Leaves the provider open, which belongs to whoever set it up."""
