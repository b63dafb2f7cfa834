"""The `gradwire` command. Each subcommand is a module with a typer app named `app`."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

from gradwire import __version__

# In the order of the help. A module loads only when its command runs or is listed.
COMMANDS = ("demo", "bench", "server", "calibrate", "lab", "report")
MODULES = {
    "calibrate": "calibration.command",
    "lab": "lab.command",
    "report": "lab.report.command",
}  # where a command's module has another name


class LazyCommands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if find_spec(_module(name))]

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in self.list_commands(ctx):
            return None
        module = import_module(_module(name))
        if not hasattr(module, "app"):
            return None
        command = typer.main.get_command(module.app)
        command.name = name
        return command


def _module(command: str) -> str:
    return f"gradwire.{MODULES.get(command, command)}"


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
    app(prog_name="gradwire")


if __name__ == "__main__":
    main()
