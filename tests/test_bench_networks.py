"""`gradwire bench networks`: what it prints, that a seed repeats, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradwire.sim.fabric import Fabric, Link
from gradwire_lab.bench import app, networks_command
from gradwire_lab.bench.network_groups import GROUPS, far
from gradwire_lab.bench.network_scenes import Job, Scene
from gradwire_lab.bench.networks import Cell, Mark, run_cell, run_networks
from gradwire_lab.bench.own_network import OPTIONS, own

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
    ("args", "named"),
    [
        (["nowhere"], "nowhere"),
        (["--only", "no such network"], "--only"),
        (["far", "--seeds", "0"], "--seeds"),
        (["--rate", "0"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "1e-9"], "--rate"),
        (["--rate", "1e12", "--size", "0.01"], "--rate"),
        (["--rate", "1", "--queue", "-64"], "--queue"),
        (["--rate", "1", "--queue", "1"], "--queue"),
        (["--rate", "1", "--queue", "1e20"], "--queue"),
        (["--rate", "1", "--uplinks", "0"], "--uplinks"),
        (["--rate", "1", "--uplinks", "1e-9"], "--uplinks"),
        (["--rate", "1", "--round-trip", "-1"], "--round-trip"),
        (["--rate", "1", "--round-trip", "1e9"], "--round-trip"),
        (["--rate", "1", "--loss", "100"], "--loss"),
        (["--rate", "1", "--loss", "nan"], "--loss"),
        (["--rate", "1", "--ranks", "1"], "--ranks"),
        (["--rate", "1", "--ranks", "100000"], "--ranks"),
        (["--rate", "1", "--size", "0"], "--size"),
        (["--rate", "1", "--size", "inf"], "--size"),
        (["--rate", "1", "--size", "1e9"], "--size"),
        (["--rate", "1", "--policer-out", "0"], "--policer-out"),
        (["--rate", "1", "--policer-in", "nan"], "--policer-in"),
        (["--rate", "1", "--policer-in", "1", "--bucket", "1e20"], "--bucket"),
        (["--rate", "1", "--policer-in", "1", "--bucket", "0"], "--bucket"),
        (["--rate", "1", "--bucket", "32"], "--bucket"),
        (["far", "--rate", "1"], "--rate"),
        *(
            ([f"--{name.replace('_', '-')}", "4", "far"], name)
            for name in OPTIONS
            if name != "rate"
        ),
        (["far", "--beside", "no such file"], "--beside"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    args: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks_command, "run_networks", lambda *_, **__: pytest.fail("it ran"))
    result = RUNNER.invoke(app, ["networks", *args])
    assert result.exit_code == 2
    assert named.replace("_", "-") in result.output


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_policer_of_ones_own_bounds_the_rate_and_drops(way: str, tmp_path: Path) -> None:
    """Two ranks at 0.2 of 1 Gbit/s: in virtual time, seed 0."""
    kept = tmp_path / "rows.json"
    common = ["networks", "--rate", "1", "--ranks", "2", "--size", "1", "--seeds", "1"]
    policer = [f"--policer-{way}", "0.2", "--bucket", "16", "--jobs", "1", "--out", str(kept)]
    result = RUNNER.invoke(app, [*common, *policer])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(kept.read_text())["rows"]
    assert row["name"].endswith(f"policer of 0.2 Gbit/s and 16 KiB on the way {way}")
    assert 0.9 < row["time"] < 1.3  # over what 0.2 Gbit/s take, a fifth of the port's rate
    assert row["payload"] > 1.0  # what the policer dropped went again


def test_times_are_over_what_the_narrowest_part_of_ones_own_network_takes() -> None:
    link = {"rate": 1, "queue": 256, "round_trip": 1, "loss": 0, "ranks": 2, "size": 1}
    plain = own(**link, uplinks=1)
    assert own(**link, uplinks=0.5).ideal == pytest.approx(2 * plain.ideal)
    assert own(**link, uplinks=10).ideal == plain.ideal
    both = own(**link, uplinks=1, policer_out=0.5, policer_in=0.25)
    assert both.ideal == pytest.approx(4 * plain.ideal)


@pytest.mark.parametrize("processes", [1, 2])
def test_what_needs_more_memory_than_the_machine_has_is_refused(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has four copies of all buffers, and what each rank keeps of each other."""
    gibibyte = {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": 1 << 18}
    monkeypatch.setattr("os.sysconf", gibibyte.__getitem__)
    link = {"rate": 1, "queue": 256, "uplinks": 1, "round_trip": 1, "loss": 0}
    fits = (1 << 30) / 1e6 / 4 / 2 / processes
    own(**link, ranks=2, size=0.99 * fits, processes=processes)
    with pytest.raises(typer.BadParameter, match="memory"):
        own(**link, ranks=2, size=1.01 * fits, processes=processes)
    with pytest.raises(typer.BadParameter, match="memory"):
        own(**link, ranks=1024, size=1, processes=processes)


@pytest.mark.parametrize(
    "row",
    [
        {"group": "far"},
        {"group": "far", "name": "x", "time": "1.0"},
        {"group": "far", "name": "x", "worst": float("nan")},
        {"group": "far", "name": "x", "growth": True},
        {"group": [], "name": "x"},
        "row",
    ],
)
@pytest.mark.parametrize("option", ["--beside", "--out"])
def test_a_file_whose_rows_are_none_is_refused_before_the_run(
    row: object, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks_command, "run_networks", lambda *_, **__: pytest.fail("it ran"))
    path = tmp_path / "rows.json"
    text = json.dumps({"rows": [row]})
    path.write_text(text)
    result = RUNNER.invoke(app, ["networks", "far", option, str(path)])
    assert result.exit_code == 2
    assert option in result.output
    assert path.read_text() == text


def test_networks_of_a_group_have_names_of_their_own() -> None:
    for name, cells in GROUPS.items():
        names = [cell.name for cell in cells()]
        assert len(set(names)) == len(names) > 0, name


def test_a_network_of_ones_own_is_kept_and_compared(tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    own = [
        "networks",
        "--rate",
        "0.5",
        "--ranks",
        "2",
        "--size",
        "0.5",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    result = RUNNER.invoke(app, [*own, "--out", str(kept)])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(kept.read_text(encoding="utf-8"))["rows"]
    assert 0.9 < row["time"] < 2
    again = RUNNER.invoke(app, [*own, "--out", str(kept), "--beside", str(kept), "--json"])
    assert again.exit_code == 0, again.output
    (compared,) = json.loads(again.stdout)
    overs = compared["time_over"], compared["worst_over"]
    assert overs == pytest.approx((1.0, 1.0), rel=1e-3)  # the file has rounded figures
    assert len(json.loads(kept.read_text(encoding="utf-8"))["rows"]) == 1


def test_an_older_engine_sets_the_marks_of_the_networks_it_was_made_for(tmp_path: Path) -> None:
    name = "A, 2 ranks, 1 MB"
    older = tmp_path / "older.json"
    older.write_text(json.dumps([{"group": "known", "name": name, "time": 0.5, "worst": 100.0}]))
    only = ["networks", "known", "--only", name, "--seeds", "1", "--beside", str(older)]
    result = RUNNER.invoke(app, [*only, "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["time_over"] == pytest.approx(row["time"] / 0.5)
    met = {mark["figure"]: mark["met"] for mark in row["marks"]}
    assert met == {"time_over": False, "worst_over": True}
    assert "1 of 2 marks met" in RUNNER.invoke(app, only).stdout


def test_a_mark_is_met_within_its_bounds() -> None:
    mark = Mark("share", least=0.35, most=0.65)
    assert [mark.met(value) for value in (0.3, 0.35, 0.5, 0.65, 0.7)] == [False, *[True] * 3, False]
    missed = replace(next(far()), marks=(Mark("time", most=0.5), Mark("drops", most=1.0)))
    (row,) = run_networks([missed], seeds=1, jobs=1, progress=lambda name: None)
    assert [(each["figure"], each["met"]) for each in row["marks"]] == [
        ("time", False),
        ("drops", True),
    ]


def _ends_with_seed_0(seed: int) -> dict[str, float]:
    if seed:
        raise ValueError("not done")
    return {"share": 0.5}


def test_a_network_on_which_a_run_does_not_end_misses_its_marks() -> None:
    """No mark is met by the seeds that end alone."""
    scene = Scene("sharing", "two", _ends_with_seed_0, (Mark("share", most=0.65),))
    (row,) = run_networks([scene], seeds=3, jobs=1, progress=lambda name: None)
    assert row["failure"] == "seed 1: not done"
    assert row["failed"] == 2
    assert [mark["met"] for mark in row["marks"]] == [False]
    assert "share" not in row


@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"megabytes": 0.0}, {"judged": 9}, {"ops": 0}])
def test_a_network_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if "ops" not in wrong else "judged"):
        replace(next(far()), **wrong)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": -1.0}, {"delay": -1.0}, {"queue": 0}])
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Fabric(2, link=Link(**wrong))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_rate_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        Link(rate=value)


@pytest.mark.parametrize("wrong", [{"host_delay": float("nan")}, {"send_time": -1.0}])
def test_hosts_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Fabric(2, **wrong)


QUICK = Cell("", "", 2, Link(), 1)


def test_two_jobs_share_the_ports() -> None:
    """Together they take what one of them takes alone."""
    alone, first = Job(QUICK, seed=1), Job(QUICK, seed=1)
    alone.run(1.0)
    second = Job(QUICK, seed=2, beside=first.fabric)
    first.run_beside(second, 1.0)
    both = first.received() + second.received()
    assert 0.8 < both / alone.received() < 1.2
    assert min(first.received(), second.received()) > 0.1 * both


def test_two_jobs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="beside"):
        Fabric(3, beside=Fabric(2))


def test_scenes_have_the_figures_that_their_marks_are_about() -> None:
    scenes = [each for name in GROUPS for each in GROUPS[name]() if isinstance(each, Scene)]
    assert {each.group for each in scenes} == {"clocks", "long", "sharing", "rates", "tcp"}
    (rates,) = (each for each in scenes if each.group == "rates")
    found = rates.figures(seed=0)
    assert {mark.figure for mark in rates.marks} <= set(found)
    assert 0 <= found["drops_halved"] < 1
