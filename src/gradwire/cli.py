"""The `gradwire` command, each subcommand of which is a typer app in a module of its own.

A module loads only when its command runs or is listed. The commands of the lab (`demo`, `bench`,
`lab`, `report`) belong to the distribution gradwire-lab, which announces them by entry points.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from gradwire import __version__

OWN = {
    "server": "gradwire.server",
    "doctor": "gradwire.doctor.command",
    "probe": "gradwire.doctor.probe",
    "calibrate": "gradwire.calibration.command",
}
LAB = ("demo", "lab", "bench", "report")
ENTRY_POINTS = "gradwire.commands"


class LazyCommands(TyperGroup):
    """The subcommands, each loaded when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the subcommands that are installed."""
        return [*(name for name in LAB if name in entry_points(group=ENTRY_POINTS).names), *OWN]

    def get_command(self, ctx: Any, name: str) -> Any:
        """Loads a subcommand; returns None for an unknown name, exits where the lab is missing."""
        if name in OWN:
            found = import_module(OWN[name]).app
        elif name in LAB:
            found = _of_the_lab(name)
        else:
            return None
        command = typer.main.get_command(found)
        command.name = name
        return command


def _of_the_lab(name: str) -> Any:
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        return entry.load()
    typer.echo(
        f"gradwire {name} is part of the lab, which is not installed: in a checkout of gradwire "
        f"type `make venv`, then `.venv/bin/gradwire {name}`",
        err=True,
    )
    raise typer.Exit(2)


app = typer.Typer(cls=LazyCommands, no_args_is_help=True, add_completion=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradwire {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    """Bounded-loss gradient transport for data-parallel PyTorch training."""


def main() -> None:
    """Runs the command."""
    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
