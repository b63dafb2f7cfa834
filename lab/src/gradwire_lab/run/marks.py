"""A scenario's marks are computed from what was measured, never assumed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire_lab.run.limits import probe_cap
from gradwire_lab.run.model import Judgement, MarkedCell, Quantities, Summary
from gradwire_lab.run.summary import interval
from gradwire_lab.scenario.load import Cell
from gradwire_lab.scenario.mark import LIMIT, QUANTITIES, Mark
from gradwire_lab.scenario.measurable import labels_of

__all__ = ["Measured", "judge", "unjudged"]

_MORE_IS_BETTER = {"throughput", "goodput", "steps_per_s", "rival_goodput"}

_TAIL = 0.25
"""Share of the wanted tail by which a tuned one may differ; with more it is another cell."""


@dataclass(frozen=True)
class Measured:
    """A measured cell has its contestants' summaries.

    Attributes:
        cell: the cell of the scenario.
        summaries: the summaries by contestant.
        complete: whether they are of all seeds.
    """

    cell: Cell
    summaries: Mapping[str, Summary]
    complete: bool = True


def judge(mark: Mark, cells: Sequence[Measured]) -> Judgement:
    """Compute a mark: the quotient in each of its cells, and whether it is met.

    A cell whose network was not the one that it asks for leaves the mark open. A quotient is judged
    by its value, all seeds together; a difference by its interval.
    """
    rows = []
    for measured in cells:
        labels = measured.cell.labels
        if all(labels.get(axis) in labels_of(wanted) for axis, wanted in mark.where.items()):
            row = _difference(mark, measured) if mark.difference else _row(mark, measured, cells)
            rows.append(row)
    known = [row for row in rows if row.value is not None]
    result = Judgement(mark.text, mark.difference, rows, mark.scope)
    if not known:
        return result
    if mark.scope == "every":
        shown = max(known, key=lambda row: row.missed_by or 0.0)
        value, wanted, missed, reach = shown.value, shown.wanted, shown.missed_by, shown.interval
    else:
        fold = statistics.fmean if mark.scope == "mean" else max
        value, wanted = (fold([vars(row)[key] for row in known]) for key in ("value", "wanted"))
        missed = _missed(mark, value, wanted)
        seeds = set.intersection(*(set(row.by_seed) for row in known))
        reach = interval([fold([vars(row)["by_seed"][s] for row in known]) for s in seeds])
    return replace(
        result,
        value=value,
        interval=reach,
        wanted=wanted,
        met=_met(mark, rows, missed or 0.0),
        missed_by=max(0.0, missed or 0.0),
    )


def unjudged(found: Judgement, why: str) -> Judgement:
    """Return what `judge` found without its verdicts, which stay open for a reason."""
    cells = [replace(row, met=None, missed_by=None, why=why) for row in found.cells]
    return replace(found, met=None, missed_by=None, cells=cells)


def _met(mark: Mark, rows: Sequence[MarkedCell], missed: float) -> bool | None:
    """Return whether a mark is met; None while a missing cell or seed could change it."""
    settled = [row.met for row in rows if row.complete and row.value is not None]
    if len(settled) == len(rows):
        return missed <= 0
    if False in settled and (
        mark.scope == "every" or (mark.scope == "max" and mark.at_most is not None)
    ):
        return False
    if True in settled and mark.scope == "max" and mark.at_least is not None:
        return True
    return None


def _row(mark: Mark, measured: Measured, cells: Sequence[Measured]) -> MarkedCell:
    row, base = MarkedCell(measured.cell.name, False, measured.complete), None
    if mark.over_cell:
        labels = {**measured.cell.labels, **mark.over_cell}
        base = next((each for each in cells if each.cell.labels == labels), None)
        complete = measured.complete and base is not None and base.complete
        row = replace(row, complete=complete)
    wanted = mark.at_most if mark.at_most is not None else mark.at_least
    if mark.share_of_cap is not None:
        cap = _cap(mark, measured)
        row = replace(row, cap=cap)
        wanted = None if cap is None else mark.share_of_cap * cap
    why = [_other_tail(each) for each in (measured, base) if each is not None]
    if any(why):
        return replace(row, why="; ".join(filter(None, why)))
    value = _quotient(mark, measured, base)
    if value is None or wanted is None:
        return row
    missed = _missed(mark, value, wanted)
    mine = measured.summaries[mark.contestant]
    found = {seed: _quotient(mark, measured, base, seed) for seed in mine.by_seed}
    by_seed = {seed: each for seed, each in found.items() if each is not None}
    return replace(
        row,
        value=value,
        by_seed=by_seed,
        interval=interval(list(by_seed.values())),
        wanted=wanted,
        missed_by=missed,
        met=missed <= 0,
    )


def _quotient(
    mark: Mark, measured: Measured, base: Measured | None, seed: str | None = None
) -> float | None:
    """Compute what the mark compares, for all seeds or for one; None where it is not known.

    Args:
        base: the other cell, where the mark compares with one.
        seed: one of the seeds; all if not given.
    """

    def quantity(of: Measured | None, contestant: str) -> float | None:
        return None if of is None else _quantity(mark, of.summaries.get(contestant), seed)

    value = quantity(measured, mark.contestant)
    other: float | None = 1.0
    if mark.over_cell:
        other = quantity(base, mark.contestant)
    elif mark.over == (LIMIT,):
        limit = "rate_limit_bps" if mark.quantity == "goodput" else "limit_s"
        mine = measured.summaries.get(mark.contestant)
        other = getattr(mine, limit) if mine else None
        if value is not None:
            value -= mark.plus_rtts * measured.cell.scenario.topology.rtt_s
    elif mark.over:
        found = [quantity(measured, name) for name in mark.over]
        known = [each for each in found if each is not None]
        highest = (mark.quantity in _MORE_IS_BETTER) == (mark.pick == "best")
        # The best of the others is known only if all of them were measured.
        complete = len(known) == len(found)
        other = (max(known) if highest else min(known)) if known and complete else None
    if value is None or other is None or (math.isinf(value) and math.isinf(other)):
        return None
    above, below = (other, value) if mark.inverse else (value, other)
    return above / below if below else None


def _other_tail(measured: Measured) -> str | None:
    """Say what is wrong with a cell's tuned tail, as its contestant met it; None if nothing is."""
    tail = measured.cell.scenario.tail
    found = measured.summaries.get(tail.contestant)
    if not tail.ratio or found is None or found.p99_s is None or not found.median_s:
        return None
    reached = found.p99_s / found.median_s
    if abs(reached - tail.ratio) <= _TAIL * tail.ratio:
        return None
    return f"{measured.cell.name}: the tail was {reached:.2f}, wanted {tail.ratio:g}"


