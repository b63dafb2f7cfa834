"""`gradwire bench encodings`: what it measures on a lab network, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_contestants_train_in_the_encodings_that_they_are_named_by() -> None:
    command = ["encodings", "--network", "1g", "--before", "2", "--steps", "1", "--json"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    (result,) = json.loads(ran.stdout)
    assert len(result["before"]["encoded"]) == 2
    found = result["contestants"]
    shares = {name: {float(share) for share in each["encoded"]} for name, each in found.items()}
    assert shares["gloo"] == shares["exact"] == {1.0}
    assert shares["gloo-fp16"] == shares["f16"] == {0.5}
    assert all(0.25 <= share < 0.3 for share in shares["int8"])
    assert result["best"] == min(("exact", "f16", "int8"), key=lambda name: found[name]["median"])
    (ours,), (theirs,) = found["adaptive"]["turns"], found[result["best"]]["turns"]
    assert result["over_best"] == pytest.approx(ours / theirs)


def test_networks_that_there_are_not_are_refused() -> None:
    ran = CliRunner().invoke(app, ["encodings", "--network", "2g"], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert "--network 2g: unshaped, 5g, 1g, 100m" in ran.output
