"""`gradwire bench idle` tells for how long ports are idle within an op, and why."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.bench.idle import REASONS, Found, PortFound, explain
from gradwire_lab.bench.options import bounded, buffer_bytes, need_network
from gradwire_lab.bench.transport_grid import NETWORKS, Ground
from gradwire_lab.contest.measure import environment, header_ideal

__all__ = ["idle"]

_SHAPED = [name for name, preset in NETWORKS.items() if preset.rate]
_NARROWEST = 124
"""Columns that a table needs; a narrower terminal wraps its lines."""


def idle(
    network: Annotated[str, typer.Option(help=", ".join(_SHAPED))] = "1g",
    ranks: Annotated[int, typer.Option(min=2, max=64, help="number of ranks")] = 4,
    size: Annotated[float, typer.Option(help="KiB of each rank's buffer")] = 4096.0,
    rounds: Annotated[int, typer.Option(min=1, help="number of sums")] = 10,
    fastest: Annotated[
        int | None,
        typer.Option(min=1, help="of these, explain so many that were fastest [all]"),
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="engine threads of a rank")] = 1,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="in virtual time, where all times are exact")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Sum exactly on a quiet network, and explain the idle time of every port."""
    from gradwire_lab.bench.idle_ground import kernel_timelines, virtual_timelines

    if network not in _SHAPED:
        raise typer.BadParameter(f"--network {network}: {', '.join(_SHAPED)}")
    length = buffer_bytes(size, ranks)
    if fastest is not None:
        bounded("--fastest", fastest, 1, rounds, ", the rounds,")
    usable = len(os.sched_getaffinity(0))
    if cores > usable:
        raise typer.BadParameter(f"--cores {cores}: at most {usable}, which this process may use")
    if virtual and cores > 1:
        raise typer.BadParameter("--cores: in virtual time an engine has one thread")
    ground = Ground(NETWORKS[network], ranks, (length,))
    if virtual:
        timelines = virtual_timelines(ground, length, rounds)
    else:
        need_network()
        with Console(stderr=True).status(network) as status:
            timelines = kernel_timelines(
                ground, length, rounds, cores=cores, progress=status.update
            )
    found = explain(timelines, ground.network.rate / 8, fastest)
    ideal = header_ideal(2 * (ranks - 1) / ranks * length, ground.network.rate)
    if as_json:
        asked = {"network": asdict(ground.network), "ranks": ranks, "bytes": length}
        answer = {**asked, "ideal": ideal, **asdict(found), "environment": environment()}
        print(json.dumps(answer))
        return
    title = f"{network}, {ranks} ranks, {size:g} KiB, {len(found.ops)} of {rounds} sums"
    _print(f"{title}{', virtual time' if virtual else ''}", found, ideal)


def _print(title: str, found: Found, ideal: float) -> None:
    means = [found.mean(way) for way in ("out", "in")]
    shown = [
        reason
        for reason in REASONS
        if any(port.idle.get(reason, 0.0) >= 5e-4 * found.seconds for port in found.ports)
    ]
    meanings = "; ".join(f"{reason}: {REASONS[reason]}" for reason in shown)
    over = means[0].sent / (ideal * len(found.ops))
    caption = (
        f"median sum {found.median * 1e3:.3g} ms, {found.median / ideal:.3f} of the header ideal; "
        f"{over:.3f} times its bytes went out; shares of the time of the sums: what the port's "
        f"bytes take at its rate, and what it was idle for, by reason\n{meanings}\n{environment()}"
    )
    table = Table(title=title, caption=caption)
    table.add_column("port", no_wrap=True)
    for column in ("busy", "idle", *shown):
        table.add_column(column, justify="right", no_wrap=True)
    for port in found.ports:
        _row(table, f"rank {port.rank}, {port.way}", port, shown, found.seconds)
    table.add_section()
    for port in means:
        _row(table, f"mean, {port.way}", port, shown, found.seconds)
    Console(width=max(Console().width, _NARROWEST)).print(table)


def _row(table: Table, name: str, port: PortFound, shown: list[str], seconds: float) -> None:
    every = [port.sent, sum(port.idle.values()), *(port.idle.get(each, 0.0) for each in shown)]
    table.add_row(name, *(f"{100 * each / seconds:.1f} %" for each in every))
