"""Marks that no run of a file could measure are refused before hours are spent on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_lab.scenario.mark import P99_SAMPLES, Mark
from gradwire_lab.scenario.reader import ScenarioError
from gradwire_lab.scenario.schema import Cell, Scenario

__all__ = ["check_measurable", "labels_of"]


def check_measurable(cells: Sequence[Cell]) -> None:
    """Check that the marks of a long form can be measured.

    Raises:
        ScenarioError: names the mark and what it lacks.
    """
    for place, mark in enumerate(cells[0].scenario.marks):
        try:
            _check(mark, cells)
        except ScenarioError as error:
            raise ScenarioError(f"marks[{place}] ({mark.text}): {error}") from None


def labels_of(wanted: Any) -> list[Any]:
    """Return the labels that a mark names on an axis: one, or a list of them."""
    return wanted if isinstance(wanted, list) else [wanted]


def _check(mark: Mark, cells: Sequence[Cell]) -> None:
    _check_labels("where", mark.where, cells)
    for axis, wanted in mark.over_cell.items():
        if isinstance(wanted, list):
            raise ScenarioError(f"over_cell.{axis}={wanted!r}: one label is expected")
    _check_labels("over_cell", mark.over_cell, cells)
    found = [
        cell
        for cell in cells
        if all(cell.labels[axis] in labels_of(wanted) for axis, wanted in mark.where.items())
    ]
    faults = [_fault(mark, cell.scenario) for cell in found]
    kept = [fault for fault in faults if fault is not None]
    if kept and (mark.scope != "max" or len(kept) == len(faults)):
        place = next(cell.name for cell, fault in zip(found, faults, strict=True) if fault)
        raise ScenarioError(f"can never be measured in cell {place}: {kept[0]}")


def _check_labels(key: str, wanted: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    for axis, value in wanted.items():
        if axis not in cells[0].labels:
            raise ScenarioError(f"{key}.{axis}: is no axis; axes are {[*cells[0].labels]}")
        known = list(dict.fromkeys(cell.labels[axis] for cell in cells))
        for label in labels_of(value) or [value]:
            if label not in known:
                raise ScenarioError(f"{key}.{axis}={label!r}: matches no cell; labels are {known}")


def _fault(mark: Mark, scenario: Scenario) -> str | None:
    """Return why a cell will never give the mark's number; None if it may."""
    work, quantity = scenario.work, mark.quantity
    training = work.kind == "training"
    if quantity == "final_loss" and not training:
        return f"quantity='final_loss' with work.kind={work.kind!r}: only training has one"
    model = scenario.model
    if quantity == "time_to_loss" and not (training and (model.target_loss or model.target_of)):
        return "quantity='time_to_loss' without model.target_loss or model.target_of"
    if quantity in ("throughput", "goodput") and training:
        return f"quantity={quantity!r} with work.kind='training': that has steps_per_s"
    if quantity == "rival_goodput" and not scenario.rivals.streams:
        return "quantity='rival_goodput' with rivals.streams=0: there are no rivals"
    if mark.difference and len(work.seeds) < 2:
        return f"difference=true with work.seeds={list(work.seeds)!r}: two or more are needed"
    samples = work.timed * len(work.seeds)
    if quantity == "time_p99" and samples < P99_SAMPLES:
        return (
            f"quantity='time_p99' of {samples} samples (work.rounds={work.rounds}, "
            f"{len(work.seeds)} seeds): {P99_SAMPLES} are needed"
        )
    if mark.share_of_cap is not None:
        other = next(each for each in scenario.contestants if each.name == mark.over[0])
        if training or not other.loosest_bound(work.kind):
            return (
                f"share_of_cap={mark.share_of_cap!r} over {other.name!r}: takes a contestant of "
                "pushes or all-reduces with a bound above 0"
            )
    return None
