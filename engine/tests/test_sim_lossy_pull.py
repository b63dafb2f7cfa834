"""Lossy pulls: what a worker goes without is its own loss alone, and within the bound."""

import itertools
import struct

import numpy as np
import pytest

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from scenarios import (
    EAGER,
    chunks_of,
    expand,
    gradients,
    must_be_ok,
    plan,
    rank_order_sum,
    same_bits,
)

VERSION = _engine.PROTOCOL_VERSION

CONTROLS = {
    "stream": {"spend": "anything", "schedule": EAGER},
    "probe": {
        "spend": "anything",
        "schedule": (("open", "worker", 0, -1.0),),
        "control": "probe",
    },
}


def lossy_down(workers: int, loss: float, **options: object) -> Fabric:
    """Only what comes down to the workers is lost."""
    fabric = Fabric(workers, **options)  # type: ignore[arg-type]
    for worker in range(workers):
        fabric.set_link(worker, "down", Link(loss=loss))
    return fabric


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("control", CONTROLS)
def test_each_worker_goes_without_some_of_each_region(control: str, servers: int) -> None:
    workers, elements, most = 4, 120_000, 0.15
    regions = [(0, 50_000, 0.2), (50_000, 20_000, 0.0), (70_000, 50_000, 0.3)]
    made = _engine.Plan(
        elements=elements, regions=regions, pull="lossy", pull_bound=most, **CONTROLS[control]
    )
    fabric = lossy_down(workers, 0.3, servers=servers, seed=1)
    fabric.all_reduce(0, made, gradients(workers, elements))
    fabric.run()
    must_be_ok(fabric)
    done = [fabric.completion(worker, 0) for worker in range(workers)]
    results = np.any([each.counted for each in done], axis=0)
    _, lengths, region, owner = chunks_of(fabric, made)
    aggregators = servers or workers
    for worker in range(workers):
        assert not (done[worker].applied > results).any()
        for a in range(aggregators):
            for r in range(3):
                here = results & (region == r) & (owner == a)
                gone = lengths[here & (done[worker].applied == 0)].sum()
                assert gone <= (0 if r == 1 else most) * lengths[here].sum()
                assert not (gone and servers == 0 and a == worker)
        applied = expand(fabric, made, done[worker].applied)
        assert not fabric.result(worker, 0)[~applied].any()
    masks = {done[worker].applied.tobytes() for worker in range(workers)}
    assert len(masks) == workers, "each misses others"


@pytest.mark.parametrize("control", ["stream", "probe"])
def test_what_arrived_is_the_result_and_the_rest_is_zero(control: str) -> None:
    """An exact push: every worker's buffer is the rank-order sum where it says so."""
    made = plan(90_000, pull="lossy", pull_bound=0.3, control=control)
    values = gradients(3, 90_000)
    fabric = lossy_down(3, 0.2)
    fabric.all_reduce(0, made, values)
    fabric.run()
    must_be_ok(fabric)
    total = rank_order_sum(values)
    for worker in range(3):
        applied = expand(fabric, made, fabric.completion(worker, 0).applied)
        assert not applied.all()
        assert same_bits(fabric.result(worker, 0), np.where(applied, total, np.float32(0)))
        assert fabric.completion(worker, 0).delivered == [1.0]


@pytest.mark.parametrize("control", CONTROLS)
def test_a_lossy_pull_sends_less_than_an_exact_one(control: str) -> None:
    sent = {"exact": 0, "lossy": 0}
    for pull, seed in itertools.product(sent, range(3)):
        made = plan(
            400_000,
            0.4,
            pull=pull,
            pull_bound=0.4 if pull == "lossy" else 0.0,
            **CONTROLS[control],
        )
        fabric = lossy_down(2, 0.3, servers=1, seed=seed)
        fabric.all_reduce(0, made, gradients(2, 400_000))
        fabric.run()
        must_be_ok(fabric)
        sent[pull] += fabric.link_counters(2, "up")["packets"]
    assert sent["lossy"] < {"stream": 0.95, "probe": 0.8}[control] * sent["exact"]


@pytest.mark.parametrize("control", CONTROLS)
def test_what_must_count_must_arrive_everywhere(control: str) -> None:
    """Results with a critical contribution, and those that are not finite: a sum that overflows."""
    workers, elements = 3, 60_000
    made = plan(elements, 0.5, pull="lossy", pull_bound=0.5, **CONTROLS[control])
    fabric = lossy_down(workers, 0.4, seed=2)
    chunks = len(chunks_of(fabric, made)[0])
    critical = [[0, 3, 50], [0, 100], [0, chunks - 1]]
    values = [np.clip(v, -50, 50) for v in gradients(workers, elements)]
    for each in values:
        each[:200] = 3e38
    fabric.all_reduce(0, made, values, critical=critical)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(workers):
        done = fabric.completion(worker, 0)
        assert done.applied[[0, 3, 50, 100, chunks - 1]].all()
        assert np.isposinf(fabric.result(worker, 0)[:200]).all()
        assert not done.applied.all()


def test_enough_is_malformed_by_a_worker_that_cannot_know_yet() -> None:
    made = plan(60_000, pull="lossy", pull_bound=0.3)
    fabric = Fabric(2)
    values = gradients(2, 60_000)
    fabric.all_reduce(0, made, values, at=[0.0, 0.01])
    fabric.run(0.001)
    head = struct.pack("<BBHI", VERSION, 9, 1, 1)
    fabric.inject(1, 0, head + struct.pack("<IIIIHH", 3000, 0, 0, 0, 0, 0))
    fabric.run()
    must_be_ok(fabric)
    assert fabric.counters(0)["malformed"] == 1
