"""A scenario file's short form is its table ``quick`` merged over the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire_lab.scenario.mark import LIMIT
from gradwire_lab.scenario.reader import ScenarioError

__all__ = ["merge_short"]


def merge_short(raw: Mapping[str, Any], short: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the tables of the short form.

    Args:
        raw: the file's, without ``quick``.
        short: the table ``quick``: `only` names the contestants that take part; its grid takes the
            other's place.
        where: the file, for errors.

    Raises:
        ScenarioError: `only` names nobody, or somebody unknown.
    """
    changes = dict(short)
    only = changes.pop("only", None)
    merged = _merge(raw, changes)
    if "grid" in changes:
        merged["grid"] = changes["grid"]
    if only is None:
        return merged
    tables = merged.get("contestants", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        return merged  # the reader of contestants raises the error
    known = [each.get("name") for each in tables]
    if not isinstance(only, list) or not only:
        raise ScenarioError(
            f"{where}: quick.only={only!r}: a list of one or more contestants is expected, of "
            f"{known}"
        )
    for name in only:
        if name not in known:
            raise ScenarioError(f"{where}: quick.only={name!r}: contestants are {known}")
    merged["contestants"] = [each for each in tables if each.get("name") in only]
    marks = merged.get("marks", [])
    if isinstance(marks, list):
        merged["marks"] = [mark for mark in marks if _takes_part(mark, [*only, LIMIT])]
    return merged


def _takes_part(mark: Any, names: list[Any]) -> bool:
    """Return whether all that a mark compares take part; what is no mark stays, for its reader."""
    if not isinstance(mark, dict) or not isinstance(mark.get("over", []), list):
        return True
    return all(name in names for name in [mark.get("contestant"), *mark.get("over", [])])


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        known = merged.get(name)
        both = isinstance(value, dict) and isinstance(known, dict)
        merged[name] = _merge(known, value) if both else value  # type: ignore[arg-type]
    return merged
