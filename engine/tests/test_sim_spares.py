"""Under an eager close chunks that were left out go in place of what heavy loss keeps in doubt.

Where others would have to pull more for it, and where nothing gets lost, they do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link
from scenarios import EAGER, chunks_of, gradients, must_be_ok, random_job

BOUND, ELEMENTS, ROUND_TRIP = 0.4, 400_000, 20e-3
REGIONS = [(0, 150_000, BOUND), (150_000, 20_000, 0.0), (170_000, 230_000, BOUND)]
HOSTS = {"host_delay": 10e-6, "host_jitter": 60e-6}
HEADER = 28  # bytes of a push before its values

Masks = list[NDArray[np.bool_]]


def pushes(
    workers: int,
    loss: float,
    critical: list[list[int]] | None = None,
    *,
    servers: int = 1,
    pull: str = "none",
    by_class: bool = False,
) -> tuple[Fabric, _engine.Plan]:
    """Two ops alike; the workers' ways up lose in the second. by_class: each has half of all
    chunks in its first class, the even or the odd ones."""
    order = "priority" if by_class else "shuffled"
    options: dict[str, Any] = {"pull": pull, "order": order, "seed": 7}
    made = _engine.Plan(
        elements=ELEMENTS, regions=REGIONS, spend="anything", schedule=EAGER, **options
    )
    link = Link(delay=ROUND_TRIP / 4)
    fabric = Fabric(workers, servers=servers, link=link, seed=3, trace=200_000, **HOSTS)
    fabric.run(0.3, until_done=False)
    values = gradients(workers, ELEMENTS)
    chunk = np.arange(len(chunks_of(fabric, made)[0]))
    classes = [np.uint8(chunk % 2 != worker) for worker in range(workers)] if by_class else None
    for op in range(2):
        if op == 1:
            for worker in range(workers):
                fabric.set_link(worker, "up", Link(delay=ROUND_TRIP / 4, loss=loss))
        fabric.all_reduce(op, made, values, critical=critical, priorities=classes, at=fabric.now)
        fabric.run(fabric.now + 60)
        fabric.run(fabric.now + 0.05, until_done=False)
    must_be_ok(fabric, 2)
    return fabric, made


def masks(fabric: Fabric, op: int) -> Masks:
    return [fabric.completion(w, op).counted.astype(bool) for w in range(fabric.workers)]


def sent(fabric: Fabric, worker: int, op: int) -> set[int]:
    return {
        each.chunk
        for each in fabric.trace()
        if (each.kind, each.source, each.op) == ("push", worker, op)
    }


@pytest.mark.parametrize("some_critical", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("loss", [0.6, 0.9])
def test_heavy_loss_calls_spares_and_the_region_closes_with_anything(
    workers: int, loss: float, some_critical: bool
) -> None:
    """It waits for its critical chunks, and what arrives meanwhile counts as well."""
    critical = [[3, 40 + worker, 900] if some_critical else [] for worker in range(workers)]
    most = 60 if some_critical else 3  # chunks beyond what closes a region
    fabric, made = pushes(workers, loss, critical)
    _, lengths, region, _ = chunks_of(fabric, made)
    for worker in range(workers):
        quiet, lossy = masks(fabric, 0)[worker], masks(fabric, 1)[worker]
        assert (lossy & ~quiet).any()  # counted beyond the list
        assert (quiet & ~lossy).any()  # and in place of some of it
        assert lossy[critical[worker]].all()
        for index, (_, length, bound) in enumerate(REGIONS):
            counted = lengths[lossy & (region == index)].sum()
            assert counted >= (1 - bound) * length
            assert counted < (1 - bound) * length + most * lengths.max() or bound == 0


@pytest.mark.parametrize(
    ("workers", "servers", "pull"),
    [(1, 1, "none"), (3, 1, "none"), (4, 0, "none"), (1, 1, "exact")],
)
def test_without_loss_nothing_beyond_the_shared_list_is_sent(
    workers: int, servers: int, pull: str
) -> None:
    fabric, made = pushes(workers, 0.0, servers=servers, pull=pull)
    _, lengths, region, aggregator = chunks_of(fabric, made)
    for op in range(2):
        for worker, counted in enumerate(masks(fabric, op)):
            assert (counted == masks(fabric, 0)[0]).all()
            away = counted & (aggregator != worker) if servers == 0 else counted
            assert sent(fabric, worker, op) == set(np.flatnonzero(away).tolist())
            # Of each region and shard as little as the bound allows.
            for index, (_, _, bound) in enumerate(REGIONS):
                for shard in range(servers or workers):
                    here = (region == index) & (aggregator == shard)
                    spare = lengths[here].sum() * (1 - bound) - lengths[here & counted].sum()
                    assert -int(lengths.max()) < spare <= 0
            done = fabric.completion(worker, op)
            wire = int((HEADER + 4 * lengths[away].astype(int)).sum())
            assert done.retransmissions == 0
            assert wire < done.bytes_sent < wire + 1000 * (servers or workers)


@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (4, 0)])
@pytest.mark.parametrize("pull", ["exact", "committed", "lossy"])
def test_masks_stay_shared_where_several_pull(workers: int, servers: int, pull: str) -> None:
    fabric, _ = pushes(workers, 0.7, servers=servers, pull=pull)
    quiet = masks(fabric, 0)[0]
    assert all((mask != quiet).sum() <= 1 for mask in masks(fabric, 1))


def test_the_spares_of_own_classes_are_the_last_ones() -> None:
    fabric, made = pushes(2, 0.7, by_class=True)
    bounded = chunks_of(fabric, made)[2] != 1
    for worker, (quiet, lossy) in enumerate(zip(masks(fabric, 0), masks(fabric, 1), strict=True)):
        first = np.arange(len(quiet)) % 2 == worker
        assert quiet[first].all()
        spares = lossy & ~quiet
        assert spares.any()
        assert not (spares & first).any()
        assert (bounded & first & ~lossy).any()
    assert (masks(fabric, 0)[0] != masks(fabric, 0)[1]).any()


def test_light_loss_sends_again_what_was_lost() -> None:
    """A chunk that is known to be missing is worth as much as a spare, and masks stay alike."""
    fabric, _ = pushes(3, 0.05)
    quiet = masks(fabric, 0)[0]
    assert fabric.completion(0, 1).retransmissions > 0
    assert all((mask == quiet).all() for mask in masks(fabric, 1))


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_jobs_under_heavy_loss_keep_every_invariant(first: int) -> None:
    """Pushes of the jobs of test_sim_property.py, all closed eagerly on networks that lose most."""
    beyond = 0
    for seed in range(first, first + 40):
        job = random_job(seed)
        loss = (0.25, 0.4, 0.5)[seed % 3]  # of each of two links
        options = {**job.plan_options, "spend": "anything", "schedule": EAGER, "pull": "none"}
        options |= {"control": "stream", "pull_bound": 0.0}
        made = _engine.Plan(elements=job.plan.elements, **options)
        job = replace(job, plan=made, link=replace(job.link, loss=loss, loss_burst=1.0))
        try:
            fabric = job.run()
            must_be_ok(fabric, len(job.ops))
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}\n{job}")
        if options["order"] == "priority":
            continue
        for op in range(len(job.ops)):
            own = [fabric.completion(w, op).counted for w in range(job.workers)]
            beyond += any((mask != own[0]).any() for mask in own)
    assert beyond > 10
