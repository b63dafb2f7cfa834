"""Long runs: what is chosen, what is kept of them, and how they go on where they ended."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import matplotlib
import pytest
from rich.console import Console
from typer.testing import CliRunner

import gradwire
from gradwire.policies.plot import Calibration as Table
from gradwire_lab.command import app
from gradwire_lab.network.bursts import BurstRecord
from gradwire_lab.report.command import app as report
from gradwire_lab.report.drawing import STYLE, figure_of, logarithmic
from gradwire_lab.report.maps import grid_values, sheets
from gradwire_lab.report.markdown import as_markdown
from gradwire_lab.report.page import render
from gradwire_lab.report.words import notes, verdict
from gradwire_lab.run import build, checks, course
from gradwire_lab.run.agenda import Agenda, choose_cells, choose_seeds, duration, time_left
from gradwire_lab.run.course import Audience, CodeChanged, done, outcome_of, run
from gradwire_lab.run.journal import NAME, Journal, fingerprint
from gradwire_lab.run.model import (
    Calibration,
    CellRun,
    Event,
    Record,
    Track,
    as_json,
)
from gradwire_lab.run.results import document
from gradwire_lab.run.voice import Voice
from gradwire_lab.scenario import Cell, Experiment, ScenarioError, load
from test_lab_run import Lab

SMALL = """
name = "small"
title = "a small one"
[topology]
preset = "B"
workers = 2
[work]
kind = "all_reduce"
bytes = 40_000
rounds = 4
block = 4
warm_up = 1
round_limit_s = 20.0
seeds = [0, 1]
[[contestants]]
name = "ours"
transport = "gradwire"
policy = "reliable"
[[marks]]
text = "soon"
contestant = "ours"
at_most = 10.0
[grid]
"work.layers" = [1, 2, 3]
"""


def small(folder: Path, *changes: tuple[str, str]) -> Experiment:
    text = SMALL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "small.toml"
    path.write_text(text)
    return load(path)


def samples(*seconds: float) -> CellRun:
    """A run as a cell leaves it behind, with something in every list."""
    track = Track(
        starts=[10.0 + n for n in range(len(seconds))],
        seconds=list(seconds),
        spans=[(10.0, 11.0)],
        job_s=sum(seconds),
        delivered=[[1.0, 0.5]] * len(seconds),
        layers={"layer0.weight": 0.75},
        bytes=[100] * len(seconds),
        packets=[10] * len(seconds),
        retransmissions=[1] * len(seconds),
        push_s=[each / 2 for each in seconds],
        passes=[2] * len(seconds),
        critical=[True] * len(seconds),
        losses=[(4, 1.5, 2.25), (8, 3.0, math.nan)],
        fingerprints=["ab", "ab"],
        reports=[{"engine": {"sent": 3}}],
    )
    return CellRun(
        9.5,
        {"ours": track},
        bursts=[BurstRecord(9.6, 9.7, 1000)],
        lossy=[(9.6, 9.8)],
        events=[Event(9.9, "cut host 1")],
        rivals=[(9.5, 0), (9.6, 5)],
        link="TAP pairs",
        facts={"parameters": 10},
    )


def record(cell: Cell, seed: int, found: CellRun, took_s: float = 2.0, day: int = 1) -> Record:
    return Record(
        cell=cell.name,
        seed=seed,
        scenario=fingerprint(cell, False),
        date=f"2026-05-0{day}T10:00:00+00:00",
        took_s=took_s,
        gradwire=build.build(),
        commit="abc",
        machine=build.machine(),
        settings=build.settings_outside(),
        load=0.5,
        run=found,
    )


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    cell = small(tmp_path).cells[0]
    wrote = record(cell, 0, samples(0.25, 0.5))
    calibration = Calibration("B", 2, 4e8, 3.9e8)
    with Journal(tmp_path / "out") as journal:
        journal.add_calibration(calibration)
        journal.add(wrote)
    with Journal(tmp_path / "out") as journal:
        (read,) = journal.records
        assert journal.calibrations == [calibration]
    (*_, (_, _, lost)) = read.run.tracks["ours"].losses
    assert lost is None
    assert math.isnan(read.run.tracks["ours"].curve[-1][1])
    for each in (wrote, read):
        each.run.tracks["ours"].losses.pop()  # no number is like another
    assert read == wrote
    for line in (tmp_path / "out" / NAME).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON


def test_a_line_that_was_cut_off_is_no_run(tmp_path: Path) -> None:
    first, second, _ = small(tmp_path).cells
    with Journal(tmp_path) as journal:
        journal.add(record(first, 0, samples(0.1)))
        journal.add(record(second, 0, samples(0.2)))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-40])
    with Journal(tmp_path) as journal:
        assert [each.cell for each in journal.records] == [first.name]
        journal.add(record(second, 0, samples(0.3)))
    with Journal(tmp_path) as journal:
        assert [each.cell for each in journal.records] == [first.name, second.name]


def test_a_journal_belongs_to_one_process(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(ScenarioError, match="another `gradwire lab run` writes"):
        Journal(tmp_path)
    assert not (tmp_path / NAME).exists()  # nothing was written
    (tmp_path / NAME).write_text("{}\n")
    with pytest.raises(ScenarioError, match=r"runs.jsonl: line 1 is no run.*--again starts over"):
        Journal(tmp_path)
    with Journal(tmp_path, again=True) as journal:
        assert journal.records == []


def test_only_what_would_come_out_the_same_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = small(tmp_path)
    first, second, third = experiment.cells
    with Journal(tmp_path) as journal:
        journal.add(record(first, 0, samples(0.1)))
        journal.add(replace(record(first, 0, samples(0.2)), gradwire="0.0.1+other"))
        journal.add(replace(record(second, 0, samples(0.2)), machine={"cpu": "another"}))
        journal.add(replace(record(second, 1, samples(0.2)), settings={"GRADWIRE_P": "0.3"}))
        failed = record(third, 0, samples(0.3))
        failed.run.error = "rank 1 died"
        journal.add(failed)

        known = journal.known(experiment.cells, False)
        assert set(known) == {(first.name, 0), (third.name, 0)}
        assert set(done(known)) == {(first.name, 0)}  # what failed runs again
        assert known[first.name, 0].run.tracks["ours"].seconds == [0.1]
        assert journal.known(experiment.cells, True) == {}  # the short form is another
        due = Agenda(experiment.cells, (0, 1)).due(done(known))
        assert [(cell.name, seed) for cell, seed in due] == [
            *((cell.name, 0) for cell in (second, third)),
            *((cell.name, 1) for cell in experiment.cells),
        ]

        # words and marks change nothing that is measured; a cell's values do
        words = small(tmp_path, ("a small one", "another title"), ("at_most = 10.0", "at_most = 1"))
        assert (first.name, 0) in journal.known(words.cells, False)
        changed = small(tmp_path, ("[1, 2, 3]", "[1, 4]"), ("bytes = 40_000", "bytes = 40_004"))
        assert journal.known(changed.cells, False) == {}
    monkeypatch.setenv("GRADWIRE_P", "0.3")
    with Journal(tmp_path) as journal:
        assert set(journal.known(experiment.cells, False)) == {(second.name, 1)}


def test_a_journal_shows_what_others_measured(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    first, second, _ = experiment.cells
    out = tmp_path / "out"
    command = ["show", str(experiment.path), "--out", str(out)]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert not out.exists()
    with Journal(out) as journal:
        journal.add(record(first, 0, samples(0.1)))
        other = {**build.machine(), "kernel": "5.15-other"}
        elsewhere = record(second, 1, samples(0.2))
        journal.add(replace(elsewhere, gradwire="0.0.1+other", machine=other))
        journal.add(replace(record(first, 1, samples(0.3)), scenario="another"))
        journal.add(replace(record(first, 0, samples(0.4)), scenario="another"))
        with Journal(out, reading=True) as read:  # while somebody writes
            found = document(outcome_of(experiment, read), "c")
    assert [len(cell.runs) for cell in found.cells] == [2, 1, 0]
    assert found.cells[0].contestants[0].max_s == 0.3  # not the 0.4 of another form
    assert found.other_forms == [first.name]
    assert found.gradwire == f"0.0.1+other, {build.build()}"
    assert found.kernel.congestion_controls == []  # this kernel's are not that one's
    (made,) = (line for line in notes(found) if line.startswith("Made by"))
    assert "5.15-other" in made
    before = (out / NAME).read_bytes()
    page = tmp_path / "page" / "report.html"
    shown = CliRunner().invoke(app, [*command, "--page", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "Made by gradwire 0.0.1+other" in shown.output
    assert "<svg" in page.read_text()
    assert CliRunner().invoke(app, [*command, "--markdown"]).output.startswith("## small")
    assert (out / NAME).read_bytes() == before
    (out / "results.json").write_text(json.dumps(as_json(found)))
    rows = json.loads(CliRunner().invoke(report, [str(out), "--json"]).output)
    assert [row["× limit"] == "–" for row in rows] == [True, False]  # of another form
    (ours,) = found.cells[0].contestants
    assert ours.throughput_bps is None  # of how many bytes and workers is not known
    assert ours.by_seed["0"].throughput_bps is None
    assert found.cells[1].contestants[0].throughput_bps > 0


def test_lines_that_cannot_be_read_are_told_from_those_of_another_format(tmp_path: Path) -> None:
    first = small(tmp_path).cells[0]
    with Journal(tmp_path) as journal:
        journal.add(record(first, 0, samples(0.1)))
    path = tmp_path / NAME
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "format": 2}) + "\n")
    with pytest.raises(ScenarioError, match="line 1 has another format than 1"):
        Journal(tmp_path)
    for name, value in (("seconds", ["a"]), ("delivered", [[None]]), ("job_s", "b")):
        broken = copy.deepcopy(line)
        broken["run"]["tracks"]["ours"][name] = value
        path.write_text(json.dumps(broken) + "\n")
        with pytest.raises(ScenarioError, match="line 1 is no run of this gradwire's lab"):
            Journal(tmp_path, reading=True)


def test_another_scenarios_results_are_not_written_over(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    before = json.dumps({"scenario": "other"})
    (out / "results.json").write_text(before)
    found = CliRunner().invoke(app, ["run", str(experiment.path), "--out", str(out)])
    assert found.exit_code == 2
    assert "holds results of scenario 'other', not of 'small'" in found.output
    assert (out / "results.json").read_text() == before
    assert not (out / NAME).exists()


def test_runs_of_another_form_leave_marks_open(tmp_path: Path) -> None:
    """Such as the quick form's, whose cells have the same names."""
    experiment = small(tmp_path, ("[1, 2, 3]", "[1]"))
    (cell,) = experiment.cells
    for scenario, met in ((fingerprint(cell, True), None), (fingerprint(cell, False), True)):
        with Journal(tmp_path / "out", again=True) as journal:
            for seed in experiment.first.work.seeds:
                journal.add(replace(record(cell, seed, samples(0.1)), scenario=scenario))
            with Journal(tmp_path / "out", reading=True) as read:
                (mark,) = document(outcome_of(experiment, read), "c").marks
        assert mark.met is met


