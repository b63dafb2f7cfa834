"""Marks of runs that are not whole: cells and seeds that are missing, failed or of another form."""

from __future__ import annotations

import pytest

from gradwire_lab.report.words import row, verdict
from gradwire_lab.run.limits import limit
from gradwire_lab.run.marks import Measured, judge
from gradwire_lab.run.model import CellRun, Track
from gradwire_lab.run.summary import summarize
from gradwire_lab.scenario import Cell, Contestant, Mark, Scenario, Work
from gradwire_lab.scenario.network import Bandwidth, Topology
from lab_results import summary

OURS = Contestant("ours", "gradwire")
WHOLE, PART = True, False


def scenario(**fields: object) -> Scenario:
    return Scenario(
        name="test",
        title="test",
        work=Work("all_reduce", bytes=4_000_000),
        topology=Topology(workers=2),
        contestants=(OURS,),
        **fields,  # type: ignore[arg-type]
    )


def cells(*found: tuple[float | None, bool]) -> list[Measured]:
    """A cell for each median, or none, and whether all of its seeds were run."""
    return [
        Measured(
            Cell({"axis": str(place)}, scenario()),
            {} if median is None else {"ours": summary(median_s=median)},
            complete,
        )
        for place, (median, complete) in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("wanted", "scope", "found", "met"),
    [
        ("at_most", "every", [(1.0, WHOLE), (1.9, WHOLE)], True),
        ("at_most", "every", [(1.0, WHOLE), (1.9, PART)], None),
        ("at_most", "every", [(1.0, WHOLE), (2.1, PART)], None),
        ("at_most", "every", [(2.1, WHOLE), (None, PART)], False),
        # The largest: what is missing could be larger, which settles it one way only.
        ("at_most", "max", [(1.0, WHOLE), (None, PART)], None),
        ("at_most", "max", [(2.1, WHOLE), (None, PART)], False),
        ("at_least", "max", [(1.0, WHOLE), (None, PART)], None),
        ("at_least", "max", [(2.1, WHOLE), (None, PART)], True),
        ("at_least", "max", [(2.1, PART), (1.0, WHOLE)], None),
        ("at_least", "max", [(1.0, WHOLE), (1.9, WHOLE)], False),
        ("at_least", "mean", [(1.0, WHOLE), (None, PART)], None),
        ("at_least", "mean", [(9.0, WHOLE), (1.0, PART)], None),
        ("at_least", "mean", [(3.0, WHOLE), (1.0, WHOLE)], True),
    ],
)
def test_what_is_missing_leaves_a_mark_open_where_it_could_change_it(
    wanted: str, scope: str, found: list[tuple[float | None, bool]], met: bool | None
) -> None:
    mark = Mark("t", "ours", scope=scope, **{wanted: 2.0})  # type: ignore[arg-type]
    assert judge(mark, cells(*found)).met is met


def test_a_mark_that_is_open_says_how_it_stands() -> None:
    mark = Mark("t", "ours", at_most=2.0)
    assert verdict(judge(mark, cells((1.0, WHOLE), (None, PART)))).endswith("so far met")
    assert verdict(judge(mark, cells((2.1, PART)))).endswith("so far missed by 5.0 %")
    assert verdict(judge(mark, cells((None, PART)))) == "not measured"


def test_over_another_cell_both_count() -> None:
    mark = Mark("t", "ours", over_cell={"axis": "0"}, at_most=2.0, where={"axis": "1"})
    assert judge(mark, cells((1.0, WHOLE), (1.5, WHOLE))).met is True
    assert judge(mark, cells((1.0, PART), (1.5, WHOLE))).met is None


def test_a_run_of_another_form_has_no_limit() -> None:
    run = CellRun(0.0, {"ours": Track(seconds=[1.0], job_s=1.0)})
    known = summarize(OURS, scenario(), {0: run})
    other = summarize(OURS, scenario(), {0: run}, limited=False)
    assert known is not None
    assert other is not None
    assert known.over_limit == pytest.approx(1.0 / 0.032)
    assert other.limit_s is None
    assert "31.25" in row(known)
    assert row(other).count("31.25") == 0
    mark = Mark("t", "ours", over=("limit",), at_most=50.0)
    cell = Cell({"axis": "a"}, scenario())
    assert judge(mark, [Measured(cell, {"ours": known})]).met is True
    assert judge(mark, [Measured(cell, {"ours": other})]).value is None


def test_goodput_counts_what_was_delivered_beside_whole_gradients_at_the_limit() -> None:
    track = Track(seconds=[0.04, 0.04], job_s=0.08, delivered=[[1.0, 0.8], [0.6, 0.8]])
    found = summarize(OURS, scenario(), {0: CellRun(0.0, {"ours": track})})
    assert found is not None
    assert found.throughput_bps == pytest.approx(2 * 32e6 / 0.04)
    assert found.goodput_bps == pytest.approx(0.8 * found.throughput_bps)
    mark = Mark("t", "ours", quantity="goodput", over=("limit",), at_least=0.85)
    judged = judge(mark, [Measured(Cell({"axis": "a"}, scenario()), {"ours": found})])
    assert judged.value == pytest.approx(0.8 * 0.032 / 0.04 * 1514 / 1432)
    assert judged.met is False


def test_of_rates_that_change_the_highest_is_the_limit() -> None:
    changing = scenario(bandwidth=Bandwidth(rates=(50e6, 2e9, 1e9), every_s=1.0))
    assert limit(changing, 4_000_000, 0.0) == pytest.approx(0.016)
