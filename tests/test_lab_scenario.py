"""Scenario files: strict reading, short forms, grids, and the files that the repository has."""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gradwire_lab.scenario import Experiment, ScenarioError, load
from gradwire_lab.scenario.contestant import Contestant
from gradwire_lab.scenario.keys import key_rows
from gradwire_lab.scenario.network import Topology
from gradwire_lab.scenario.reader import build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    "time_to_quality",
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


def test_contestants_reach_the_ranks_as_they_are() -> None:
    for path in EXPERIMENTS.glob("*.toml"):
        for each in load(path).first.contestants:
            assert build(Contestant, json.loads(json.dumps(asdict(each))), "one") == each


def test_values_and_defaults(tmp_path: Path) -> None:
    scenario = read(tmp_path, GOOD).first
    assert (scenario.topology.workers, scenario.topology.hosts) == (2, 3)
    assert scenario.topology.ports.name == "A"
    assert scenario.work.bytes == 4_000_000
    assert scenario.contestants[0].bound == 0.1
    assert scenario.contestants[1].congestion_control == "cubic"
    assert scenario.marks[0].over == ("tcp",)


BAD = [
    ("workers = 2", "wrokers = 2", r"file.toml: topology.wrokers: unknown key.*'workers'"),
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
    (
        "workers = 2",
        "workers = 2\nrates = [1e9]",
        r"topology: rates=\[1000000000.0\]: one for each",
    ),
    (
        "workers = 2",
        "workers = 2\nqueue = 65_536\nqueues = [65_536, 65_536, 65_536]",
        r"queues=\[65536, 65536, 65536\] beside queue=65536: give one of both",
    ),
    (
        "workers = 2",
        "workers = 2\necn = 30_000\nqueues = [65_536, 20_000, 65_536]",
        r"ecn=30000 with a queue of 20000 bytes",
    ),
    (
        "servers = 1",
        "servers = 1\nrates = [1e9, 1e9, 1e8]\n[bandwidth]\nrates = [1e8, 1e9]",
        r"bandwidth.rates=\[100000000.0, 1000000000.0\] beside topology.rates",
    ),
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
    ("servers = 1", "servers = 2", r"topology.servers=2: work.kind='push' takes 1"),
    ('kind = "push"', 'kind = "pull"', r"work.kind='pull': allowed are 'push', 'all_reduce'"),
    ('kind = "push"', 'kind = "push"\nbytes = 6', r"work: bytes=6: a multiple of 4"),
    ('kind = "push"', 'kind = "push"\nseeds = [1, 1]', r"seeds=\[1, 1\]: one or more different"),
    ('kind = "push"', "", r"work.kind: missing"),
    ('transport = "tcp"', 'transport = "gloo"', r"tcp: transport='gloo': with work.kind='push'"),
    (
        'transport = "tcp"',
        'transport = "tcp"\nbound = 0.5',
        r"bound=0.5 with transport='tcp': that is gr",
    ),
    ("bound = 0.1", "bound = 1.5", r"contestants\[0\].bound=1.5: must be 0.0 or more and 0.99"),
    (
        "bound = 0.1",
        "options = { prot = 5 }",
        r"contestants: ours: options: unknown setting prot=5",
    ),
    ('name = "tcp"', 'name = "ours"', r"one or more with different names"),
    ('over = ["tcp"]', 'over = ["udp"]', r"marks\[0\]: contestant 'udp' takes no part"),
    ("at_most = 1.0", "", r"one of at_most, at_least"),
    ("[work]", "[loss]\nrate = 2\n[work]", r"loss.rate=2: must be 0.0 or more and 0.99 at most"),
    ("[work]", "[loss]\nper_worker = [0.1]\n[work]", r"loss.per_worker: 1 shares for 2 workers"),
    ("[work]", "[loss]\nrate = 0.9\nrun = 2.0\n[work]", r"run=2.0 with a share of 0.9: runs of 9"),
    ("[work]", '[loss]\nwhen = "steps"\n[work]', r"steps=\[\] with when='steps'"),
    ("[work]", "[topology2]\n[work]", r"toml: topology2: unknown key"),
    ("[work]", "[[bursts]]\nrate = 1e9\non_s = 2\nperiod_s = 1\n[work]", r"on_s=2.0: no longer"),
    (
        "[work]",
        "[[faults]]\nkind='cut'\nhost=3\nat_s=1\n[work]",
        r"faults.host=3: a host from 0 to 2",
    ),
    ("[work]", "[[faults]]\nkind='kill'\nhost=0\nat_s=1\n[work]", r"kill ends the cell"),
    (
        "[work]",
        "[[faults]]\nkind='kill'\nhost=0\nat_s=1\nfor_s=2\n[work]",
        r"faults\[0\]: for_s=2.0: what is killed does not come back",
    ),
    ("[work]", "[rivals]\nstreams = -1\n[work]", r"rivals.streams=-1: must be 0 or more"),
    ("[work]", "[topology3", r"not TOML"),
    ("[work]", "[grid]\n'loss.rate' = 3\n[work]", r"grid.loss.rate=3: a list of values"),
    ("[work]", "[grid]\n'loss.rats' = [0.1]\n[work]", r"loss.rats: unknown key"),
    ("[work]", "[quick]\nonly = ['nobody']\n[work]", r"quick.only='nobody'"),
    ("[work]", "[quick.work]\nrounds = 0\n[work]", r"work.rounds=0: must be 1 or more"),
    ("[work]", "[map]\nrows = 'length'\n[work]", r"map.rows='length': is no axis"),
    # what is no table, no list, or nothing
    ("[work]", "[quick]\nonly = []\n[work]", r"quick.only=\[\]: a list of one or more contestants"),
    ("[work]", "[quick]\nonly = 'ours'\n[work]", r"quick.only='ours': a list of one or more"),
    ("[work]", "[quick]\nonly = [['ours']]\n[work]", r"quick.only=\['ours'\]: contestants are"),
    ("[work]", "[quick]\ncontestants = []\n[work]", r"short form: .*one or more with different na"),
    ("workers = 2", f"workers = {'9' * 5000}", r"not TOML: Exceeds the limit"),
    ("workers = 2", f"workers = {'9' * 30}", r"topology.workers: a whole number of 64 bits"),
    ("[work]", f"{'a.' * 3000}b = 1\n[work]", r"tables in tables, 16 deep, are allowed"),
    ('[[contestants]]\nname = "ours"', "[[contestants]]\nname = 5", r"name=5: a text is expected"),
    # grids that lead nowhere
    (
        "[work]",
        "[grid]\n'work.kind.x' = [1]\n[work]",
        r"'work.kind.x': kind='push' is no table",
    ),
    ("[work]", "[grid]\n'contestants.2.bound' = [0]\n[work]", r"contestants is a list of 2: a key"),
    ("[work]", "[grid]\n'contestants.0' = [0]\n[work]", r"one of its tables is expected, as in"),
    ("[work]", "[grid]\n'contestants.².bound' = [0]\n[work]", r"contestants is a list of 2: a key"),
    ("[work]", "[grid]\n'loss.' = [0]\n[work]", r"'loss.': a key has a name before and after"),
    ("[work]", "[grid]\nloss.rate = [0.1]\n[work]", r"a dotted key stands in quotes, as in \"loss"),
    ("[work]", "[grid]\na = [{label = ' '}]\n[work]", r"grid.a: label=' ': a text of one line"),
    (
        "[work]",
        "[grid]\na = [{label='x'}, {label='x, y'}]\nb = [{label='y, z'}, {label='z'}]\n[work]",
        r"two cells are called 'x, y, z'",
    ),
    (
        "[work]",
        f"[grid]\n'loss.rate' = {[n / 1000 for n in range(101)]}\n"
        f"'work.rounds' = {[*range(1, 101)]}\n[work]",
        r"grid: 10100 cells; 10000 at most",
    ),
    # grids over what a file has once
    (
        "[work]",
        "[grid]\ntitle = ['x']\n[work]",
        r"grid.title: title='x': the same in all cells; give",
    ),
    ("[work]", "[grid]\nname = ['file']\n[work]", r"grid.name: name='file': the same in all cells"),
    ("[work]", "[grid]\npublished = ['']\n[work]", r"published='': the same in all cells"),
    (
        "[work]",
        "[grid]\na = [{label = 'x', 'work.seeds' = [1]}]\n[work]",
        r"file.toml: grid.a: work.seeds=\[1\]: the same in all cells; give it outside of the grid",
    ),
    (
        "[work]",
        "[grid]\nwork = [{kind = 'push', seeds = [1]}]\n[work]",
        r"grid.work: work.seeds=\[1\]: the same in all cells",
    ),
    ("[work]", "[grid]\n'map.rows' = ['']\n[work]", r"grid.map.rows: map.rows='': the same in all"),
    (
        "[work]",
        "[quick.grid]\n'marks.0.at_most' = [1, 2]\n[work]",
        r"short form: grid.marks.0.at_most: marks.0.at_most=1: the same in all cells",
    ),
    # texts of more than one line where tables and lists have one
    ('title = "a title"', 'title = "a\\ntitle"', r"title='a\\ntitle': a text of one line"),
    (
        'name = "ours"',
        'name = "a\\u2028b"',
        r"contestants\[0\].name='a\\u2028b': a text of one line",
    ),
    ('text = "faster"', 'text = "\\u001b[1m"', r"marks\[0\].text='\\x1b\[1m': a text of one line"),
    (
        "[work]",
        '[grid]\na = [{label = "a\\rb"}]\n[work]',
        r"grid.a: label='a\\rb': a text of one line is expected",
    ),
    (
        "[work]",
        '[grid]\n"contestants.0.policy" = ["a\\nb"]\n[work]',
        r"label='a\\nb': a text of one line is expected",
    ),
    # numbers that nothing can be made of
    (
        'kind = "push"',
        'kind = "push"\nround_limit_s = 0.001',
        r"work.round_limit_s=0.001: must be 0.01 or more",
    ),
    (
        "[work]",
        "[[bursts]]\nrate=1e9\non_s=0.1\nperiod_s=1\nphase_s=1\n[work]",
        r"phase_s=1.0: less than period_s=1.0 is allowed",
    ),
    ("[work]", "[tail]\nratio = 1\n[work]", r"tail: ratio=1.0: above 1 is allowed, .* or 0"),
    # keys that would do nothing, and values that nothing can be made of
    (
        "bound = 0.1",
        "policy = 'dblp'",
        r"ours: policy='dblp' with work.kind='push': pushes take bound",
    ),
    ("bound = 0.1", "spend = 'lost'", r"spend='lost' without a bound: nothing is given up"),
    (
        "bound = 0.1",
        "bound = 0.1\ncontrol = 'probe'\nspend = 'lost'",
        r"spend='lost' with control='probe': .* allowed are",
    ),
    ("bound = 0.1", "bound = 0.1\nlate = 2", r"late=2.0 without enough"),
    ("bound = 0.1", "bound = 0.1\nenough = 0.8", r"bound=0.1 with enough: the clock closes it"),
    (
        "bound = 0.1",
        "congestion_control = 'bbr'",
        r"congestion_control='bbr' with transport='gradwi",
    ),
    (
        "bound = 0.1",
        "options = { route = 'sharded' }",
        r"ours: options: route='sharded': topology.servers de",
    ),
    (
        "bound = 0.1",
        "options = { p = 0.1 }",
        r"options: p=0.1: pushes have no policy; they take bound",
    ),
    ("[work]", "[model]\nwidth = 64\n[work]", r"model: with work.kind='push' none is trained"),
    (
        "[work]",
        "[loss]\nper_worker = [0.1, 0.2]\nat = 'server'\n[work]",
        r"the server's way has none",
    ),
    (
        "[work]",
        "[[bursts]]\nrate=1e9\non_s=1\nperiod_s=1\nsources=32\n" * 7 + "[work]",
        r"topology: 3 hosts and 224 for bursts and rivals: 200 at most",
    ),
    # marks that say nothing, or that no run could measure
    ("at_most = 1.0", "at_least = 0", r"at_least=0: must be above 0"),
    ('over = ["tcp"]', 'over = ["limit", "tcp"]', r"'limit' stands alone, for one of time_median"),
    ('over = ["tcp"]', 'over = ["limit"]\nquantity = "throughput"', r"'limit' stands alone"),
    (
        'over = ["tcp"]',
        'over = ["ours"]',
        r"contestant='ours' over \['ours'\]:",
    ),
    ('contestant = "ours"', 'contestant = "limit"', r"contestant='limit' over"),
    ('over = ["tcp"]', 'over = ["tcp"]\nover_cell = {a = "b"}', r"over and over_cell: one of them"),
    (
        "at_most = 1.0",
        "share_of_cap = 0.8",
        r"share_of_cap=0.8: takes one contestant in over, inver",
    ),
    (
        "at_most = 1.0",
        "share_of_cap = 0.8\ninverse = true",
        r"marks\[0\] \(faster\): can never be measured in cell the only cell: share_of_cap=0.8 "
        r"over 'tcp': takes a contestant .* with a bound above 0",
    ),
    (
        "at_most = 1.0",
        'at_most = 1.0\nquantity = "final_loss"',
        r"'final_loss' with work.kind='push'",
    ),
    ("at_most = 1.0", 'at_most = 1.0\nquantity = "rival_goodput"', r"there are no rivals"),
    (
        "at_most = 1.0",
        'at_most = 1.0\nquantity = "time_p99"',
        r"'time_p99' of 20 samples .*300 are",
    ),
    ("at_most = 1.0", "at_most = 1.0\nwhere = { a = 'b' }", r"where.a: is no axis; axes are \[\]"),
]


