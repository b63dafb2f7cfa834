"""Order "priority": each worker's own classes decide what goes first and what an eager close leaves
out, and which DSCP the datagrams carry. In virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradwire import _engine
from gradwire.sim.fabric import Fabric, Link, Sent
from scenarios import EAGER, chunks_of, expand, gradients, must_be_ok, plan, same_bits

BY_CLASS: dict[str, Any] = {"spend": "anything", "schedule": EAGER, "order": "priority"}
TABLE = [40, 32, 24, 16, 8]
CONTROL = {"ack", "open", "stop", "close", "fold", "forgive", "commit"}

Classes = NDArray[np.uint8]


def own_classes(workers: int, chunks: int, seed: int = 0) -> list[Classes]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 8, chunks).astype(np.uint8) for _ in range(workers)]


def fresh_pushes(fabric: Fabric, source: int, destination: int) -> list[Sent]:
    """In the order in which they left, retransmissions left out."""
    seen: dict[int, Sent] = {}
    for sent in fabric.trace():
        if (sent.kind, sent.source, sent.destination) == ("push", source, destination):
            seen.setdefault(sent.chunk, sent)
    return list(seen.values())


def test_critical_chunks_go_first_then_class_by_class() -> None:
    made = plan(60_000, order="priority")
    fabric = Fabric(3, link=Link(loss=0.02), seed=1, trace=100_000)
    classes = own_classes(3, len(chunks_of(fabric, made)[0]))
    critical = np.flatnonzero(classes[0] == 7)[::5].astype(np.uint32)
    fabric.all_reduce(
        0, made, gradients(3, 60_000), priorities=classes, critical=[critical, None, None]
    )
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        for other in {0, 1, 2} - {worker}:
            order = np.array([sent.chunk for sent in fresh_pushes(fabric, worker, other)])
            at = classes[worker][order].astype(int)
            if worker == 0:
                at[np.isin(order, critical)] = -1
                assert (at == -1).any()
            assert (np.diff(at) >= 0).all()
            assert len(set(at)) >= 8


@pytest.mark.parametrize("spend", ["nothing", "lost", "late"])
def test_holes_wait_for_fresh_chunks_where_they_may_be_forgiven(spend: str) -> None:
    """And are filled first where nothing may, for there they delay the sum. LTP's retransmissions
    come last, too: its third queue."""
    lossy = spend != "nothing"
    options: dict[str, Any] = {"spend": spend, "order": "shuffled"} if lossy else {}
    if spend == "late":
        options["schedule"] = [("open", "worker", 0, 1.0), ("open", "worker", 10**9, 0.98)]
    made = plan(150_000, 0.02 if lossy else 0.0, **options)
    fabric = Fabric(3, link=Link(loss=0.06), seed=1, trace=100_000)
    fabric.all_reduce(0, made, gradients(3, 150_000))
    fabric.run()
    must_be_ok(fabric)
    pushes = [
        s.chunk for s in fabric.trace() if (s.kind, s.source, s.destination) == ("push", 0, 1)
    ]
    again = [chunk in pushes[:at] for at, chunk in enumerate(pushes)]
    last_fresh = max(at for at, copy in enumerate(again) if not copy)
    assert sum(again[last_fresh:]) > 0
    early = sum(again[:last_fresh])
    assert early == 0 if lossy else early > 0


def test_within_a_class_all_workers_share_the_order_of_the_seed() -> None:
    def order(seed: int) -> list[list[int]]:
        made = plan(60_000, order="priority", seed=seed)
        fabric = Fabric(3, trace=100_000)
        classes = own_classes(1, len(chunks_of(fabric, made)[0]))[0]
        fabric.all_reduce(0, made, gradients(3, 60_000), priorities=[classes] * 3)
        fabric.run()
        return [[sent.chunk for sent in fresh_pushes(fabric, worker, 2)] for worker in (0, 1)]

    first, second = order(1)
    assert first == second
    assert order(2)[0] != first
    assert sorted(order(2)[0]) == sorted(first)


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("pull", ["exact", "committed"])
def test_each_worker_leaves_out_its_own_last_chunks(servers: int, pull: str) -> None:
    workers, elements = 4, 120_000
    regions = [(0, 50_000, 0.3), (50_000, 20_000, 0.0), (70_000, 50_000, 0.1)]
    bound = {"pull": pull, "pull_bound": 0.1 if pull == "committed" else 0.0}
    made = _engine.Plan(elements=elements, regions=regions, **BY_CLASS, **bound)
    fabric = Fabric(workers, servers=servers, link=Link(loss=0.05), seed=2)
    _, lengths, region, aggregator = chunks_of(fabric, made)
    classes = own_classes(workers, len(region))
    values = [np.clip(v, -50, 50) for v in gradients(workers, elements)]
    fabric.all_reduce(0, made, values, priorities=classes)
    fabric.run()
    must_be_ok(fabric)
    masks = [fabric.completion(worker, 0).counted.astype(bool) for worker in range(workers)]
    for worker, counted in enumerate(masks):
        for place in {*zip(region.tolist(), aggregator.tolist(), strict=True)}:
            here = (region == place[0]) & (aggregator == place[1])
            left = here & ~counted
            if regions[place[0]][2] == 0.0:
                assert not left.any()
                continue
            # As much as the bound allows, and nothing of it before what counted.
            assert lengths[left].sum() <= regions[place[0]][2] * lengths[here].sum()
            assert left.any()
            assert classes[worker][left].min() >= classes[worker][here & counted].max()
    assert any((mask != masks[0]).any() for mask in masks[1:])
    results = [fabric.result(worker, 0) for worker in range(workers)]
    assert all(same_bits(result, results[0]) for result in results[1:])
    if pull == "exact":  # what anybody sent is summed and pulled
        assert (fabric.completion(0, 0).applied.astype(bool) == np.any(masks, axis=0)).all()
        total = sum(
            np.where(expand(fabric, made, mask), value, 0.0)
            for mask, value in zip(masks, values, strict=True)
        )
        np.testing.assert_allclose(results[0], total, rtol=1e-5, atol=1e-4)


def test_without_classes_it_is_the_shared_order() -> None:
    def left_out(order: str, priorities: list[Classes] | None) -> list[NDArray[np.uint8]]:
        made = plan(100_000, 0.3, **{**BY_CLASS, "order": order}, seed=5)
        fabric = Fabric(2)
        fabric.all_reduce(0, made, gradients(2, 100_000), priorities=priorities)
        fabric.run()
        return [fabric.completion(worker, 0).counted for worker in range(2)]

    alike = [np.full(len(left_out("shuffled", None)[0]), 3, np.uint8)] * 2
    shared = left_out("shuffled", None)
    assert all((mask == shared[0]).all() for mask in shared)
    for masks in (left_out("priority", None), left_out("priority", alike)):
        assert all((mask == shared[0]).all() for mask in masks)


def test_critical_chunks_count_whatever_their_class() -> None:
    made = plan(60_000, 0.5, **BY_CLASS)
    fabric = Fabric(3, link=Link(loss=0.1), seed=3)
    chunks = len(chunks_of(fabric, made)[0])
    classes = [np.zeros(chunks, np.uint8) for _ in range(3)]
    for worker in range(3):
        classes[worker][worker::3] = 7
    critical = [np.flatnonzero(each)[::4].astype(np.uint32) for each in classes]
    fabric.all_reduce(0, made, gradients(3, 60_000), priorities=classes, critical=critical)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        counted = fabric.completion(worker, 0).counted.astype(bool)
        assert counted[critical[worker]].all()
        assert not counted[classes[worker] == 7].all()


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("whole_trains", [False, True])
def test_datagrams_carry_the_dscp_of_their_class(servers: int, whole_trains: bool) -> None:
    made = plan(60_000, 0.2, **BY_CLASS, class_dscp=TABLE)
    fabric = Fabric(3, servers=servers, whole_trains=whole_trains, trace=100_000)
    classes = own_classes(3, len(chunks_of(fabric, made)[0]))
    critical = [np.flatnonzero(each == 7)[:3].astype(np.uint32) for each in classes]
    fabric.all_reduce(0, made, gradients(3, 60_000), priorities=classes, critical=critical)
    fabric.run()
    must_be_ok(fabric)
    for worker in range(3):
        classes[worker][critical[worker]] = 0
    dscp = np.array([*TABLE, *[TABLE[-1]] * 3])  # the last one for all further classes
    heard = np.full(classes[0].shape, 7)
    for worker in range(3):
        counted = fabric.completion(worker, 0).counted.astype(bool)
        heard[counted] = np.minimum(heard, classes[worker])[counted]
    kinds = set()
    for sent in fabric.trace():
        kinds.add(sent.kind)
        if sent.kind == "push":
            assert sent.dscp == dscp[classes[sent.source][sent.chunk]]
        elif sent.kind == "pull":
            # A result is of the first class that a worker gave it; an aggregator that is a worker
            # knows its own classes of what it left out, too.
            own = classes[sent.source][sent.chunk] if sent.source < 3 else 7
            assert sent.dscp == dscp[min(heard[sent.chunk], own)]
        elif sent.kind in CONTROL:
            assert sent.dscp == TABLE[0]
    assert kinds >= {"push", "pull", "open", "ack", "close"}


def test_without_a_table_all_datagrams_are_of_the_engines_dscp() -> None:
    made = plan(30_000, 0.2, **BY_CLASS)
    fabric = Fabric(2, trace=10_000)
    classes = own_classes(2, len(chunks_of(fabric, made)[0]))
    fabric.all_reduce(0, made, gradients(2, 30_000), priorities=classes)
    fabric.run()
    assert {sent.dscp for sent in fabric.trace()} == {0}


@pytest.mark.parametrize(
    ("order", "classes", "text"),
    [
        ("priority", np.zeros(5, np.uint8), "priorities: 5 given; the plan has 28 chunks"),
        ("priority", np.full(28, 8, np.uint8), "priorities: class 8 of chunk 0; allowed are 0 to"),
        ("shuffled", np.zeros(28, np.uint8), 'for a plan whose order is not "priority"'),
    ],
)
def test_classes_that_do_not_fit_the_plan_are_errors(
    order: str, classes: Classes, text: str
) -> None:
    made = plan(10_000, order=order)
    fabric = Fabric(2)
    fabric.start(0, 0, made, np.zeros(10_000, np.float32), priorities=classes)
    fabric.run(1.0)
    done = fabric.completion(0, 0)
    assert done is not None
    assert text in done.error
