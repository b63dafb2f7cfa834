"""`gradwire bench networks`: what it prints, that a seed repeats, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app
from gradwire_lab.bench.networks import GROUPS, far, run_cell

RUNNER = CliRunner()


def test_a_seed_gives_the_same_figures() -> None:
    cell = next(far())
    first, second = (run_cell(cell, seed=3) for _ in range(2))
    assert first == second
    assert not first.failure
    assert len(first.times) == cell.judged
    assert min(first.first, *first.times) >= 1.0
    assert 0 <= first.drops < 1


def test_json_has_a_row_for_each_network() -> None:
    args = ["networks", "incast", "--only", "16 workers", "--seeds", "2", "--json"]
    result = RUNNER.invoke(app, args)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["group"] == "incast"
    assert 0.95 < row["time"] <= row["worst"]
    assert 0 <= row["drops"] < 1


def test_a_table_names_each_network() -> None:
    result = RUNNER.invoke(app, ["networks", "far", "--seeds", "1"])
    assert result.exit_code == 0, result.output
    assert "10 ms away" in result.stdout


@pytest.mark.parametrize(
    "args", [["nowhere"], ["--only", "no such network"], ["far", "--seeds", "0"]]
)
def test_what_cannot_be_is_refused_before_the_run(args: list[str]) -> None:
    result = RUNNER.invoke(app, ["networks", *args])
    assert result.exit_code == 2


def test_networks_of_a_group_have_names_of_their_own() -> None:
    for name, cells in GROUPS.items():
        names = [cell.name for cell in cells()]
        assert len(set(names)) == len(names) > 0, name
