"""The demo's page is one HTML file that needs no other."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from gradwire_lab.demo.plots import all_plots
from gradwire_lab.demo.table import COLUMNS, rows
from gradwire_lab.demo.words import Document
from gradwire_lab.report.template import fill
from gradwire_lab.report.words import filled


def render(document: Document) -> str:
    columns, cells = _table(document)
    far = document["far"]
    far_columns, far_cells = _table(far) if far else ([], [])
    drawn = all_plots(document) if document["contestants"] else {}
    return fill(
        Path(__file__).with_name("page.html.j2"),
        title="gradwire demo",
        document=document,
        columns=columns,
        rows=cells,
        far_columns=far_columns,
        far_rows=far_cells,
        plots={name: Markup(svg) for name, svg in drawn.items()},
    )


def _table(document: Document) -> tuple[list[str], list[list[str]]]:
    return filled(COLUMNS, rows(document)) if document["contestants"] else ([], [])


def write_page(document: Document, path: Path) -> None:
    path.write_text(render(document), encoding="utf-8")
