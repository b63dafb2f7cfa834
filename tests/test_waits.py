"""What a step's report says of its slowest bucket: whom it waited for, and what the network did."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import gradwire
from ddp_jobs import wrap
from gradwire.core.regions import TensorSlot
from gradwire.core.report import StepReport
from gradwire.core.slowest import SlowestBucket
from gradwire.core.transfer_report import Waits
from gradwire.sim.fabric import NETWORK_A
from gradwire.sim.job import Job
from ranks import Ranks
from test_telemetry import transfer

WORLD, SIZE = 4, 120_000


def job(**options: object) -> Job:
    return Job(WORLD, {"a": SIZE // 2, "b": SIZE // 2}, buckets=[1, 1], **options)  # type: ignore[arg-type]


def step(running: Job, apart_s: float = 0.0) -> list[StepReport]:
    rng = np.random.default_rng(1)
    running.step([rng.normal(size=SIZE).astype(np.float32) for _ in range(WORLD)], apart_s)
    running.compute(0.02)
    return [each.report() for each in running.pipelines]


def slowest(report: StepReport) -> SlowestBucket:
    assert report.slowest is not None
    return report.slowest


def test_the_rank_that_begins_last_is_named() -> None:
    running = job()
    step(running)
    early, *_, late = step(running, apart_s=0.01)
    assert (slowest(early).began, early.workers) == ("rank 3", WORLD)
    assert 0.03 <= slowest(early).began_s <= slowest(early).pushed_s <= slowest(early).total_s
    assert slowest(late).began_s < 0.001


def test_the_rank_whose_way_out_is_slow_is_named_by_the_others() -> None:
    running = job()
    step(running)
    running.fabric.set_link(2, "up", replace(NETWORK_A, rate=25e6))
    for rank, report in enumerate(step(running)):
        found = slowest(report)
        if rank != 2:
            assert (found.pushed, found.queued) == ("rank 2", "rank 2")
            assert found.pushed_s > 2 * found.began_s
            assert found.queued_s > 1e-3


@pytest.mark.parametrize("policy", ["reliable", "adaptive", "ltp"])
def test_what_is_lost_is_counted_where_it_was_lost(policy: str) -> None:
    running = job(policy=policy)
    step(running)
    running.fabric.set_link(1, "down", replace(NETWORK_A, loss=0.1, loss_burst=4))
    for rank, report in enumerate(step(running)):
        found = slowest(report)
        if rank == 1:
            assert found.missed_packets > 0
            assert found.missed != ""
            assert found.resent_packets == 0
        else:
            assert (found.resent, found.missed_packets) in (("rank 1", 0), ("", 0))
        assert found.burst_packets > 1


def test_servers_are_named_as_such() -> None:
    running = job(servers=2)
    found = [slowest(report) for report in step(running)]
    assert {each.pulled for each in found} <= {"server 0", "server 1"}
    assert {each.pushed for each in found} == {""}  # the servers have the sums


def test_nobody_is_waited_for_alone() -> None:
    alone = Job(1, {"a": 1000})
    alone.step([np.ones(1000, np.float32)])
    assert (alone.report.slowest, alone.report.workers) == (None, 1)


def test_a_slowest_bucket_is_the_one_whose_transfer_took_longest() -> None:
    running = Job(2, {"small": 500, "large": 400_000}, buckets=[1, 1])
    rng = np.random.default_rng(1)
    running.step([rng.normal(size=400_500).astype(np.float32) for _ in range(2)])
    found = slowest(running.report)
    assert (found.bucket, found.layers, found.encoding) == (1, ("large", "large"), "f32")


def cost(rank: int, world: int) -> tuple[float, float]:
    """The processor time of a small job's step, and that of noting whom its buckets waited for."""
    ddp = wrap(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))))
    attachment = gradwire.attach(ddp, "reliable")
    data = torch.randn(256, 512)
    spent = 0.0
    for warm in (False, True):
        spent = time.process_time()
        for _ in range(10):
            ddp(data).square().mean().backward()
        spent = (time.process_time() - spent) / 10 if warm else 0.0
    report = attachment.report()
    attachment.detach()
    buckets = [transfer([100], [1.0])] * report.buckets
    slots = [(TensorSlot("a", 0, 100),)] * report.buckets
    noted = [(1, 1000)] * 7
    start = time.thread_time()
    for _ in range(100):
        for _ in buckets:
            Waits.of(noted)
        replace(report, slowest=SlowestBucket.of(buckets, (0, 1), slots)).line()
        replace(report, slowest=None).line()
    return spent, (time.thread_time() - start) / 100


def test_noting_them_costs_less_than_a_hundredth_of_a_steps_processor_time(two: Ranks) -> None:
    for step_s, noting_s in two.run(cost):
        assert noting_s < step_s / 100
