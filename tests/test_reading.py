"""`gradwire report`, `gradwire diff` and `gradwire why`: what they say of report files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gradwire import cli
from gradwire.sim.fabric import NETWORK_A
from gradwire.sim.job import Job
from report_files import SLOW, step, write

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "reading-a-report.md"


def run(*arguments: object, status: int = 0, **environment: str) -> Any:
    unfolded = {"COLUMNS": None, **environment}  # xdist sets it, and lines would be folded
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), env=unfolded)
    assert result.exit_code == status, result.output
    return result


def found(*arguments: object, status: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", status=status).stdout)


# ---------------------------------------------------------------------------- why, on a network


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of four ranks, whose steps are slow for one known reason each."""
    folder = tmp_path_factory.mktemp("network")
    job = Job(
        4,
        {"a": 16_000, "b": 32_000},
        buckets=[1, 1],
        report=str(folder / "steps-{rank}.jsonl"),
    )
    rng = np.random.default_rng(0)
    slow_path, lossy_path = replace(NETWORK_A, rate=5e6), replace(NETWORK_A, loss=0.3, loss_burst=9)
    for number in range(40):
        job.fabric.set_link(2, "up", slow_path if number == 14 else NETWORK_A)
        job.fabric.set_link(0, "down", lossy_path if number == 20 else NETWORK_A)
        gradients = [rng.normal(size=48_000).astype(np.float32) for _ in range(4)]
        job.step(gradients, apart_s=0.02 if number == 26 else 0.0)
        job.compute(0.3 if number == 32 else 0.02)
    for pipeline in job.pipelines:
        pipeline.close()
    return folder


@pytest.mark.parametrize(
    ("step", "cause", "who"),
    [
        (10, "usual", ""),
        (14, "path in", "rank 2"),
        (26, "late rank", "rank 3"),
        (32, "computing", ""),
    ],
)
def test_why_names_what_held_a_step_up(network: Path, step: int, cause: str, who: str) -> None:
    why = found("why", network, "--step", step)
    assert (why["cause"], why["who"]) == (cause, who)
    assert ("probably" in why["short"]) == bool(who)
    assert len(why["lines"]) == 5


def test_why_counts_what_a_path_lost(network: Path) -> None:
    lines = found("why", network, "--step", 20)["lines"]
    missed = re.search(r"(\d+) of rank \d missing", lines[3])
    burst = re.search(r"a burst of (\d+)", lines[3])
    assert missed is not None
    assert burst is not None
    assert int(missed[1]) >= int(burst[1]) >= 3
    assert "lost" in lines[0]


def test_files_of_other_ranks_bear_witness(network: Path) -> None:
    alone = run("why", network / "steps-0.jsonl", "--step", 26).stdout
    together = run("why", network, "--step", 26).stdout
    assert "no file of rank 3" in alone
    assert "its own file says" in together


def test_why_without_a_step_explains_the_slowest(network: Path) -> None:
    assert found("why", network)["step"] == 32
    assert f"--step {99}" in run("why", network, "--step", 99, status=2).stderr


# ---------------------------------------------------------------------------- why, from records


