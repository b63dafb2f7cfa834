"""The commands of `gradwire bench` share options, and what they need of the machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from gradwire_lab.network import network
from gradwire_lab.network.presets import NETWORKS

__all__ = ["AsJson", "Standard", "need_network"]


def _known(name: str) -> str:
    if name not in NETWORKS:
        raise typer.BadParameter(f"{name}: {' or '.join(NETWORKS)}")
    return name


AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of lines")]
Standard = Annotated[str, typer.Option(help="standard network: A or B", callback=_known)]


def need_network() -> None:
    """End the program where this machine cannot make namespaces."""
    if (reason := network.probe()) is not None:
        line = f"gradwire bench: no lab network on this machine: {reason}"
        Console(stderr=True).print(line, markup=False)
        raise typer.Exit(2)
