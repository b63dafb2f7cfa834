"""The command line of `gradwire demo`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradwire.core.errors import suggestion
from gradwire_lab.contest.interrupts import end_as_ctrl_c_does
from gradwire_lab.demo.scenario import CASES, ENTRIES, Scenario, scenarios_of

app = typer.Typer(add_completion=False)

OUT = Path("out/demo")
_INTERRUPTED = 130


NETWORKS = ("A", "B")
CONTESTANTS = tuple(entry.name for entry in ENTRIES)


@app.command()
def demo(
    network: Annotated[
        str,
        typer.Option(help="A: 1 Gbit/s, 256 KiB queues. B: 200 Mbit/s, 64 KiB, no offloads."),
    ] = "A",
    quick_run: Annotated[
        bool, typer.Option("--quick", help="A few steps only, to see that everything works.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Take only this of {', '.join(CONTESTANTS)}; may be given again."),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Take only this of bursts, far; without --quick both [bursts, far]."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1.0, help="End a case about so long after its start [150].")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each contestant, at most [400].")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.html.")] = OUT,
    figure: Annotated[
        Path | None,
        typer.Option(help="Draw the picture of the README into this SVG file, with its figures."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON instead of the table.")
    ] = False,
) -> None:
    """Train a small model over a bursting network: on TCP and on gradwire, in turn.

    Four hosts on one switch are made on this machine. The same four processes train the same
    model over Gloo on TCP (in single and in half precision), over gradwire without loss, and over
    gradwire with bounded loss, while cross traffic bursts into one port. Then some steps follow
    over a path with a round trip of 10 ms and 1 % of loss. Takes less than four minutes.
    """
    _check("--network", [network], NETWORKS)
    _check("--only", only or [], CONTESTANTS)
    _check("--case", case or [], CASES)
    if figure is not None and (figure.suffix != ".svg" or not figure.parent.is_dir()):
        raise typer.BadParameter(f"{figure}: FILE.svg in a folder", param_hint="--figure")
    end_as_ctrl_c_does()
    progress = Console(stderr=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"cannot be made: {error}", param_hint="--out") from error
    try:
        given = {"seconds": seconds, "steps": steps}
        changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        scenarios = [
            dataclasses.replace(each, **changes)
            for each in scenarios_of(case or [], network, only or [], short=quick_run)
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        document = run_cases(scenarios, progress, shlex.join(["gradwire", *sys.argv[1:]]))
    except KeyboardInterrupt:
        progress.print("interrupted: nothing is left behind")
        raise typer.Exit(_INTERRUPTED) from None
    show(document, out, as_json, progress)
    if figure is not None and document["contestants"]:
        from gradwire_lab.demo.figure import write_figure

        written = ", ".join(map(str, write_figure(document, figure)))
        progress.print(f"Written: {written}", highlight=False, markup=False)
    if any(each["error"] is not None for each in (document, document["far"]) if each):
        raise typer.Exit(1)


def _check(option: str, given: list[str], known: tuple[str, ...]) -> None:
    for each in given:
        if each not in known:
            why = f"{each!r} is not one of {', '.join(known)}{suggestion(each, known)}"
            raise typer.BadParameter(why, param_hint=option)


def run_cases(scenarios: Sequence[Scenario], console: Console, command: str) -> dict[str, Any]:
    """Run the cases of a demo one after another, and return its JSON.

    Args:
        scenarios: a scenario for each case; the second one is that of hosts far from each other.
    """
    from gradwire_lab.demo.audience import Bars
    from gradwire_lab.demo.course import Outcome, run
    from gradwire_lab.demo.ground import why_not
    from gradwire_lab.demo.results import document

    outcomes: list[Outcome] = []
    for scenario in scenarios:
        if outcomes:
            reason = outcomes[0].error or why_not(scenario)
            if reason is not None:
                console.print(f"no hosts far from each other: {reason}", markup=False)
                break
        with Bars(console, scenario) as bars:
            outcomes.append(run(scenario, bars))
    return document(outcomes[0], command, *outcomes[1:])


def show(document: dict[str, Any], out: Path, as_json: bool, progress: Console) -> None:
    """Write a demo's JSON and page into a folder, and print its table or its JSON."""
    from gradwire_lab.demo.table import terminal_tables

    written = out / "demo.json"
    written.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    files = [str(written)]
    page = out / "demo.html"
    try:
        from gradwire_lab.demo.page import write_page  # it needs matplotlib and jinja2

        write_page(document, page)
        files.append(str(page))
    except ImportError as error:
        hint = "type pip install ./lab in a checkout of gradwire"
        progress.print(f"no page: {error}: {hint}", markup=False)
    if as_json:
        typer.echo(json.dumps(document, allow_nan=False))
    else:
        console = Console()
        cases = [document, *([document["far"]] if document["far"] else [])]
        for each in cases:
            if each["contestants"]:
                for table in terminal_tables(each, console):
                    console.print(table)
                for note in each["notes"]:
                    console.print(f"· {note}", style="dim", highlight=False, markup=False)
        for each in cases:
            console.print(each["headline"], style="bold", highlight=False, markup=False)
    for each in filter(None, (document, document["far"])):
        if each["error_details"]:
            progress.print(each["error_details"], highlight=False, markup=False)
    progress.print(f"wrote {' and '.join(files)}", highlight=False, markup=False)
