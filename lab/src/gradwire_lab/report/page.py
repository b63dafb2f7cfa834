"""The page of a run is one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from gradwire_lab.report.maps import map_plot
from gradwire_lab.report.plots import cell_plots, colours
from gradwire_lab.report.template import fill
from gradwire_lab.report.words import (
    dates,
    mark_rows,
    notes,
    number,
    reached,
    rows,
    share,
)
from gradwire_lab.run.model import Judgement, Results

__all__ = ["render", "write_page"]


def render(document: Results) -> str:
    palette = colours(document)
    cells = [
        (cell, *rows(cell), *(list(map(Markup, plots)) for plots in cell_plots(cell, palette)))
        for cell in document.cells
        if cell.runs
    ]
    drawn = map_plot(document) if document.map.rows else ""
    return fill(
        Path(__file__).with_name("run.html.j2"),
        title=document.title,
        dates=dates(document),
        document=document,
        marks=mark_rows(document.marks),
        mark_cells=_mark_cells,
        map=Markup(drawn) if drawn else None,
        cells=cells,
        notes=notes(document),
        shares=_shares,
        layer_shares=_layer_shares,
    )


def write_page(document: Results, path: Path) -> None:
    path.write_text(render(document), encoding="utf-8")


def _mark_cells(mark: Judgement) -> list[list[str]]:
    return [[row.cell, reached(row), number(row.wanted), number(row.cap)] for row in mark.cells]


def _shares(values: Sequence[float]) -> str:
    return ", ".join(map(share, values))


def _layer_shares(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share(value)}" for name, value in values.items())