def _difference(mark: Mark, measured: Measured) -> MarkedCell:
    """Make the row of a difference: its mean over seeds, and the interval of that."""
    row = MarkedCell(measured.cell.name, True, measured.complete)
    mine, other = (
        _final_losses(measured.summaries.get(name)) for name in (mark.contestant, mark.over[0])
    )
    found = [mine[seed] - other[seed] for seed in mine if seed in other]
    if len(found) < 2 or mark.within is None:
        return row
    reach = interval(found)  # it is None where a loss was no number
    far = math.inf if reach is None else max(map(abs, reach))
    missed = (far - mark.within) / mark.within
    return replace(
        row,
        value=statistics.fmean(found),
        interval=reach,
        wanted=mark.within,
        missed_by=missed,
        met=missed <= 0,
    )


def _final_losses(summary: Summary | None) -> dict[str, float]:
    """Return the final losses by seed, of the seeds that have one."""
    alone = {} if summary is None else summary.by_seed
    return {s: each.final_loss for s, each in alone.items() if each.final_loss is not None}


def _quantity(mark: Mark, summary: Summary | None, seed: str | None = None) -> float | None:
    """Return the mark's quantity, of all seeds or of one; None where it is not known."""
    found: Quantities | None = summary
    if summary is not None and seed is not None:
        found = summary.by_seed.get(seed)
    value: float | None = getattr(found, QUANTITIES[mark.quantity], None)
    if value is None and mark.quantity == "time_to_loss" and found is not None:
        return math.inf if found.final_loss is not None else None  # the loss was never reached
    return value


def _cap(mark: Mark, measured: Measured) -> float | None:
    mine = measured.summaries.get(mark.contestant)
    theirs = [measured.summaries.get(name) for name in mark.over]
    if mine is None or mine.limit_s is None or not theirs or theirs[0] is None:
        return None
    scenario = measured.cell.scenario
    return probe_cap(scenario, scenario.work.bytes, mine.bound or 0.0, theirs[0].bound or 0.0)


def _missed(mark: Mark, value: float, wanted: float) -> float:
    """Return by what share of the wanted value a mark is missed; 0 or less where it is met."""
    missed = (value - wanted) / wanted if mark.at_most is not None else (wanted - value) / wanted
    return math.inf if math.isnan(missed) else missed
