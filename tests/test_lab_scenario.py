"""Scenario files: strict reading, short forms, grids, and the files that the repository has."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.lab.scenario import Experiment, ScenarioError, load
from gradwire.lab.scenario.keys import key_rows
from gradwire.lab.scenario.network import Topology

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
NAMES = {
    "dblp_job",
    "dblp_phases",
    "dblp_round",
    "leaf_spine",
    "ltp_incast",
    "microburst_sweep",
    "netsenseml_bandwidth",
    "optireduce_tail",
    "plot_tail",
}

GOOD = """
name = "file"
title = "a title"
[topology]
workers = 2
servers = 1
[work]
kind = "push"
[[contestants]]
name = "ours"
transport = "gradwire"
bound = 0.1
[[contestants]]
name = "tcp"
transport = "tcp"
[[marks]]
text = "faster"
contestant = "ours"
over = ["tcp"]
at_most = 1.0
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "file.toml"
    path.write_text(text)
    return path


def read(folder: Path, text: str, *, quick: bool = False) -> Experiment:
    return load(write(folder, text), quick=quick)


@pytest.mark.parametrize("quick", [False, True])
def test_the_scenarios_of_the_repository_can_be_read(quick: bool) -> None:
    found = {path.stem: load(path, quick=quick) for path in EXPERIMENTS.glob("*.toml")}
    assert set(found) >= NAMES
    for experiment in found.values():
        assert experiment.first.marks or experiment.first.map.rows or quick
        assert all(cell.scenario.work.seeds == (0,) for cell in experiment.cells) or not quick


def test_values_and_defaults(tmp_path: Path) -> None:
    scenario = read(tmp_path, GOOD).first
    assert (scenario.topology.workers, scenario.topology.hosts) == (2, 3)
    assert scenario.topology.ports.name == "A"
    assert scenario.work.bytes == 4_000_000
    assert scenario.contestants[0].bound == 0.1
    assert scenario.contestants[1].congestion_control == "cubic"
    assert scenario.marks[0].over == ("tcp",)


