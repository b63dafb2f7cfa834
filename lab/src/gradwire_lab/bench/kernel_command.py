"""`gradwire bench kernel` measures exact sums over short queues of a kernel, beside Gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.bench.kernel import MOST_DROPS, MOST_OVER, Shallow, marks, run_shallow
from gradwire_lab.bench.options import bounded, buffer_bytes
from gradwire_lab.contest.measure import CONVENTION
from gradwire_lab.network.network import probe
from gradwire_lab.network.presets import KIB

_NO_NETWORK = 2
_QUEUES_KIB = 2, (1 << 21) - 1
"""A packet needs 2 KiB with its headers, and the kernel counts a queue's bytes in 32 bits."""
_RATES_MBITS = 0.1, 10_000
"""A sum of the usual size takes hours below, and a host is slower above."""


def kernel(
    ranks: Annotated[list[int] | None, typer.Option(help="number of hosts, again [2, 4]")] = None,
    queue: Annotated[
        list[float] | None, typer.Option(help="KiB of each port's queue, again [16, 32, 64]")
    ] = None,
    rate: Annotated[float, typer.Option(help="of each port, Mbit/s")] = 200.0,
    size: Annotated[float, typer.Option(help="KiB of each rank's buffer")] = 2048.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each contestant")] = 60,
    out: Annotated[
        Path | None,
        typer.Option(help="keep the rows in this JSON file; a network that it has is not run"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Sum over ports with short queues, hosts faster than they: gradwire, Gloo on cubic and BBR."""
    cases = _cases(ranks or [2, 4], queue or [16.0, 32.0, 64.0], rate, size, rounds)
    kept = _read(out) if out is not None and out.exists() else []
    if (reason := probe()) is not None:
        line = f"gradwire bench: no lab network on this machine: {reason}"
        Console(stderr=True).print(line, markup=False)
        raise typer.Exit(_NO_NETWORK)
    found = []
    with Console(stderr=True).status("") as status:
        for case in cases:
            row = next((row for row in kept if _is_of(row, case)), None)
            if row is None:
                row = run_shallow(case, progress=status.update)
                kept.append(row)
                if out is not None:
                    out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            found.append(row)
    print(json.dumps(found)) if as_json else _print(found)


def _cases(
    ranks: list[int], queues: list[float], rate: float, size: float, rounds: int
) -> list[Shallow]:
    for number in ranks:
        bounded("--ranks", number, 2, 64, "")
    for each in queues:
        bounded("--queue", each, *_QUEUES_KIB, " KiB")
    bounded("--rate", rate, *_RATES_MBITS, " Mbit/s")
    length = buffer_bytes(size, max(ranks))
    return [
        Shallow(number, round(each * KIB), round(rate * 1e6), length, rounds)
        for number in ranks
        for each in queues
    ]


def _is_of(row: dict[str, Any], case: Shallow) -> bool:
    return all(row.get(key) == getattr(case, key) for key in Shallow.__dataclass_fields__)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(row, dict) and "contestants" in row for row in rows):
            raise ValueError("no rows")
    except (OSError, ValueError, TypeError) as error:
        why = f"{path}: no file of `gradwire bench kernel`: {error}"
        raise typer.BadParameter(why, param_hint="--out") from error
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    table = Table(
        title=f"{first['rate'] / 1e6:g} Mbit/s, {first['size'] / 2**20:g} MiB, hosts faster than "
        "the ports",
        caption="times over the header ideal; dropped: share of the packets that came to the "
        f"ports; marks: median ≤ {MOST_OVER} of Gloo's with CUBIC, dropped ≤ {MOST_DROPS:.0%}\n"
        f"{CONVENTION}",
    )
    for column in ("network", "contestant", "rounds", "median", "p90", "dropped", "marks"):
        left = column in ("network", "contestant", "marks")
        table.add_column(column, justify="left" if left else "right")
    for row in rows:
        name = f"{row['ranks']} ranks, {row['queue'] / KIB:g} KiB"
        found = marks(row)
        for contestant, each in row["contestants"].items():
            said = "" if contestant != "gradwire" else _said(found)
            table.add_row(
                name,
                contestant,
                str(row["rounds"]),
                f"{each['median']:.2f}",
                f"{each['p90']:.2f}",
                f"{each['dropped']:.1%}",
                said,
            )
            name = ""
        table.add_section()
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    for row in rows:
        machine = row["machine"]
        console.print(
            f"{row['ranks']} ranks, {row['queue'] / KIB:g} KiB: {row['date']}, {machine['cpu']}, "
            f"{machine['cores']} cores, load {machine['load']:.1f}, kernel {machine['kernel']}, "
            f"torch {machine['torch']}, gradwire {machine['gradwire']}",
            highlight=False,
            markup=False,
        )


def _said(found: dict[str, Any]) -> str:
    if found["over"] is None:
        return "no Gloo with CUBIC"
    return f"{found['over']:.2f} of Gloo's: {'met' if found['met'] else 'MISSED'}"