def test_the_short_form_judges_no_mark_and_names_what_it_ran(tmp_path: Path) -> None:
    path = small(tmp_path).path
    path.write_text(f'{path.read_text()}[quick.grid]\n"work.layers" = [1, 2]\n')
    experiment = load(path, quick=True)
    with Journal(tmp_path / "out") as journal:
        for cell in experiment.cells:
            for seed in experiment.first.work.seeds:
                form = fingerprint(cell, True)
                journal.add(replace(record(cell, seed, samples(99.0)), scenario=form))
        found = document(outcome_of(experiment, journal), "c")
    (mark,) = found.marks
    assert mark.value == 99.0  # over 10
    assert mark.met is mark.missed_by is None
    assert [row.met for row in mark.cells] == [None, None]
    assert verdict(mark).startswith("open: ")
    page = render(found)
    assert 'class="missed"' not in page
    assert "<h1>Short form of small: 2 workers; layers 1; layers 2</h1>" in page
    assert load(path).title == "a small one"


@pytest.mark.parametrize("chosen", [[], ["--seeds", "0,"]])
@pytest.mark.parametrize("stop", ["rights", "rate", "interrupt"])
def test_starting_over_forgets_nothing_where_nothing_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str, chosen: list[str]
) -> None:
    experiment = small(tmp_path)
    with Journal(tmp_path / "out") as journal:
        journal.add(record(experiment.cells[0], 0, samples(0.1)))
    before = (tmp_path / "out" / NAME).read_bytes()

    def refuse(*_: object) -> Calibration:
        if stop == "interrupt":
            raise KeyboardInterrupt
        raise ScenarioError("a lower rate is allowed")

    monkeypatch.setattr(checks, "probe", lambda **_: "no rights" if stop == "rights" else None)
    monkeypatch.setattr(course, "calibrate", refuse)
    command = ["run", str(experiment.path), "--again", *chosen, "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, command)
    said = {"rights": "no rights", "rate": "a lower rate", "interrupt": "interrupted"}
    assert said[stop] in found.output
    assert found.exit_code == (130 if stop == "interrupt" else 2)
    assert (tmp_path / "out" / NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("preset", "impairment", "part"),
    [
        ("B", "[topology]\nrtt_s = 0.01", "wired"),
        ("A", "[loss]\nrate = 0.1\n[topology]", "wired"),  # packets out of trains
        ("B", "[loss]\nrate = 0.1\n[topology]", "lossy"),
        ("A", "[[faults]]\nkind = 'cut'\nhost = 1\nat_s = 0.0\n[topology]", "lossy"),
    ],
)
def test_what_cells_need_is_tried_before_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, impairment: str, part: str
) -> None:
    """Namespaces alone do not carry every scenario."""
    name = f'preset = "{preset}"'
    experiment = small(tmp_path, ("[topology]", impairment), ('preset = "B"', name))
    monkeypatch.setattr(checks, "probe", lambda **wanted: "no such part" if wanted else None)
    with pytest.raises(ScenarioError, match=r"small.toml: cell .*: no such part"):
        checks.check(experiment)
    tried: list[dict[str, bool]] = []
    monkeypatch.setattr(checks, "probe", lambda **wanted: tried.append(wanted))
    checks.check(experiment)
    assert tried == [{}, {part: True}]


