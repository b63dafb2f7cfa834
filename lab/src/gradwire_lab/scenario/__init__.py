"""Scenario files are defined, read and checked here."""

from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.load import Experiment, load
from gradwire_lab.scenario.mark import LIMIT, Mark
from gradwire_lab.scenario.reader import ScenarioError
from gradwire_lab.scenario.schema import Cell, Scenario
from gradwire_lab.scenario.work import Model, Work

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
