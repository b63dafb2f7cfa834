"""`gradwire bench page` draws the pictures of the page of benchmarks."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradwire_lab.network.network import probe

PARTS = ("demo", "where", "networks", "sizes")
WITH_NETWORK = ("demo", "sizes")
"""The parts that measure on networks of namespaces."""
PAGE = "page"


def page(
    part: Annotated[
        list[str] | None,
        typer.Argument(help=f"{', '.join((*PARTS, PAGE))} [all]", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="the folder of the page")] = Path("docs"),
    jobs: Annotated[int, typer.Option(min=0, help="processes at a time [the cores]")] = 0,
) -> None:
    """Draw the pictures of the page of benchmarks, and write it.

    The demo and the sizes need namespaces and a machine with nothing else to do, for four minutes
    each. The map of where gradwire pays is virtual time. The page of networks is written from the
    rows that `gradwire bench networks` keeps. "page" alone writes the page of benchmarks from the
    figures that are there.
    """
    for name in part or ():
        if name not in (*PARTS, PAGE):
            raise typer.BadParameter(f"{name}: {', '.join((*PARTS, PAGE))}", param_hint="PART")
    if not out.is_dir():
        raise typer.BadParameter(f"{out}: no folder", param_hint="--out")
    from gradwire_lab.bench.page import write_page

    console = Console(stderr=True)
    command = shlex.join(["gradwire", *sys.argv[1:]])
    parts = [name for name in part or PARTS if name != PAGE]
    if {*parts} & {*WITH_NETWORK} and (reason := probe()) is not None:
        why = f"no lab network on this machine: {reason}"
        console.print(f"gradwire bench page: {why}", markup=False)
        raise typer.Exit(2)
    try:
        for name in parts:
            if name == "demo":
                written = _demo(out, command, console)
            else:
                from gradwire_lab.bench.pictures import PARTS as DRAWN

                with console.status(name) as status:
                    processes = jobs or len(os.sched_getaffinity(0))
                    written = DRAWN[name](out, command, processes, status.update)
            console.print(f"Written: {', '.join(map(str, written))}", highlight=False, markup=False)
        console.print(f"Written: {write_page(out)}", highlight=False, markup=False)
    except FileNotFoundError as error:
        why = f"the page is not written: {error.filename} is not there"
        console.print(f"gradwire bench page: {why}", markup=False)
        raise typer.Exit(1) from None


def _demo(out: Path, command: str, console: Console) -> list[Path]:
    """Run the demo, and draw both of its cases."""
    from gradwire_lab.demo.command import run_cases
    from gradwire_lab.demo.figure import write_figure
    from gradwire_lab.demo.scenario import scenarios_of

    document = run_cases(scenarios_of([], "A", [], short=False), console, command)
    for each in (document, document["far"]):
        if each is None or each["error"] or each["mode"] == "loopback":
            why = "no far case" if each is None else each["error"] or each["reason"]
            console.print(f"gradwire bench page: no pictures of the demo: {why}", markup=False)
            raise typer.Exit(1)
    first = write_figure(document, out / "step-times.svg")
    return [*first, *write_figure(document["far"], out / "far-times.svg")]
