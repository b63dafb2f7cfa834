"""The lab is a distribution of its own, whose commands are found by their entry points."""

from importlib.metadata import entry_points
from typing import Any

__all__ = ["ENTRY_POINTS", "lab_command"]

ENTRY_POINTS = "gradwire.commands"


def lab_command(name: str) -> Any:
    """Loads a command of the lab, a typer app; raises LookupError where there is no lab."""
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        return entry.load()
    raise LookupError(
        f"gradwire {name} is part of the lab, which is not installed: in a checkout of gradwire "
        f"type `make venv`, then `.venv/bin/gradwire {name}`"
    )