@pytest.mark.parametrize(("old", "new", "complaint"), BAD)
def test_what_cannot_be_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError, match=complaint) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert str(tmp_path / "file.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


ONE_BURST = "[[bursts]]\nrate = 1e9\non_s = 0.1\nperiod_s = 1\n"
TRAINED = """
name = "file"
title = "a title"
[work]
kind = "training"
[[contestants]]
name = "tcp"
transport = "gloo"
"""


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (
            "target_loss = 2.0\ntarget_of = 'tcp'",
            "target_of='tcp' beside target_loss=2: one of them",
        ),
        ("target_of = 'udp'", r"model.target_of='udp': takes no part; those that do: \['tcp'\]"),
        ("target_of = 'tcp'\ntarget_within = -1", "target_within=-1: must be 0.0 or more"),
    ],
)
def test_a_loss_to_time_that_cannot_be_is_named(tmp_path: Path, model: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint):
        read(tmp_path, f"{TRAINED}[model]\n{model}\n")


@pytest.mark.parametrize(
    ("text", "table", "line", "complaint", "remedy"),
    [
        (GOOD, "loss", "at = 'server'", "at='server'.*loss.rate or loss.per_worker", "rate = 0.1"),
        (GOOD, "loss", "when = 'rounds'", "when='rounds'.*loss.rate", "per_worker = [0.0, 0.1]"),
        (GOOD, "loss", "run = 2", "run=2.0.*loss.rate", "rate = 0.1"),
        (GOOD, "loss", "lasts_s = 1", "lasts_s=1.0.*loss.rate", "rate = 0.1\nwhen = 'rounds'"),
        (GOOD, "loss", "rate = 0.1\nlasts_s = 1", "lasts_s=1.0.*when='rounds'", "when = 'rounds'"),
        (
            TRAINED,
            "model",
            "target_within = 1",
            "target_within=1.0.*target_of",
            "target_of = 'tcp'",
        ),
        (TRAINED, "loss", "when = 'steps'\nsteps = [3]", "when='steps'.*loss.rate", "rate = 0.1"),
        (GOOD, "rivals", "target = 1", "target=1.*rivals.streams", "streams = 1"),
        (GOOD, "rivals", "congestion_control = 'bbr'", ".*control='bbr'.*streams", "streams = 1"),
        (GOOD, "bandwidth", "every_s = 1", "every_s=1.0.*bandwidth.rates", "rates = [1e8]"),
        (GOOD + ONE_BURST, "tail", "contestant = 'tcp'", "contestant='tcp'.*ratio", "ratio = 1.5"),
        (GOOD + ONE_BURST, "tail", "rounds = 9", "rounds=9", "ratio = 1.5\ncontestant = 'tcp'"),
        (GOOD + ONE_BURST, "tail", "tries = 2", "tries=2", "ratio = 1.5\ncontestant = 'tcp'"),
        (TRAINED, "model", "bucket_mb = 2", "bucket_mb=2.0.*model.overlap=true", "overlap = true"),
    ],
)
def test_a_key_that_does_nothing_is_named(
    tmp_path: Path, text: str, table: str, line: str, complaint: str, remedy: str
) -> None:
    text += f"[{table}]\n{line}\n"
    with pytest.raises(ScenarioError, match=rf"file.toml: {table}\.{complaint}.*or leave it out"):
        read(tmp_path, text)
    assert read(tmp_path, f"{text}{remedy}\n").cells


