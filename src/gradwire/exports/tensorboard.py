"""TensorBoard: one scalar a figure and step, in an event file."""

from __future__ import annotations

from typing import Any

from gradwire.exports.exporter import Record, library
from gradwire.exports.figures import figures


class TensorBoard:
    """Writes each figure as a scalar `gradwire/…` at the step's number.

    Args:
        target: A folder, which is made; or a SummaryWriter, which stays open and belongs to whoever
            made it. TensorBoard reads one open file a folder, so give gradwire a folder of its own.

    Raises:
        ConfigError: The library is not installed.
    """

    def __init__(self, target: Any) -> None:
        self._summary = library("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._own = isinstance(target, str)
        writers = library("torch.utils.tensorboard", "tensorboard")
        self._writer: Any = writers.SummaryWriter(target) if self._own else target

    def write(self, record: Record) -> None:
        """Adds the step's scalars as one event."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in figures(record.report).items()
        ]
        self._writer.file_writer.add_summary(
            self._summary(value=values), record.report.step, record.ended
        )

    def close(self) -> None:
        """Closes the file, or flushes the writer that was given."""
        if self._own:
            self._writer.close()
        else:
            self._writer.flush()
