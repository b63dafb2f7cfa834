"""Jobs drawn from seeds: those that ever failed, a slice, and the faults they are made of."""

from datetime import date
from pathlib import Path

import numpy as np
import pytest

from gradwire.sim.fabric import Fabric, Link
from gradwire.sim.fuzz import Cut, draw
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
