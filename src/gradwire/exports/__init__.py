"""Exporters carry each step's figures to the tools that operators and researchers already have.

gradwire.attach(model, export="prometheus:9400, tensorboard:runs/gradwire")

Each library is needed by its own exporter alone, and is imported when that opens.
"""

from gradwire.exports.exporter import Exporter, Record
from gradwire.exports.figures import FIGURES, figures
from gradwire.exports.opentelemetry import OpenTelemetry
from gradwire.exports.prometheus import Prometheus
from gradwire.exports.tensorboard import TensorBoard
from gradwire.exports.wandb import WandB

__all__ = [
    "FIGURES",
    "Exporter",
    "OpenTelemetry",
    "Prometheus",
    "Record",
    "TensorBoard",
    "WandB",
    "figures",
]
