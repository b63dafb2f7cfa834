"""The demo's page: one HTML file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

import jinja2
from markupsafe import Markup

from gradwire_lab.demo.plots import all_plots
from gradwire_lab.demo.table import COLUMNS, rows
from gradwire_lab.demo.words import Document

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(document: Document) -> str:
    """The page as text."""
    template = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    drawn = all_plots(document) if document["contestants"] else {}
    return template.render(
        document=document,
        columns=COLUMNS,
        rows=rows(document) if document["contestants"] else [],
        plots={name: Markup(svg) for name, svg in drawn.items()},
    )


def write_page(document: Document, path: Path) -> None:
    """Write the page to a file."""
    path.write_text(render(document), encoding="utf-8")