def test_layers_are_those_of_an_all_reduce(tmp_path: Path) -> None:
    layered = GOOD.replace("[work]", "[work]\nlayers = 2")
    with pytest.raises(ScenarioError, match=r"work.layers=2.*work.kind='all_reduce'"):
        read(tmp_path, layered)


def test_a_key_need_not_do_something_in_every_cell(tmp_path: Path) -> None:
    grid = '[grid]\na = [{ label = "x"%s }, { label = "y", "rivals.streams" = 1 }]\n'
    target, streams = "target = 1\n", "streams = 1\n"
    for good in (
        f"[rivals]\n{target}" + grid % "",
        f"[rivals]\n{target}[quick.rivals]\n{streams}",
        f"[rivals]\n{target}{streams}[quick.rivals]\nstreams = 0\n",
    ):
        assert read(tmp_path, GOOD + good).cells
    for bad in (
        grid % ', "rivals.target" = 1',  # only where there is none
        f"[quick.rivals]\n{target}",
        f"[rivals]\n{streams}[quick.rivals]\n{target}streams = 0\n",
    ):
        with pytest.raises(ScenarioError, match=r"file.toml: rivals.target=1: does nothing in any"):
            read(tmp_path, GOOD + bad)


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


def test_contestants_are_tables(tmp_path: Path) -> None:
    start = GOOD.partition("[[contestants]]")[0]
    for value in ("5", "[]", "[1, 2]", "['ours']", "{}"):
        text = f"contestants = {value}\n{start}[quick]\nonly = ['ours']\n"
        for quick in (False, True):
            with pytest.raises(ScenarioError, match=r"contestants(\[0\])?[:=]"):
                read(tmp_path, text, quick=quick)


