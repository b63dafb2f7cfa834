"""The parts of the demo, each by itself."""

from __future__ import annotations

import html.parser
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gradwire_lab.contest.ranks import RankError, Ranks
from gradwire_lab.demo import audience, command, course
from gradwire_lab.demo.course import Outcome
from gradwire_lab.demo.figure import write_figure
from gradwire_lab.demo.page import render
from gradwire_lab.demo.results import document, summarize
from gradwire_lab.demo.scenario import ENTRIES, Scenario, far, quick, scenarios_of
from gradwire_lab.demo.table import COLUMNS, rows, terminal_tables
from gradwire_lab.demo.words import headline, milliseconds, notes
from gradwire_lab.network import BURSTS, NETWORKS, BurstRecord
from gradwire_lab.report.words import NONE, share
from gradwire_lab.scenario.reader import build
from gradwire_lab.training.block import Block, Step, join
from gradwire_lab.training.model import CharacterModel, Shape
from gradwire_lab.training.startline import StartLine, memory
from gradwire_lab.training.text import SYMBOLS, NoText, Text, load

# ---------------------------------------------------------------------------- text


def test_the_text_is_this_pythons_library_with_whole_files_held_out() -> None:
    text = load()
    assert len(text.train) > 1_000_000
    assert len(text.train) > 5 * len(text.held_out) > 0
    held_out, train = (bytes(part.tolist()) for part in (text.held_out, text.train))
    assert held_out[:2000] not in train
    assert b"import" in held_out


def test_a_batch_depends_on_step_and_rank_and_nothing_else() -> None:
    text = load()
    options = {"seed": 1, "size": 3, "context": 16}
    inputs, targets = text.batch(step=5, rank=1, **options)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    torch.manual_seed(99)
    assert torch.equal(inputs, text.batch(step=5, rank=1, **options)[0])
    assert not torch.equal(inputs, text.batch(step=5, rank=2, **options)[0])
    assert not torch.equal(inputs, text.batch(step=6, rank=1, **options)[0])


def test_validation_reads_only_what_was_held_out() -> None:
    text = Text(torch.zeros(100, dtype=torch.uint8), torch.ones(100, dtype=torch.uint8), 2)
    inputs, targets = text.validation(rank=0, seed=1, size=8, context=10)
    assert bool((inputs == 1).all())
    assert bool((targets == 1).all())


