"""The page "Networks" and its map are made from the rows that `gradwire bench networks` keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from gradwire_lab.bench.kernel import MOST_DROPS, MOST_OVER, marks
from gradwire_lab.bench.network_groups import ENOUGH_S, RANKS, RATES, UPLINKS, grid
from gradwire_lab.bench.network_marks import TITLES, compared, failed_text, missed, no_worse, tally
from gradwire_lab.bench.network_scenes import WORDS, figure_text
from gradwire_lab.bench.networks import GIGABIT, Cell
from gradwire_lab.bench.page import filled, paying
from gradwire_lab.report.drawing import write_forms

__all__ = ["BEFORE", "FIGURES", "KERNEL", "NAME", "render", "write"]

NAME, PICTURE = "networks.md", "networks.svg"
FIGURES, BEFORE, KERNEL = "networks.json", "networks-before.json", "kernel.json"
_FREE, _LITTLE = (1.10, 0.005), (1.25, 0.02)
"""Time over the header ideal and own drops, at most, of what costs nothing and of what costs
little."""
_VERDICTS = ("costs nothing", "costs little", "costs something")
_COLOURS = ("#bfe3d4", "#f3dfa2", "#eeb09b")
_INK = "#1f2328"
_COLUMNS = ("least", "2 × least", "1 ms", "4 ms")

Row = Mapping[str, Any]


def write(folder: Path) -> list[Path]:
    """Draw the map and write the page.

    Raises:
        FileNotFoundError: there are no figures in the folder.
    """
    rows = _rows(folder)
    page = folder / NAME
    page.write_text(render(folder), encoding="utf-8")
    return [*write_forms(folder / PICTURE, lambda: _map(rows)), page]


def render(folder: Path) -> str:
    """Return the page that belongs to the figures in a folder.

    Raises:
        FileNotFoundError: there are no figures in the folder.
    """
    rows = _rows(folder)
    pays = json.loads((folder / "where-it-pays.json").read_text(encoding="utf-8"))
    path = folder / BEFORE
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    every = compared(list(rows.values()), before["rows"] if before else ())
    days = sorted(row["date"][:10] for row in every)
    template = Path(__file__).with_name("networks.md.j2").read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    page = environment.from_string(template).render(
        map=paying(pays["cells"]),
        days=days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}",
        seeds=sorted({row["seeds"] for row in every}),
        enough=f"{1000 * ENOUGH_S:g}",
        titles=TITLES,
        tally=tally(every),
        missed=list(missed(every)),
        before=before,
        no_worse=no_worse(every),
        glance=_glance(rows),
        racks=[row for each in _places() if set((row := _rack(rows, *each))[3:]) != {"–"}],
        tables={
            name: [
                _cells(row) + (_overs(row) if before and name == "known" else ())
                for row in every
                if row["group"] == name
            ]
            for name in ("small", "policers", "incast", "far", "sites", "known")
        },
        scenes=[
            line
            for row in every
            if row["group"] in ("sharing", "rates", "tcp", "clocks", "long")
            for line in _scene(row)
        ],
        kernel=_kernel(folder / KERNEL),
    )
    return "\n\n".join(map(filled, page.split("\n\n")))


def _rows(folder: Path) -> dict[tuple[str, str], Row]:
    found = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    return {(row["group"], row["name"]): row for row in found["rows"]}


# ---------------------------------------------------------------------------- what it costs


def verdict(time: float, drops: float) -> int:
    """Return what a network costs: an index of `_VERDICTS`."""
    for level, (most_time, most_drops) in enumerate((_FREE, _LITTLE)):
        if time <= most_time and drops <= most_drops:
            return level
    return len(_VERDICTS) - 1


def _glance(rows: Mapping[tuple[str, str], Row]) -> list[tuple[str, str, str, str]]:
    """Return kinds of networks, with the ranges of times and drops and what gradwire costs there.

    A kind costs what most of its networks cost.
    """
    kinds: dict[str, Callable[[Cell], bool]] = {
        f"quiet racks, queues of {1000 * ENOUGH_S:g} ms and more": _is_enough,
        "quiet racks, shorter queues, hosts as fast as the ports": lambda cell: (
            not _is_enough(cell) and not _has_fast_hosts(cell)
        ),
        "quiet racks, shorter queues, hosts ten times as fast": lambda cell: (
            not _is_enough(cell) and _has_fast_hosts(cell)
        ),
    }
    found = []
    cells = [(cell, rows.get((cell.group, cell.name))) for cell in grid()]
    for name, belongs in kinds.items():
        found.append(_range(name, [row for cell, row in cells if row and belongs(cell)]))
    for name, group in (
        ("a policer of a tenth of the links' rate", "policers"),
        ("pushes of 16 and 64 workers into one port, and a sum of 64 ranks", "incast"),
    ):
        found.append(_range(name, [row for row in rows.values() if row["group"] == group]))
    return [each for each in found if each]


def _range(name: str, rows: Sequence[Row]) -> tuple[str, str, str, str] | tuple[()]:
    if not rows:
        return ()
    ended = [row for row in rows if "failure" not in row]
    times = sorted(row["time"] for row in ended)
    drops = sorted(row["drops"] for row in ended)
    levels = sorted(_level(row) for row in rows)
    stuck = len(rows) - len(ended)
    return (
        name,
        f"{times[0]:.2f} to {times[-1]:.2f}" if ended else "–",
        f"{100 * drops[0]:.1f} to {100 * drops[-1]:.1f} %" if ended else "–",
        _VERDICTS[levels[len(levels) // 2]] + (f"; {stuck} did not end" if stuck else ""),
    )


def _level(row: Row) -> int:
    """Return what a network costs; one on which a run did not end costs most."""
    return len(_VERDICTS) - 1 if "failure" in row else verdict(row["time"], row["drops"])


def _is_enough(cell: Cell) -> bool:
    return cell.link.queue >= int(ENOUGH_S * cell.link.rate)


def _has_fast_hosts(cell: Cell) -> bool:
    return cell.uplink is not None and cell.uplink.rate > cell.link.rate


# ---------------------------------------------------------------------------- racks


def _places() -> list[tuple[float, int, int]]:
    """Return rates, ranks and queues of the racks."""
    return list(dict.fromkeys((cell.link.rate, cell.ranks, cell.link.queue) for cell in grid()))


def _rack(
    rows: Mapping[tuple[str, str], Row], rate: float, ranks: int, queue: int
) -> tuple[str, ...]:
    found = [f"{rate / GIGABIT:g} Gbit/s", str(ranks), _queue_text(queue)]
    for uplink in UPLINKS:
        row = rows.get(("grid", _name_of(rate, ranks, queue, uplink)))
        if row is None:
            found += ["–"] * 3
        elif "failure" in row:
            found += [failed_text(row), "–", "–"]
        else:
            found += [f"{row['time']:.2f}", f"{row['worst']:.2f}", f"{100 * row['drops']:.1f} %"]
    return tuple(found)


def _queue_text(size: int) -> str:
    return f"{size / (1 << 20):.3g} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB"


def _name_of(rate: float, ranks: int, queue: int, uplink: int) -> str:
    (name,) = (
        cell.name
        for cell in grid(rates=(rate / GIGABIT,), ranks=(ranks,))
        if cell.link.queue == queue
        and cell.uplink is not None
        and round(cell.uplink.rate / rate) == uplink
    )
    return name


def _map(rows: Mapping[tuple[str, str], Row]) -> Figure:
    """Draw racks by rate and ranks (down), queue (across) and uplinks (side by side)."""
    kinds = [(rate * GIGABIT, ranks) for rate in RATES for ranks in RANKS]
    figure = Figure(figsize=(9.6, 0.28 * len(kinds) + 0.9), layout="constrained")
    with matplotlib.rc_context({"axes.grid": False}):
        for panel, uplink in enumerate(UPLINKS):
            axes = figure.add_subplot(1, len(UPLINKS), panel + 1)
            for cell in grid():
                row = rows.get((cell.group, cell.name))
                if row is None or cell.uplink is None:
                    continue
                if round(cell.uplink.rate / cell.link.rate) != uplink:
                    continue
                y = len(kinds) - 1 - kinds.index((cell.link.rate, cell.ranks))
                for x in _columns_of(cell):
                    colour = _COLOURS[_level(row)]
                    corner = (x - 0.48, y - 0.46)
                    axes.add_patch(matplotlib.patches.Rectangle(corner, 0.96, 0.92, color=colour))
                    axes.text(x, y, _field(row), ha="center", va="center", fontsize=8, color=_INK)
            axes.set_xlim(-0.5, len(_COLUMNS) - 0.5)
            axes.set_ylim(-0.5, len(kinds) - 0.5)
            axes.set_xticks(range(len(_COLUMNS)), _COLUMNS)
            names = [f"{rate / GIGABIT:g} Gbit/s, {ranks}" for rate, ranks in reversed(kinds)]
            axes.set_yticks(range(len(kinds)) if panel == 0 else [], names if panel == 0 else [])
            axes.tick_params(length=0)
            axes.spines[["left", "bottom"]].set_visible(False)
            axes.set_xlabel("queue of a port")
            if panel == 0:
                axes.set_ylabel("rate of a port, ranks")
            how = "as fast as the ports" if uplink == 1 else f"{uplink} times as fast"
            axes.set_title(f"hosts {how}", loc="left", fontsize=9)
    return figure


def _field(row: Row) -> str:
    if "failure" in row:
        return "did not end"
    return f"{row['time']:.2f} · {100 * row['drops']:.1f} %"


def _columns_of(cell: Cell) -> list[int]:
    """Return the columns of the map that a rack stands in: its queue may be two of them."""
    named = (int(1e-3 * cell.link.rate), int(4e-3 * cell.link.rate))
    least = min(
        each.link.queue for each in grid(rates=(cell.link.rate / GIGABIT,), ranks=(cell.ranks,))
    )
    return [
        column
        for column, queue in enumerate((least, 2 * least, *named))
        if queue == cell.link.queue
    ]


# ---------------------------------------------------------------------------- tables


def _cells(row: Row) -> tuple[str, ...]:
    if "failure" in row:
        return row["name"], "–", failed_text(row), *["–"] * 4
    return (
        row["name"],
        *(f"{row[key]:.2f}" for key in ("first", "time", "worst")),
        f"{100 * row['drops']:.1f} %",
        f"{row['payload']:.2f}",
        f"{row['acks']:.2f}",
    )


def _overs(row: Row) -> tuple[str, ...]:
    """Return a row's times over those of the engine before, where they are compared."""
    return tuple(f"{row[key]:.2f}" if key in row else "–" for key in ("time_over", "worst_over"))


