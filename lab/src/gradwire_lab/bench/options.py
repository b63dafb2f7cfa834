"""The commands of `gradwire bench` share options, and what they need of the machine."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from gradwire_lab.network import network
from gradwire_lab.network.presets import NETWORKS

__all__ = ["AsJson", "Standard", "bounded", "buffer_bytes", "need_memory", "need_network"]

_COPIES = 4
"""Times that a rank's buffer is in memory: 3.3 in virtual time (2 to 8 ranks, 20 to 40 MB)."""


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


def bounded(option: str, value: float, least: float, most: float, unit: str) -> None:
    """Raise BadParameter where an option's value is not within bounds, or no number."""
    if not least <= value <= most:
        why = f"{value:g}: {least:.10g} to {most:.10g}{unit} are allowed"
        raise typer.BadParameter(why, param_hint=option)


def buffer_bytes(kib: float, ranks: int) -> int:
    """Return the bytes of a buffer of float32 elements that `--size` has in KiB.

    Raises:
        typer.BadParameter: it has no element, or the ranks' buffers do not fit this machine.
    """
    if not 4 <= kib * 1024 < float("inf"):
        why = f"{kib:g}: a buffer has at least 4 bytes, 0.00390625 KiB"
        raise typer.BadParameter(why, param_hint="--size")
    need_memory("--size", kib * 1024 * ranks)
    return int(kib * 256) * 4


def need_memory(option: str, buffers: float, beside: float = 0.0) -> None:
    """Raise BadParameter where a run needs more memory than this machine has.

    Args:
        option: what asks for it.
        buffers: bytes of all ranks' buffers.
        beside: bytes of all else.
    """
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = _COPIES * buffers + beside
    if wanted > has:
        why = (
            f"some {wanted / 1e9:.3g} GB of memory are needed, and this machine has {has / 1e9:.3g}"
        )
        raise typer.BadParameter(why, param_hint=option)