def test_a_grid_is_all_its_points(tmp_path: Path) -> None:
    cells = read(tmp_path, GOOD + GRID).cells
    assert [cell.name for cell in cells] == [
        "loss 50 %, small",
        "loss 50 %, work.bytes=800, contestants.0.bound=0.2",
        "loss 90 %, small",
        "loss 90 %, work.bytes=800, contestants.0.bound=0.2",
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
    text = GOOD.replace("bound = 0.1", "options = { hovercraft = 'eels' }\noptional = true")
    experiment = read(tmp_path, text)
    assert [each.name for each in experiment.first.contestants] == ["tcp"]
    assert "unknown setting hovercraft='eels'" in experiment.left_out["ours"]
    assert len(experiment.first.marks) == 1  # which is then told as not measured
    # in one cell: then in none
    grid = "[grid]\n'contestants.0.options' = [{ timeout = 9.0 }, { hovercraft = 'eels' }]\n"
    experiment = read(tmp_path, GOOD.replace("bound = 0.1", "optional = true") + grid)
    assert [len(cell.scenario.contestants) for cell in experiment.cells] == [1, 1]


@pytest.mark.parametrize(
    "options", ["{ timeout = -1 }", "{ route = 'moon' }", "{ hovercraft = 1, timeout = -1 }"]
)
def test_an_optional_contestant_may_not_be_wrong(tmp_path: Path, options: str) -> None:
    text = GOOD.replace("bound = 0.1", f"options = {options}\noptional = true")
    with pytest.raises(ScenarioError, match=r"ours: options: (timeout=-1|route='moon'): "):
        read(tmp_path, text)


ALL_REDUCE = """
name = "file"
title = "a title"
[work]
kind = "all_reduce"
layers = 4
[[contestants]]
name = "ours"
transport = "gradwire"
policy = "plot"
options = { table = { "layer3.*" = 0.1, "*" = 0.2 } }
"""
TRAINING = ALL_REDUCE.replace('"all_reduce"\nlayers = 4', '"training"').replace(
    "layer3", "blocks.0"
)


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        (ALL_REDUCE, 'table = { "layer4.*" = 0.1 }', r"table\['layer4.\*'\]: matches no tensor"),
        (TRAINING, 'table = { "blocks.2.*" = 0.1 }', r"table\['blocks.2.\*'\]: matches no tensor"),
        (
            ALL_REDUCE,
            'table = { "*" = 0.1 }, route = "server"',
            r"route='server': topology.servers decides",
        ),
        (TRAINING, 'table = { "*" = 0.1 }, servers = 1', r"servers=1: topology.servers decides"),
        (
            ALL_REDUCE,
            'table = { "*" = 0.1 }, loss_rise = 0.1',
            r"loss_rise=0.1: only work.kind='tr",
        ),
        (ALL_REDUCE, 'table = { "*" = 2 }', r"table\['\*'\]=2: a bound is a number in"),
        (ALL_REDUCE, 'table = { "*" = 0.1 }, p = 0.1', r"p=0.1 does not go with policy='plot'"),
    ],
)
def test_options_that_could_do_nothing(
    tmp_path: Path, text: str, options: str, complaint: str
) -> None:
    assert len(read(tmp_path, text).first.contestants) == 1
    start, _, rest = text.partition("options = {")
    with pytest.raises(ScenarioError, match=rf"ours: options: .*{complaint}"):
        read(tmp_path, f"{start}options = {{ {options} }}\n{rest.partition(chr(10))[2]}")


