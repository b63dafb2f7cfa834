"""Scenario files: what they may say, and how they are read."""

from gradwire.lab.scenario.contestant import Contestant
from gradwire.lab.scenario.load import Experiment, load
from gradwire.lab.scenario.mark import LIMIT, Mark
from gradwire.lab.scenario.reader import ScenarioError
from gradwire.lab.scenario.schema import Cell, Scenario
from gradwire.lab.scenario.work import Model, Work

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
