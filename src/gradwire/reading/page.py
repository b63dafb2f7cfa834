"""The page of a report: one file of HTML without scripts and outside resources."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

import numpy as np

from gradwire.core.words import seconds, share
from gradwire.reading.records import Record, Run
from gradwire.reading.summary import Summary

WIDTH, HEIGHT, LEFT, BELOW = 860, 180, 70, 22
COLUMNS = 200
"""Columns of a plot: of more steps than these, each shows the mean of several."""
LAYERS = 100
"""How many layers the page names."""

Value = Callable[[Record], float]

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2530; --faint: #6a7480; --rule: #dde2e7;
  --first: #3b6fb6; --second: #d9762b; --mark: #9a3fa0; }
@media (prefers-color-scheme: dark) { :root { --back: #14181d; --text: #e4e8ec; --faint: #98a2ad;
  --rule: #333b44; --first: #78a9ee; --second: #f09a52; --mark: #d58adb; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 56rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
  border-top: 1px solid var(--rule); overflow-wrap: anywhere; }
th { white-space: nowrap; font-weight: 600; } caption { text-align: left; }
summary { cursor: pointer; } td.short { white-space: nowrap; }
.wide { overflow-x: auto; } .faint, figcaption { color: var(--faint); }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--faint); }
.axis { stroke: var(--rule); } .first { fill: var(--first); } .second { fill: var(--second); }
.mark { fill: var(--mark); }
pre { white-space: pre-wrap; margin: 0; font-size: .85rem; }
"""


def page(runs: Sequence[tuple[Run, Summary]]) -> str:
    body = "".join(_section(run, summary) for run, summary in runs)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>gradwire report</title><style>{STYLE}</style></head>\n"
        f"<body><main><h1>gradwire report</h1>\n{body}</main></body></html>\n"
    )


def _section(run: Run, summary: Summary) -> str:
    rows = [(what, text) for what, text in summary.lines() if what not in ("slowest", "to try")]
    why = [
        (str(e.step), seconds(e.took_s), "\n".join((e.short, *e.lines))) for e in summary.slowest
    ]
    layers = [(e.name, share(e.lost), share(e.bound)) for e in summary.layers[:LAYERS]]
    left = len(summary.layers) - len(layers)
    plots = [
        _plot(
            "Time of a step",
            "computing below, waiting for the network above; a dot is the longest step of a column",
            run.records,
            [lambda each: each.took_s - each.waited_s, _waited_of(run.records)],
            seconds,
            longest=lambda each: each.took_s,
        ),
        _plot(
            "Left out",
            "share of this rank's elements that did not count",
            run.records,
            [lambda each: 1 - each.number("delivered", 1.0)],
            share,
        ),
        _plot(
            "Training loss",
            "as the ranks gave it",
            run.records,
            [lambda e: e.loss],
            "{:.3g}".format,
        ),
    ]
    return (
        f"<section><h2>{escape(summary.name)}</h2>\n"
        + _table("Summary", ("about", "what the records say"), rows)
        + "<h2>What to try</h2><ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in summary.advice)
        + "</ul>\n"
        + "".join(plots)
        + "<h2>The slowest steps</h2>"
        + _table("Slowest steps", ("step", "took", "what held it up; open for the records"), why)
        + "<h2>Lost by layer</h2>"
        + _table("Loss of each region, the most first", ("region", "lost", "allowed"), layers)
        + (f'<p class="faint">{left:,} more lost no more than these.</p>' if left > 0 else "")
        + "</section>\n"
    )


def _waited_of(records: Sequence[Record]) -> Value:
    """Returns what gives the waiting of a step.

    A step whose duration is not recorded, as of a run's last one, would look short by its waiting
    alone; where no duration is, waiting is all that there is to show.
    """
    if all(math.isnan(each.took_s) for each in records):
        return lambda each: each.waited_s
    return lambda each: math.nan if math.isnan(each.took_s) else each.waited_s


def _table(caption: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>\n'
        for row in rows
    )
    return (
        f'<div class="wide"><table><caption class="faint">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n"
    )


def _cell(text: str) -> str:
    first, _, rest = text.partition("\n")
    if rest:
        shown = f"<summary>{escape(first)}</summary><pre>{escape(rest)}</pre>"
        return f"<td><details>{shown}</details></td>"
    return f"<td{' class=short' if len(text) < 10 else ''}>{escape(text)}</td>"


def _plot(
    title: str,
    caption: str,
    records: Sequence[Record],
    values: Sequence[Value],
    words: Callable[[float], str],
    longest: Value | None = None,
) -> str:
    """Draws values over the steps as stacked columns, and the longest of each column as a dot.

    Returns "" where nothing is known.
    """
    parts = np.array_split(np.arange(len(records)), min(COLUMNS, len(records)))
    of = [[records[index] for index in part] for part in parts]
    columns = [[float(np.mean(_known(value, part) or [0])) for value in values] for part in of]
    dots = [max(_known(longest, part), default=0.0) for part in of] if longest else []
    top = max([*map(sum, columns), *dots])
    if top <= 0:
        return ""
    ground, wide = HEIGHT - BELOW, (WIDTH - LEFT) / len(columns)
    scale = (ground - 8) / top
    shapes = []
    for part in (0.0, 0.5, 1.0):
        y = ground - top * part * scale
        shapes.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH}"/>')
        shapes.append(_text(LEFT - 6, y + 4, words(top * part), "end"))
    for index, column in enumerate(columns):
        x, y = LEFT + index * wide, float(ground)
        for name, value in zip(("first", "second"), column, strict=False):
            y -= max(value, 0.0) * scale
            shapes.append(
                f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{max(wide - 0.4, 0.8):.1f}" '
                f'height="{max(value, 0.0) * scale:.1f}"/>'
            )
    shapes += [
        f'<circle class="mark" cx="{LEFT + (index + 0.5) * wide:.1f}" r="1.8" '
        f'cy="{ground - dot * scale:.1f}"/>'
        for index, dot in enumerate(dots)
        if dot
    ]
    first, last = (f"step {records[at].step}" for at in (0, -1))
    shapes += [_text(LEFT, HEIGHT - 4, first), _text(WIDTH, HEIGHT - 4, last, "end")]
    label = escape(f"{title}, {first} to {last}: {caption}")
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
    return (
        f"<h2>{escape(title)}</h2><figure><svg {frame}>{''.join(shapes)}</svg>"
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _known(value: Value, records: Iterable[Record]) -> list[float]:
    return [each for each in map(value, records) if math.isfinite(each)]
