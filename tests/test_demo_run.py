"""`gradwire demo` as a user runs it, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gradwire_calls import Call

CONTESTANTS = ["gloo", "gloo-fp16", "reliable", "dblp", "adaptive"]
NUMBERS = (
    "steps",
    "timed_steps",
    "steps_per_s",
    "comm_median_s",
    "comm_p90_s",
    "comm_max_s",
    "comm_share",
    "delivered",
    "final_loss",
    "final_training_loss",
)
STEP_KEYS = {
    *("step", "turn", "timed", "start", "comm", "took", "loss", "delivered", "critical", "encoded"),
}
KEYS = {
    "headline",
    "format",
    "date",
    "command",
    "machine",
    "mode",
    "reason",
    "network",
    "bursts",
    "scenario",
    "model",
    "payload_bytes",
    "header_ideal_s",
    "contestants",
    "turns",
    "bursts_sent",
    "network_drops",
    "softnet_drops",
    "error",
    "error_details",
    "late",
    "far",
    "wall_s",
    "notes",
}


class Demo(Call):
    """One run, with a folder for temporary files of its own."""

    def __init__(self, folder: Path, *arguments: str, **env: str) -> None:
        self.out = folder / "out"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        env = {"TMPDIR": str(self.temporary), **env}
        super().__init__(folder, "demo", "--out", str(self.out), *arguments, **env)

    def check_that_nothing_is_left(self) -> None:
        """No process (they hold the namespaces) and no temporary file."""
        super().check_that_nothing_is_left()
        assert list(self.temporary.rglob("*")) == []


def _check_document(document: dict[str, Any], demo: Demo) -> None:
    assert set(document) == KEYS
    assert document["error"] is None
    assert [entry["name"] for entry in document["contestants"]] == CONTESTANTS
    assert document["model"]["parameters"] >= 2_000_000
    for entry in document["contestants"]:
        assert all(entry[name] > 0 for name in NUMBERS)
        assert entry["comm_p99_s"] is None
        assert entry["replicas_identical"] is True
        assert set(entry["series"][0]) == STEP_KEYS
        assert len(entry["series"]) == entry["steps"]
        assert entry["validation"][-1]["step"] == entry["steps"]
    gloo, half, reliable, dblp, adaptive = document["contestants"]
    assert {entry["steps"] for entry in document["contestants"]} == {gloo["steps"]}
    assert gloo["steps"] >= 4
    assert [gloo["compressed_share"], half["compressed_share"]] == [0.0, 1.0]
    assert [gloo["peer"], half["peer"], reliable["peer"], dblp["peer"]] == [
        None,
        None,
        *2 * ["gloo"],
    ]
    assert adaptive["peer"] == ("gloo-fp16" if adaptive["compressed_share"] > 0.5 else "gloo")
    assert set(adaptive["speed_over"]) == {"gloo", "gloo-fp16"}
    assert gloo["delivered"] == reliable["delivered"] == 1.0
    # The bound of the critical phase in which training starts, by what was delivered.
    assert 0.99 <= dblp["delivered_min"] <= 1.0
    assert dblp["critical_share"] == 1.0
    # Nothing was lost, so the models differ by the order of additions only.
    assert abs(gloo["final_loss"] - reliable["final_loss"]) < 1e-3
    assert abs(gloo["final_loss"] - half["final_loss"]) < 0.01
    assert abs(gloo["final_loss"] - dblp["final_loss"]) < 0.1
    assert abs(gloo["final_loss"] - adaptive["final_loss"]) < 0.1
    page = (demo.out / "demo.html").read_text()
    assert page.count("<svg") == 4
    assert json.loads((demo.out / "demo.json").read_text()) == document


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_quick_demo_in_namespaces(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--quick", "--json")
    assert demo.wait(90.0) == 0, demo.said()
    document = json.loads(demo.output.read_text())
    assert document["mode"] == "namespaces"
    assert document["reason"] is None
    assert document["network"]["rate"] == 1_000_000_000
    assert len(document["bursts_sent"]) > 5
    ideal = document["header_ideal_s"]
    assert 0.1 < ideal < 0.12
    # What crosses a port cannot be faster than the port; dblp leaves out up to 0.8 %, and adaptive
    # sends half or a quarter of the bytes once it knows what steps wait for.
    gloo, half, reliable, dblp, adaptive = document["contestants"]
    assert all(entry["comm_median_s"] > 0.9 * ideal for entry in (gloo, reliable, dblp))
    assert half["comm_median_s"] > 0.45 * ideal
    assert adaptive["bytes_sent"] < reliable["bytes_sent"]
    assert adaptive["series"][-1]["comm"] > 0.2 * ideal
    _check_document(document, demo)
    demo.check_that_nothing_is_left()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("wires")
def test_hosts_far_from_each_other_in_namespaces(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--case", "far", "--steps", "3", "--json")
    assert demo.wait(150.0) == 0, demo.said()
    document = json.loads(demo.output.read_text())
    assert (document["mode"], document["bursts"], document["far"]) == ("namespaces", None, None)
    assert [each["name"] for each in document["contestants"]] == [
        "gloo-fp16",
        "reliable",
        "adaptive",
    ]
    for entry in document["contestants"]:
        assert entry["replicas_identical"] is True
        assert min(step["comm"] for step in entry["series"]) > document["scenario"]["round_trip_s"]
    assert document["contestants"][1]["retransmissions"] > 0  # the path really loses
    assert "too few steps" in document["headline"]
    demo.check_that_nothing_is_left()


@pytest.mark.slow
def test_a_quick_demo_on_loopback(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--quick", "--json", GRADWIRE_DEMO_LOOPBACK="1")
    assert demo.wait(90.0) == 0, demo.said()
    document = json.loads(demo.output.read_text())
    assert document["mode"] == "loopback"
    assert document["network"] is document["bursts"] is document["header_ideal_s"] is None
    assert document["bursts_sent"] == []
    assert "GRADWIRE_DEMO_LOOPBACK" in document["reason"]
    assert demo.said().count("on loopback instead, with injected loss") == 1
    assert document["contestants"][2]["retransmissions"] > 0  # loss really was injected
    _check_document(document, demo)
    demo.check_that_nothing_is_left()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_control_c_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--quick")
    demo.wait_until_it_says("training in turn")
    os.killpg(demo.process.pid, signal.SIGINT)  # as a terminal does
    assert demo.wait(10.0) == 130
    assert "Traceback" not in demo.said()
    assert not (demo.out / "demo.json").exists()
    demo.check_that_nothing_is_left()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_killed_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--quick")
    demo.wait_until_it_says("starting the ranks")
    demo.process.kill()
    demo.wait(5.0)
    demo.check_that_nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--quick", "--only", "gloo", GRADWIRE_DEMO_LOOPBACK="1")
    demo.wait_until_it_says("training in turn")
    victim = max(demo.processes("gradwire_lab.demo.worker"))
    os.kill(victim, signal.SIGKILL)
    assert demo.wait(20.0) == 1
    document = json.loads((demo.out / "demo.json").read_text())
    assert "Gloo f32: rank " in document["error"]
    assert document["headline"].startswith("The demo ended early: Gloo f32: rank ")
    assert (demo.out / "demo.html").exists()
    demo.check_that_nothing_is_left()


@pytest.mark.slow
def test_a_contestant_that_fails_is_named(tmp_path: Path) -> None:
    demo = Demo(
        tmp_path, "--quick", "--only", "reliable", GRADWIRE_DEMO_LOOPBACK="1", GRADWIRE_ROUTE="air"
    )
    assert demo.wait(40.0) == 1
    document = json.loads((demo.out / "demo.json").read_text())
    assert "gradwire reliable: " in document["error"]
    assert "'air'" in document["error"]
    assert "'air'" in demo.output.read_text()
    demo.check_that_nothing_is_left()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--network", "C"], "'C' is not one of A, B"),
        (["--only", "tcp"], "'tcp' is not one of"),
        (["--case", "near"], "'near' is not one of bursts, far"),
        (["--case", "far", "--only", "dblp"], "entries"),
        (["--seconds", "0"], "--seconds"),
        (["--out", "/dev/null/there"], "--out"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: list[str], complaint: str) -> None:
    demo = Demo(tmp_path, *arguments, COLUMNS="200", TERM="dumb")
    assert demo.wait(20.0) == 2
    assert complaint in demo.said()
