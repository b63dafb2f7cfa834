"""Findings: what a check found, in one sentence, and what to type."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Level", "as_json", "exit_status", "lines", "summary", "worst"]

Level = Literal["ok", "warning", "problem"]
"""A job runs well (ok), runs with a handicap (warning), or does not run (problem)."""

LEAST_COLUMNS = 72

LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        level: How bad it is.
        about: What was checked, in a word or two.
        text: What was found, as a sentence.
        command: What to type; "" where nothing need be typed.
    """

    level: Level
    about: str
    text: str
    command: str = ""


def worst(findings: Iterable[Finding]) -> Level:
    """Returns the worst level among findings; "ok" where there are none."""
    return max((each.level for each in findings), key=LEVELS.index, default="ok")


def exit_status(findings: Iterable[Finding]) -> int:
    """Returns the exit status: 1 where there is a problem, else 0."""
    return 1 if worst(findings) == "problem" else 0


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the status and the findings, for --json."""
    return {"status": worst(findings), "findings": [asdict(each) for each in findings]}


def lines(findings: Sequence[Finding]) -> list[str]:
    """Returns findings as lines of text, what to type below each."""
    width = max((len(each.about) for each in findings), default=0)
    indent = " " * (width + 13)
    columns = max(shutil.get_terminal_size((100, 24)).columns, LEAST_COLUMNS)
    found: list[str] = []
    for each in findings:
        head = f"  {each.level:8} {each.about:{width}}  "
        found += textwrap.wrap(
            head + each.text,
            columns,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        # What is typed stays in one line, so that it can be copied.
        found += [f"{indent}type: {line}" for line in each.command.splitlines()]
    return found


def summary(findings: Sequence[Finding]) -> str:
    """Returns one sentence that counts problems and warnings."""
    counts = [
        f"{count} {level}{'s' if count > 1 else ''}"
        for level in ("problem", "warning")
        if (count := sum(each.level == level for each in findings))
    ]
    return " and ".join(counts) + "." if counts else "All is well."
