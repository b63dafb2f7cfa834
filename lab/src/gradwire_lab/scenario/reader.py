"""The reader makes dataclasses from TOML tables; it refuses unknown keys and bad values."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gradwire.core.errors import suggestion

__all__ = ["MISSING", "ScenarioError", "build", "default_of", "is_line", "key"]

MISSING: Any = dataclasses.MISSING
T = TypeVar("T")


class ScenarioError(ValueError):
    """A scenario cannot be run; the message names file, key, value and what is allowed."""


def key(
    default: Any,
    meaning: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    line: bool = False,
) -> Any:
    """Make a field of a table.

    Args:
        default: its value where the file names none; `MISSING` if the file must.
        meaning: a line for the documentation, units included.
        low: smallest number allowed.
        high: largest number allowed.
        above: a number that must be exceeded.
        choices: the words allowed.
        line: whether a text must be one line, as tables and lists have it.
    """
    metadata = {
        "meaning": meaning,
        "low": low,
        "high": high,
        "above": above,
        "choices": tuple(choices),
        "line": line,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(kind: type, name: str) -> Any:
    """Return what a field made by `key` holds where the file names nothing."""
    field = next(each for each in dataclasses.fields(kind) if each.name == name)
    factory: Any = field.default_factory
    return field.default if factory is MISSING else factory()


def is_line(text: str) -> bool:
    """Return whether a text is one line, without control characters."""
    return all(unicodedata.category(each) not in ("Cc", "Zl", "Zp") for each in text)


def build(kind: type[T], table: Any, where: str) -> T:
    """Make a dataclass from a table.

    Args:
        kind: the dataclass, whose fields are made by `key`.
        table: the table as the TOML parser gave it.
        where: the file and the table's name, for errors; "file:" for the file's own keys.

    Raises:
        ScenarioError: a key or a value is not allowed; also when the dataclass itself refuses.
    """
    if not isinstance(table, Mapping):
        raise ScenarioError(f"{where}={table!r}: a table of keys is expected")
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in fields:
            known = ", ".join(fields)
            raise ScenarioError(
                f"{_inside(where, name)}: unknown key; known are {known}"
                f"{suggestion(str(name), fields)}"
            )
    hints = typing.get_type_hints(kind)
    values = {}
    for name, field in fields.items():
        place = _inside(where, name)
        if name in table:
            values[name] = _value(hints[name], table[name], field.metadata, place)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ScenarioError(f"{place}: missing; {field.metadata['meaning']}")
    try:
        return kind(**values)
    except ScenarioError as error:
        raise ScenarioError(f"{where.removesuffix(':')}: {error}") from None


def _inside(where: str, name: object) -> str:
    """Return the place of a key: that of a file's own follows the file and a colon."""
    return f"{where} {name}" if where.endswith(":") else f"{where}.{name}"


def _value(hint: Any, value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
        origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin in (list, tuple):
        inner = typing.get_args(hint)[0]
        if not isinstance(value, list):
            raise ScenarioError(f"{where}={value!r}: a list is expected")
        made = [_value(inner, each, metadata, f"{where}[{n}]") for n, each in enumerate(value)]
        return tuple(made) if origin is tuple else made
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ScenarioError(f"{where}={value!r}: a table of keys is expected")
        return dict(value)
    return _scalar(hint, value, metadata, where)


def _scalar(hint: Any, value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    fits = isinstance(value, hint) or (hint is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and hint is not bool):
        raise ScenarioError(f"{where}={value!r}: {names[hint]} is expected")
    if hint in (int, float):
        _check_number(value, metadata, where)
        return hint(value)
    if metadata["line"] and not is_line(value):
        raise ScenarioError(f"{where}={value!r}: a text of one line is expected")
    choices = metadata["choices"]
    if choices and value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ScenarioError(f"{where}={value!r}: allowed are {allowed}{suggestion(value, choices)}")
    return value


def _check_number(value: float, metadata: Mapping[str, Any], where: str) -> None:
    low, high, above = metadata["low"], metadata["high"], metadata["above"]
    limits = [
        text
        for limit, text in (
            (above, f"above {above}"),
            (low, f"{low} or more"),
            (high, f"{high} at most"),
        )
        if limit is not None
    ]
    inside = (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    if not inside:
        raise ScenarioError(f"{where}={value!r}: must be {' and '.join(limits) or 'finite'}")
