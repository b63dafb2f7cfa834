"""Communicators over engines in virtual time, which take the place of those over sockets."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.distributed import HashStore

from gradwire.core.errors import GradwireError, TransferError
from gradwire.core.plan import TransferPlan
from gradwire.policies import PlanContext, Policy, Reliable
from gradwire.policies.base import Chunks, Priorities
from gradwire.sim.fabric import NETWORK_A, Fabric
from gradwire.sim.job import Job, VirtualEngine
from gradwire.transport.communicator import Communicator
from threads import at_once

WORLD = 2


class Pair:
    """Two ranks over one fabric, with any number of communicators each."""

    def __init__(self) -> None:
        self.fabric = Fabric(WORLD, link=NETWORK_A)
        self.engines = [VirtualEngine(self.fabric, rank) for rank in range(WORLD)]
        self.store = HashStore()

    def join(self) -> list[Communicator]:
        """One more communicator of each rank."""
        return [
            Communicator(self.store, rank, WORLD, engine=engine)
            for rank, engine in enumerate(self.engines)
        ]

    def numbered(self) -> list[Communicator]:
        """One more communicator of each rank, in an order of its own."""
        members = self.join()

        def take(rank: int) -> int:
            with contextlib.closing(members[rank].meeting("number")) as meeting:
                return members[rank].take_number(meeting)

        numbers = at_once(WORLD, take)
        assert numbers[0] == numbers[1]
        return members

    def run(self) -> bool:
        """Runs to the end of all that was started; returns whether everything ended."""
        done = self.fabric.run(self.fabric.now + 60)
        for engine in self.engines:
            engine.collect()
        return done


def test_a_communicator_over_an_open_engine_meets_nobody() -> None:
    pair = Pair()
    members = pair.join()
    arrays = [np.full(5000, rank + 1.0, np.float32) for rank in range(WORLD)]
    handles = [m.all_reduce(a, step=3) for m, a in zip(members, arrays, strict=True)]
    assert not any(handle.done() for handle in handles)
    assert pair.run()
    for handle, array in zip(handles, arrays, strict=True):
        assert handle.report.step == 3
        np.testing.assert_array_equal(array, np.full(5000, 3.0, np.float32))
    assert members[0].counters()["packets_sent"] > 0


def test_communicators_with_numbers_have_no_common_order_in_virtual_time_either() -> None:
    pair = Pair()
    first, second = pair.numbered(), pair.numbered()
    small, large = TransferPlan.whole(300), TransferPlan.whole(5000)
    handles = []
    for rank, order in enumerate(([first, second], [second, first])):
        for members in order:
            plan = small if members is first else large
            handles.append(members[rank].all_reduce(np.ones(plan.elements, np.float32), plan))
    assert pair.run()
    assert [handle.report.delivered for handle in handles] == [(1.0,)] * 4


def test_a_number_that_was_returned_is_free_again() -> None:
    pair = Pair()
    members = pair.numbered()
    for member in members:
        member.return_number()
    pair.numbered()
    assert [sorted(engine.numbers) for engine in pair.engines] == [[0], [0]]


def test_a_setting_decides_how_long_a_transfer_takes_at_most_in_virtual_time_too() -> None:
    job = Job(WORLD, {"a.weight": 5000}, timeout=2.0)
    handle = job.pipelines[0].communicator.all_reduce(np.ones(5000, np.float32), step=7)
    job.fabric.run(5.0)  # rank 1 never starts its part
    with pytest.raises(TransferError) as raised:
        job.engines[0].collect()
    assert (raised.value.step, raised.value.cause) == (7, "timeout")
    assert not handle.done()


def test_the_loss_of_a_virtual_network_is_that_of_its_links() -> None:
    with pytest.raises(GradwireError, match="a virtual network loses what its links lose"):
        Pair().join()[0].set_drop(0.5)


def test_a_worker_alone_needs_no_engine_in_virtual_time_either() -> None:
    job = Job(1, {"a.weight": 500}, "mlt", p=0.3)
    gradient = np.arange(500, dtype=np.float32)
    np.testing.assert_array_equal(job.step([gradient])[0], gradient)
    assert job.fabric.now == 0.0


# ---------------------------------------------------------------------------- callbacks


class Unready(Reliable):
    """Cannot give the first bucket's chunks their classes, which a StartQueue does."""

    def plan(self, context: PlanContext) -> TransferPlan:
        return replace(super().plan(context), order="priority")

    def priorities(
        self, context: PlanContext, gradient: NDArray[np.float32], chunks: Chunks
    ) -> Priorities | None:
        if context.bucket == 0:
            raise GradwireError("not ready")
        return None


@pytest.mark.parametrize("policy", ["reliable", Unready()], ids=["done at once", "not started"])
def test_a_callback_of_a_bucket_may_wait_for_a_later_one(policy: str | Policy) -> None:
    """It does so where a bucket waits for a copy, and its transfer is over as soon as it begins.

    A job of one rank has such transfers.
    """
    job = Job(1, {"a.weight": 10, "b.weight": 10}, policy, buckets=[1, 1])
    start_queue = job.pipelines[0].communicator.start_queue
    asked, later = threading.Event(), threading.Event()
    start_queue.submit(lambda: [asked.wait(60)].clear())  # both buckets queue behind this
    _, (first, second) = job.start([np.ones(20, np.float32)])
    came: list[bool] = []
    waited = threading.Event()

    def wait(_: object) -> None:
        came.append(later.wait(10))
        waited.set()

    first.add_done_callback(wait)
    second.add_done_callback(lambda _: later.set())
    asked.set()
    assert waited.wait(60)
    assert came == [True]
    start_queue.stop()


@pytest.mark.parametrize("servers", [0, 1])
def test_steps_are_cut_for_what_the_paths_carry_be_it_less_or_more(servers: int) -> None:
    job = Job(2, {"layer.weight": 100_000}, servers=servers)
    gradients = [np.full(100_000, rank + 1.0, np.float32) for rank in range(2)]

    def packets() -> tuple[int, int]:
        """The packets that rank 0 sends in a step, and those of all that go in parts."""
        before = [job.fabric.counters(host) for host in range(2 + servers)]
        assert (job.step(gradients)[0] == 1.5).all()
        after = [job.fabric.counters(host) for host in range(2 + servers)]
        parts = sum(
            new["fragmented"] - old["fragmented"] for old, new in zip(before, after, strict=True)
        )
        return after[0]["packets_sent"] - before[0]["packets_sent"], parts

    whole, parts = packets()
    assert parts == 0
    for way in ("up", "down"):
        job.fabric.set_link(1, way, replace(NETWORK_A, longest=600))
    for _ in range(3):  # the first finds out, and the second agrees
        shorter, parts = packets()
    assert (shorter > 2 * whole, parts) == (True, 0)
    for way in ("up", "down"):
        job.fabric.set_link(1, way, NETWORK_A)
    job.compute(15.0)
    packets()
    again, parts = packets()
    assert (again < 1.2 * whole, parts) == (True, 0)
