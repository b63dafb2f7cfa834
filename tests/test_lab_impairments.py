"""What a scenario file may do to its network, seen in what its rounds measured."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire_lab.command import app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.netns,
    pytest.mark.usefixtures("namespaces", "wires"),
]

SCENARIO = """
name = "impaired"
title = "each impairment by itself"
[topology]
preset = "B"
rate = 40e6
workers = 3
[work]
kind = "all_reduce"
bytes = 200_000
rounds = 8
block = 8
warm_up = 1
round_limit_s = 20.0
[[contestants]]
name = "ours"
transport = "gradwire"
policy = "dblp"
options = { p_low = 0.2, p_high = 0.4, spend = "lost" }
[grid]
with = [
  { label = "jitter", "topology.rtt_s" = 0.004, "topology.jitter_s" = 0.03 },
  { label = "runs", "loss.rate" = 0.1, "loss.run" = 8.0 },
  { label = "uneven", "loss.per_worker" = [0.0, 0.3, 0.0] },
  { label = "cut", "faults" = [{ kind = "cut", host = 1, at_s = 0.0, for_s = 0.7 }] },
  { label = "incast", "bursts" = [
    { rate = 400e6, on_s = 0.01, period_s = 0.05, target = 1, sources = 2 }
  ] },
  { label = "rates", "bandwidth" = { rates = [40e6, 5e6], every_s = 0.2 } },
]
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("impaired")
    file = folder / "impaired.toml"
    file.write_text(SCENARIO)
    out = folder / "out"
    found = CliRunner().invoke(app, ["run", str(file), "--quick", "--out", str(out)])
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert document["errors"] == []
    return {cell["labels"]["with"]: cell for cell in document["cells"]}


def run_of(cell: dict[str, Any]) -> dict[str, Any]:
    """The only run of a cell."""
    (record,) = cell["runs"]
    run: dict[str, Any] = record["run"]
    return run


def track_of(cell: dict[str, Any]) -> dict[str, Any]:
    """The samples of the only contestant."""
    (track,) = run_of(cell)["tracks"].values()
    found: dict[str, Any] = track
    return found


def test_jitter_holds_each_packet_up_by_itself(cells: dict[str, dict[str, Any]]) -> None:
    """The last of some hundred packets is late by nearly all of it, there and back."""
    assert min(track_of(cells["jitter"])["seconds"]) > 0.004 + 2 * 0.025


def test_losses_come_in_runs_and_are_counted(cells: dict[str, dict[str, Any]]) -> None:
    (entry,), run = cells["runs"]["contestants"], run_of(cells["runs"])
    assert cells["runs"]["loss"]["run"] == 8.0
    assert run["lost"] > 50
    assert entry["retransmitted"] > 0.01


def test_uneven_loss_is_borne_by_its_worker(cells: dict[str, dict[str, Any]]) -> None:
    (entry,) = cells["uneven"]["contestants"]
    first, lossy, last = entry["delivered_by_worker"]
    assert lossy < min(first, last) - 0.05


def test_a_cut_link_holds_its_round_up_until_it_heals(cells: dict[str, dict[str, Any]]) -> None:
    run, first = run_of(cells["cut"]), track_of(cells["cut"])
    cut, healed = run["events"]
    assert (cut["what"], healed["what"]) == ("cut host 1", "heal host 1")
    assert first["starts"][0] + first["seconds"][0] > cut["at"] + 0.7
    assert healed["at"] >= cut["at"] + 0.7
    assert run["lost"] > 0


def test_an_incast_has_all_its_sources_send_at_once(cells: dict[str, dict[str, Any]]) -> None:
    run = run_of(cells["incast"])
    starts = sorted(each["start"] for each in run["bursts"])
    assert min(later - sooner for sooner, later in pairwise(starts)) < 0.01  # the period is 0.05
    assert run["lost"] > 0


def test_a_rate_changes_by_the_clock_within_a_turn(cells: dict[str, dict[str, Any]]) -> None:
    run = run_of(cells["rates"])
    rates = [each["what"] for each in run["events"]]
    assert rates[:3] == ["rate 40 Mbit/s", "rate 5 Mbit/s", "rate 40 Mbit/s"]
    first, second, third = (each["at"] for each in run["events"][:3])
    assert second >= first + 0.2
    assert third >= first + 0.4
    seconds = track_of(cells["rates"])["seconds"]
    assert max(seconds) > 2 * min(seconds)