def test_what_training_cannot(tmp_path: Path) -> None:
    for line, complaint in (
        ("[work]\nbytes = 8", r"bytes=8 with kind='training'"),
        ("[work]\nrounds = 2", r"warm_up=2: of rounds=2 steps of training none would be timed"),
        (
            "[loss]\nrate=0.1\nwhen='steps'\nsteps=[19, 20]\n[work]",
            r"loss.steps=\[20\]: of work.round",
        ),
    ):
        with pytest.raises(ScenarioError, match=complaint):
            read(tmp_path, TRAINING.replace("[work]", line))
    for change, complaint in (
        ('policy = "reliable"\ntolerant = ["mid"]', "it has no phases to vote for"),
        ('policy = "dblp"\noptions = { every = "epoch" }', "the lab has no epochs"),
        ('policy = "dblp"\ntolerant = ["never", "mid"]', "'never' stands alone"),
        ('policy = "dbpl"', "policy='dbpl': allowed are .*did you mean 'dblp'"),
    ):
        with pytest.raises(ScenarioError, match=complaint):
            read(tmp_path, TRAINING.partition("policy")[0] + change)


MARK = """
[[marks]]
text = "t"
contestant = "ours"
at_most = 1.0
"""


def test_marks_belong_to_cells_that_there_are(tmp_path: Path) -> None:
    grid = '[grid]\na = [{ label = "x" }, { label = "y", "work.rounds" = 400 }]\n'
    for line, complaint in (
        ("where = { a = ['x', 'z'] }", r"where.a='z': matches no cell; labels are \['x', 'y'\]"),
        ("where = { a = [] }", r"where.a=\[\]: matches no cell"),
        ("where = { a = 1 }", r"where.a=1: matches no cell"),
        ("over_cell = { a = 'z' }", r"over_cell.a='z': matches no cell"),
        ("over_cell = { a = ['x'] }", r"over_cell.a=\['x'\]: one label is expected"),
        ("quantity = 'time_p99'", r"in cell x: quantity='time_p99' of 20 samples"),
    ):
        with pytest.raises(ScenarioError, match=complaint):
            read(tmp_path, ALL_REDUCE + MARK + line + "\n" + grid)
    for line in (
        "quantity = 'time_p99'\nwhere = { a = 'y' }",
        "quantity = 'time_p99'\nscope = 'max'",
        "over_cell = { a = 'x' }",
    ):
        assert len(read(tmp_path, ALL_REDUCE + MARK + line + "\n" + grid).cells) == 2


