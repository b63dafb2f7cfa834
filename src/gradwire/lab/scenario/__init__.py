"""Scenario files: what they may say, and how they are read."""

from gradwire.lab.scenario.load import Cell, Experiment, load
from gradwire.lab.scenario.reader import ScenarioError
from gradwire.lab.scenario.schema import LIMIT, Contestant, Mark, Model, Scenario, Work

__all__ = [
    "LIMIT",
    "Cell",
    "Contestant",
    "Experiment",
    "Mark",
    "Model",
    "Scenario",
    "ScenarioError",
    "Work",
    "load",
]