def _scene(row: Row) -> list[tuple[str, str, str]]:
    if "failure" in row:
        return [(row["name"], "–", failed_text(row))]
    return [(row["name"], WORDS[key], figure_text(key, row[key])) for key in WORDS if key in row]


def _kernel(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    rows = json.loads(path.read_text(encoding="utf-8"))
    first = rows[0]
    machine = first["machine"]
    return {
        "rows": [
            (
                str(row["ranks"]),
                _queue_text(row["queue"]),
                name,
                f"{each['median']:.2f}",
                f"{each['p90']:.2f}",
                f"{100 * each['dropped']:.1f} %",
            )
            for row in rows
            for name, each in row["contestants"].items()
        ],
        "rounds": first["rounds"],
        "rate": f"{first['rate'] / 1e6:g}",
        "size": f"{first['size'] / 2**20:g}",
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "kernel": machine["kernel"],
        "torch": machine["torch"],
        "load": f"{max(row['machine']['load'] for row in rows):.1f}",
        "date": max(row["date"] for row in rows)[:10],
        "met": sum(marks(row)["met"] for row in rows),
        "networks": len(rows),
        "most_over": f"{MOST_OVER:g}",
        "most_drops": f"{100 * MOST_DROPS:g}",
        "over": f"{max(marks(row)['over'] or 0.0 for row in rows):.2f}",
    }