def test_a_folder_without_sources_is_named(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("pass\n")
    with pytest.raises(NoText, match=f"{tmp_path} holds too few"):
        load(tmp_path)


# ---------------------------------------------------------------------------- model


def _shape(scenario: Scenario) -> Shape:
    return Shape(SYMBOLS, scenario.context, scenario.width, scenario.layers, scenario.heads)


def test_the_model_has_two_million_parameters() -> None:
    assert CharacterModel(_shape(Scenario())).parameter_count >= 2_000_000


def test_the_model_sees_no_future_and_starts_knowing_nothing() -> None:
    torch.manual_seed(1)
    model = CharacterModel(Shape(SYMBOLS, 16, 32, 2, 4))
    characters = torch.randint(SYMBOLS, (1, 16))
    targets = torch.full((1, 16), -100)  # cross_entropy ignores these
    targets[0, 5] = 7
    loss = model(characters, targets)
    later = characters.clone()
    later[0, 6:] = 3
    assert torch.allclose(loss, model(later, targets))
    earlier = characters.clone()
    earlier[0, 4] = (earlier[0, 4] + 1) % SYMBOLS
    assert not torch.allclose(loss, model(earlier, targets))
    assert abs(loss.item() - 5.545) < 0.3  # ln 256


def test_the_model_learns() -> None:
    torch.manual_seed(1)
    model = CharacterModel(Shape(SYMBOLS, 16, 32, 2, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = load()
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = model(*text.batch(step=step, rank=0, seed=1, size=8, context=16))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.5


# ---------------------------------------------------------------------------- scenario


def test_a_scenario_survives_json() -> None:
    scenario = quick("B", ENTRIES[:2])
    assert build(Scenario, json.loads(json.dumps(asdict(scenario))), "scenario") == scenario


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("entries", (), "entries"),
        ("seconds", 0.0, "seconds=0.0"),
        ("block", 0, "block=0"),
        ("warm_up", 20, "warm_up=20"),
        ("heads", 3, "width=208"),
    ],
)
def test_an_impossible_scenario_names_the_field(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Scenario(**{field: value})


# ---------------------------------------------------------------------------- start line


def test_nobody_leaves_the_line_before_all_are_there() -> None:
    descriptor = memory(3)
    try:
        lines = [StartLine(descriptor, rank, 3) for rank in range(3)]
    finally:
        os.close(descriptor)
    left: list[int] = []

    def rank(number: int) -> None:
        for _ in range(20):
            lines[number].wait(5.0)
            left.append(number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for passed in range(20):
        assert len(left) <= 2 * passed
        lines[2].wait(5.0)
    for thread in threads:
        thread.join()
    assert len(left) == 40


def test_a_rank_that_does_not_come_is_named() -> None:
    descriptor = memory(3)
    line = StartLine(descriptor, 0, 3)
    with pytest.raises(TimeoutError):
        StartLine(descriptor, 2, 3).wait(0.0)
    os.close(descriptor)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not reach"):
        line.wait(0.01)


# ---------------------------------------------------------------------------- results


def _rank_step(step: int, rank: int, at: float, comm: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "began": at,
        "ready": at + 0.09 + rank / 1000,
        "start": at + 0.1 + rank / 10_000,
        "end": at + 0.1 + comm + rank / 1000,
        "ended": at + 0.2 + comm,
        "loss": 3.0 + rank,
        "delivered": 1.0,
        "critical": None,
        "bytes": None,
        "retransmissions": None,
        "encoded": 1.0,
        **more,
    }


def _block(contestant: str, start: float, comm: list[float], **more: Any) -> Block:
    ranks: list[list[dict[str, Any]]] = [[], []]
    at = start
    for step, seconds in enumerate(comm):
        for rank in (0, 1):
            ranks[rank].append(_rank_step(step, rank, at, seconds, **more))
        at += 0.2 + seconds
    phases = more.get("critical") is not None
    return Block(contestant, start, 1, ranks, 2.5, "fixed bound" if phases else None)


class _Hosts:
    """What a document needs to know of a lab network."""

    reason = None
    parent = 0
    preset = NETWORKS["A"]
    burst = BURSTS["A"]
    traffic = None
    store = ("10.77.0.1", 29400)


class _Loopback(_Hosts):
    reason = "no network namespaces here: not allowed"
    preset = burst = None  # type: ignore[assignment]


def _document(ground: Any = _Hosts, **changes: Any) -> dict[str, Any]:
    outcome = Outcome(Scenario(ranks=2, block=4, warm_up=1), origin=100.0, ground=ground())
    outcome.facts = {"parameters": 2_000_000, "characters": 10, "files": 3}
    outcome.bursts = [BurstRecord(101.0, 101.01, 1)]
    outcome.blocks = [
        _block("gloo", 101.0, [0.9, 0.2, 0.3, 0.4]),
        _block("reliable", 105.0, [0.9, 0.2, 0.2, 0.3], bytes=10, retransmissions=1),
        _block(
            "dblp",
            109.0,
            [0.9, 0.1, 0.1, 0.2],
            bytes=5,
            retransmissions=0,
            delivered=0.6,
            critical=True,
        ),
    ]
    outcome.fingerprints = {name: ["same", "same"] for name in ("gloo", "reliable", "dblp")}
    for name, value in changes.items():
        setattr(outcome, name, value)
    return document(outcome, "gradwire demo")


def test_a_step_lasts_from_the_start_line_to_the_last_rank() -> None:
    steps = join(_block("gloo", 50.0, [0.5, 0.2]), 7, 40.0)
    assert [step.timed for step in steps] == [False, True]
    assert [step.turn for step in steps] == [7, 7]
    assert steps[0].start == pytest.approx(10.1)
    assert steps[0].comm == pytest.approx(0.501)
    assert [step.took for step in steps] == pytest.approx([0.7, 0.4])
    assert steps[0].loss == 3.5


def _steps(count: int) -> list[Step]:
    return [Step(n, 0, True, float(n), 0.1, 0.4, 2.0, 1.0, n < 30) for n in range(count)]


def test_a_tail_is_given_only_from_enough_steps_on() -> None:
    assert summarize(_steps(299))["comm_p99_s"] is None
    numbers = summarize(_steps(300))
    assert numbers["comm_p99_s"] == 0.1
    assert numbers["steps_per_s"] == pytest.approx(2.5)
    assert numbers["comm_share"] == pytest.approx(0.25)
    assert numbers["critical_share"] == pytest.approx(0.1)


def test_the_document_tells_everything() -> None:
    known = _document()
    # 2 ranks: 2·(1/2)·8 MB through each port; 1 Gbit/s.
    assert known["payload_bytes"] == 8_000_000
    assert known["header_ideal_s"] == pytest.approx(0.064 * 1514 / 1432)
    gloo, reliable, dblp = known["contestants"]
    assert gloo["comm_median_s"] == pytest.approx(0.301)
    assert gloo["bytes_sent"] is gloo["critical_share"] is gloo["verdict"] is None
    assert reliable["bytes_sent"] == 80
    assert reliable["retransmissions"] == 8
    assert dblp["delivered"] == pytest.approx(0.6)
    assert dblp["critical_share"] == 1.0
    assert dblp["verdict"] == "fixed bound"
    assert all(entry["replicas_identical"] for entry in known["contestants"])
    assert known["bursts_sent"] == [{"start": 1.0, "stop": pytest.approx(1.01)}]
    assert [turn["contestant"] for turn in known["turns"]] == ["gloo", "reliable", "dblp"]


def test_a_loss_that_is_no_number_is_null_and_still_shown() -> None:
    blocks = [_block("gloo", 101.0, [0.9, 0.2, 0.3], loss=float("nan"))]
    blocks[0] = Block("gloo", 101.0, 1, blocks[0].ranks, float("nan"), None)
    known = _document(blocks=blocks)
    assert known["contestants"][0]["final_loss"] is None
    assert rows(known)[0][-1] == "diverged"
    assert "<svg" in render(known)


# ---------------------------------------------------------------------------- words and table


def test_what_is_not_all_never_reads_as_all() -> None:
    assert share(1.0) == "100.0 %"
    assert share(0.99999) == "> 99.9 %"
    assert share(None) == milliseconds(None) == "–"


def _long(document: dict[str, Any]) -> dict[str, Any]:
    """The same after as many timed steps as comparisons need."""
    return {**document, "contestants": [{**e, "timed_steps": 60} for e in document["contestants"]]}


def test_a_short_run_compares_no_times() -> None:
    line = headline(_document())
    assert "Everything works" in line
    assert "times as fast" not in line


def test_the_headline_says_what_was_gained_and_what_was_lost() -> None:
    known = _long(_document())
    line = headline(known)
    assert "gradwire dblp" in line
    assert "times as fast" in line
    assert f"{known['contestants'][-1]['final_loss']:.3f} against" in line
    (note,) = (note for note in notes(known) if "gradwire dblp the model trains" in note)
    assert "101 ms and 301 ms" in note
    assert "60.0 % of them" in note


class _Far(_Hosts):
    burst = None  # type: ignore[assignment]


def _far(theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """The case of hosts far from each other, with these times after one step of warm-up."""
    outcome = Outcome(replace(far(), ranks=2), origin=100.0, ground=_Far())
    outcome.facts = {"parameters": 2_000_000, "characters": 10, "files": 3}
    outcome.blocks = [
        _block("gloo-fp16", 101.0, [9.0, *theirs], encoded=0.5),
        _block("adaptive", 200.0, [9.0, *ours], bytes=10, retransmissions=1),
    ]
    return document(outcome, "gradwire demo")


def test_few_steps_are_compared_where_all_of_one_are_shorter() -> None:
    known = _far([4.0, 5.0, 4.0, 4.5, 4.0], [0.3, 0.2, 0.4, 0.3, 0.3])
    line = headline(known)
    assert "round trip of 10 ms and 1.0 % of loss" in line
    assert "9.0 times as fast over gradwire adaptive as over Gloo fp16" in line
    assert "301 ms and 4001 ms" in line
    assert any("cubic" in note for note in notes(known))
    assert not any("burst" in note for note in notes(known))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [([0.3, 0.4, 0.4, 0.4, 0.4], [0.2, 0.2, 0.35, 0.2, 0.2]), ([4.0] * 4, [0.2] * 4)],
)
def test_few_steps_that_do_not_lie_apart_are_not(theirs: list[float], ours: list[float]) -> None:
    assert "times as fast" not in headline(_far(theirs, ours))


def test_a_demo_that_ended_early_says_which_case_and_whether_the_machine_was_busy() -> None:
    late = {"error": "Gloo fp16: rank 0 did not answer within 90 s", "late": True}
    outcome = Outcome(replace(far(), ranks=2), origin=100.0, ground=_Far(), **late)
    known = document(outcome, "gradwire demo")
    known["machine"].update(load=20.0, cores=2)
    line = headline(known)
    assert "in its far case: Gloo fp16: rank 0 did not answer within 90 s. The" in line
    assert "20 on 2 processors, which is probably why" in line
    assert "--case far" in line
    known["machine"]["load"] = 3.0
    assert "probably" not in headline(known)
    known["late"] = False
    assert headline(known).endswith("within 90 s")
    first = {**_document(), "far": {**known, "error": None}}
    assert "Everything works" in headline(first)
    assert "Everything works" not in headline({**first, "far": known})


def test_ranks_that_do_not_answer_are_named_with_the_time_that_they_had() -> None:
    with Ranks(_sleeps, "asleep", [{}, {}]) as ranks:
        with pytest.raises(RankError, match=r"rank 0, 1 did not answer within 0 s") as caught:
            ranks.gather(time.monotonic() + 0.05)
        assert caught.value.late


@pytest.mark.parametrize("terminal", [False, True])
def test_where_no_bars_can_be_drawn_a_line_says_now_and_then_how_far_it_is(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    now = [0.0]
    monkeypatch.setattr(audience, "time", SimpleNamespace(monotonic=lambda: now[0]))
    out = io.StringIO()
    scenario = quick("A")
    with audience.Bars(Console(file=out, force_terminal=terminal), scenario) as bars:
        bars.plan(8)
        for number in range(4):
            now[0] = 10.0 * number
            bars.tick(scenario.entries[0], {"step": number, "start": 0, "end": 1, "loss": 2.0})
    lines = [line for line in out.getvalue().splitlines() if "step" in line]
    assert [line.strip() for line in lines] == ["Gloo f32: step 3 of about 8"]


def _sleeps(host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], pass_fds=options["pass_fds"], stdin=subprocess.DEVNULL)


def test_the_far_case_is_slower_where_it_is() -> None:
    known = _far([0.3] * 5, [4.0] * 5)
    assert "0.1 times as fast over gradwire adaptive" in headline(known)


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        ({}, [False, True]),
        ({"short": True}, [False]),
        ({"only": ["gloo"]}, [False]),
        ({"only": ["gloo", "adaptive"]}, [False, True]),
        ({"cases": ["far"]}, [True]),
        ({"cases": ["far", "bursts"], "short": True}, [False, True]),
    ],
)
def test_the_far_case_comes_last_and_not_in_the_short_form(
    arguments: dict[str, Any], cases: list[bool]
) -> None:
    given: dict[str, Any] = {"cases": [], "network": "A", "only": [], "short": False, **arguments}
    scenarios = scenarios_of(**given)
    assert [scenario.far for scenario in scenarios] == cases
    if len(cases) == 2 and not arguments:
        assert sum(scenario.seconds for scenario in scenarios) <= 220


def test_page_and_terminal_show_the_far_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {**_document(), "far": _far([4.0] * 5, [0.3] * 5)}
    assert known["far"]["headline"] in render(known)
    command.show(known, tmp_path, False, Console(stderr=True, width=300))
    said = " ".join(capsys.readouterr().out.split())
    assert said.index(known["headline"]) < said.index(known["far"]["headline"])


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("ground", [_Hosts, _Loopback])
@pytest.mark.parametrize("names", [(), ("gloo-fp16", "gloo"), ("gloo",)])
def test_the_headline_is_one_sentence(
    long: bool, ground: type[_Hosts], names: tuple[str, ...]
) -> None:
    blocks = [each for each in _all_blocks(0.5) if not names or each.contestant in names]
    known = _document(ground, blocks=blocks)
    line = headline(_long(known) if long else known)
    assert line
    assert ". " not in line
    assert len(line) <= 150


def test_the_default_policy_is_in_the_headline_and_its_encoding_in_the_notes() -> None:
    known = _document()
    assert not any("sends half precision" in note for note in notes(known))
    known = _document(blocks=_all_blocks(encoded=0.5))
    assert "Over gradwire adaptive the model trains" in headline(_long(known))
    assert any("50.0 % of the bytes of gradwire reliable" in note for note in notes(known))
    assert "<svg" in render(known)


def _all_blocks(encoded: float) -> list[Block]:
    return [
        _block("gloo", 101.0, [0.9, 0.2]),
        _block("gloo-fp16", 103.0, [0.9, 0.1], encoded=0.5),
        _block("reliable", 105.0, [0.9, 0.2], bytes=100),
        _block("dblp", 109.0, [0.9, 0.1], bytes=60, delivered=0.6, critical=True),
        _block("adaptive", 113.0, [0.9, 0.05], bytes=50, encoded=encoded),
    ]


def _peers(document: dict[str, Any]) -> dict[str, str | None]:
    return {entry["name"]: entry["peer"] for entry in document["contestants"]}


def test_like_is_compared_with_like() -> None:
    known = _document(blocks=_all_blocks(encoded=0.25))
    assert _peers(known) == {
        "gloo": None,
        "gloo-fp16": None,
        "reliable": "gloo",
        "dblp": "gloo",
        "adaptive": "gloo-fp16",
    }
    adaptive = known["contestants"][-1]
    assert adaptive["compressed_share"] == 1.0
    assert adaptive["encoded_share"] == 0.25
    assert adaptive["speed_over"] == {
        "gloo": pytest.approx(0.4 / 0.25),
        "gloo-fp16": pytest.approx(0.3 / 0.25),
    }
    adaptive_line = "Over gradwire adaptive the model trains 1.20 times as fast as over Gloo fp16"
    assert headline(_long(known)).startswith(adaptive_line)
    found = "\n".join(notes(_long(known)))
    assert adaptive_line in found
    assert "Over gradwire dblp the model trains 1.33 times as fast as over Gloo f32" in found
    places = [COLUMNS.index(column) for column in ("× peer", "peer")]
    assert [[row[place] for place in places] for row in rows(known)] == [
        ["–", "–"],
        ["–", "–"],
        ["1.00", "Gloo f32"],
        ["1.33", "Gloo f32"],
        ["1.20", "Gloo fp16"],
        ["–", "–"],
    ]


def test_what_was_not_compressed_is_compared_with_single_precision() -> None:
    known = _document(blocks=_all_blocks(encoded=1.0))
    assert _peers(known)["adaptive"] == "gloo"
    assert "1.60 times as fast as over Gloo f32" in headline(_long(known))
    assert "Gloo fp16" not in headline(_long(known))


def test_without_a_peer_the_headline_compares_nothing() -> None:
    blocks = [each for each in _all_blocks(0.5) if each.contestant in ("gloo", "adaptive")]
    known = _document(blocks=blocks)
    assert _peers(known) == {"gloo": None, "adaptive": None}
    assert "times as fast" not in headline(_long(known))
    assert any("gradwire adaptive with none here" in note for note in notes(known))


def test_the_headline_says_so_when_it_is_slower() -> None:
    blocks = [_block("gloo", 101.0, [0.9, 0.1]), _block("dblp", 103.0, [0.9, 0.3])]
    assert "trains 0.60 times as fast as over Gloo" in headline(_long(_document(blocks=blocks)))


def test_on_loopback_no_times_are_compared() -> None:
    known = _document(_Loopback)
    assert known["mode"] == "loopback"
    assert known["header_ideal_s"] is None
    assert "times as fast" not in headline(known)
    assert any("TCP cannot be treated so" in note for note in notes(known))
    labels = {entry.name: entry.label for entry in ENTRIES}
    assert [row[0] for row in rows(known)] == [labels[n] for n in ("gloo", "reliable", "dblp")]


def test_replicas_that_differ_are_told() -> None:
    prints = {"gloo": ["a", "a"], "reliable": ["b", "b"], "dblp": ["c", "d"]}
    known = _document(fingerprints=prints)
    assert "The replicas differ between ranks: gradwire dblp." in notes(known)


@pytest.mark.parametrize("width", [80, 50])
def test_the_table_fits_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    known = _document(blocks=_all_blocks(encoded=0.5))
    tables = terminal_tables(known, console)
    assert len(tables) == (1 if width == 80 else 2)  # of some contestants each
    for table in tables:
        with console.capture() as capture:
            console.print(table)
        shown = [line.split() for line in capture.get().splitlines() if line.strip()]
        (rule,) = (place for place, line in enumerate(shown) if "─" in line[0])
        assert rule <= 2  # lines of headings
        assert len(shown[rule][0]) <= width
        lines = [" ".join(each) for each in shown[rule + 1 :]]
        # There are as many lines as quantities: none is broken, and p99 has no number here.
        assert "…" not in capture.get()
        assert [line for line in lines if line.startswith("comm median")]
        assert not [line for line in lines if set(line.split()[1:]) == {NONE}]
        assert len(lines) <= len(COLUMNS) - 2


class _Table(html.parser.HTMLParser):
    """Reads the rows of a page's tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_contestants_are_columns_of_the_page() -> None:
    known = _document(blocks=_all_blocks(encoded=0.5))
    found = rows(known)
    head, *lines = _Table(render(known).partition("</table>")[0]).rows
    assert head == ["", *(row[0] for row in found)]
    assert [line[0] for line in lines] == [column for column in COLUMNS[1:] if column != "p99"]
    assert lines[-1] == ["final loss", *(row[-1] for row in found)]


# ---------------------------------------------------------------------------- page


class _Links(html.parser.HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.plots = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.plots += tag == "svg"
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {name}={value}")


def test_the_page_is_one_file_with_its_plots() -> None:
    known = _document()
    page = render(known)
    links = _Links()
    links.feed(page)
    assert links.outside == []
    assert links.plots == 4
    assert "url(http" not in page
    assert "@import" not in page
    for text in (known["headline"].split("'")[0], "gradwire demo", known["machine"]["torch"]):
        assert text in page


def test_the_picture_and_its_figures_are_of_one_demo(tmp_path: Path) -> None:
    known = _document(blocks=_all_blocks(encoded=0.25))
    light, dark, figures = write_figure(known, tmp_path / "times.svg")
    read = json.loads(figures.read_text())
    assert read["date"] == known["date"]
    for name, entry in read["contestants"].items():
        mine = next(each for each in known["contestants"] if each["name"] == name)
        assert entry["comm_max_s"] == mine["comm_max_s"]
        keys = ("comm_median_s", "comm_p90_s", "comm_max_s")
        times = " · ".join(f"{1000 * mine[key]:.0f}" for key in keys)
        for form in (light, dark):
            assert times in form.read_text()
            assert mine["label"] in form.read_text()
            if (ratio := mine["speed_over"].get(mine["peer"])) is not None:
                assert f"{times}; trained {ratio:.2f} × " in form.read_text()
    assert light.read_text() != dark.read_text()


def test_the_page_of_a_failed_demo_shows_why() -> None:
    page = render(_document(error="rank 2: <broken>", details="Traceback: here", blocks=[]))
    assert "rank 2: &lt;broken&gt;" in page
    assert "Traceback: here" in page
    assert "<svg" not in page


def test_what_an_error_says_is_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gloo's errors name their file in brackets."""
    known = _document(error="rank 0: [/gloo/transport/tcp/pair.cc:534] Connection closed")
    command.show(known, tmp_path, False, Console(stderr=True, width=300))
    assert "[/gloo/transport/tcp/pair.cc:534]" in "".join(capsys.readouterr().out.split("\n"))


def test_without_the_extra_for_pages_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradwire_lab.demo.page", None)
    command.show(_document(), tmp_path, False, Console(stderr=True, width=300))
    assert json.loads((tmp_path / "demo.json").read_text())["headline"]
    assert not (tmp_path / "demo.html").exists()
    assert "pip install ./lab" in capsys.readouterr().err


# ---------------------------------------------------------------------------- course


class _Crew:
    """Ranks that need a given time for a step, on a clock of their own."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.asked: list[tuple[str, int]] = []

    def ask(self, command: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        self.asked.append((command["contestant"], command["steps"]))
        self.clock[0] = command["start"] + command["steps"] * self.seconds
        return [{"steps": [], "validation": 1.0, "verdict": None}]


@pytest.mark.parametrize(("seconds", "turns"), [(0.1, [20, 20, 10]), (0.5, [20, 20, 6])])
def test_turns_go_on_until_steps_or_time_are_used_up(
    monkeypatch: pytest.MonkeyPatch, seconds: float, turns: list[int]
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(course, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    scenario = Scenario(seconds=118.0, steps=50)
    outcome = Outcome(scenario, origin=1000.0)
    crew: Any = _Crew(clock, seconds)
    course.train_in_turn(scenario, crew, _Hosts(), outcome, course.Audience())
    expected = [(entry.name, steps) for steps in turns for entry in ENTRIES]
    assert crew.asked == expected
    assert clock[0] - 1000.0 < 118.0