def test_a_difference_is_that_of_seeds(tmp_path: Path) -> None:
    other = '[[contestants]]\nname = "tcp"\ntransport = "gloo"\n'
    mark = MARK.replace("at_most = 1.0", 'over = ["tcp"]\nwithin = 0.01\ndifference = true')
    text = TRAINING.replace("[work]", "[work]\nseeds = [0, 1]") + other + mark
    good = 'quantity = "final_loss"\n'
    assert read(tmp_path, text + good).first.marks[0].within == 0.01
    for old, new, complaint in (
        (
            "difference = true",
            "difference = false",
            "difference=false with within=0.01",
        ),
        ("within = 0.01", "at_most = 0.01", "difference=true with within=None: each takes"),
        (
            "within = 0.01",
            "within = 0.01\nat_most = 1",
            "one of at_most, at_least, share_of_cap",
        ),
        ("within = 0.01", "within = 0", "within=0: must be above 0"),
        ('over = ["tcp"]', "", r"over=\[\]: takes final_loss, one contestant in over"),
        ('"final_loss"', '"job_time"', "quantity='job_time'"),
        ("within = 0.01", "within = 0.01\nscope = 'max'", "scope='every' and no inverse"),
        ("seeds = [0, 1]", "seeds = [4]", r"work.seeds=\[4\]: two or more are needed"),
    ):
        with pytest.raises(ScenarioError, match=complaint):
            read(tmp_path, (text + good).replace(old, new))


