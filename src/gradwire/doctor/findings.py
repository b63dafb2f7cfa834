"""Findings: what a check found, in one sentence, and what to type."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from gradwire.core.errors import ConfigError
from gradwire.core.words import count

Level = Literal["ok", "warning", "problem"]
"""A job runs well (ok), runs with a handicap (warning), or does not run (problem)."""

BESIDE = 40
"""A finding's text of fewer columns than these stands below what was checked, not beside it."""

LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        about: What was checked, in a word or two.
        text: What was found, as a sentence.
        command: What to type; "" where nothing need be typed.
    """

    level: Level
    about: str
    text: str
    command: str = ""


def worst(findings: Iterable[Finding]) -> Level:
    return max((each.level for each in findings), key=LEVELS.index, default="ok")


def exit_status(findings: Iterable[Finding]) -> int:
    return 1 if worst(findings) == "problem" else 0


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"status": worst(findings), "findings": [asdict(each) for each in findings]}


def wrapped(text: str, taken: int = 0) -> list[str]:
    """Returns a text as lines that the terminal holds, beside columns that are taken.

    The terminal's width is read from it, or from COLUMNS; it counts as 100 columns where there is
    no terminal.
    """
    columns = shutil.get_terminal_size((100, 24)).columns
    console = Console(width=max(columns, taken + 1), file=io.StringIO())
    return [line.plain.rstrip() for line in Text(text).wrap(console, console.width - taken)]


def lines(findings: Sequence[Finding]) -> list[str]:
    width = max((len(each.about) for each in findings), default=0)
    beside = shutil.get_terminal_size((100, 24)).columns >= width + 13 + BESIDE
    indent = " " * (width + 13 if beside else 4)
    found: list[str] = []
    for each in findings:
        head = f"  {each.level:8} {each.about:{width}}  "
        text = [indent + line for line in wrapped(each.text, len(indent))]
        if beside:
            text[0] = head + text[0][len(indent) :]
        else:
            text.insert(0, head.rstrip())
        # What is typed stays in one line, so that it can be copied.
        found += [*text, *(f"{indent}type: {line}" for line in each.command.splitlines())]
    return found


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines; all columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"  {row[0]:{widths[0]}}  "
        + "  ".join(f"{text:>{width}}" for text, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def refuse(command: str, error: ConfigError, *, in_json: bool) -> NoReturn:
    """Prints what a command cannot begin with, and ends it."""
    if in_json:
        typer.echo(json.dumps({"status": "error", "setting": error.setting, "error": str(error)}))
    else:
        typer.echo(f"gradwire {command}: {error}", err=True)
    raise typer.Exit(2) from error


def summary(findings: Sequence[Finding]) -> str:
    counts = [
        count(number, level)
        for level in ("problem", "warning")
        if (number := sum(each.level == level for each in findings))
    ]
    return " and ".join(counts) + "." if counts else "All is well."
