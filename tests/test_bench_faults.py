"""`gradwire bench faults`: the verdict on a job, the cells there are, and some of them in truth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app
from gradwire_lab.faults.cells import Cell, every
from gradwire_lab.faults.ground import Ground
from gradwire_lab.faults.judge import Told, judge
from gradwire_lab.faults.run import HOSTS, Patience, Table

RUNNER = CliRunner()
NAMED = "step 2: rank 0 has heard nothing of rank 2"


def ranks(*third: Told, errors: tuple[str, ...] = (), replica: str = "") -> list[Told]:
    others = [Told(f"rank {rank}", errors=list(errors), replica=replica) for rank in (0, 1)]
    return [*others, *third]


DEAD = Told("rank 2", struck=True, status=-9)
KILLED = Cell("kill -9", "rank 2", "stop", what="kill")
LAST = Cell("SIGSTOP", "rank 2", "either", "detach", what="stop")
FROZEN = Cell("frozen", "rank 2", "on", what="stop", ground="thaw")


@pytest.mark.parametrize(
    ("cell", "told", "fate", "right"),
    [
        (KILLED, ranks(DEAD, errors=(NAMED,)), "stop", True),
        (KILLED, ranks(DEAD, errors=("step 2: rank 0 has heard nothing",)), "stop", False),
        (KILLED, ranks(DEAD, errors=("rank 2 is gone",)), "stop", False),
        (KILLED, ranks(DEAD, replica="same"), "on", False),
        (KILLED, ranks(DEAD), "neither", False),
        (
            LAST,
            [Told("rank 0", replica="same"), Told("rank 1", errors=[NAMED]), DEAD],
            "stop",
            True,
        ),
        (LAST, [Told("rank 0", replica="other"), Told("rank 1", errors=[NAMED])], "stop", False),
        (LAST, [Told("rank 0", replica="same"), Told("rank 1"), DEAD], "neither", False),
        (FROZEN, ranks(Told("rank 2", True, "same"), replica="same"), "on", True),
        (FROZEN, ranks(Told("rank 2", True, "other"), replica="same"), "on", False),
        (FROZEN, ranks(Told("rank 2", True, "same", status=-11), replica="same"), "on", False),
    ],
)
def test_a_job_goes_on_alike_or_every_rank_names_who_and_when(
    cell: Cell, told: list[Told], fate: str, right: bool
) -> None:
    verdict = judge(cell, told, "same", 5.0)
    assert (verdict.fate, not verdict.faults) == (fate, right), verdict


def test_a_rank_that_stops_too_late_is_a_fault() -> None:
    late = Told("rank 1", errors=[NAMED], after_s=5.5)
    told = [Told("rank 0", errors=[NAMED], after_s=1.0), late, DEAD]
    assert judge(KILLED, told, "same", 6.0).faults == []
    assert len(judge(KILLED, told, "same", 5.0).faults) == 1


def test_each_cell_has_a_name_of_its_own() -> None:
    names = [cell.name for cell in every()]
    assert len(set(names)) == len(names)
    listed = RUNNER.invoke(app, ["faults", "--list"])
    assert len(listed.stdout.splitlines()) == len(names)


@pytest.mark.parametrize(
    "args", [["--only", "no such cell"], ["--repetitions", "0"], ["--peer-timeout", "0.5"]]
)
def test_what_cannot_be_is_refused(args: list[str]) -> None:
    assert RUNNER.invoke(app, ["faults", *args]).exit_code == 2


@pytest.fixture(scope="module")
def table(namespaces: None) -> Iterator[Table]:
    with Ground(HOSTS) as ground:
        yield Table(ground, Patience(peer_s=3.0, slack_s=30.0, job_s=100.0))


@pytest.mark.netns
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "kill -9 of a worker, rank 2, push",
        "kill -9 of a leader, rank 2, push",
        "firewall refuses what a host sends (EPERM), rank 2, push",
        "firewall refuses what a host sends (EPERM), of a server, server 0, push",
        "firewall refuses for a moment (EPERM), rank 2, push",
        'firewall refuses what a host sends (EPERM), on_failure="host", rank 2, push',
        "GSO refused in mid-run, rank 2, push",
        "all begin anew on the same ports after a kill -9, rank 2, push",
    ],
)
def test_a_cell_is_as_it_has_to_be(table: Table, name: str) -> None:
    (cell,) = [each for each in every() if each.name == name]
    assert table.run(cell).faults == []