ODD = "[/x] [bold] :x: $x^{$ a|b\\"
"""What terminals, Markdown and plots take for something else."""


def test_names_are_shown_to_the_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    experiment = small(
        tmp_path,
        ('"a small one"', f"'{ODD}'"),
        ('"ours"', f"'{ODD}'"),
        ('"soon"', f"'mark {ODD}'"),
        (
            '"work.layers" = [1, 2, 3]',
            f"a = [{{ label = 'label {ODD}' }}]\nb = [{{ label = 'b' }}]",
        ),
        ("[grid]", f"[map]\nrows = 'a'\ncolumns = 'b'\nquiet = 'label {ODD}'\n[grid]"),
    )
    out, page = tmp_path / "out", tmp_path / "page.html"
    run_of_it = samples(0.1)
    run_of_it.tracks[ODD] = run_of_it.tracks.pop("ours")
    with Journal(out) as journal:
        journal.add(record(experiment.cells[0], 0, run_of_it))
        failed = record(experiment.cells[0], 1, CellRun(0.0))
        failed.run.error = f"failed {ODD}"
        journal.add(failed)
        (out / "results.json").write_text(
            json.dumps(as_json(document(outcome_of(experiment, journal), "c")))
        )

    def said(program: Any, *arguments: str) -> str:
        found = CliRunner().invoke(program, arguments)
        assert found.exit_code == 0, found.output
        return found.output

    assert ODD in said(app, "list", str(tmp_path))
    show = ("show", str(experiment.path), "--out", str(out))
    found = said(app, *show, "--page", str(page))
    for text in (f"small: label {ODD}, b", f" {ODD}  ", f"mark {ODD}", f"failed {ODD}"):
        assert text in found
    assert page.read_text().count(f"{ODD}: maximum / quiet median") == 1
    found = said(report, str(out), "--out", str(page))
    for text in (f"small: label {ODD}, b", f" {ODD}  ", f": mark {ODD}: "):
        assert text in found
    rows = [line for line in said(app, *show, "--markdown").splitlines() if line.startswith("|")]
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) in (6, 7)  # of either table
    assert sum(ODD.replace("|", r"\|") in row for row in rows) == 2

    for terminal, kind in ((False, "xterm"), (True, "dumb"), (True, "xterm")):
        monkeypatch.setenv("TERM", kind)
        heard = io.StringIO()
        with Voice(Console(file=heard, force_terminal=terminal, width=400)) as voice:
            voice.stage(f"stage {ODD}")
            voice.tick(ODD, 3)
        ticks = f": {ODD} 3" if terminal and kind == "xterm" else ""
        assert f"stage {ODD}{ticks}" in heard.getvalue()


