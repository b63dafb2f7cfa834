"""`gradwire lab` and `gradwire report` as a user runs them, and what is left of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire import cli
from gradwire_calls import Lab
from gradwire_lab.report.command import app
from gradwire_lab.run import checks
from gradwire_lab.run.model import as_json
from lab_results import results

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"


def check_times(document: dict[str, Any], cell: dict[str, Any], entry: dict[str, Any]) -> None:
    """The numbers of a contestant, against its own raw samples."""
    tracks = [each["run"]["tracks"][entry["name"]] for each in cell["runs"]]
    seconds = [each for track in tracks for each in track["seconds"]]
    assert len(seconds) == entry["samples"] > 0
    assert entry["max_s"] == max(seconds)
    assert entry["p99_s"] is None  # too few samples
    assert len(tracks) == entry["seeds"] == len(document["work"]["seeds"])


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_quick_run_of_pushes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = EXPERIMENTS / "ltp_incast.toml"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out), "--json")
    assert lab.wait(180.0) == 0, lab.said()
    lab.check_that_nothing_is_left()
    document = json.loads((out / "results.json").read_text())
    assert document == json.loads(lab.output.read_text())
    assert document["scenario"] == "ltp_incast"
    assert document["quick"] is True
    assert document["errors"] == []
    assert document["machine"]["kernel"]
    assert document["kernel"]["offloads"] == ["on"]
    assert document["calibrations"][0]["reached"] > 0
    clean, lossy = document["cells"]
    assert (clean["loss"]["rate"], lossy["loss"]["rate"]) == (0.0, 0.02)
    for cell in document["cells"]:
        assert [entry["name"] for entry in cell["contestants"]] == [
            "gradwire ltp",
            "tcp cubic",
            "tcp bbr",
        ]
        for entry in cell["contestants"]:
            check_times(document, cell, entry)
        ours, tcp, _ = cell["contestants"]
        track = cell["runs"][0]["run"]["tracks"]["tcp cubic"]
        # What 3 workers push crosses one port of 1 Gbit/s, whose bucket lets 72 KiB pass at once.
        assert min(track["seconds"]) > (3 * 1_000_000 - 80_000) * 8 / 1e9
        assert track["reports"][0]["congestion_control"] == "cubic"
        assert ours["delivered_min"] < 1.0  # a push that is late closes with less
        assert ours["delivered"] > 0.5
        sent = ours["wire_bytes_per_round"]  # by the workers with headers, ACKs by the server
        assert ours["bytes_per_round"] < sent < 1.2 * 3_000_000
        assert tcp["bytes_per_round"] is None
        assert 1.03 * 3_000_000 < tcp["wire_bytes_per_round"] < 2 * 3_000_000
    # A push on a busy machine is late, and closes before much of what was lost is sent again.
    assert lossy["contestants"][0]["retransmitted"] > 0
    assert lossy["runs"][0]["run"]["lost"] > 100
    assert 0.0 <= lossy["runs"][0]["stolen"] <= 1.0
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4  # a time line and a distribution of each cell
    assert not re.search(r"(src|href)=.(https?:)?//", page)  # it needs nothing else
    again = tmp_path / "again.html"
    copy = shutil.copytree(out, tmp_path / "copy")
    report = Lab(tmp_path, "report", str(out), str(copy), "--out", str(again), "--json")
    assert report.wait(60.0) == 0, report.said()
    rows = json.loads(report.output.read_text())
    assert len(rows) == 2 * 2 * 3
    assert {row["× the first run"] for row in rows} == {"1.00"}
    compared = again.read_text()
    assert "Runs side by side" in compared
    assert "<th>max</th>" in compared
    assert "<th>p99</th>" not in compared  # nobody has one


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces", "wires")
@pytest.mark.parametrize(
    "name",
    [
        "dblp_phases",
        "dblp_round",
        "leaf_spine",
        "ltp_server",
        "microburst_sweep",
        "netsenseml_bandwidth",
        "optireduce_tail",
        "plot_tail",
        "time_to_quality",
    ],
)
def test_the_short_form_of(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = EXPERIMENTS / f"{name}.toml"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out))
    assert lab.wait(200.0) == 0, lab.said()
    lab.check_that_nothing_is_left()
    document = json.loads((out / "results.json").read_text())
    assert (document["errors"], document["missing"]) == ([], 0)
    for cell in document["cells"]:
        for entry in cell["contestants"]:
            check_times(document, cell, entry)
            assert (entry["push"] is None) == (entry["transport"] != "gradwire")
            if name == "plot_tail":
                assert entry["rival_goodput_bps"] > 1e6
            if name == "dblp_round" and entry["name"].startswith("probe"):
                assert entry["passes_max"] > 1
    if name == "netsenseml_bandwidth":
        rates = {each["what"] for each in document["cells"][0]["runs"][0]["run"]["events"]}
        assert rates == {"rate 100 Mbit/s", "rate 50 Mbit/s"}


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_quick_run_of_training(tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = EXPERIMENTS / "dblp_job.toml"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out))
    assert lab.wait(200.0) == 0, lab.said()
    lab.check_that_nothing_is_left()
    document = json.loads((out / "results.json").read_text())
    (cell,) = document["cells"]
    run = cell["runs"][0]["run"]
    facts = run["facts"]
    assert facts["compute_s"] > 0
    for entry in cell["contestants"]:
        check_times(document, cell, entry)
        if entry["name"] != "probe P_low":  # its way down is lossy, as the paper's
            assert entry["replicas_identical"] is True
        assert entry["final_loss"] > 0
        assert [step for step, _, _ in run["tracks"][entry["name"]]["losses"]] == [9, 16]
    fixed, ours, gloo = cell["contestants"]
    assert fixed["delivered_min"] >= 0.99  # it may lose 0.8 %
    assert ours["delivered_min"] < fixed["delivered_min"]
    assert gloo["delivered"] is None
    ring = 2 * (cell["topology"]["workers"] - 1) * 4 * facts["parameters"]
    assert 1.02 * ring < gloo["wire_bytes_per_round"] < 2 * ring
    assert run["lost"] > 0  # in steps 5 and 12
    assert len(run["lossy"]) == 2 * len(cell["contestants"])
    assert (out / "report.html").read_text().count("<svg") == 4


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["SIGINT", "SIGTERM", "SIGHUP"]
)
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    file = EXPERIMENTS / "dblp_round.toml"
    out = tmp_path / "out"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out))
    lab.wait_until_it_says("cell 1 of")
    time.sleep(1.0)
    # A terminal tells everybody, `kill` the process.
    (os.kill if number == signal.SIGTERM else os.killpg)(lab.process.pid, number)
    assert lab.wait(20.0) == 130
    assert "Traceback" not in lab.said()
    assert not (out / "results.json").exists()
    lab.check_that_nothing_is_left()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    file = EXPERIMENTS / "dblp_round.toml"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(tmp_path / "out"))
    lab.wait_until_it_says("cell 1 of")
    time.sleep(2.0)
    lab.process.kill()
    lab.wait(5.0)
    lab.check_that_nothing_is_left()


SMALL = """
name = "small"
title = "a small one"
[topology]
preset = "B"
workers = 2
[work]
kind = "all_reduce"
bytes = 40_000
rounds = 6
block = 6
warm_up = 1
round_limit_s = 20.0
[[contestants]]
name = "ours"
transport = "gradwire"
policy = "reliable"
"""


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_frozen_host_holds_its_round_up_and_a_killed_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    fault = "[[faults]]\nkind = '{}'\nhost = 1\nat_s = 0.0\n"
    file.write_text(SMALL + fault.format("freeze"))
    out = tmp_path / "out"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out), "--json")
    assert lab.wait(90.0) == 0, lab.said()
    (cell,) = json.loads(lab.output.read_text())["cells"]
    (entry,) = cell["contestants"]
    assert entry["max_s"] > 0.5
    assert entry["median_s"] < 0.5
    assert [event["what"] for event in cell["runs"][0]["run"]["events"]] == [
        "freeze host 1",
        "heal host 1",
    ]
    file.write_text(SMALL + fault.format("kill"))
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out), "--json")
    assert lab.wait(90.0) == 1
    (error,) = json.loads(lab.output.read_text())["errors"]
    assert "rank 1: ended with status -9" in error
    lab.check_that_nothing_is_left()


def refused(*arguments: str) -> str:
    """What a call says that is refused, made in this process."""
    found = CliRunner().invoke(cli.app, arguments)
    assert found.exit_code == 2, found.output
    return found.stderr


@pytest.mark.parametrize(
    ("change", "arguments", "complaint"),
    [
        (("workers = 2", "wrokers = 2"), [], "small.toml: topology.wrokers: unknown key"),
        (("workers = 2", "workers = 1"), [], "topology.workers=1: work.kind='all_reduce' takes 2"),
        (("", ""), ["--out", "/dev/null/there"], "--out /dev/null/there: cannot be made"),
    ],
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, change: tuple[str, str], arguments: list[str], complaint: str
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL.replace(*change))
    refusal = refused("lab", "run", str(file), *arguments)
    assert complaint in refusal
    assert refusal.count("\n") == 1


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("workers = 2", "workers = 2\nrate = 3e10"), "topology.rate=3e+10: 2 ports at once"),
        (("workers = 2", "workers = 200"), "200 hosts need about"),
        (("bytes = 40_000", "bytes = 4_000_000_000"), "2 hosts need about"),
    ],
)
def test_what_the_machine_cannot_do_is_found_first(
    tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL.replace(*change))
    assert complaint in refused("lab", "run", str(file), "--quick", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "runs.jsonl").exists()


def test_the_report_refuses_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    for folder, complaint in ((tmp_path, "not written by"), (tmp_path / "no", "cannot be read")):
        assert complaint in refused("report", str(folder))
    samples = tmp_path / "samples"
    samples.mkdir()
    (samples / "runs.jsonl").touch()
    assert f"gradwire lab show SCENARIO.toml --out {samples}" in refused("report", str(samples))


def test_a_scenario_is_found_by_the_name_that_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for folder in (EXPERIMENTS.parent, tmp_path):
        monkeypatch.chdir(folder)
        listed = CliRunner().invoke(cli.app, ["lab", "list", "--json"])
        assert listed.exit_code == 0, listed.output
        found.append([Path(each["file"]).stem for each in json.loads(listed.stdout)])
        for scenario in ("ltp_incast", "experiments/ltp_incast.toml"):
            checked = CliRunner().invoke(cli.app, ["lab", "check", scenario, "--json"])
            assert checked.exit_code in (0, 2), checked.output  # 2: this machine cannot run it
            found.append(json.loads(checked.stdout)["cells"] if not checked.exit_code else [])
    assert found[:3] == found[3:]
    assert "ltp_incast" in found[0]
    nowhere = CliRunner().invoke(cli.app, ["lab", "check", "no/ltp_incast"])
    assert "cannot be read" in nowhere.stderr


def test_a_report_makes_the_folder_it_is_written_to(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(as_json(results())))
    files = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    page = tmp_path / "there" / "is" / "none.html"
    runner = CliRunner()
    found = runner.invoke(app, [*files, "--out", str(page)])
    assert found.exit_code == 0, found.output
    assert "2026-05-01" in page.read_text()
    found = runner.invoke(app, [*files, "--out", "/dev/null/there.html"])
    assert found.exit_code == 2
    assert "--out /dev/null/there.html: cannot be written" in found.output


def test_the_list_names_every_scenario() -> None:
    found = CliRunner().invoke(cli.app, ["lab", "list", str(EXPERIMENTS), "--json"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert {Path(row["file"]).stem for row in rows} == {
        path.stem for path in EXPERIMENTS.glob("*.toml")
    }
    assert all(row["cells"] >= 1 for row in rows)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv, to give up what root may",
)
def test_missing_rights_are_one_sentence(tmp_path: Path) -> None:
    file = EXPERIMENTS / "ltp_incast.toml"
    found = subprocess.run(
        [
            *("setpriv", "--bounding-set=-all", "--inh-caps=-all"),
            *(sys.executable, "-m", "gradwire.cli", "lab", "run", str(file), "--quick"),
            *("--out", str(tmp_path / "out")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "400", "TERM": "dumb"},
    )
    if found.returncode == 0:
        pytest.skip("this kernel asks for no rights")
    assert found.returncode == 2
    assert "no network namespaces here" in found.stderr
    assert "root or an unprivileged user namespace is needed" in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_run_on_leaves_calibrates_its_uplinks_and_names_them(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    leaves = SMALL.replace("workers = 2", "workers = 2\nleaves = 2\nuplink_rate = 50e6")
    file.write_text(leaves.replace("40_000", "400_000"))
    out = tmp_path / "out"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out), "--json")
    assert lab.wait(90.0) == 0, lab.said()
    lab.check_that_nothing_is_left()
    document = json.loads(lab.output.read_text())
    words = "2 hosts on 2 leaves under one spine, uplinks of 50 Mbit/s, 64 KiB (4:1)"
    assert document["kernel"]["topology"] == [words]
    (calibration,) = document["calibrations"]
    assert calibration["wanted"] == pytest.approx(2 * 50e6 * 1448 / 1514)
    assert 0.25 < calibration["reached"] / calibration["wanted"] < 1.05
    (cell,) = document["cells"]
    assert cell["topology"]["uplink_rate"] == 50e6
    (entry,) = cell["contestants"]
    assert entry["limit_s"] == pytest.approx(400_000 * 8 / 50e6)
    assert entry["over_limit"] > 0.9  # no faster than its uplink, but for what a bucket holds
    assert words in (out / "report.html").read_text()
    file.write_text(leaves.replace("leaves = 2", "leaves = 3"))
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out))
    assert lab.wait(30.0) == 2
    assert "leaves=3 for 2 hosts" in lab.said()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_run_on_switches_that_mark_counts_the_marks(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    marking = SMALL.replace("workers = 2", "workers = 2\nrate = 50e6\necn = 16_384")
    gloo = '[[contestants]]\nname = "tcp"\ntransport = "gloo"\n'
    rivals = "[rivals]\nstreams = 2\ntarget = 1\n"  # two ways into one port
    file.write_text(marking.replace("40_000", "200_000") + gloo + rivals)
    out = tmp_path / "out"
    lab = Lab(tmp_path, "lab", "run", str(file), "--quick", "--out", str(out), "--json")
    status = lab.wait(90.0)
    if "no links with delay here" in lab.said():
        pytest.skip("no TAP devices")
    assert status == 0, lab.said()
    lab.check_that_nothing_is_left()
    document = json.loads(lab.output.read_text())
    words = "2 hosts on one switch, marks above 16 KiB"
    assert document["kernel"]["topology"] == [words]
    assert "which mark" in document["kernel"]["shaper"]
    (cell,) = document["cells"]
    assert cell["topology"]["ecn"] == 16_384
    run = cell["runs"][0]["run"]
    assert run["marked"] > 0
    assert run["wire_failures"] == 0
    engines = [each["engine"] for each in run["tracks"]["ours"]["reports"]]
    assert sum(each["marked"] for each in engines) > 0
    assert [each["ecn_failed"] for each in engines] == [0, 0]
    assert min(entry["over_limit"] for entry in cell["contestants"]) > 0.9
    page = (out / "report.html").read_text()
    assert words in page
    assert f"the switches marked {run['marked']} packets" in page


def test_a_congestion_control_that_the_kernel_lacks_is_named_before() -> None:
    assert checks.has_congestion_control("reno")
    assert not checks.has_congestion_control("nonesuch")
