"""WandB: the figures join the rows of a Weights & Biases run."""

from __future__ import annotations

from typing import Any

from gradwire.core.errors import ConfigError
from gradwire.exports.exporter import Record, library
from gradwire.exports.figures import figures


class WandB:
    """Adds each figure to the run's current row, which the next `run.log` of the script completes.

    It begins no row itself, so the steps that the script counts stay as they are. The figures have
    an axis of their own, `gradwire/step`.

    Args:
        run: The run; None for the active one, `wandb.run`.

    Raises:
        ConfigError: The library is not installed, or no run is active.
    """

    def __init__(self, run: Any = None) -> None:
        self._run = library("wandb", "wandb").run if run is None else run
        if self._run is None:
            raise ConfigError.of("export", "wandb", "call wandb.init() before gradwire.attach")
        self._run.define_metric("gradwire/step", hidden=True)
        self._run.define_metric("gradwire/*", step_metric="gradwire/step")

    def write(self, record: Record) -> None:
        """Adds the step's figures to the row."""
        step = {"gradwire/step": record.report.step}
        self._run.log({**step, **figures(record.report)}, commit=False)

    def close(self) -> None:
        """Leaves the run open, which belongs to whoever began it."""