PAGE = ("--out", "page.html")
ENTRY: list[Any] = ["cells", 0, "contestants", 0]
BROKEN: list[tuple[tuple[str, ...], list[Any], Any, str]] = [
    *(
        (arguments, place, None, f"{name}: missing")
        for arguments in ((), PAGE, ("--markdown",), ("--json",), (*PAGE, "whole.json"))
        for place, name in (
            (["cells"], "cells"),
            (["command"], "command"),
            (["cells", 0, "name"], "cells[0].name"),
            ([*ENTRY, "median_s"], "cells[0].contestants[0].median_s"),
        )
    ),
    ((), ["cells"], 5, "cells=5: a list is expected"),
    ((), ["cells", 0], [], "cells[0]=[]: a table of keys is expected"),
    ((), [*ENTRY, "name"], 5, "cells[0].contestants[0].name=5: a text is expected"),
    ((), ["marks", 0, "scope"], "some", "marks[0].scope='some': allowed are 'every', 'mean'"),
]


@pytest.mark.parametrize(("arguments", "place", "value", "complaint"), BROKEN)
def test_results_that_lack_something_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    place: list[Any],
    value: Any,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = small(tmp_path)
    with Journal(tmp_path) as journal:
        journal.add(record(experiment.cells[0], 0, samples(0.1)))
        found = document(outcome_of(experiment, journal), "c")
    Path("whole.json").write_text(json.dumps(as_json(found)))
    written = inner = as_json(found)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if value is None:
        del inner[place[-1]]
    Path("broken.json").write_text(json.dumps(written))
    said = CliRunner().invoke(report, [*arguments, "broken.json"])
    assert said.exit_code == 2, said.output
    assert said.output.startswith(
        "gradwire report: broken.json: not as `gradwire lab run` writes it: "
    )
    assert complaint in said.output
    assert said.output.count("\n") == 1
    assert not Path("page.html").exists()