def test_a_map_has_its_axes(tmp_path: Path) -> None:
    grid = '[grid]\na = [{ label = "x" }]\nb = [{ label = "y" }]\n[map]\n'
    assert read(tmp_path, ALL_REDUCE + grid + 'rows = "a"\ncolumns = "b"\nquiet = "x"').cells
    for lines, complaint in (
        ('rows = "a"', "map.columns='': is no axis"),
        ('columns = "a"', "map.rows='': is no axis"),
        ('rows = "a"\ncolumns = "a"', "map.columns='a': another axis"),
        ('rows = "a"\ncolumns = "b"\nquiet = "y"', r"map.quiet='y': labels of 'a' are \['x'\]"),
    ):
        with pytest.raises(ScenarioError, match=complaint):
            read(tmp_path, ALL_REDUCE + grid + lines)


def test_a_table_without_a_label_is_a_value_where_the_axis_is_a_key(tmp_path: Path) -> None:
    grid = """
[grid]
"contestants.0.options" = [{ table = { "*" = 0.1 } }, { table = { "*" = 0.2 } }]
"""
    cells = read(tmp_path, ALL_REDUCE + grid).cells
    assert [cell.scenario.contestants[0].options for cell in cells] == [
        {"table": {"*": 0.1}},
        {"table": {"*": 0.2}},
    ]
    assert [cell.name for cell in cells] == ["options table={'*': 0.1}", "options table={'*': 0.2}"]


def mutate(tables: Any, random: Random) -> None:
    """Change one thing: a value, a key, or its place."""
    places: list[tuple[Any, Any]] = []
    waiting = [tables]
    while waiting:
        inner = waiting.pop()
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        places += [(inner, key) for key in keys]
        waiting += [inner[key] for key in keys if isinstance(inner[key], (dict, list))]
    inner, key = random.choice(places)
    odd = [0, -1, 1 << 62, 0.5, math.inf, math.nan, True, "", "x", "a\nb", [], {}, [1], [{}]]
    odd += ["limit", "training", "plot", {"label": "a"}, {"a.b": 1}, datetime.date(2026, 5, 1)]
    words = ["", ".", "label", "only", "policy", "options", "work.bytes.x", "marks.9.text", "grid"]
    change = random.randrange(4)
    if change == 0:
        del inner[key]
    elif change == 1 and isinstance(inner, dict):
        inner[random.choice(words)] = inner.pop(key)
    elif change == 2:
        other, place = random.choice(places)
        inner[key] = copy.deepcopy(other[place])
    else:
        inner[key] = copy.deepcopy(random.choice(odd))


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_whatever_a_file_says_is_read_or_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["gradwire_lab.scenario.load"]
    tables = tomllib.loads(path.read_text())
    for axis, values in tables.get("grid", {}).items():
        tables["grid"][axis] = values[:2]
    for axis in list(tables.get("grid", {}))[2:]:
        del tables["grid"][axis]
    random = Random(path.stem + os.environ.get("GRADWIRE_TEST_SEED", ""))  # as `make fuzz` sets it
    refused: list[str] = []
    for _ in range(60):
        mutated = copy.deepcopy(tables)
        for _ in range(random.randint(1, 2)):
            mutate(mutated, random)
        monkeypatch.setattr(module, "_read", lambda path, found=mutated: copy.deepcopy(found))
        try:
            load(path, quick=random.random() < 0.5)
        except ScenarioError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(each.startswith(f"{path}: ") and "\n" not in each for each in refused)


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
    assert scenario.topology.words == "3 hosts (1 server) on one switch, marks above 29.3 KiB"
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
    assert [cell.name for cell in load(path, quick=True).cells] == ["loss 1 %"]


def test_the_reproduction_page_has_every_scenario_and_mark() -> None:
    text = (EXPERIMENTS.parent / "docs" / "reproduction.md").read_text()
    for path in EXPERIMENTS.glob("*.toml"):
        assert f"## {path.stem}\n" in text
        assert f"gradwire lab run experiments/{path.name}" in text
        for mark in load(path).first.marks:
            assert mark.text in text
