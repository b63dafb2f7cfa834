"""Exporter: where the record of each step goes, and what a record holds."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol, runtime_checkable

from gradwire.core.errors import ConfigError
from gradwire.core.report import StepReport


class Record(NamedTuple):
    """What an exporter gets of a step.

    Attributes:
        report: The step's report.
        ended: When the step ended, in seconds since 1970.
        telemetry_s: Processor time in seconds that all exporters of this process and its report
            files have taken so far.
    """

    report: StepReport
    ended: float
    telemetry_s: float


@runtime_checkable
class Exporter(Protocol):
    """Where the record of each step goes; a class of one's own has these two methods, too.

    They are called on a thread of the exporter's own, so one that is slow holds up no step. An
    exporter that raises is warned of, closed, and called no more.
    """

    def write(self, record: Record) -> None:
        """Takes the record of a step."""

    def close(self) -> None:
        """Writes what is left, and lets go of files and sockets; no step comes after it."""


def library(module: str, extra: str) -> Any:
    """Imports the module of a library; raises ConfigError where that is not installed.

    Args:
        module: Name of the module.
        extra: The extra of gradwire that brings the library, and the exporter's name.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError.of(
            "export",
            extra,
            f"its library is not installed ({error}); `pip install '.[{extra}]'` in gradwire's "
            "checkout installs it",
        ) from error
