"""Writes docs/reference/settings.md from the code: each setting and each policy's options.

    python tools/settings_page.py            prints the page
    python tools/settings_page.py --write    writes it

Names, types and defaults are those of the dataclasses, the meanings those of their docstrings.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterable
from pathlib import Path

from gradwire.core.settings import PREFIX, Settings
from gradwire.policies import names, policy_class
from gradwire.policies.base import option_names

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "settings.md"

HEAD = """\
# Settings

This page lists every setting of gradwire, generated from the code by `tools/settings_page.py`.

A setting is given as a keyword argument of `gradwire.attach` or `gradwire.HookState`, or in the
`pg_options` of a process group ([the backend](../guides/backend.md)). A setting that is not given
is read from its environment variable, and one that is set nowhere has its default. An empty
variable counts as unset. A variable that begins with `GRADWIRE_` and names no setting is an error,
except for `GRADWIRE_LAB_…`, `GRADWIRE_DEMO_…`, `GRADWIRE_BENCH_…` and `GRADWIRE_TEST_…`. A variable
for an option that the job's policy does not have is a warning. `GRADWIRE_POLICY=off` wins over the
argument ([off](../guides/choosing-a-policy.md#off)).

Truth values in variables are `1`, `true`, `yes`, `on` and `0`, `false`, `no`, `off`. Tables and
lists can be given as arguments only. The words that the meanings use are explained in
[design.md](../design.md#words).

## The policy

| setting | variable | type | default | meaning |
|---|---|---|---|---|
| `policy` | `GRADWIRE_POLICY` | a name or a policy object | `"adaptive"` | POLICIES |

## Settings of every policy

"""

SHARED = {
    "fill": 'what takes the place of a missing contribution: "zero", "mean" or "momentum" '
    "([policies](../policies.md#fill))",
    "order": 'of the chunks within a push: "shuffled" or "sequential"',
    "pull": 'how results come back: "exact", or "committed" (all workers leave the same part out)',
    "spend": 'which missing chunks may be given up: "anything" or "lost" '
    "([concepts](../concepts.md#what-may-be-lost))",
    "eta": "the relative change of the gradient's norm that makes a phase critical",
    "every": 'how often the detector looks: a number of steps, or "epoch" for each '
    "`attachment.epoch(n)`",
    "strict_steps": "how many steps are exact after the loss rose (`loss_rise`)",
    "detector": 'what the detector looks at: "ours", "paper" or "layers" '
    "([policies](../policies.md#phases))",
}
"""Meanings of what docstrings only point to, or explain beside another name."""


def meanings(docstring: str, known: Iterable[str]) -> dict[str, str]:
    """The text of each name in a docstring that says "name: text" or "name, name: text".

    Both forms are read: entries that follow one another in a paragraph, and a Google-style list.
    """
    text = re.split(r"^\s*(?:Raises|Returns|Examples?):", docstring, flags=re.MULTILINE)[0]
    text = re.sub(r"^\s*(Attributes|Args|Options):\s*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\s+", " ", text)
    word = "(?:" + "|".join(sorted(map(re.escape, known), key=len, reverse=True)) + ")"
    entry = re.compile(rf"(?:(?<=[.:;)] )|(?<=\()|^)({word}(?:, {word})*): ")
    found: dict[str, str] = {}
    hits = list(entry.finditer(text))
    for hit, following in zip(hits, [*hits[1:], None], strict=True):
        end = len(text) if following is None else following.start()
        said = text[hit.end() : end].strip(" (").removesuffix(".").removesuffix(";")
        if text[hit.start() - 1 : hit.start()] == "(":
            said = said.removesuffix(")")
        found |= dict.fromkeys(hit[1].split(", "), said)
    return found


def described(docstring: str, name: str, found: dict[str, str]) -> str:
    """What the table says of a setting; a pointer to another page gives way to its words here."""
    said = found.get(name, "")
    if name in SHARED and (not said or "docs/" in said or "parts.phases" in said):
        return SHARED[name]
    return said


def cell(text: str) -> str:
    """A text as a cell of a Markdown table takes it."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(part if part.startswith("`") else part.replace("*", r"\*") for part in parts)


def kind(hint: object) -> str:
    """A type in words."""
    words = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if hint in words:
        return words[typing.cast(type, hint)]
    if hint is type(None):
        return "none"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(
            f'"{word}"' if isinstance(word, str) else str(word).lower() for word in inner
        )
    if origin is tuple:
        return "pair"
    if origin is dict:
        return "table"
    if inner and origin is not None and "Sequence" not in str(origin):
        parts = [kind(part) for part in inner if "PathLike" not in str(part)]
        rest = [part for part in parts if part != "none"]
        return ", ".join([*rest, *(["none"] if "none" in parts else [])])
    return "list" if "Sequence" in str(hint) else str(hint)


def default(value: object) -> str:
    """A default as Python writes it, with the quotes of these pages."""
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def table(kind_of: type, wanted: Iterable[str]) -> list[str]:
    """The rows of one dataclass."""
    hints = typing.get_type_hints(kind_of)
    fields = {field.name: field for field in dataclasses.fields(kind_of)}
    docstring = inspect.cleandoc(kind_of.__doc__ or "")
    found = meanings(docstring, fields)
    lines = ["| setting | variable | type | default | meaning |", "|---|---|---|---|---|"]
    for name in wanted:
        said = described(docstring, name, found)
        if not said:
            raise SystemExit(f"{kind_of.__name__}: the docstring says nothing of {name!r}")
        row = [
            f"`{name}`",
            f"`{PREFIX}{name.upper()}`",
            cell(kind(hints[name])),
            default(fields[name].default),
            cell(said),
        ]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def page() -> str:
    """The whole page."""
    policies = [policy_class(name) for name in names()]
    listed = ", ".join(f'`"{policy.name}"`' for policy in policies)
    said = f'what may be lost, and when a transfer ends: {listed}; `"off"` leaves DDP alone'
    lines = [HEAD.replace("POLICIES", said)]
    lines[0] = lines[0].rstrip() + "\n"
    lines += table(Settings, (field.name for field in dataclasses.fields(Settings)))
    for policy in policies:
        options = option_names(policy)
        lines += ["", f"## Options of `{policy.name}`", ""]
        lines += table(policy, options) if options else ["The policy has no options."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the page, or writes it."""
    if sys.argv[1:] == ["--write"]:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
