"""`gradwire bench start`: what it measures of jobs that start, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app


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
    for job in result["jobs"]:
        assert job["third_over_late"] == pytest.approx(job["seconds"][2] / job["late"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["start", "--network", "2g"], "--network 2g: A, unshaped"),
        (["start", "--size", "0"], "--size 0: at least one float32 element"),
        (["net", "--rhythm", "5", "3"], "5 3: positive, and no longer than"),
    ],
)
def test_what_there_is_not_is_refused(options: list[str], named: str) -> None:
    ran = CliRunner().invoke(app, options, env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert named in ran.output