def test_a_run_ends_where_the_code_changes(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    with Journal(tmp_path) as journal:
        journal.here = ("0.0.1+before", *journal.here[1:])
        with pytest.raises(CodeChanged, match=r"gradwire was changed while this ran \(0.0.1\+bef"):
            run(experiment, [(experiment.cells[0], 0)], journal, Audience())
        assert journal.records == []


def test_what_is_only_read_from_a_run_is_no_part_of_its_form(tmp_path: Path) -> None:
    def form(model: str) -> str:
        training = (
            ('kind = "all_reduce"\nbytes = 40_000', 'kind = "training"'),
            ('[grid]\n"work.layers" = [1, 2, 3]', f"[model]\n{model}"),
        )
        (cell,) = small(tmp_path, *training).cells
        return fingerprint(cell, False)

    assert form("target_loss = 2.5") == form("target_loss = 2.6") == form("")
    assert form('target_of = "ours"\ntarget_within = 0.1') == form('target_of = "ours"') == form("")
    assert form("width = 32") != form("")
    assert form("gamma = 1.0") == form("") != form("gamma = 0.1")


def test_what_stands_in_a_table_counts_not_only_its_name(tmp_path: Path) -> None:
    table = tmp_path / "bounds.toml"
    model = Table.fingerprint({"layer0.weight": 10_000})
    plot = f'policy = "plot"\noptions = {{ table = "{table}" }}'
    prints = []
    for bound in (0.1, 0.2, 0.2):
        Table(model, {"layer0.weight": bound}).save(table)
        (cell,) = small(tmp_path, ('policy = "reliable"', plot), ("[1, 2, 3]", "[1]")).cells
        prints.append(fingerprint(cell, False))
    assert prints[0] != prints[1] == prints[2]


def test_starting_over(tmp_path: Path) -> None:
    first, second, _ = small(tmp_path).cells
    with Journal(tmp_path) as journal:
        for cell in (first, second):
            journal.add(record(cell, 0, samples(0.1)))
    with Journal(tmp_path) as journal:
        journal.forget([(first.name, 0), (first.name, 1)])
        assert [each.cell for each in journal.records] == [second.name]
    with Journal(tmp_path) as journal:  # nothing came of it
        assert [each.cell for each in journal.records] == [first.name, second.name]
        journal.forget([(first.name, 0), (first.name, 1)])
        journal.add(record(first, 0, samples(0.2)))
        journal.add(record(first, 1, samples(0.2)))
    with Journal(tmp_path) as journal:
        assert [(each.cell, each.seed) for each in journal.records] == [
            (second.name, 0),
            (first.name, 0),
            (first.name, 1),
        ]


def test_starting_over_with_everything(tmp_path: Path) -> None:
    first, second, third = small(tmp_path).cells
    old, new = (Calibration("B", 2, 4e8, reached) for reached in (3e8, 3.9e8))
    with Journal(tmp_path) as journal:
        journal.add_calibration(old)
        journal.add(record(first, 0, samples(0.1)))
    before = (tmp_path / NAME).read_bytes()
    with Journal(tmp_path, again=True) as journal:
        journal.add_calibration(new)
        assert (journal.records, journal.calibrations) == ([], [new])
    assert (tmp_path / NAME).read_bytes() == before  # nothing came of it
    with Journal(tmp_path, again=True) as journal:
        journal.add_calibration(new)
        journal.add(record(second, 0, samples(0.1)))
        journal.add(record(third, 0, samples(0.1)))
    with Journal(tmp_path) as journal:
        assert [each.cell for each in journal.records] == [second.name, third.name]
        assert journal.calibrations == [new]


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_keys_and_checks_of_a_file_run_nothing(tmp_path: Path) -> None:
    runner = CliRunner()
    rows = json.loads(runner.invoke(app, ["keys", "--json"]).output)
    assert {"key", "default", "allowed", "meaning"} == set(rows[0])
    assert "work.bytes" in {row["key"] for row in rows}
    assert "work.bytes" in runner.invoke(app, ["keys"], env={"COLUMNS": "400"}).output
    experiment = small(tmp_path)
    checked = runner.invoke(app, ["check", str(experiment.path), "--json"])
    assert checked.exit_code == 0, checked.output
    facts = json.loads(checked.output)
    assert facts["cells"] == [each.name for each in experiment.cells]
    assert facts["contestants"] == ["ours"]
    said = runner.invoke(app, ["check", str(experiment.path)]).output
    assert [line for line in said.splitlines() if line.startswith("cell: ")] == [
        f"cell: {each.name}" for each in experiment.cells
    ]
    small(tmp_path, ("workers = 2", "workers = 200"))
    refused = runner.invoke(app, ["check", str(experiment.path)])
    assert refused.exit_code == 2
    assert "200 hosts need about" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == [experiment.path.name]


def test_results_are_those_of_the_journal(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    first, second, _ = experiment.cells
    with Journal(tmp_path) as journal:
        journal.add_calibration(Calibration("B", 2, 4e8, 3.8e8))
        journal.add_calibration(Calibration("B", 2, 4e8, 3.9e8))
        journal.add_calibration(Calibration("A", 2, 4e8, 3.9e8))  # of another text
        journal.add(record(second, 1, samples(0.2), day=3))
        journal.add(record(first, 0, samples(0.1), day=1))
        found = document(outcome_of(experiment, journal), "gradwire lab run")
    assert [cell.name for cell in found.cells] == [cell.name for cell in experiment.cells]
    assert [len(cell.contestants) for cell in found.cells] == [1, 1, 0]
    assert found.cells[1].tracks("ours")[0].starts == [10.0]
    assert found.cells[1].runs[0].date == "2026-05-03T10:00:00+00:00"
    assert found.dates == ("2026-05-01T10:00:00+00:00", "2026-05-03T10:00:00+00:00")
    assert found.commits == ["abc"]
    assert [each.reached for each in found.calibrations] == [3.9e8]
    assert found.seeds == [0, 1]
    assert found.wall_s == 4.0
    # A mark is not met while a cell is missing.
    assert found.marks[0].met is None
    assert found.missing == 4
    assert "Not complete: 4 of 6 runs of this file (a cell, a seed) are not there." in notes(found)
    page = render(found)
    assert "2026-05-01 to 2026-05-03" in page
    assert page.count("<summary>layers ") == 2  # no room for what was not run


def test_the_report_tells_of_runs_whose_processors_were_given_to_others(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    first, second, third = experiment.cells
    with Journal(tmp_path) as journal:
        journal.add(replace(record(first, 0, samples(0.1)), stolen=0.1))
        journal.add(replace(record(second, 1, samples(0.2)), stolen=0.001))
        journal.add(record(third, 0, samples(0.3)))
    path = tmp_path / NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    del lines[-1]["stolen"]  # as journals from before have it
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Journal(tmp_path) as journal:
        found = document(outcome_of(experiment, journal), "c")
    assert [cell.runs[0].stolen for cell in found.cells] == [0.1, 0.001, None]
    (told,) = (line for line in notes(found) if "gave" in line)
    assert told.startswith(f"{first.name}, seed 0: ")
    assert "10%" in told


def test_a_cells_numbers_are_those_of_the_seeds_that_did_not_fail(tmp_path: Path) -> None:
    experiment = small(tmp_path, ("[1, 2, 3]", "[1]"))
    (cell,) = experiment.cells
    failed = replace(samples(9.0), error="rank 1 died")
    with Journal(tmp_path) as journal:
        journal.add(record(cell, 0, failed))
        journal.add(record(cell, 1, samples(0.25, 0.75)))
        found = document(outcome_of(experiment, journal), "c")
        (shown,) = found.cells[0].contestants
        assert (shown.samples, shown.seeds, shown.max_s) == (2, 1, 0.75)
        assert [each.seed for each in found.cells[0].counted] == [1]
        assert [each.run.error for each in found.cells[0].runs] == ["rank 1 died", None]
        text = as_markdown(found)
        assert f"- Failed: {cell.name}, seed 0: rank 1 died" in text
        assert "- Not complete: 1 of 2 runs" in text
        assert "rank 1 died" in render(found)
        journal.add(record(cell, 1, replace(samples(8.0), error="rank 0 died")))
        found = document(outcome_of(experiment, journal), "c")
        assert found.cells[0].contestants[0].samples == 2  # what there is
        assert found.marks[0].met is None


def test_the_page_of_a_map_tells_why_nothing_was_measured(tmp_path: Path) -> None:
    axes = "a = [{ label = 'x' }]\nb = [{ label = 'y' }]"
    table = "[map]\nrows = 'a'\ncolumns = 'b'\nquiet = 'x'\n[grid]"
    experiment = small(tmp_path, ('"work.layers" = [1, 2, 3]', axes), ("[grid]", table))
    with Journal(tmp_path) as journal:
        journal.add(record(experiment.cells[0], 0, CellRun(0.0, error="rank 1 died")))
        found = document(outcome_of(experiment, journal), "c")
    assert "rank 1 died" in render(found)


@pytest.mark.parametrize(("low", "high"), [(24, 230), (3, 31), (1, 900), (0.5, 30_000)])
@pytest.mark.parametrize("which", ["x", "y"])
def test_labels_of_a_logarithmic_axis_are_round_and_have_room(
    low: float, high: float, which: Literal["x", "y"]
) -> None:
    with matplotlib.rc_context(STYLE):
        figure, axes = figure_of(4.9, 3.4)
        axes.plot([low, high], [low, high])
        logarithmic(axes, which)
        figure.draw_without_rendering()
        axis = axes.xaxis if which == "x" else axes.yaxis
        labels = axis.get_ticklabels(which="both")
        shown = [float(label.get_text()) for label in labels if label.get_text()]
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
    assert len(shown) >= 3
    assert {f"{each:e}"[0] for each in shown} <= set("1235")
    assert {f"{each:e}"[1:8] for each in shown} == {".000000"}
    edges = [(box.x0, box.x1) if which == "x" else (box.y0, box.y1) for box in boxes]
    assert all(before[1] < after[0] for before, after in itertools.pairwise(sorted(edges)))


def test_a_map_has_a_line_of_panels_for_each_label_of_a_third_axis(tmp_path: Path) -> None:
    axes = "\n".join(f"{axis} = [{{label='{axis}1'}}, {{label='{axis}2'}}]" for axis in "abc")
    table = "[map]\nrows = 'a'\ncolumns = 'b'\nquiet = 'a1'\n[grid]"
    experiment = small(tmp_path, ('"work.layers" = [1, 2, 3]', axes), ("[grid]", table))
    times = iter(range(1, 9))
    with Journal(tmp_path) as journal:
        for cell in experiment.cells:
            journal.add(record(cell, 0, samples(float(next(times)))))
        found = document(outcome_of(experiment, journal), "c")
    assert sheets(found) == [{"c": "c1"}, {"c": "c2"}]
    name = found.cells[0].contestants[0].name
    # cells in the file's order: a1 b1 c1, a1 b1 c2, a1 b2 c1, …: 1 to 8 seconds
    first, second = (grid_values(found, name, sheet) for sheet in sheets(found))
    assert first[:2] == second[:2] == (["a1", "a2"], ["b1", "b2"])
    assert first[2] == [[1.0, 1.0], [5 / 1, 7 / 3]]
    assert second[2] == [[1.0, 1.0], [6 / 2, 8 / 4]]
    assert "c2: maximum / quiet median" in render(found)


def test_what_lost_packets_is_named_by_who_had_wires(tmp_path: Path) -> None:
    """nftables where there are veth pairs; and a push's delay is on the server's wire alone."""
    loss = "[loss]\nrate = {rate}\nat = '{at}'\n[work]"

    def losers(at: str, rates: list[float], links: list[str | None], *more: tuple[str, str]) -> Any:
        grid = f'"loss.rate" = {rates}'
        edits = (('"work.layers" = [1, 2, 3]', grid), ("[work]", loss.format(rate=0.1, at=at)))
        experiment = small(tmp_path, *edits, *more)
        folder = tmp_path / f"{at} {rates} {len(more)}"
        with Journal(folder) as journal:
            for cell, link in zip(experiment.cells, links, strict=True):
                journal.add(record(cell, 0, replace(samples(0.1), link=link)))
            return document(outcome_of(experiment, journal), "c").kernel.loss

    kernel = "nftables, behind the port's rate"
    wires = "the hosts' wires (TAP pairs), packet by packet"
    slow, taps = ('preset = "B"', 'preset = "B"\nrtt_s = 0.01'), "TAP pairs"
    assert losers("workers", [0.0], [None]) == ["none"]
    assert losers("workers", [0.1], [None]) == [kernel]
    trains = ('preset = "B"', 'preset = "A"')
    assert losers("workers", [0.0, 0.1], [None, taps], trains) == [wires]
    assert losers("workers", [0.1], [taps], slow) == [wires]  # all-reduces: all have a wire
    push = (
        slow,
        ("workers = 2", "workers = 2\nservers = 1"),
        ('kind = "all_reduce"', 'kind = "push"'),
        ('policy = "reliable"', ""),
    )
    assert losers("workers", [0.1], [taps], *push) == [kernel]  # the delay is the server's
    assert losers("server", [0.1], [taps], *push) == [wires]


def test_a_tuned_tail_is_told_where_its_attempts_had_the_samples_for_one(tmp_path: Path) -> None:
    experiment = small(tmp_path)
    tuned = {"wanted": 1.5, "reached": 1.63, "on_s": 0.06, "attempts": []}
    kinds = ({**tuned, "rounds": 300}, {**tuned, "rounds": 299}, tuned)  # the last: older journals
    with Journal(tmp_path) as journal:
        for cell, tail in zip(experiment.cells, kinds, strict=True):
            journal.add(record(cell, 0, replace(samples(0.1), facts={"tail": tail})))
        found = document(outcome_of(experiment, journal), "c")
    told = [line for line in notes(found) if "60 ms were tuned for a tail of 1.5" in line]
    assert [" and gave one of 1.63." in line for line in told] == [True, False, False]
    assert ["too few rounds" in line for line in told] == [False, True, True]


def test_cells_are_chosen_by_parts_and_patterns_of_their_names(tmp_path: Path) -> None:
    text = SMALL + 'size = [{ label = "all of it" }, { label = "half", "work.bytes" = 20_000 }]\n'
    path = tmp_path / "small.toml"
    path.write_text(text)
    experiment = load(path)

    def chosen(*patterns: str) -> list[str]:
        return [cell.name for cell in choose_cells(experiment, patterns)]

    assert len(chosen()) == 6
    assert chosen("layers 1") == ["layers 1, all of it", "layers 1, half"]
    assert chosen("layers ?, half") == ["layers 1, half", "layers 2, half", "layers 3, half"]
    assert chosen("layers 3, half", "1, a") == ["layers 1, all of it", "layers 3, half"]
    for pattern in ("layers 4", "", "layers ?"):  # a pattern is that of the whole name
        with pytest.raises(ScenarioError, match=r"--cells .*matches no cell; .*; layers 3, half$"):
            chosen("half", pattern)


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", (0, 1, 2)), ("1", (0,)), ("0,1", (0, 1)), ("7, 2", (7, 2)), ("4,", (4,))],
)
def test_seeds_are_a_number_or_a_list(text: str, seeds: tuple[int, ...]) -> None:
    assert choose_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", ",", "1,1", "-1", "a", "1,,2", "²", "1e3", "9" * 5000])
def test_what_are_no_seeds(text: str) -> None:
    with pytest.raises(ScenarioError, match=r"--seeds .*a number of seeds from 1 to 1000, or"):
        choose_seeds(text)


def test_the_time_left_goes_by_the_cells_done() -> None:
    assert time_left([("a", 0)], {}) is None
    took = {("a", 0): 10.0, ("b", 0): 100.0}
    # a and b as they took before, the unknown one as the mean
    assert time_left([("c", 0), ("a", 1), ("b", 1)], took) == 55.0 + 10.0 + 100.0
    assert [duration(s) for s in (5, 200, 5400, 9000)] == [
        "5 s",
        "3 min",
        "1 h 30 min",
        "2 h 30 min",
    ]


def test_a_build_knows_its_code() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\+[0-9a-f]{12}", build.build())
    places = (Path(build.__file__).parents[2], Path(gradwire.__file__).parents[1])
    assert all(any((each / name).exists() for each in places) for name in build.READERS)
    assert "load" not in build.machine()
    outside = {"GRADWIRE_P": "0.1", "GRADWIRE_LAB_ADDRESS": "x", "GRADWIRE_SEED": "", "PATH": "/"}
    assert build.settings_outside(outside) == {"GRADWIRE_P": "0.1"}


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_an_interrupted_run_has_a_report_and_goes_on(tmp_path: Path) -> None:
    experiment = small(tmp_path, ("seeds = [0, 1]", "seeds = [0]"), ("[1, 2, 3]", "[1, 2]"))
    out = tmp_path / "out"
    call = ("lab", "run", str(experiment.path), "--quick", "--out", str(out))

    def results() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((out / "results.json").read_text())
        return found

    lab = Lab(tmp_path, *call)
    lab.wait_until_it_says("cell 2 of 2")
    assert re.search(r"cell 2 of 2, seed 0: layers 2 \(about \d+ s left\)", lab.said())
    os.killpg(lab.process.pid, signal.SIGINT)
    assert lab.wait(20.0) == 130
    lab.check_that_nothing_is_left()
    assert "the same command, without --again, carries on" in lab.said()
    first, second = results()["cells"]
    assert first["contestants"][0]["samples"] == 4
    assert second["contestants"] == []
    assert "not there" in (out / "report.html").read_text()

    lab = Lab(tmp_path, *call, "--json")
    assert lab.wait(120.0) == 0, lab.said()
    assert "1 of 2 cells were there" in lab.said()
    assert "cell 1 of 2" not in lab.said()
    document = results()
    assert document == json.loads(lab.output.read_text())
    assert document["cells"][0] == first
    assert document["cells"][1]["contestants"][0]["samples"] == 4
    assert document["missing"] == 0
    assert document["quick"] is True
    assert [mark["met"] for mark in document["marks"]] == [None]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--cells", "layers 7"], "--cells 'layers 7': matches no cell; cells are layers 1; layer"),
        (["--seeds", "0,0"], "--seeds '0,0': a number of seeds from 1 to 1000"),
    ],
)
def test_what_cannot_be_chosen_is_one_sentence(
    tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    path = small(tmp_path).path
    out = ["--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, ["run", str(path), *out, *arguments])
    assert found.exit_code == 2
    assert complaint in found.output
    assert found.output.count("\n") == 1
    assert not (tmp_path / "out").exists()
