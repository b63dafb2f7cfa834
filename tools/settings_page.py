"""Writes docs/reference/settings.md from the code: each setting and each policy's options.

    python tools/settings_page.py            prints the page
    python tools/settings_page.py --write    writes it

Names, types and defaults are those of the dataclasses. The meanings, units and allowed values are
those of their docstrings, whose entries may end with "Unit: …." and "Allowed: ….".
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from gradwire.core.environment import PREFIX
from gradwire.core.settings import Settings, setting_names
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
lists can be given as arguments only. A unit "share" is a part of one: 0.1 is a tenth. [0, 1) means
from 0 to 1 without 1 itself. The words that the meanings use are explained in
[concepts.md](../concepts.md#words).

## The policy

### `policy`

POLICIES

- Type: a name, or a policy object
- Allowed: NAMES
- Default: `"adaptive"`
- Variable: `GRADWIRE_POLICY`
- More: [choosing a policy](../guides/choosing-a-policy.md)
"""

SECTIONS = {
    "Where sums are made, and how packets travel": (
        "route",
        "servers",
        "hosts",
        "interface",
        "port",
        "datagram",
        "dscp",
        "ecn",
        "cores",
        "min_bytes",
    ),
    "Who may speak": ("auth", "key", "key_file"),
    "Limits of time and memory": (
        "rendezvous_timeout",
        "peer_timeout",
        "timeout",
        "memory_limit",
        "on_failure",
    ),
    "Losses, and what follows from them": (
        "error_feedback",
        "max_age",
        "floor",
        "guard",
        "loss_rise",
        "strict_steps",
        "seed",
    ),
    "The report, and other tools": ("report", "export"),
}
"""The settings of every policy, by the section of the page that has them."""

MORE = {
    "servers": "[parameter servers](../guides/servers.md)",
    "hosts": "[several ranks a host](../guides/several-ranks-a-host.md)",
    "interface": "[several hosts](../guides/several-hosts.md#which-network)",
    "port": "[firewalls and MTU](../guides/firewalls-and-mtu.md#ports)",
    "datagram": "[firewalls and MTU](../guides/firewalls-and-mtu.md#mtu)",
    "auth": "[security model](../security-model.md)",
    "key": "[security model](../security-model.md)",
    "key_file": "[security model](../security-model.md)",
    "cores": "[more than one core](../guides/several-hosts.md#more-than-one-core)",
    "dscp": "[firewalls and MTU](../guides/firewalls-and-mtu.md#marks-and-priorities)",
    "peer_timeout": "[how long gradwire waits]"
    "(../guides/when-something-goes-wrong.md#how-long-gradwire-waits)",
    "error_feedback": "[error feedback](../policies.md#error-feedback)",
    "guard": "[the guard](../policies.md#the-guard)",
    "report": "[reading a report](../guides/reading-a-report.md)",
    "export": "[dashboards and loggers](../guides/exports.md)",
    "min_bytes": "[the backend](../guides/backend.md)",
    "fill": "[fill](../policies.md#fill)",
    "spend": "[what may be lost](../concepts.md#what-may-be-lost)",
    "detector": "[phases](../policies.md#phases)",
}
"""Pages that say more of a setting."""


class Meaning(typing.NamedTuple):
    """What a docstring says of a setting: text, then "Unit: …." and "Allowed: …."."""

    text: str
    unit: str
    allowed: str

    @staticmethod
    def read(said: str) -> Meaning:
        """Takes the two last sentences off; either may be absent."""
        text, _, allowed = said.partition(" Allowed: ")
        text, _, unit = text.partition(" Unit: ")
        return Meaning(text.rstrip(".") + ".", unit.rstrip("."), allowed.rstrip("."))


def meanings(docstring: str) -> dict[str, str]:
    """The text of each name in a docstring's section "Attributes"."""
    _, _, rest = docstring.partition("\nAttributes:\n")
    listed = re.match(r"(?:    .*\n?)*", rest)
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", listed[0] if listed else "", re.M)
    return {name: re.sub(r"\s+", " ", said) for name, said in found}


def escaped(text: str) -> str:
    """A text whose stars Markdown leaves alone."""
    parts = re.split(r"(`[^`]*`)", text)
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


def entries(kind_of: type) -> dict[str, Meaning]:
    """What a dataclass's docstring says of each of its fields."""
    said = meanings(inspect.cleandoc(kind_of.__doc__ or ""))
    return {name: Meaning.read(text) for name, text in said.items()}


def section(kind_of: type, wanted: Iterable[str], of: str = "") -> Iterator[str]:
    """The headings of one dataclass's fields, each with its text and its facts."""
    hints = typing.get_type_hints(kind_of)
    fields = {field.name: field for field in dataclasses.fields(kind_of)}
    found = entries(kind_of)
    for name in wanted:
        if name not in found:
            raise SystemExit(f"{kind_of.__name__}: the docstring says nothing of {name!r}")
        said = found[name]
        facts = {
            "Type": kind(hints[name]),
            "Unit": said.unit,
            "Allowed": said.allowed,
            "Default": default(fields[name].default),
            "Variable": f"`{PREFIX}{name.upper()}`",
            "More": MORE.get(name, ""),
        }
        yield from ("", f"### `{name}`{of}", "")
        yield from wrapped(escaped(said.text))
        yield ""
        for fact, value in facts.items():
            if value:
                value = value if fact in ("Default", "Variable", "More") else escaped(value)
                yield from wrapped(f"- {fact}: {value}", "  ")


def wrapped(text: str, indent: str = "") -> list[str]:
    """A paragraph in lines of the pages' length."""
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def page() -> str:
    """The whole page."""
    policies = [policy_class(name) for name in names()]
    listed = ", ".join(f'`"{policy.name}"`' for policy in policies)
    said = 'What may be lost, and when a transfer ends; `"off"` leaves DDP alone.'
    allowed = "\n".join(wrapped(f'- Allowed: {listed}, `"off"`, or an object', "  "))
    head = HEAD.replace("POLICIES", said).replace("- Allowed: NAMES", allowed)
    lines = [head.rstrip()]
    for title, wanted in SECTIONS.items():
        lines += ["", f"## {title}", *section(Settings, wanted)]
    if left := {*setting_names()} - {name for some in SECTIONS.values() for name in some}:
        raise SystemExit(f"no section has {', '.join(sorted(left))}")
    for policy in policies:
        options = option_names(policy)
        lines += ["", f"## Options of `{policy.name}`"]
        if not options:
            lines += ["", "The policy has no options."]
        lines += section(policy, options, f" of `{policy.name}`")
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
