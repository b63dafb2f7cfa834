"""The `gradwire` command, each subcommand of which is a typer app in a module of its own.

A module loads only when its command runs; its line of help stands here, so that `gradwire --help`
imports neither it nor torch. The commands of the lab (`demo`, `bench`, `lab`) belong to the
distribution gradwire-lab, which announces them by entry points.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from gradwire import __version__
from gradwire.core.lab import ENTRY_POINTS, lab_command

LAB = {
    "demo": "Train a small model over a bursting network: on TCP and on gradwire, in turn.",
    "lab": "Run scenario files on real kernel networks: hosts, queues, loss, bursts, and TCP "
    "beside.",
    "bench": "Measure gradwire beside its peers.",
}
"""The commands of the lab, with their lines of help."""
OWN = {
    "server": ("gradwire.server", 'Sum gradients for the workers of one job (route="server").'),
    "doctor": (
        "gradwire.doctor.command",
        "Check this host, or under torchrun all hosts of the job and the network between them.",
    ),
    "probe": (
        "gradwire.doctor.probe",
        "Measure the network between two hosts: `gradwire probe --listen` there, then this here.",
    ),
    "top": (
        "gradwire.watch.command",
        "Show what a running job does: rates, losses, waits and steps, from any of its hosts.",
    ),
    "calibrate": (
        "gradwire.calibration.command",
        'Find how much loss each layer of a model bears, for policies "plot" and "adaptive".',
    ),
    "report": (
        "gradwire.reading.command:report",
        "Say what a job's report files hold: what was lost, what it cost, what to try.",
    ),
    "diff": (
        "gradwire.reading.command:diff",
        "Compare two runs: status 0 when the second is no worse, 1 when it is, 2 for neither.",
    ),
    "why": (
        "gradwire.reading.command:why",
        "Say in five lines why a step was slow, as far as the records tell.",
    ),
    "sim": (
        "gradwire.sim.fuzz.command",
        "Search for faults of the engine by seeds: whole jobs in virtual time.",
    ),
}
"""The product's commands: the module (and its app, unless that is `app`) and the line of help."""


class LazyCommands(TyperGroup):
    """The subcommands, each loaded when it is used."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        lines = {**LAB, **{name: line for name, (_, line) in OWN.items()}}
        self.commands = {name: TyperGroup(name=name, help=line) for name, line in lines.items()}
        self._lists = False  # lines of help are enough

    def list_commands(self, _ctx: Any) -> list[str]:
        """Returns the names of the subcommands that are installed."""
        return [*(name for name in LAB if name in entry_points(group=ENTRY_POINTS).names), *OWN]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the page of help from the lines here."""
        self._lists = True
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Completes the name of a subcommand from the lines here."""
        self._lists = True
        return super().shell_complete(ctx, incomplete)

    def get_command(self, ctx: Any, name: str) -> Any:
        """Loads a subcommand; returns None for an unknown name, exits where the lab is missing."""
        if self._lists or name not in self.commands:
            return super().get_command(ctx, name)
        found = _of_the_product(name) if name in OWN else _of_the_lab(name)
        command = typer.main.get_command(found)
        command.name = name
        return command


def _of_the_product(name: str) -> Any:
    module, _, app = OWN[name][0].partition(":")
    return getattr(import_module(module), app or "app")


def _of_the_lab(name: str) -> Any:
    try:
        return lab_command(name)
    except LookupError as error:
        typer.echo(error.args[0], err=True)
        raise typer.Exit(2) from None


app = typer.Typer(cls=LazyCommands, no_args_is_help=True)


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
    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
