"""The accuracy study: its statistics, its book-keeping, and that arms differ in nothing else."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gradwire.core.agreed import Phase
from gradwire.core.errors import ConfigError, GradwireError
from gradwire.policies import names
from gradwire.sim.job import Job
from gradwire_lab.bench import app
from gradwire_lab.contest.intervals import t_quantile
from gradwire_lab.network import network
from gradwire_lab.study import digits, trainer, tuning
from gradwire_lab.study.arms import ARMS, BAD, LOSSLESS, POLICIES
from gradwire_lab.study.cell import Cell, Outcome
from gradwire_lab.study.digits import DigitsLesson
from gradwire_lab.study.kernel import train_on_kernel
from gradwire_lab.study.ledger import Ledger, LedgerError
from gradwire_lab.study.lesson import WORKERS
from gradwire_lab.study.replica import Replica
from gradwire_lab.study.results import notes, results
from gradwire_lab.study.runner import run
from gradwire_lab.study.scenarios import SCENARIOS
from gradwire_lab.study.statistics import Paired, compare
from gradwire_lab.study.study import Row, Training, cells, left_out, rows
from gradwire_lab.study.table import markdown
from gradwire_lab.study.tasks import TASKS
from gradwire_lab.study.text import TextLesson
from gradwire_lab.study.trainer import train
from gradwire_lab.study.weather import UNLUCKY, Weather

SHORT = Cell("digits", "sgd", "mixed", LOSSLESS, "quiet", seed=0, rounds=12, parts=1)
TRAINING = Training("digits", "sgd", 12, 1)
DONE = Outcome(97.0, (97.0,), 1.0, 0.0, 0, 0, 0.0, "", 0.0)

# ---------------------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 6.314), (9, 1.833), (20, 1.725), (21, 1.721), (30, 1.697)]
)
def test_the_quantiles_are_students(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=6e-4)


def test_the_quantile_ends_at_the_normal_distributions() -> None:
    assert t_quantile(10**6) == pytest.approx(1.644854, abs=1e-5)
    with pytest.raises(ValueError, match="0 degrees"):
        t_quantile(0)


def test_differences_are_paired() -> None:
    paired = compare([96.0, 91.0, 99.0], [97.0, 92.0, 98.0])
    assert paired.pairs == 3
    assert paired.mean == pytest.approx(-1 / 3)
    assert paired.half == pytest.approx(2.920 * math.sqrt(4 / 3 / 3))
    assert compare([1.0], [2.0]) == Paired(1, -1.0, None)


@pytest.mark.parametrize(
    ("mean", "half", "more", "less"),
    [
        (0.0, 0.4, "as good", "as good"),
        (0.2, 0.4, "open", "open"),
        (-1.0, 0.4, "worse", "better"),
        (1.0, 0.4, "better", "worse"),
        (-1.0, 0.6, "open", "open"),
        (0.0, None, "open", "open"),
    ],
)
def test_the_interval_decides(mean: float, half: float | None, more: str, less: str) -> None:
    assert Paired(5, mean, half).verdict(0.5, True) == more
    assert Paired(5, mean, half).verdict(0.5, False) == less


# ---------------------------------------------------------------------------- the study


def test_every_policy_is_in_the_study_and_every_row_is_known() -> None:
    assert {arm.policy for arm in ARMS.values()} >= set(names())
    for row in rows():
        assert row.arm in ARMS
        assert row.scenario in SCENARIOS
    quiet = {ARMS[row.arm].policy for row in rows(["quiet"])}
    assert quiet >= set(names())
    for phase in ("critical", "tolerant"):
        there = rows(["bursts"], scenarios=[f"bursts-{phase}"])
        assert {ARMS[row.arm].policy for row in there} >= set(names())
        for percent in (60, 70, 80, 90):
            assert rows(["levels"], scenarios=[f"burst-{percent}-{phase}"])


def test_each_cell_is_trained_once_beside_its_baseline() -> None:
    chosen = (Row("quiet", "dblp"), Row("choices", "dblp"), Row("shapes", "ltp", data="own"))
    made = cells([TRAINING], chosen, 2)
    assert len(made) == len(set(made)) == 2 * 4
    assert [cell.arm for cell in made[:4]] == [LOSSLESS, LOSSLESS, "dblp", "ltp"]
    assert {cell.data for cell in made[:2]} == {"mixed", "own"}


def test_a_task_may_have_some_tables_only() -> None:
    training = replace(TRAINING, task="digits-decay")
    chosen = (Row("quiet", "dblp"), Row("thirds", "80-early"))
    assert [cell.arm for cell in cells([training], chosen, 1)] == [LOSSLESS, "80-early"]
    assert left_out([training], chosen) == []
    assert len(left_out([training], chosen[:1])) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_arm_of_the_study_can_be_trained(optimizer: str) -> None:
    training = Training("digits", optimizer, 1, 1)
    chosen = {row.arm: row for row in rows() if row.where == "virtual"}
    made = cells([training], list(chosen.values()), 1)
    assert {cell.arm for cell in made} >= {arm.name for arm in POLICIES}
    assert ("eager-40-momentum" in {cell.arm for cell in made}) == (optimizer == "adam")
    for cell in made:
        assert train(cell).score is not None
    told = results([training], list(chosen.values()), 1, dict.fromkeys(made, DONE))
    assert {found.row.arm for found in told} == {cell.arm for cell in made} - {LOSSLESS}


def test_a_bad_arm_that_counts_as_good_is_told() -> None:
    chosen = (Row("quiet", BAD), Row("quiet", "ltp"))
    outcomes = dict.fromkeys(cells([TRAINING], chosen[:1], 3), DONE)
    found = results([TRAINING], chosen, 3, outcomes)
    assert [result.verdict for result in found] == ["as good", "not run"]
    told = notes(found)
    assert "too easy" in told[0]
    assert "1 of 2 rows have not been run" in told[1]
    for cell in outcomes:
        if cell.arm == BAD:
            outcomes[cell] = replace(DONE, score=90.0 + 0.1 * cell.seed)
    found = results([TRAINING], chosen, 3, outcomes)
    assert found[0].verdict == "worse"
    assert not any("bad" in note for note in notes(found))


def test_a_training_that_halts_is_no_score() -> None:
    chosen = (Row("quiet", "ltp"),)
    outcomes = dict.fromkeys(cells([TRAINING], chosen, 3), DONE)
    outcomes[replace(SHORT, arm="ltp", seed=1)] = replace(DONE, score=None, error="it halts")
    (found,) = results([TRAINING], chosen, 3, outcomes)
    assert found.verdict == "halts"
    assert found.errors == ("it halts",)
    assert found.difference is not None
    assert found.difference.pairs == 2


def test_tables_say_which_commits_their_rows_are_of() -> None:
    chosen = (Row("quiet", "ltp"),)
    outcomes = dict.fromkeys(cells([TRAINING], chosen, 2), replace(DONE, commit="abc"))
    outcomes[replace(SHORT, arm="ltp", seed=1)] = replace(DONE, commit="def")
    found = results([TRAINING], chosen, 2, outcomes)
    assert found[0].commits == ("abc", "def")
    assert "Commits: abc, def." in list(markdown(found))
    unknown = results([TRAINING], chosen, 2, dict.fromkeys(outcomes, DONE))
    assert not any("Commits" in line for line in markdown(unknown))


# ---------------------------------------------------------------------------- the ledger


def test_what_is_done_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    Ledger(path).add(SHORT, DONE)
    again = Ledger(path)
    assert again.outcomes == {SHORT: DONE}
    with path.open("a") as file:
        file.write('{"cell": {"task": "dig')
    cut = Ledger(path)
    assert cut.outcomes == {SHORT: DONE}
    cut.add(replace(SHORT, seed=1), DONE)
    assert len(Ledger(path).outcomes) == 2


def test_a_file_of_something_else_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(LedgerError, match=r"cells\.jsonl, line 1: no cell"):
        Ledger(path)


# ---------------------------------------------------------------------------- tasks


def test_the_folds_share_the_digits_out() -> None:
    held_out = [set(DigitsLesson(3, fold, "mixed").held_out.tolist()) for fold in range(5)]
    assert sum(map(len, held_out)) == len(set.union(*held_out)) == 1797
    for fold, out in enumerate(held_out):
        lesson = DigitsLesson(3, fold, "mixed")
        epoch = [set(lesson.order(2, worker).tolist()) for worker in range(WORKERS)]
        assert sum(map(len, epoch)) == len(set.union(*epoch)) == 1797 - len(out)
        assert not set.union(*epoch) & out


def test_workers_with_data_of_their_own_see_other_classes() -> None:
    lesson = DigitsLesson(0, 0, "own")
    seen = [set(lesson.labels[lesson.own[w]].tolist()) for w in range(WORKERS)]
    assert seen[0] <= {0, 1, 2}
    assert not seen[0] & seen[2]
    assert all(len(lesson.order(0, w)) >= 16 * lesson.rounds_per_epoch for w in range(WORKERS))
    text = TextLesson(0, 0, "own")
    assert not torch.equal(text.texts[0].train[:1000], text.texts[1].train[:1000])


@pytest.mark.parametrize("name", TASKS)
def test_a_lesson_is_the_same_every_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BEFORE", 4)
    tuning.trained.cache_clear()
    first, again = (TASKS[name].open(2, 0, "mixed") for _ in range(2))
    torch.manual_seed(77)
    assert first.loss(3, 1).item() == again.loss(3, 1).item()
    assert first.loss(3, 1).item() != first.loss(3, 2).item()
    assert first.loss(3, 1).item() != first.loss(4, 1).item()
    assert first.score() == again.score()
    other = TASKS[name].open(3, 0, "mixed")
    assert first.loss(3, 1).item() != other.loss(3, 1).item()
    tuning.trained.cache_clear()


@pytest.mark.slow
def test_tuning_goes_on_from_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BEFORE", 12)
    tuning.trained.cache_clear()
    fresh, trained = (TASKS[name].open(5, 0, "mixed").score() for name in ("text", "tuning"))
    tuning.trained.cache_clear()
    assert trained < fresh - 0.1


# ---------------------------------------------------------------------------- training


@pytest.mark.parametrize(("task", "optimizer"), [("digits", "adam"), ("text", "adamw")])
def test_reliable_is_lossless_to_the_bit(task: str, optimizer: str) -> None:
    cell = replace(SHORT, task=task, optimizer=optimizer)
    lossless = train(cell)
    reliable = train(replace(cell, arm="reliable", scenario="even-10"))
    assert reliable.score == lossless.score
    assert reliable.delivered == 1.0
    assert reliable.comm_s > 0.0


@pytest.mark.netns
@pytest.mark.slow
def test_real_processes_train_as_virtual_ones_do() -> None:
    cell = replace(
        SHORT, task="text", optimizer="adamw", arm="reliable", scenario="even-10", rounds=5
    )
    assert train_on_kernel(replace(cell, where="kernel")).score == train(cell).score
    cell = replace(SHORT, arm=BAD, rounds=5)
    there, here = train_on_kernel(replace(cell, where="kernel")), train(cell)
    assert there.delivered == pytest.approx(here.delivered)
    assert there.lossy_rounds == here.lossy_rounds == 5


def test_an_arm_may_have_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    class Noted(Job):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            jobs.append(self)

    monkeypatch.setattr(trainer, "Job", Noted)
    for arm in ("dblp", "dblp-buckets"):
        train(replace(SHORT, task="text", optimizer="adamw", arm=arm, rounds=2))
    one, several = ([sum(p.numel() for p in group) for group in job.groups] for job in jobs)
    assert len(one) == 1
    assert len(several) == 3
    assert sum(several) == one[0]
    assert max(several) < 0.6 * one[0]


def test_a_cell_is_determined_by_what_it_says() -> None:
    cell = replace(SHORT, arm="dblp", scenario="even-10", rounds=30, parts=2)
    first, again = (replace(train(cell), seconds=0.0) for _ in range(2))
    assert first == again
    assert first.delivered < 1.0
    assert len(first.scores) == 2
    assert 0.0 < first.critical_share < 1.0
    assert first.scores != train(replace(cell, seed=1)).scores


def test_masks_of_their_own_leave_few_chunks_to_nobody() -> None:
    cell = replace(SHORT, arm="eager-40-own", rounds=4)
    own, shared = train(cell), train(replace(cell, arm="eager-40"))
    assert own.delivered == pytest.approx(shared.delivered, abs=0.02)
    assert own.comm_s > shared.comm_s  # every chunk has a contributor, so every one is pulled


def test_thirds_lose_in_their_third_only() -> None:
    cell = replace(SHORT, arm="80-mid", rounds=30)
    outcome = train(cell)
    assert outcome.lossy_rounds == 10
    assert outcome.delivered == pytest.approx(1 - 0.8 / 3, abs=0.02)
    assert train(replace(cell, arm="80-mid-late")).lossy_rounds == 20
    assert train(replace(cell, arm="80-early")).lossy_rounds == 9  # the first round is critical


def test_a_policy_that_halts_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def halt(job: Job, gradients: object) -> None:
        raise GradwireError("rank 0, step 3: it halts\n\nAt: somewhere")

    monkeypatch.setattr(Job, "step", halt)
    outcome = train(replace(SHORT, arm="optireduce", parts=2))
    assert outcome.score is None
    assert outcome.error == "rank 0, step 3: it halts"


def _lost(job: Job) -> list[int]:
    return [job.fabric.link_counters(worker, "up")["dropped_loss"] for worker in range(job.world)]


def test_bursts_fall_into_their_phase_only() -> None:
    scenario = replace(SCENARIOS["burst-60-critical"], share=1.0)
    job = Job(WORKERS, {"a.weight": 20_000})
    weather = Weather(scenario, job, [1])
    gradients = [np.ones(20_000, np.float32)] * WORKERS
    phases: tuple[Phase, ...] = ("tolerant", "critical", "tolerant")
    for phase in phases:
        weather.before_round(phase)
        before = _lost(job)
        job.step(gradients)
        assert (_lost(job) != before) == (phase == "critical")


def test_each_burst_draws_its_level() -> None:
    job = Job(WORKERS, {"a.weight": 54})
    weather = Weather(replace(SCENARIOS["bursts-tolerant"], share=0.5), job, [1])
    seen = []
    for number in range(60):
        weather.before_round("critical" if number < 10 else "tolerant")
        seen.append(weather.loss)
    assert set(seen[:10]) == {0.0}
    assert set(seen) == {0.0, 0.6, 0.7, 0.8, 0.9}


def test_the_rate_rises_and_falls() -> None:
    text = TASKS["text"].rate
    assert text(0.0) < 0.2 < text(0.05) < text(0.1) == 1.0
    assert text(0.5) < 0.7
    assert text(1.0) == pytest.approx(0.02)
    assert [TASKS["digits"].rate(done) for done in (0.0, 0.7, 0.75, 0.99)] == [1.0, 1.0, 0.1, 0.1]
    thirds = [TASKS["digits-decay"].rate(step / 9) for step in range(9)]
    assert thirds == pytest.approx([1.0] * 3 + [0.3] * 3 + [0.09] * 3)


def test_a_large_gradient_is_clipped() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    before = model.weight.detach().clone()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), clip=0.5)
    replica.apply(np.array([3.0, 0.0, 4.0], np.float32))
    assert torch.allclose(before - model.weight, torch.tensor([[0.3, 0.0, 0.4]]))


def test_uneven_loss_is_one_workers() -> None:
    lost = {}
    for name in ("even-10", "uneven-10"):
        job = Job(WORKERS, {"a.weight": 100_000})
        weather = Weather(SCENARIOS[name], job, [1])
        for _ in range(5):
            weather.before_round("tolerant")
            job.step([np.ones(100_000, np.float32)] * WORKERS)
        lost[name] = _lost(job)
    assert all(lost["even-10"])
    assert [count > 0 for count in lost["uneven-10"]] == [w == UNLUCKY for w in range(WORKERS)]


# ---------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_a_quick_study_and_its_resumption(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    command = ["accuracy", "--quick", "--json", "--jobs", "1", "--out", str(out)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert [row["arm"] for row in found["rows"]] == [BAD, "dblp"]
    assert all(row["seeds"] == 2 and row["difference"]["half"] for row in found["rows"])
    assert found["rows"][0]["delivered"] < 0.7
    lines = out.read_text().splitlines()
    assert len(lines) == 6
    assert CliRunner().invoke(app, command).exit_code == 0
    assert out.read_text().splitlines() == lines  # nothing was run again
    shown = CliRunner().invoke(app, ["accuracy", "--quick", "--show", "--out", str(out)])
    assert shown.exit_code == 0
    assert "dblp" in shown.output
    written = CliRunner().invoke(
        app, ["accuracy", "--quick", "--show", "--markdown", "--out", str(out)]
    )
    assert "### `quiet`: digits, sgd" in written.output
    assert "| `dblp` | quiet | 2 | " in written.output


@pytest.mark.slow
def test_processes_train_as_this_one_does(tmp_path: Path) -> None:
    command = ["accuracy", "--task", "digits", "--optimizer", "sgd", "--section", "quiet"]
    command += ["--arms", "mlt", "--seeds", "2", "--rounds", "3", "--jobs", "2"]
    ran = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "cells.jsonl")])
    assert ran.exit_code == 0, ran.output
    for cell, outcome in Ledger(tmp_path / "cells.jsonl").outcomes.items():
        assert replace(train(cell), seconds=0.0) == replace(outcome, seconds=0.0, commit=None)


@pytest.mark.slow
def test_a_cell_that_cannot_be_trained_ends_the_study_at_once(tmp_path: Path) -> None:
    bad = replace(SHORT, arm="eager-40-momentum", rounds=1)  # SGD keeps no mean of gradients
    left = [bad, *(replace(SHORT, seed=seed, rounds=60) for seed in range(1000))]
    ledger = Ledger(tmp_path / "cells.jsonl")
    with pytest.raises(ConfigError, match="fill='momentum' with optimizer=SGD"):
        run(left, ledger, 2, lambda *_: None)
    assert len(ledger.outcomes) < 50  # and it is over: those that wait would take minutes
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "digit"], "did you mean 'digits'?"),
        (["--arms", "dlbp"], "did you mean 'dblp'?"),
        (["--optimizer", "lion"], "allowed are sgd, adam, adamw"),
        (["--section", "quiet", "--scenarios", "even-10"], "no row of the study"),
        (["--task", "digits-decay", "--section", "quiet"], "its only tables are thirds"),
        (
            ["--task", "digits", "--optimizer", "sgd", "--arms", "eager-40-momentum"],
            "digits, sgd: without eager-40-momentum, for this optimizer keeps no",
        ),
    ],
)
def test_an_unknown_word_names_itself(arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(app, ["accuracy", *arguments], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert message in ran.output


def test_without_the_digits_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.load.cache_clear()
    ran = CliRunner().invoke(app, ["accuracy", "--quick", "--jobs", "1"])
    assert ran.exit_code == 2
    assert "pip install './lab[accuracy]'" in " ".join(ran.output.split())


def test_without_namespaces_the_rows_over_a_kernel_network_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "probe", lambda: "no rights [lab]")
    command = ["accuracy", "--task", "text", "--section", "check", "--arms", "reliable"]
    command += ["--rounds", "1", "--seeds", "1", "--jobs", "1", "--json"]
    ran = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "cells.jsonl")])
    assert ran.exit_code == 0, ran.output
    assert "nothing was run over a kernel network: no rights [lab]" in ran.stdout
    places = {cell.where for cell in Ledger(tmp_path / "cells.jsonl").outcomes}
    assert places == {"virtual"}


@pytest.mark.parametrize("bench", [["net"], ["replicas"], ["encodings"], ["start"]])
def test_a_bench_of_networks_needs_one(bench: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "probe", lambda: "no rights")
    ran = CliRunner().invoke(app, bench)
    assert ran.exit_code == 2
    assert "no lab network on this machine: no rights" in " ".join(ran.output.split())


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "probe", lambda: None)
    ran = CliRunner().invoke(app, ["net", "--out", "/dev/null/x.json"], env={"COLUMNS": "200"})
    assert ran.exit_code == 2
    assert "/dev/null/x.json: cannot be written" in ran.output
    monkeypatch.setattr(network, "probe", lambda: "no rights")
    out = tmp_path / "new" / "x.json"
    assert CliRunner().invoke(app, ["net", "--out", str(out)]).exit_code == 2
    assert not out.parent.exists()  # and nothing is left where nothing can run
