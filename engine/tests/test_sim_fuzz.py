"""Jobs drawn from seeds: those that ever failed, a slice, and the faults they are made of."""

from datetime import date
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gradwire.sim.fabric import Fabric, Link
from gradwire.sim.fuzz import Cut, command, draw
from gradwire.sim.fuzz.command import app
from gradwire.sim.fuzz.runner import BATCH, known, run, verdict_of
from gradwire.sim.fuzz.shrink import shrink
from scenarios import gradients, must_be_ok, plan, rank_order_sum, same_bits

FRESH = 200
"""Seeds of a day."""
FAILED = [
    int(line)
    for line in Path(__file__).with_name("failed_seeds.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("seed", FAILED)
def test_a_seed_that_failed_once_does_not_again(seed: int) -> None:
    verdict = verdict_of(seed)
    assert not verdict.wrong, verdict.text


def test_a_slice_of_seeds() -> None:
    """The first ones, of which some notice what breaks, and others each day."""
    fresh = 1_000_000_000 + FRESH * date.today().toordinal()
    for seed in [*range(100), *range(fresh, fresh + FRESH)]:
        verdict = verdict_of(seed)
        again = f"gradwire sim fuzz --seeds {seed}"
        assert not verdict.wrong, f"{again}: {verdict.outcome}: {verdict.text}"


@pytest.mark.parametrize("seed", range(10))
def test_a_seed_is_one_life(seed: int) -> None:
    assert draw(seed) == draw(seed)
    assert verdict_of(seed) == verdict_of(seed)


def test_shrinking_leaves_the_fault_that_is_needed() -> None:
    life = next(each for each in map(draw, range(1000)) if len(each.faults) >= 4)
    needed = life.faults[2]
    cut = shrink(life, lambda cut: needed in cut.of(life).faults)
    left = cut.of(life)
    assert left.faults == (needed,)
    assert (left.workers, left.servers, left.elements, left.steps, left.lanes) == (2, 0, 1, 1, 1)
    assert not left.leave
    assert Cut().of(life) == life


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    batches = run(0, 2 * BATCH - 1, 1, path)
    first = next(batches)
    batches.close()
    assert [batch["seeds"] for batch in known(path)] == [first["seeds"]]
    path.write_text(path.read_text() + '{"seeds": [5')  # cut off
    path.write_text(path.read_text() + "\n")
    assert [batch["seeds"] for batch in run(0, 2 * BATCH - 1, 1, path)] == [[0, 49], [50, 99]]


def fuzz(*arguments: str) -> tuple[int, str]:
    """Exit status and output of the command; an exception that it lets pass is the test's."""
    result = CliRunner().invoke(app, ["fuzz", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--seeds 3..", "'3..'"),
        ("--seeds 9..3", "'9..3'"),
        ("--seeds -1", "-1"),
        ("--seeds 1_0", "'1_0'"),
        (f"--seeds {1 << 64}", "2**64"),
        ("--seeds 0..1000000000000", "at most"),
        ("--seeds 3..9 --keep none", "single seed"),
        ("--seeds 3 --state s.jsonl --keep none", "--state"),
        ("--seeds 3 --keep 99", "--keep"),
        ("--seeds 3 --keep -1", "--keep"),
        ("--seeds 3 --keep 0,0", "--keep"),
        ("--seeds 3 --keep none,0", "--keep"),
        ("--seeds 3 --sizes workers=0", "workers=0"),
        ("--seeds 3 --sizes workers=99999", "workers=99999"),
        ("--seeds 3 --sizes elements=0", "elements=0"),
        ("--seeds 3 --sizes steps=-1", "steps=-1"),
        ("--seeds 3 --sizes lanes=0", "lanes=0"),
        ("--seeds 3 --sizes lanes", "lanes"),
        ("--seeds 3 --sizes ranks=2", "ranks=2"),
        ("--seeds 3 --plain bogus", "bogus"),
        ("--seeds 3 --plain seed,", "''"),
        ("--seeds 3 --state /nonexistent/x", "/nonexistent/x"),
        ("--seeds 3 --state /", "--state"),
    ],
)
def test_an_impossible_option_is_named_and_runs_nothing(
    arguments: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "verdict_of", None)
    monkeypatch.setattr(command, "run", None)
    code, output = fuzz(*arguments.split())
    assert code == 2
    assert named in " ".join(output.replace("│", "").split())


@pytest.mark.parametrize(
    "text",
    [
        '{"steps": 3}',
        "[1, 2]",
        "7",
        "once upon a time",
        '{"seeds": [0, 1], "outcomes": {}, "faults": {}, "causes": {}}',
        '{"seeds": [0, 1], "outcomes": {"done": "x"}, "faults": {}, "causes": {}, "failed": []}',
        '{"seeds": ["a", 1], "outcomes": {}, "faults": {}, "causes": {}, "failed": []}',
        '{"seeds": [0, 1], "outcomes": {}, "faults": {}, "causes": {}, "failed": [[1]]}',
        "\udcff",
    ],
)
def test_a_file_of_something_else_is_no_state_and_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    before = path.read_bytes()
    code, output = fuzz("--seeds", "3", "--state", str(path))
    assert code == 2
    assert "--state" in output
    assert path.read_bytes() == before


def test_a_longer_range_runs_what_a_shorter_one_left(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    list(run(0, 2, 1, path))
    assert [batch["seeds"] for batch in run(0, 4, 1, path)] == [[0, 2], [3, 4]]
    assert [batch["seeds"] for batch in run(0, 4, 1, path)] == [[0, 2], [3, 4]]


def test_a_cut_seed_is_replayed_as_a_line_says() -> None:
    life = next(life for life in map(draw, range(100)) if life.faults and life.steps > 1)
    cut = Cut((0,), (("steps", 1),), ("skew",))
    code, output = fuzz("--seeds", str(life.seed), *str(cut).split())
    assert code == 0
    assert str(cut.of(life)) in output
    assert "done after" in output or "error after" in output


def test_ops_asked_for_while_a_process_is_frozen_start_in_their_order() -> None:
    fabric = Fabric(2)
    fabric.run(0.1, until_done=False)
    fabric.pause(1)
    for op in range(4):
        fabric.all_reduce(op, plan(100), gradients(2, 100), at=0.1 + 3.3e-4 * op)
    fabric.run(0.15)
    fabric.resume(1)
    assert fabric.run(1.0)
    must_be_ok(fabric, 4)


def test_a_job_that_is_started_again_takes_nothing_of_the_one_before() -> None:
    elements = 400_000
    fabric = Fabric(3, peer_timeout=1.0, ping_interval=0.2, link=Link(delay=5e-3))
    fabric.all_reduce(0, plan(elements), gradients(3, elements))
    fabric.run(0.02)
    values = gradients(3, elements, 1)
    for host in range(3):
        fabric.restart(host, 2)
        fabric.start(host, 0, plan(elements), values[host], at=fabric.now)
        fabric.run(fabric.now + 0.01, until_done=False)
    assert fabric.run(5.0)
    must_be_ok(fabric)
    assert all(same_bits(fabric.result(rank, 0), rank_order_sum(values)) for rank in range(3))
    with pytest.raises(ValueError, match="session"):
        fabric.restart(0, 2)


def test_what_the_checksum_finds_is_dropped_by_the_host() -> None:
    fabric = Fabric(2, link=Link(corrupt=0.1), seed=1)
    fabric.all_reduce(0, plan(50_000), gradients(2, 50_000))
    fabric.run()
    must_be_ok(fabric)
    assert fabric.link_counters(0, "down")["corrupted"] > 0


@pytest.mark.parametrize("stood", [False, True])
def test_clocks_that_jump_or_stand_still_end_no_job(stood: bool) -> None:
    elements = 1_000_000
    fabric = Fabric(2, peer_timeout=2.0, ping_interval=0.2)
    values = gradients(2, elements)
    fabric.all_reduce(0, plan(elements), values)
    fabric.run(0.02)
    if stood:
        fabric.pause(1)
        fabric.run(1.0)
        fabric.resume(1, clock_stood=True)
    else:
        fabric.jump_clock(1, 100.0)
        with pytest.raises(ValueError, match="back"):
            fabric.jump_clock(1, -1.0)
    assert fabric.run(5.0)
    must_be_ok(fabric)
    assert np.isfinite(fabric.result(0, 0)).all()


def test_a_one_way_cut_is_an_error_on_both_sides() -> None:
    fabric = Fabric(3, peer_timeout=1.0, ping_interval=0.2)
    fabric.all_reduce(0, plan(1_000_000), gradients(3, 1_000_000))
    fabric.run(0.02)
    fabric.cut(0, 1)
    fabric.run(10.0)
    done = [fabric.completion(rank, 0) for rank in range(3)]
    assert [each and each.error_cause for each in done] == ["silence"] * 3
