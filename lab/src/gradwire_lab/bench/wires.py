"""`gradwire bench wires` measures how exact and how fast the lab's wires are on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.bench.wire_trial import DelayError, WireLoad, delay_error, wire_load
from gradwire_lab.contest.measure import environment
from gradwire_lab.network.network import LabUnavailable


def wires(
    delay: Annotated[list[float] | None, typer.Option(help="ms of each direction")] = None,
    rate: Annotated[list[int] | None, typer.Option(help="of the ports, in Mbit/s")] = None,
    trains: Annotated[bool, typer.Option("--trains", help="let trains pass whole")] = False,
    seconds: Annotated[float, typer.Option(help="of each load")] = 3.0,
    count: Annotated[int, typer.Option(help="round trips for each delay, at least 300")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Try the wires of the lab's hosts: the error of their delay, and the rate that they carry."""
    delays = [ms * 1e-3 for ms in delay or (10.0, 40.0)]
    rates = [mbit * 1_000_000 for mbit in rate or (200, 400)]
    if count < 300:
        raise typer.BadParameter(f"--count {count}: a 99th percentile needs 300 round trips")
    try:
        errors = [delay_error(seconds_, count) for seconds_ in delays]
        loads = [
            wire_load(bits, seconds_, offloads=trains, seconds=seconds)
            for bits in rates
            for seconds_ in delays
        ]
    except LabUnavailable as error:
        Console(stderr=True).print(f"gradwire bench: {error}", markup=False)
        raise typer.Exit(2) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        results = {"errors": [asdict(e) for e in errors], "loads": [asdict(x) for x in loads]}
        print(json.dumps({**results, "environment": environment()}))
    else:
        _print(errors, loads)


def _print(errors: list[DelayError], loads: list[WireLoad]) -> None:
    delays = Table(
        title="round trips over one wire: longer than without it and twice its delay by",
        caption="late: how long after it was due a frame came out of the wire",
    )
    for column in ("delay", "round trips", "median", "p99", "without wire", "late, mean", "max"):
        delays.add_column(column, justify="right")
    for error in errors:
        times = (error.median_s, error.p99_s, error.plain_s, error.late_s, error.max_late_s)
        delays.add_row(
            f"{error.delay_s * 1e3:g} ms", str(error.count), *(f"{s * 1e6:.0f} µs" for s in times)
        )
    Console().print(delays)
    rates = Table(title="packets of 1,514 bytes over one wire, both ways at once")
    for column in ("port", "delay", "carried", "lost", "late", "processor", "too much for"):
        rates.add_column(column, justify="right")
    for load in loads:
        rates.add_row(
            f"{load.rate / 1e6:g} Mbit/s",
            f"{load.delay_s * 1e3:g} ms",
            f"{load.carried / 1e6:.0f} Mbit/s",
            f"{load.lost:.2%}",
            f"{load.mean_late_s * 1e6:.0f} µs",
            f"{load.cpu:.2f}",
            load.limit or "–",
        )
    Console().print(rates)
