"""Regions of a bucket: tables of bounds by tensor name, and pools of tensors that are small."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from gradwire.core.checks import check_bound
from gradwire.core.errors import ConfigError, suggestion
from gradwire.core.plan import REMEMBERED
from gradwire.core.regions import Region, Regions, TensorSlot


def check_table(name: str, table: Mapping[str, float]) -> None:
    """Checks that a table maps name patterns to bounds; raises ConfigError naming the setting."""
    if not table:
        raise ConfigError.about(
            f"{name}={{}}",
            "at least one pattern with its bound is needed",
            setting=name,
            value=table,
        )
    for pattern, bound in table.items():
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError.about(
                f"{name}",
                f"pattern {pattern!r}: a tensor's name, * and ? allowed",
                setting=name,
                value=pattern,
            )
        check_bound(f"{name}[{pattern!r}]", bound)


def check_patterns(name: str, table: Mapping[str, float], tensors: Sequence[str]) -> None:
    """Checks a table's patterns against a model.

    Args:
        name: Name of the setting, for errors.
        table: Bounds by pattern; the first pattern that matches a tensor applies.

    Raises:
        ConfigError: A pattern matches no tensor; or it has no effect, because one that stands
            before it matches all of its tensors. A broader pattern after narrower ones is allowed
            even if nothing is left for it.
    """
    matches: dict[str, set[str]] = {}
    for pattern, bound in table.items():
        found = {tensor for tensor in tensors if fnmatch.fnmatchcase(tensor, pattern)}
        if not found:
            raise ConfigError.about(
                f"{name}[{pattern!r}]",
                f"matches no tensor of the model{suggestion(pattern, tensors)}; it has "
                f"{len(tensors)}, such as {', '.join(map(repr, tensors[:3]))}",
                setting=f"{name}[{pattern!r}]",
                value=bound,
            )
        for earlier, others in matches.items():
            narrower = found <= others and not fnmatch.fnmatchcase(earlier, pattern)
            if narrower and bound != table[earlier]:
                raise ConfigError.about(
                    f"{name}[{pattern!r}]={bound!r} never counts",
                    f"{earlier!r} stands before it and matches all of its tensors, and the first "
                    "pattern that matches a tensor applies; put the narrower one first",
                    setting=name,
                    value=pattern,
                )
        matches[pattern] = found


class BoundTable:
    """The bound of each tensor: that of the first pattern that matches its name.

    Args:
        default: The bound of tensors that no pattern matches.
    """

    def __init__(self, table: Mapping[str, float], default: float) -> None:
        self._table = dict(table)
        self._default = default
        self._known: dict[str, float] = {}

    def __call__(self, tensor: str) -> float:
        known = self._known.get(tensor)
        if known is None:
            hits = (b for p, b in self._table.items() if fnmatch.fnmatchcase(tensor, p))
            known = self._known[tensor] = next(hits, self._default)
        return known


def pool(slots: Iterable[TensorSlot], bound: float, chunk_elements: int) -> Regions:
    """Makes one region per tensor with a common bound, and merges tensors that are small.

    A bound is rounded down to whole chunks, so a tensor of fewer than 1/bound chunks could never
    lose one. Such a tensor is merged with its neighbours, first within its layer, until the region
    has 1/bound chunks (docs/design.md, invariant 1). At bound 0 nothing is merged.

    Args:
        slots: the bucket's tensors in order, without gaps.
        bound: the share of a region's elements, in [0, 1), that may be missing.

    Returns:
        The regions; the same object for the same arguments.
    """
    return _pool(slots if isinstance(slots, tuple) else tuple(slots), bound, chunk_elements)


def regions_by_tensor(
    slots: Sequence[TensorSlot],
    bounds: Sequence[float],
    grid_bounds: Sequence[float],
    chunk_elements: int,
) -> Regions:
    """Makes the regions of a bucket whose tensors have a bound each.

    Small tensors are merged as by `pool`, and the strictest bound of a region's tensors is its
    bound. Tensors that are critical by `grid_bounds` share regions among themselves only.

    Args:
        slots: the bucket's tensors in order, without gaps.
        grid_bounds: the bounds that decide which tensors share a region. They are the same in all
            phases, so that the chunk grid stays.

    Returns:
        The regions; the same object for the same arguments.
    """
    return _regions(
        slots if isinstance(slots, tuple) else tuple(slots),
        tuple(bounds),
        tuple(grid_bounds),
        chunk_elements,
    )


@functools.lru_cache(maxsize=REMEMBERED)
def _pool(slots: tuple[TensorSlot, ...], bound: float, chunk_elements: int) -> Regions:
    if bound <= 0.0:
        return Regions(Region(slot.offset, slot.length, bound, slot.name) for slot in slots)
    bounds = (bound,) * len(slots)
    return _regions(slots, bounds, bounds, chunk_elements)


@functools.lru_cache(maxsize=REMEMBERED)
def _regions(
    slots: tuple[TensorSlot, ...],
    bounds: tuple[float, ...],
    grid_bounds: tuple[float, ...],
    chunk_elements: int,
) -> Regions:
    return Regions(
        Region(
            slots[first].offset,
            slots[last].offset + slots[last].length - slots[first].offset,
            min(bounds[first : last + 1]),
            slots[first].name if first == last else f"{slots[first].name} … {slots[last].name}",
        )
        for first, last in _pools(slots, grid_bounds, chunk_elements)
    )


@functools.lru_cache(maxsize=REMEMBERED)
def _pools(
    slots: tuple[TensorSlot, ...], bounds: tuple[float, ...], chunk_elements: int
) -> tuple[tuple[int, int], ...]:
    """Returns the first and last tensor of each region."""

    def enough(first: int, last: int) -> bool:
        elements = slots[last].offset + slots[last].length - slots[first].offset
        needed = math.ceil(1.0 / min(bounds[first : last + 1]) - 1e-9)
        return elements // chunk_elements >= needed

    def mergeable(left: tuple[int, int], right: tuple[int, int], within_layer: bool) -> bool:
        if (bounds[left[1]] == 0.0) != (bounds[right[0]] == 0.0):
            return False
        if within_layer and slots[left[1]].layer != slots[right[0]].layer:
            return False
        return bounds[right[0]] == 0.0 or not enough(*left) or not enough(*right)

    groups = [(i, i) for i in range(len(slots))]
    for within_layer in (True, False):
        merged: list[tuple[int, int]] = []
        for group in groups:
            if merged and mergeable(merged[-1], group, within_layer):
                merged[-1] = (merged[-1][0], group[1])
            else:
                merged.append(group)
        groups = merged
    return tuple(groups)