BAD = [
    ("workers = 2", "wrokers = 2", r"file.toml: scenario.topology.wrokers: unknown key.*'workers'"),
    ("workers = 2", "workers = 2.5", r"topology.workers=2.5: a whole number"),
    ("workers = 2", "workers = true", r"topology.workers=True: a whole number"),
    ("workers = 2", "workers = 0", r"topology.workers=0: must be 1 or more"),
    ("workers = 2", "workers = 9000", r"topology.workers=9000: must be 1 or more and 200 at most"),
    ("workers = 2", "workers = 2\nleaves = 4", r"topology: leaves=4 for 3 hosts: 1 to 3 are"),
    ("workers = 2", "workers = 2\nleaves = 0", r"topology.leaves=0: must be 1 or more"),
    ("workers = 2", "workers = 2\nuplink_rate = 1e9", r"uplink_rate=.* with leaves=1: one switch"),
    ("workers = 2", "workers = 2\nuplink_queue = 9999", r"uplink_queue=9999 with leaves=1"),
    ("workers = 2", "workers = 2\nleaves = 2\nuplink_rate = 10", r"uplink_rate=10: must be 1000"),
    ("workers = 2", "workers = 2\nleaves = 2\nuplink_queue = 9", r"uplink_queue=9: must be 3028"),
    ("workers = 2", "workers = 4\nleaves = 2\nrate = 2e10", r"uplink_rate: none, .*3e\+10 at most"),
    ("workers = 2", "workers = 2\necn = 900", r"topology.ecn=900: must be 1514 or more"),
    ("workers = 2", "workers = 2\necn = 300000", r"ecn=300000 with a queue of 262144 bytes"),
    (
        "workers = 2",
        "workers = 2\necn = 9000\nleaves = 2\nuplink_queue = 8000",
        r"ecn=9000 with a queue of 8000 bytes: less than the queue",
    ),
    (
        'transport = "tcp"',
        'transport = "tcp"\ncongestion_control = "dctcp"',
        r"contestants: tcp: congestion_control='dctcp': it needs switches that mark; give ecn",
    ),
    (
        "[work]",
        '[rivals]\nstreams = 1\ncongestion_control = "dctcp"\n[work]',
        r"rivals.congestion_control='dctcp': it needs switches that mark",
    ),
    ("servers = 1", "", r"topology.servers=0: work.kind='push' takes 1"),
    ('kind = "push"', 'kind = "pull"', r"work.kind='pull': allowed are 'push', 'all_reduce'"),
    ('kind = "push"', 'kind = "push"\nbytes = 6', r"work: bytes=6: a multiple of 4"),
    ('kind = "push"', 'kind = "push"\nseeds = [1, 1]', r"seeds=\[1, 1\]: one or more different"),
    ('kind = "push"', "", r"work.kind: missing"),
    ('transport = "tcp"', 'transport = "gloo"', r"tcp: transport='gloo': with work.kind='push'"),
    ('transport = "tcp"', 'transport = "tcp"\nbound = 0.5', r"bound or enough: those are gradw"),
    ("bound = 0.1", "bound = 1.5", r"contestants\[0\].bound=1.5: must be 0.0 or more and 0.99"),
    (
        "bound = 0.1",
        "options = { prot = 5 }",
        r"contestants: ours: options: unknown setting prot=5",
    ),
    ('name = "tcp"', 'name = "ours"', r"one or more with different names"),
    ('over = ["tcp"]', 'over = ["udp"]', r"marks: contestant 'udp' takes no part"),
    ("at_most = 1.0", "", r"one of at_most, at_least and share_of_cap"),
    ("[work]", "[loss]\nrate = 2\n[work]", r"loss.rate=2: must be 0.0 or more and 0.99 at most"),
    ("[work]", "[loss]\nper_worker = [0.1]\n[work]", r"loss.per_worker: 1 shares for 2 workers"),
    ("[work]", "[loss]\nrate = 0.9\nrun = 2.0\n[work]", r"run=2.0 with a share of 0.9: runs of 9"),
    ("[work]", '[loss]\nwhen = "steps"\n[work]', r"steps=\[\] with when='steps'"),
    ("[work]", "[topology2]\n[work]", r"scenario.topology2: unknown key"),
    ("[work]", "[[bursts]]\nrate = 1e9\non_s = 2\nperiod_s = 1\n[work]", r"on_s=2.0: no longer"),
    (
        "[work]",
        "[[faults]]\nkind='cut'\nhost=3\nat_s=1\n[work]",
        r"faults.host=3: a host from 0 to 2",
    ),
    ("[work]", "[[faults]]\nkind='kill'\nhost=0\nat_s=1\n[work]", r"kill ends the cell"),
    ("[work]", "[rivals]\nstreams = -1\n[work]", r"rivals.streams=-1: must be 0 or more"),
    ("[work]", "[topology3", r"not TOML"),
    ("[work]", "[grid]\n'loss.rate' = 3\n[work]", r"grid.loss.rate=3: a list of values"),
    ("[work]", "[grid]\n'loss.rats' = [0.1]\n[work]", r"loss.rats: unknown key"),
    ("[work]", "[quick]\nonly = ['nobody']\n[work]", r"quick.only='nobody'"),
    ("[work]", "[quick.work]\nrounds = 0\n[work]", r"work.rounds=0: must be 1 or more"),
    ("[work]", "[map]\nrows = 'length'\n[work]", r"map: 'length' is no axis"),
]


