"""Invariants of docs/design.md that hold in Python: what is lossy, and what is agreed.

Real engines over loopback, threads of this process for ranks, losses injected by seed. Each of
these fails when its invariant is broken on purpose (engine/tests/broken_on_purpose.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray

from gradwire.core.errors import RendezvousError
from gradwire.core.plan import CloseStep, TransferPlan
from gradwire.core.regions import Region
from gradwire.core.transfer_report import TransferReport
from gradwire.transport.communicator import Communicator
from gradwire.transport.introductions import agree

RANKS = 3
ELEMENTS = 40_000
BY_TIME = (CloseStep("open", "all", 0.0, 0.5),)
LOSSY = {
    "lost": {"spend": "lost"},
    "anything": {"spend": "anything", "order": "shuffled", "seed": 5},
    "late": {"spend": "late", "schedule": BY_TIME},
    "mean": {"spend": "lost", "fill": "mean"},
    "committed": {"spend": "lost", "pull": "committed", "pull_bound": 0.2},
}

Array = NDArray[np.float32]


def on_all_ranks(call: Callable[[int], Any]) -> list[Any]:
    """call(rank) on a thread each; what it returned or raised."""
    outcomes: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            outcomes[rank] = call(rank)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes


@pytest.fixture(scope="module")
def lossy_network() -> Iterator[list[Communicator]]:
    """Communicators that lose a tenth of what reaches them, in runs."""
    store = dist.HashStore()
    times = {"rendezvous_timeout": 20, "peer_timeout": 10, "timeout": 20}
    # Datagrams of a size of which many enough are lost on loopback too.
    config = {**times, "interface": "lo", "datagram": 1472}
    members = on_all_ranks(lambda rank: Communicator(store, rank, RANKS, config))
    assert all(isinstance(member, Communicator) for member in members), members
    for member in members:
        member.set_drop(0.1, 2.0, 11 + member.rank)
    yield members
    for member in members:
        member.close()


def gradients(seed: int) -> list[Array]:
    """Of magnitudes that differ by element, so that the order of a sum shows."""
    random = np.random.default_rng(seed)
    scale = np.exp(4 * random.standard_normal(ELEMENTS))
    return [(random.standard_normal(ELEMENTS) * scale).astype(np.float32) for _ in range(RANKS)]


def reduce(
    members: list[Communicator], arrays: list[Array], plan: TransferPlan | None = None, **more: Any
) -> list[TransferReport]:
    handles = [m.all_reduce(a, plan, **more) for m, a in zip(members, arrays, strict=True)]
    return [handle.wait(30) for handle in handles]


def lossy_plan(kind: str) -> TransferPlan:
    return TransferPlan(ELEMENTS, (Region(0, ELEMENTS, 0.3),), **LOSSY[kind])  # type: ignore[arg-type]


def must_be_exact(arrays: list[Array], before: list[Array], reports: list[TransferReport]) -> None:
    expected = before[0] + before[1] + before[2]
    for rank, (array, report) in enumerate(zip(arrays, reports, strict=True)):
        assert report.delivered == (1.0,), f"rank {rank}"
        assert report.counted.all(), f"rank {rank}"
        assert report.applied.all(), f"rank {rank}"
        assert array.tobytes() == expected.tobytes(), f"rank {rank}"


@pytest.mark.parametrize("kind", LOSSY)
def test_only_a_lossy_plan_loses(lossy_network: list[Communicator], kind: str) -> None:
    """Invariant 3: beside lossy transfers, at the same time, a plain one is exact to the bit."""
    plan = lossy_plan(kind)
    plain, lossy = gradients(1), gradients(2)
    before = [array.copy() for array in plain]
    handles = []
    for member, first, second in zip(lossy_network, lossy, plain, strict=True):
        handles.append((member.all_reduce(first, plan), member.all_reduce(second)))
    reports = [(first.wait(30), second.wait(30)) for first, second in handles]
    must_be_exact(plain, before, [second for _, second in reports])
    assert any(not first.counted.all() for first, _ in reports), "nothing was lost"
    assert lossy[0].tobytes() == lossy[1].tobytes() == lossy[2].tobytes()


@pytest.mark.parametrize("kind", LOSSY)
def test_an_exact_step_of_a_lossy_plan_loses_nothing(
    lossy_network: list[Communicator], kind: str
) -> None:
    """Invariant 3: what flush() promises before a checkpoint."""
    plan = lossy_plan(kind).exact()
    assert not plan.lossy
    arrays = gradients(3)
    before = [array.copy() for array in arrays]
    must_be_exact(arrays, before, reduce(lossy_network, arrays, plan))


@pytest.mark.parametrize("kind", LOSSY)
def test_votes_are_whole_whatever_the_plan_loses(
    lossy_network: list[Communicator], kind: str
) -> None:
    """Invariants 3 and 10: statistics of all ranks, in rank order, to the last bit."""
    votes = [[0.1, 1e16, 3.0, -1.0, 5.0, -2.0, 0.0, 7.0],
             [0.2, 1.0, 4.0, -2.0, 6.0, -3.0, 0.0, 2.0],
             [0.3, -1e16, 5.0, -3.0, 4.0, -1.0, 0.0, 9.0]]  # fmt: skip
    arrays = gradients(4)
    handles = [
        member.all_reduce(array, lossy_plan(kind), stats=vote)
        for member, array, vote in zip(lossy_network, arrays, votes, strict=True)
    ]
    for handle in handles:
        report = handle.wait(30)
        assert report.stats_sum == (0.1 + 0.2 + 0.3, 1e16 + 1.0 - 1e16, 12.0, -6.0)
        assert report.stats_max == (6.0, -1.0, 0.0, 9.0)


def test_a_rank_that_is_configured_otherwise_is_named(lossy_network: list[Communicator]) -> None:
    """Invariant 10: before anything travels."""

    def configure(rank: int) -> None:
        bound = 0.2 if rank == 2 else 0.1
        agree(lossy_network[rank].meeting("invariants"), {"bound": bound})

    for error in on_all_ranks(configure):
        assert isinstance(error, RendezvousError)
        assert "rank 2" in str(error)
        assert "bound" in str(error)
