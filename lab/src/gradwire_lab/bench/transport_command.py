"""`gradwire bench transport` measures the transports alone, on quiet networks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.bench.options import buffer_bytes, need_network
from gradwire_lab.bench.transport_grid import (
    BFLOATS,
    NETWORKS,
    OFFLOADS,
    RANKS,
    SIZES,
    Ground,
    contestants,
    grounds,
    quick_grounds,
)

_NARROWEST = 124
"""Columns that a table needs; a narrower terminal wraps its lines."""
_CAPTION = (
    "ratio: Gloo's median time over this one's, and the lowest and highest of a block; s/GB: "
    "processor seconds for each GB of all ranks' buffers, by the ranks and by the whole machine; "
    "for a round of all ranks, packets sent, calls (of gradwire sends, receives and waits, of Gloo "
    "reads and writes) and wake-ups of threads; peak: the memory that the rank which takes most "
    "takes in a turn, beyond what it had before"
)


def transport(
    network: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(NETWORKS)}; may be given again [all]")
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="number of ranks, again [2, 4, 8]")
    ] = None,
    size: Annotated[
        list[float] | None, typer.Option(help="KiB of each rank's buffer, again [1 … 65536]")
    ] = None,
    offloads: Annotated[
        str,
        typer.Option(
            help="on: trains pass whole; off: none do; tso: TCP's do and UDP's do not, as on most "
            "clouds' network cards"
        ),
    ] = "on",
    contestant: Annotated[
        list[str] | None,
        typer.Option(help="beside Gloo; may be given again [all but bf16 and gloo bf16]"),
    ] = None,
    cores: Annotated[
        str | None,
        typer.Option(
            help="compare numbers of engine threads of a rank, as in 1,2,4, by exact sums"
        ),
    ] = None,
    auth: Annotated[
        bool, typer.Option("--auth", help="compare ways to authenticate datagrams, by exact sums")
    ] = False,
    blocks: Annotated[int, typer.Option(min=1, help="turns of each contestant")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="only the cells of the marks: less than 20 minutes")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the ratios into this SVG file")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="put a profile of each contestant there, made by perf")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Sum buffers over quiet networks by Gloo and gradwire in turn; ratios are Gloo's time over it.

    "unshaped-9000" has an MTU of 9,000 bytes, and in "loopback" all ranks are on one host. "floor"
    sends and receives the same bytes over UDP, unacknowledged, and sums nothing.
    """
    from gradwire_lab.bench.transport import run_ground

    chosen = _chosen(network, ranks, size, offloads, quick)
    _check_contestants(contestant or [])
    kinds = _kinds(cores, auth, contestant)
    for name, path in (("--plot", plot), ("--profile", profile)):
        if path is not None:
            _make_room(name, path)
    if profile is not None and shutil.which("perf") is None:
        raise typer.BadParameter(f"{profile}: there is no perf here", param_hint="--profile")
    need_network()
    cells: list[dict[str, Any]] = []
    with Console(stderr=True).status("") as status:
        for ground in chosen:
            cells += run_ground(
                ground,
                names=contestant or [],
                kinds=kinds,
                blocks=blocks,
                progress=status.update,
                profile=profile,
            )
            if not as_json:
                status.stop()
                _print(ground, cells[-len(ground.sizes) :])
                if auth:
                    _print_costs(ground, cells[-len(ground.sizes) :])
                status.start()
    if as_json:
        print(json.dumps(cells))
    if plot is not None:
        from gradwire_lab.bench.transport_plot import ratios

        plot.write_text(ratios(cells), encoding="utf-8")


def _chosen(
    network: list[str] | None,
    ranks: list[int] | None,
    size: list[float] | None,
    offloads: str,
    quick: bool,
) -> list[Ground]:
    if offloads not in OFFLOADS:
        raise typer.BadParameter(f"--offloads {offloads}: {', '.join(OFFLOADS)}")
    if quick:
        if network or ranks or size:
            raise typer.BadParameter("--quick has networks, ranks and sizes of its own")
        return quick_grounds(offloads)
    for name in network or []:
        if name not in NETWORKS:
            raise typer.BadParameter(f"--network {name}: {', '.join(NETWORKS)}")
    for number in ranks or []:
        if not 2 <= number <= 64:
            raise typer.BadParameter(f"--ranks {number}: 2 to 64")
    sizes = [buffer_bytes(kib, max(ranks or RANKS)) for kib in size or []]
    return grounds(network or list(NETWORKS), ranks or RANKS, sizes or SIZES, offloads)


def _kinds(cores: str | None, auth: bool, names: list[str] | None) -> dict[str, dict[str, object]]:
    """Return the settings to compare, by name; none where no option asks for it."""
    if names and (auth or cores is not None):
        option = "--auth" if auth else "--cores"
        raise typer.BadParameter(f"{option} has contestants of its own")
    if auth and cores is not None:
        raise typer.BadParameter("--auth and --cores compare one thing each")
    if auth:
        from gradwire_lab.bench.auth import kinds

        return kinds()
    if cores is None:
        return {}
    usable = len(os.sched_getaffinity(0))
    texts = [text.strip() for text in cores.split(",")]
    for text in texts:
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= usable):
            raise typer.BadParameter(
                f"--cores {cores}: numbers from 1 to {usable}, the cores that this process may "
                "use, with commas between"
            )
    return {f"cores {number}": {"cores": number} for number in sorted(set(map(int, texts)))}


def _check_contestants(names: list[str]) -> None:
    known = [entry.name for entry in contestants(NETWORKS["unshaped"])] + list(BFLOATS)
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"--contestant {name}: {', '.join(known)}")


def _make_room(option: str, path: Path) -> None:
    """Raises BadParameter where the file or folder cannot be made."""
    try:
        if option == "--profile":
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    except OSError as error:
        why = f"{path}: cannot be written: {error.strerror}"
        raise typer.BadParameter(why, param_hint=option) from error


def _print(ground: Ground, cells: list[dict[str, Any]]) -> None:
    network = ground.network
    kind = {value: name for name, value in OFFLOADS.items()}
    offloads = kind[network.offloads, network.udp_trains]
    table = Table(
        title=f"{network.name}, {ground.ranks} ranks, offloads {offloads}",
        caption=f"{_CAPTION}\n{cells[-1]['environment']}",
    )
    columns = ("size", "contestant", "rounds", "ms", "ratio", "blocks", "s/GB ranks")
    for column in (*columns, "s/GB machine", "packets", "calls", "wake-ups", "peak"):
        left = column in ("size", "contestant")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for cell in cells:
        for name, found in cell["contestants"].items():
            table.add_row(
                _size_text(cell["bytes"]) if name == "gloo" else "",
                name,
                str(found["rounds"]),
                f"{found['median'] * 1e3:.3g}",
                f"{found['ratio']:.2f}",
                f"{min(found['block_ratios']):.2f}–{max(found['block_ratios']):.2f}",
                f"{found['processor_per_gb']:.2f}",
                f"{found['machine_per_gb']:.2f}",
                f"{found['packets']:.0f}",
                f"{found['calls']:.0f}",
                f"{found['wakeups']:.0f}",
                f"{found['peak_bytes'] / 2**20:.1f} MiB",
            )
        table.add_section()
    Console(width=max(Console().width, _NARROWEST)).print(table)


def _print_costs(ground: Ground, cells: list[dict[str, Any]]) -> None:
    from gradwire_lab.bench.auth import table

    title = f"{ground.network.name}, {ground.ranks} ranks"
    Console(width=max(Console().width, _NARROWEST)).print(table(title, cells, _size_text))


def _size_text(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"
