"""Bounds by tensor: name patterns, and the regions that a bucket gets from them."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence

from gradwire.errors import ConfigError, suggestion
from gradwire.plans import Region, TensorSlot, check_bound

__all__ = ["check_patterns", "check_table", "find_bound", "regions_by_tensor"]


def check_table(name: str, table: Mapping[str, float]) -> None:
    """Raises ConfigError unless `table` maps name patterns to bounds; `name` is the setting's."""
    if not table:
        raise ConfigError(f"{name}={{}}: at least one pattern with its bound is needed")
    for pattern, bound in table.items():
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"{name}: pattern {pattern!r}: a tensor's name, * and ? allowed")
        check_bound(f"{name}[{pattern!r}]", bound)


def check_patterns(name: str, table: Mapping[str, float], tensors: Sequence[str]) -> None:
    """Raises ConfigError for a pattern that matches none of the model's tensors."""
    for pattern in table:
        if not any(fnmatch.fnmatchcase(tensor, pattern) for tensor in tensors):
            raise ConfigError(
                f"{name}[{pattern!r}]: matches no tensor of the model"
                f"{suggestion(pattern, tensors)}; it has {len(tensors)}, such as "
                f"{', '.join(map(repr, tensors[:3]))}"
            )


def find_bound(table: Mapping[str, float], tensor: str, default: float) -> float:
    """The bound of the first pattern in `table` that matches the tensor's name, else `default`."""
    for pattern, bound in table.items():
        if fnmatch.fnmatchcase(tensor, pattern):
            return bound
    return default


def regions_by_tensor(
    slots: Sequence[TensorSlot],
    bounds: Sequence[float],
    grid_bounds: Sequence[float],
    chunk_elements: int,
) -> tuple[Region, ...]:
    """Makes the regions of a bucket whose tensors have a bound each.

    slots: in order, without gaps. bounds: of this step. grid_bounds: those that decide which
    tensors share a region, alike in all phases, so that the chunk grid stays. As in
    `gradwire.plans.pool`, a tensor of fewer than 1/bound chunks is merged with its neighbours,
    first within its layer; the strictest bound of its tensors is the region's. Tensors that are
    critical by `grid_bounds` share regions among themselves only.
    """

    def enough(group: list[int]) -> bool:
        chunks = sum(slots[i].length for i in group) // chunk_elements
        return chunks >= math.ceil(1.0 / min(grid_bounds[i] for i in group) - 1e-9)

    def mergeable(left: list[int], right: list[int], within_layer: bool) -> bool:
        if (grid_bounds[left[-1]] == 0.0) != (grid_bounds[right[0]] == 0.0):
            return False
        if within_layer and slots[left[-1]].layer != slots[right[0]].layer:
            return False
        return grid_bounds[right[0]] == 0.0 or not enough(left) or not enough(right)

    groups = [[i] for i in range(len(slots))]
    for within_layer in (True, False):
        merged: list[list[int]] = []
        for group in groups:
            if merged and mergeable(merged[-1], group, within_layer):
                merged[-1].extend(group)
            else:
                merged.append(list(group))
        groups = merged
    return tuple(
        Region(
            slots[group[0]].offset,
            sum(slots[i].length for i in group),
            min(bounds[i] for i in group),
            slots[group[0]].name
            if len(group) == 1
            else f"{slots[group[0]].name} … {slots[group[-1]].name}",
        )
        for group in groups
    )