def test_why_says_so_where_no_record_explains_a_step(tmp_path: Path) -> None:
    older = write(tmp_path / "older.jsonl", slowest=None)
    why = found("why", older, "--step", SLOW)
    assert (why["cause"], why["who"]) == ("unknown", "")
    quick = {**step(0)["slowest"]}  # the transfers were as quick as ever
    host = write(tmp_path / "host.jsonl", slowest=quick)
    assert found("why", host, "--step", SLOW)["cause"] == "unknown"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"guard": "resent"}, "resent"),
        ({"bytes": 120_000_000}, "more bytes"),
        ({"slowest": {**step(0)["slowest"], "total_s": 0.24, "out_s": 0.23}}, "path out"),
        ({"slowest": {**step(0)["slowest"], "total_s": 0.24}}, "results"),
        ({"exposed_s": 0.008}, "computing"),
    ],
)
def test_each_cause_has_its_evidence(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    file = write(tmp_path / "steps.jsonl")
    lines = file.read_text().splitlines()
    lines[12] = json.dumps({**json.loads(lines[12]), **changes})
    file.write_text("\n".join(lines) + "\n")
    assert found("why", file, "--step", SLOW)["cause"] == cause


def test_a_share_that_time_closed_is_nobodys_fault(tmp_path: Path) -> None:
    slowest = {**step(SLOW)["slowest"], "pushed": "", "missed": "", "missed_packets": 0}
    file = write(tmp_path / "steps.jsonl")
    lines = file.read_text().splitlines()
    lines[12] = json.dumps(step(SLOW, slowest=slowest))
    file.write_text("\n".join(lines) + "\n")
    why = found("why", file, "--step", SLOW)
    assert (why["cause"], why["who"]) == ("path in", "")
    assert "the deadline for late gradients" in why["short"]


def change(path: Path, number: int, **changes: Any) -> Path:
    """Changes one step of a file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**line, **changes} if line["step"] == number else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_step_without_an_end_is_compared_by_its_communication(tmp_path: Path) -> None:
    file = write(tmp_path / "steps.jsonl")
    last = SLOW + 27
    change(file, last, comm_s=0.07)  # the usual step takes 76 ms, and communicates for 60 of them
    why = found("why", file, "--step", last)
    assert (why["took_s"], why["usual_s"]) == (0.07, 0.06)
    change(file, last, comm_s=9.0)
    assert found("why", file)["step"] == SLOW  # the slowest of those that have an end
    assert "is not recorded" in found("why", file, "--step", last)["lines"][0]


def test_why_says_what_waiting_no_time_explains(tmp_path: Path) -> None:
    file = write(tmp_path / "steps.jsonl")
    assert "other" not in found("why", file, "--step", SLOW)["lines"][2]
    change(file, SLOW, exposed_s=0.272, slowest={**step(SLOW)["slowest"], "pulled_s": 0.152})
    change(file, SLOW, slowest={**step(0)["slowest"], "pulled_s": 0.152})
    assert "other 120 ms of the waiting" in found("why", file, "--step", SLOW)["lines"][2]


def test_a_phase_is_critical_where_some_layers_are(tmp_path: Path) -> None:
    def decision(*bounds: float) -> str:
        regions = [{"name": f"fc{b}", "bound": b, "delivered": 1.0} for b in bounds]
        file = change(write(tmp_path / "steps.jsonl"), SLOW, phase="critical", regions=regions)
        line: str = found("why", file, "--step", SLOW)["lines"][4]
        return line

    assert "critical phase of some layers" in decision(0.0, 0.008, 0.408)
    for bounds in ((0.008,), (0.0, 0.008), (0.004, 0.008, 0.016), (0.0,)):
        assert "critical phase:" in decision(*bounds)


def test_the_guide_shows_what_why_prints(tmp_path: Path) -> None:
    shown = run("why", write(tmp_path / "steps.jsonl"), "--step", SLOW, COLUMNS="400").stdout
    assert len(shown.splitlines()) == 5
    block = re.search(r"```text\n(step 412 .*?)```", GUIDE.read_text(), re.DOTALL)
    assert block is not None
    unfolded = re.sub(r"\n +", " ", block[1])
    assert unfolded == shown


# ---------------------------------------------------------------------------- report


def test_a_report_says_what_was_lost_where_and_why_steps_were_slow(tmp_path: Path) -> None:
    (summary,) = found("report", write(tmp_path / "steps.jsonl"))
    assert (summary["steps"], summary["workers"], summary["policies"]) == (40, 8, {"adaptive": 40})
    assert summary["step_s"][0] == pytest.approx(0.076)
    assert summary["step_s"][3] == pytest.approx(0.312)
    assert [layer["name"] for layer in summary["layers"]] == ["fc1", "conv3"]
    assert summary["layers"][0]["lost"] == pytest.approx(0.024 / 40, rel=1e-3)
    assert summary["bytes_s"] == pytest.approx(3.6e6 / 400e6)
    assert (summary["slowest"][0]["step"], summary["slowest"][0]["who"]) == (SLOW, "rank 3")
    assert summary["missing"] == []
    assert "an estimate" in run("report", tmp_path / "steps.jsonl").stdout


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"exposed_s": 0.001}, "nothing"),
        ({"policy": "reliable", "retransmissions": 50}, "policy='adaptive': the network loses"),
        ({"policy": "reliable", "encoded_share": 1.0}, "compresses"),
        ({}, "encoded already"),
        ({"policy": "ltp", "exceeded": ["fc1"]}, "a smaller p"),
        ({"btlbw": 0.0}, "gradwire doctor"),
    ],
)
def test_advice_follows_the_rules_of_the_guide(
    tmp_path: Path, changes: dict[str, Any], advice: str
) -> None:
    (summary,) = found("report", write(tmp_path / "steps.jsonl", **changes))
    assert advice in " ".join(summary["advice"])


def test_a_rank_that_is_often_late_is_to_be_looked_at(tmp_path: Path) -> None:
    late = {
        **step(0)["slowest"],
        "began_s": 0.2,
        "pushed_s": 0.205,
        "out_s": 0.206,
        "total_s": 0.21,
    }
    file = tmp_path / "steps.jsonl"
    lines = []
    for number in range(200):
        slow = {"slowest": late, "exposed_s": 0.21} if number % 10 == 5 else {}
        period = {"period_s": 0.28 if number % 10 == 6 else 0.076}
        lines.append(json.dumps(step(number, **slow, **period)))
    file.write_text("\n".join(lines) + "\n")
    (summary,) = found("report", file)
    assert "look at rank 3" in summary["advice"][0]


def test_several_files_are_reported_one_after_another(network: Path, tmp_path: Path) -> None:
    (summary,) = found("report", network)  # the files of four ranks are one run
    assert (summary["rank"], summary["workers"]) == (0, 4)
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", attachment=1)
    assert len(found("report", tmp_path)) == 2
    assert "holds 2 runs" in run("why", tmp_path, status=2).stderr


def test_a_folder_of_the_lab_needs_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results.json").write_text("{}")
    assert "a folder of the lab" in run("why", tmp_path, status=2).stderr
    monkeypatch.setattr("gradwire.core.lab.entry_points", lambda **_: ())
    assert "needs the lab" in run("report", tmp_path, status=2).stderr


# ---------------------------------------------------------------------------- bad input


def cut_off(path: Path) -> None:
    path.write_text(path.read_text()[:-200])


def garbled(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[3], lines[7] = "\0\0\0", '{"another": "program"}'
    path.write_text("\n".join(lines) + "\n")


def older(path: Path) -> None:
    new = ("format", "workers", "slowest", "exposed_s", "attachment", "regions", "encoded_share")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [{key: line[key] for key in line if key not in new} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


def later(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 2', '"format": 9, "news": {}'))


def restarted(path: Path) -> None:
    path.write_text(path.read_text() + json.dumps(step(SLOW, period_s=0.0)) + "\n")


@pytest.mark.parametrize(
    ("harm", "steps", "notes"),
    [
        (cut_off, 39, ["1 line cannot be read (the last one is cut off"]),
        (garbled, 38, ["1 line cannot be read", "1 line of another kind", "2 steps between"]),
        (older, 40, ["exposed_s", "what a step waits for"]),
        (later, 40, ["40 lines of a later gradwire"]),
        (restarted, 40, ["the job went back 1 time"]),
    ],
)
def test_what_is_there_is_shown_and_in_a_line_what_is_not(
    tmp_path: Path, harm: Callable[[Path], None], steps: int, notes: list[str]
) -> None:
    file = write(tmp_path / "steps.jsonl")
    harm(file)
    (summary,) = found("report", file)
    assert summary["steps"] == steps
    assert len(summary["missing"]) == len(notes)
    for note, wanted in zip(summary["missing"], notes, strict=True):
        assert wanted in note
    assert run("report", file).stdout.count("not there") == len(notes)
    assert len(found("why", file, "--step", SLOW - 10)["lines"]) == 5


@pytest.mark.parametrize("command", ["report", "why"])
@pytest.mark.parametrize("content", [None, "", "no json\n", '{"step": 1}\n', "[" * 100_000])
def test_what_holds_no_step_is_refused_in_a_line(
    tmp_path: Path, command: str, content: str | None
) -> None:
    file = tmp_path / "steps.jsonl"
    if content is not None:
        file.write_text(content)
    said = run(command, file, status=2).stderr
    assert said.startswith(f"gradwire {command}: {file}: ")
    assert said.count("\n") == 1
    assert run(command, tmp_path / "nowhere", status=2).stderr.count("\n") == 1


@pytest.mark.parametrize(
    "odd", ["null", "NaN", "-1e308", "1" + "0" * 400, '"text"', "[]", "[1]", '{"a": 1}', "true"]
)
def test_odd_values_of_any_key_stop_nothing(tmp_path: Path, odd: str) -> None:
    whole = step(SLOW)
    keys = [*whole, *whole["slowest"]]
    lines = []
    for number, key in enumerate(keys, SLOW - len(keys) + 5):
        line = json.dumps(step(number))
        lines.append(re.sub(rf'"{key}": ("[^"]*"|[^,{{}}\[\]"]+)', f'"{key}": {odd}', line))
    file = tmp_path / "steps.jsonl"
    file.write_text("\n".join(lines) + "\n")
    commands = [["why", file, "--step", SLOW + after] for after in range(-5, 5)]
    commands += [["report", file, "--out", tmp_path / "page.html"]]
    commands += [["diff", write(tmp_path / "whole.jsonl"), file]]
    for words in commands:
        said = CliRunner().invoke(cli.app, list(map(str, words)))
        assert said.exit_code in (0, 2), said.exception
        assert isinstance(said.exception, (SystemExit, type(None)))


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "steps.jsonl")
    assert "cannot be written" in run("report", file, "--out", "/dev/null/page", status=2).stderr


@pytest.mark.parametrize("arguments", [("report",), ("why", "--step", str(SLOW))])
def test_a_narrow_terminal_folds_and_a_pipe_does_not(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = write(tmp_path / "steps.jsonl")
    narrow = run(*arguments, file, COLUMNS="40").stdout
    assert max(map(len, narrow.splitlines())) <= max(40, len(str(file)))
    program = [sys.executable, "-m", "gradwire.cli", *arguments, str(file)]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    piped = subprocess.run(program, capture_output=True, text=True, env=environment, check=True)
    assert "\x1b" not in narrow + piped.stdout
    assert len(piped.stdout.splitlines()) < len(narrow.splitlines())
    assert re.sub(r"\s+", "", narrow) == re.sub(r"\s+", "", piped.stdout)


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    file = write(tmp_path / "steps.jsonl")
    program = (
        "import sys\n"
        "from gradwire.cli import app\n"
        "for words in (['report'], ['why'], ['diff', sys.argv[1]]):\n"
        "    try:\n"
        "        app([*words, sys.argv[1]])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# ---------------------------------------------------------------------------- diff


def verdicts(a: Path, b: Path, status: int, *options: str) -> list[str]:
    worse: list[str] = found("diff", a, b, *options, status=status)["worse"]
    return worse


def test_diff_tells_a_run_that_is_worse(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", steps=100)
    slow = write(tmp_path / "slow.jsonl", steps=100, period_s=0.09)
    assert verdicts(a, slow, 1) == ["median step", "90 % of steps within"]
    assert verdicts(slow, a, 0) == []
    assert verdicts(a, a, 0) == []
    assert verdicts(a, slow, 0, "--threshold", "25") == []
    untrained = write(tmp_path / "untrained.jsonl", steps=100, agreed={"loss": 2.0})
    assert verdicts(a, untrained, 1) == ["training loss"]
    assert "worse: training loss" in run("diff", a, untrained, status=1).stdout
    said = run("diff", a, slow, status=1).stdout
    assert "all steps" in said
    assert "longest step" in said


def test_a_difference_within_chance_is_not_worse(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    files = []
    for name, more in (("a", 1.0), ("b", 1.06)):
        file = tmp_path / f"{name}.jsonl"
        times = more * rng.lognormal(-3, 0.6, size=40)
        lines = [json.dumps(step(i, period_s=float(times[i]))) for i in range(40)]
        file.write_text("\n".join(lines) + "\n")
        files.append(file)
    assert verdicts(files[0], files[1], 0) == []
    assert "within chance, 39 steps are too few" in run("diff", *files).stdout


def test_diff_says_why_it_does_not_judge_the_loss(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", agreed={"loss": None})
    (end,) = re.findall(r"([\d.]+) at the end", run("report", a).stdout)
    assert f"training loss: {end}, then {end}" in run("diff", a, a).stdout
    for files in ((a, b), (b, b)):
        said = run("diff", *files).stdout
        assert "training loss: not recorded" in said
        assert "attachment.loss(loss)" in said
    assert f"not recorded of {b};" in run("diff", a, b).stdout
    far = write(tmp_path / "far.jsonl", first=SLOW + 10)
    assert "training loss: 18 steps have one in both" in run("diff", a, far).stdout


def test_runs_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl")
    for name, changes, complaint in (
        ("short", {"steps": 10}, "20 are needed"),
        ("other", {"elements": 7}, "different models: 1,000,000 and 7 elements"),
    ):
        other = write(tmp_path / f"{name}.jsonl", **changes)
        assert complaint in run("diff", a, other, status=2).stderr
    assert "cannot be read" in run("diff", a, tmp_path / "none.jsonl", status=2).stderr


# ---------------------------------------------------------------------------- the page


class Parts(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "<b>.jsonl"
    write(file)
    done = run("report", file, "-o", tmp_path / "a" / "page.html", "--json")
    assert str(tmp_path / "a" / "page.html") in done.stderr
    assert json.loads(done.stdout)
    text = (tmp_path / "a" / "page.html").read_text()
    page = Parts(text)
    assert page.of("script") == page.of("link") == page.of("img") == page.of("b") == []
    assert not re.search(r"https?:|url\(|@import|\bsrc=|\bhref=", text)
    assert "prefers-color-scheme: dark" in text
    assert all(each.get("role") == "img" and each["aria-label"] for each in page.of("svg"))
    assert len(page.of("svg")) == 3
    assert all("scope" in each for each in page.of("th"))
    assert len(page.of("caption")) == len(page.of("table")) == 3
    assert "an estimate" in text
    assert "probably the path from rank 3" in text


@pytest.mark.parametrize(("changes", "drawn"), [({}, 39), ({"period_s": 0.0}, 40)])
def test_the_page_draws_no_step_short_whose_end_is_not_recorded(
    tmp_path: Path, changes: dict[str, Any], drawn: int
) -> None:
    """As that of a run's last one never is, and of some files none."""
    file = write(tmp_path / "steps.jsonl", **changes)
    run("report", file, "-o", tmp_path / "page.html")
    plot = (tmp_path / "page.html").read_text().partition("Time of a step")[2]
    waiting = re.findall(r'class="second"[^>]* height="([\d.]+)"', plot.partition("</svg>")[0])
    assert len([height for height in waiting if float(height)]) == drawn


def test_the_page_of_a_long_run_of_a_large_model_is_small(tmp_path: Path) -> None:
    regions = [
        {"name": f"layers.{i}.attention.weight", "bound": 0.1, "delivered": 0.99}
        for i in range(200)
    ]
    file = write(tmp_path / "steps.jsonl", steps=1000, first=0, regions=regions)
    run("report", file, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 500_000
