"""The keys of scenario files are listed from the dataclasses that read them."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from gradwire_lab.scenario.reader import MISSING
from gradwire_lab.scenario.schema import Scenario

__all__ = ["COLUMNS", "key_rows"]

COLUMNS = ("key", "default", "allowed", "meaning")


def key_rows() -> list[tuple[str, str, str, str]]:
    """Return every key: its place, default, allowed values and meaning."""
    return list(_rows(Scenario, ""))


def _rows(kind: Any, place: str) -> Iterator[tuple[str, str, str, str]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            hint = next(each for each in typing.get_args(hint) if each is not type(None))
        many = typing.get_origin(hint) is tuple
        inner = typing.get_args(hint)[0] if many else hint
        name = f"{place}{field.name}{'[]' if many and dataclasses.is_dataclass(inner) else ''}"
        if dataclasses.is_dataclass(inner):
            yield from _rows(inner, f"{name}.")
        else:
            yield name, _default(field), _allowed(inner, many, field), field.metadata["meaning"]


def _default(field: dataclasses.Field[Any]) -> str:
    value: Any = field.default
    factory: Any = field.default_factory
    if factory is not MISSING:
        value = factory()
    if value is MISSING:
        return "required"
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _allowed(kind: Any, many: bool, field: dataclasses.Field[Any]) -> str:
    metadata = field.metadata
    names = {int: "whole number", float: "number", str: "text", bool: "true, false", dict: "table"}
    text = names.get(typing.get_origin(kind) or kind, "value")
    if metadata["choices"]:
        text = ", ".join(f'"{word}"' for word in metadata["choices"])
    for limit, sign in (("above", "> "), ("low", "≥ "), ("high", "≤ ")):
        if metadata[limit] is not None:
            text += f", {sign}{metadata[limit]:g}"
    return f"list of: {text}" if many else text
