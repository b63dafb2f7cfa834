"""`gradwire bench start`: what it measures of jobs that start, and what it refuses."""

from __future__ import annotations

import json
import statistics

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app
from gradwire_lab.bench.cases import cases
from gradwire_lab.network.presets import Burst


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("network", ["1g", "unshaped"])
def test_each_job_starts_afresh(network: str) -> None:
    command = [
        "start",
        "--network",
        network,
        "--ranks",
        "2",
        "--size",
        "256",
        "--jobs",
        "2",
        "--json",
    ]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert [len(job["seconds"]) for job in result["jobs"]] == [40, 40]
    if network == "unshaped":  # its ports have no queues that count
        assert [job["packets_lost_at_ports"] for job in result["jobs"]] == [0, 0]
    for job in result["jobs"]:
        assert job["late"] == pytest.approx(statistics.median(job["seconds"][29:40]))
        assert job["third_over_late"] == pytest.approx(job["seconds"][2] / job["late"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["start", "--network", "2g"], "--network 2g: A, unshaped"),
        (["start", "--size", "0"], "--size 0: at least one float32 element"),
        (["start", "--size", "nan"], "--size nan: at least one float32 element"),
        (["net", "--case", "bursts", "--rhythm", "5", "3"], "5 3: positive, and no longer than"),
        (
            ["net", "--case", "bursts", "--rhythm", "1", "inf"],
            "1 inf: positive, and no longer than",
        ),
        (["net", "--case", "exact", "--rhythm", "3", "50"], "--rhythm: case exact has no bursts"),
    ],
)
def test_what_there_is_not_is_refused(options: list[str], named: str) -> None:
    ran = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert named in ran.output


def test_a_rhythm_is_in_milliseconds_and_concerns_cases_with_bursts() -> None:
    known = cases("A")
    assert known["bursts"].with_rhythm(3, 50).bursts == Burst(rate=4e9, on=0.003, period=0.05)
    assert known["exact"].with_rhythm(3, 50) == known["exact"]
