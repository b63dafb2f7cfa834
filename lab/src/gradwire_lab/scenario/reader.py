"""The reader makes dataclasses from tables of TOML or JSON, and refuses what does not fit them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
        kind: the dataclass, whose fields may be made by `key`.
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
    hints = _hints(kind)  # type: ignore[arg-type]
    values = {}
    for name, field in fields.items():
        place = _inside(where, name)
        if name in table:
            values[name] = _value(hints[name], table[name], field.metadata, place)
        elif field.default is MISSING and field.default_factory is MISSING:
            meaning = field.metadata.get("meaning")
            raise ScenarioError(f"{place}: missing" + (f"; {meaning}" if meaning else ""))
    try:
        return kind(**values)
    except ScenarioError as error:
        raise ScenarioError(f"{where.removesuffix(':')}: {error}") from None


_hints = functools.cache(typing.get_type_hints)


def _inside(where: str, name: object) -> str:
    """Return the place of a key: that of a file's own follows the file and a colon."""
    return f"{where} {name}" if where.endswith(":") else f"{where}.{name}"


def _value(hint: Any, value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        hint = next(each for each in inner if each is not type(None))
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin in (list, tuple):
        return _list(origin, inner, value, metadata, where)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ScenarioError(f"{where}={value!r}: a table of keys is expected")
        return {
            name: _value(inner[1], each, metadata, f"{where}.{name}")
            for name, each in value.items()
        }
    return _scalar(hint, value, metadata, where)


def _list(origin: Any, inner: Any, value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    if not isinstance(value, list):
        raise ScenarioError(f"{where}={value!r}: a list is expected")
    if not metadata and all(type(each) is inner[0] for each in value):
        return origin(value)  # the many samples of a run
    hints = itertools.repeat(inner[0])
    if origin is tuple and ... not in inner:
        hints = inner
        if len(value) != len(inner):
            raise ScenarioError(f"{where}={value!r}: {len(inner)} values are expected")
    return origin(
        _value(each, one, metadata, f"{where}[{n}]")
        for n, (each, one) in enumerate(zip(hints, value, strict=False))
    )


def _scalar(hint: Any, value: Any, metadata: Mapping[str, Any], where: str) -> Any:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    fits = isinstance(value, hint) or (hint is float and isinstance(value, int))
    if not fits or (isinstance(value, bool) and hint is not bool):
        raise ScenarioError(f"{where}={value!r}: {names[hint]} is expected")
    if hint in (int, float):
        _check_number(value, metadata, where)
        return hint(value)
    if metadata.get("line") and not is_line(value):
        raise ScenarioError(f"{where}={value!r}: a text of one line is expected")
    choices = metadata.get("choices", ())
    if choices and value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ScenarioError(f"{where}={value!r}: allowed are {allowed}{suggestion(value, choices)}")
    return value


def _check_number(value: float, metadata: Mapping[str, Any], where: str) -> None:
    low, high, above = (metadata.get(name) for name in ("low", "high", "above"))
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