@pytest.mark.parametrize(("old", "new", "complaint"), BAD)
def test_what_cannot_be_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError, match=complaint) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert str(tmp_path / "file.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_power_sgd_takes_no_overlap(tmp_path: Path) -> None:
    text = GOOD.replace("servers = 1", "").replace('kind = "push"', 'kind = "training"')
    text = text.replace('transport = "tcp"', 'transport = "gloo"\nhook = "powersgd"')
    text = text.replace("bound = 0.1", "")
    assert read(tmp_path, text).first.contestants[1].hook == "powersgd"
    with pytest.raises(ScenarioError, match=r"hook='powersgd' with model.overlap=true"):
        read(tmp_path, text + "[model]\noverlap = true\n")


def test_the_file_names_the_scenario(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="name='other': must be 'file'"):
        read(tmp_path, GOOD.replace('name = "file"', 'name = "other"'))
    with pytest.raises(ScenarioError, match="cannot be read"):
        load(tmp_path / "nothing.toml")


GRID = """
[loss]
when = "rounds"
[grid]
"loss.rate" = [0.5, 0.9]
setup = [
  { label = "small", "work.bytes" = 400 },
  { "work.bytes" = 800, "contestants.0.bound" = 0.2 },
]
[quick]
only = ["ours"]
work = { rounds = 3 }
[quick.grid]
"loss.rate" = [0.7]
"""


def test_a_grid_is_all_its_points(tmp_path: Path) -> None:
    cells = read(tmp_path, GOOD + GRID).cells
    assert [cell.name for cell in cells] == [
        "rate 0.5, small",
        "rate 0.5, work.bytes=800, contestants.0.bound=0.2",
        "rate 0.9, small",
        "rate 0.9, work.bytes=800, contestants.0.bound=0.2",
    ]
    assert [cell.scenario.loss.rate for cell in cells] == [0.5, 0.5, 0.9, 0.9]
    assert [cell.scenario.work.bytes for cell in cells] == [400, 800, 400, 800]
    assert [cell.scenario.contestants[0].bound for cell in cells] == [0.1, 0.2, 0.1, 0.2]
    assert all(cell.scenario.loss.when == "rounds" for cell in cells)


def test_the_short_form_is_merged_over_the_long_one(tmp_path: Path) -> None:
    experiment = read(tmp_path, GOOD + GRID, quick=True)
    (cell,) = experiment.cells
    assert cell.scenario.loss.rate == 0.7
    assert cell.scenario.loss.when == "rounds"
    assert cell.scenario.work.rounds == 3
    assert cell.scenario.work.kind == "push"
    assert [each.name for each in cell.scenario.contestants] == ["ours"]
    assert cell.scenario.marks == ()  # the mark is about somebody who takes no part


def test_an_optional_contestant_is_left_out_where_it_cannot_be(tmp_path: Path) -> None:
    text = GOOD.replace("bound = 0.1", "options = { route = 'moon' }\noptional = true")
    experiment = read(tmp_path, text)
    assert [each.name for each in experiment.first.contestants] == ["tcp"]
    assert "'moon'" in experiment.left_out["ours"]
    assert len(experiment.first.marks) == 1  # which is then told as not measured


def test_ports_follow_the_preset_unless_they_are_named() -> None:
    assert Topology(preset="B").ports.rate == 200_000_000
    ports = Topology(preset="A", rate=500e6, queue=65_536).ports
    assert (ports.rate, ports.queue, ports.offloads) == (500_000_000, 65_536, True)
    assert ports.bucket == Topology().ports.bucket  # a train must pass whole
    single = Topology(preset="A", offloads=False).ports
    assert single.bucket == 37_500  # 0.3 ms


def test_uplinks_carry_what_their_ports_do_unless_they_are_named() -> None:
    assert Topology().spread is None
    assert Topology().words == "4 hosts on one switch"
    even = Topology(workers=7, leaves=2).spread
    assert even is not None
    assert (even.uplink.rate, even.uplink.queue) == (4_000_000_000, 256 * 1024)
    assert even.uplink.offloads
    named = Topology(workers=8, leaves=2, uplink_rate=1e9, uplink_queue=65_536)
    assert named.spread is not None
    assert (named.spread.uplink.rate, named.spread.uplink.queue) == (1_000_000_000, 65_536)
    assert named.words == (
        "8 hosts on 2 leaves under one spine, uplinks of 1000 Mbit/s, 64 KiB (4:1)"
    )


def test_dctcp_takes_part_where_switches_mark(tmp_path: Path) -> None:
    text = GOOD.replace("workers = 2", "workers = 2\necn = 30_000")
    text = text.replace('transport = "tcp"', 'transport = "tcp"\ncongestion_control = "dctcp"')
    scenario = read(tmp_path, text).first
    assert scenario.topology.words == "3 hosts on one switch, marks above 29.3 KiB"
    assert scenario.congestion_controls == {"contestants: tcp: congestion_control": "dctcp"}


def test_the_documentation_has_every_key() -> None:
    text = (EXPERIMENTS.parent / "docs" / "lab.md").read_text()
    for name, default, allowed, meaning in key_rows():
        assert f"| `{name}` | {default} | {allowed} | {meaning} |" in text


def test_the_example_of_the_documentation_can_be_read(tmp_path: Path) -> None:
    text = (EXPERIMENTS.parent / "docs" / "lab.md").read_text()
    example = text.split("```toml\n")[1].split("```")[0]
    path = tmp_path / "mine.toml"
    path.write_text(example)
    assert len(load(path).cells) == 4
    assert [cell.name for cell in load(path, quick=True).cells] == ["rate 0.01"]


def test_the_reproduction_page_has_every_scenario_and_mark() -> None:
    text = (EXPERIMENTS.parent / "docs" / "reproduction.md").read_text()
    for path in EXPERIMENTS.glob("*.toml"):
        assert f"## {path.stem}\n" in text
        assert f"gradwire lab run experiments/{path.name}" in text
        for mark in load(path).first.marks:
            assert mark.text in text
