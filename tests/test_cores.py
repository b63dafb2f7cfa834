"""cores=: several engine threads of a process, from the communicator down."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.core.plan import CloseStep, TransferPlan
from gradwire.core.regions import Region
from gradwire.core.settings import Settings
from gradwire.transport.communicator import Communicator
from gradwire.transport.engines import SharedEngine
from ranks import free_port
from threads import at_once

ALLOWED = len(os.sched_getaffinity(0))
several = pytest.mark.skipif(ALLOWED < 2, reason="this process may use one core only")


def open_all(world: int, own: dict[int, dict[str, Any]], **common: Any) -> list[Any]:
    """The communicator of each rank, or what it raised."""
    store = dist.HashStore()
    settings = {"rendezvous_timeout": 20, "timeout": 20, "datagram": 1472, **common}
    return at_once(
        world, lambda rank: Communicator(store, rank, world, {**settings, **own.get(rank, {})})
    )


@contextlib.contextmanager
def team(world: int, **common: Any) -> Iterator[list[Communicator]]:
    members = open_all(world, {}, **common)
    try:
        for each in members:
            if isinstance(each, BaseException):
                raise each
        yield members
    finally:
        for each in members:
            if isinstance(each, Communicator):
                each.close()


@several
def test_transfers_over_two_cores_are_those_over_one() -> None:
    elements = 100_000
    arrays = [np.random.default_rng(rank).standard_normal(elements) for rank in range(2)]
    plan = TransferPlan(
        elements, (Region(0, elements, 0.2),), spend="late", schedule=(CloseStep(delay_s=20.0),)
    )
    results, bounds = [], []
    for cores in (1, 2):
        with team(2, cores=cores) as members:
            values = [array.astype(np.float32) for array in arrays]
            handles = [m.all_reduce(v, plan) for m, v in zip(members, values, strict=True)]
            reports = [handle.wait(30) for handle in handles]
            assert all(report.delivered == (1.0,) for report in reports)
            assert len(members[0].chunk_grid(plan)) == len(reports[0].counted)
            bounds.append(members[0].effective_bounds(plan)[0])
            results.append(values[0])
    assert np.array_equal(results[0], results[1])
    assert bounds[1] <= bounds[0] <= 0.2


@several
def test_ranks_that_differ_in_cores_are_named() -> None:
    for error in open_all(2, {1: {"cores": 2}}, cores=1):
        assert isinstance(error, RendezvousError)
        assert error.ranks == (1,)
        assert "cores=2" in str(error)
        assert str(error).endswith("cores must be the same on all ranks")


def test_more_cores_than_the_process_may_use_are_refused_on_all_ranks() -> None:
    first, second = open_all(2, {1: {"cores": ALLOWED + 1}})
    assert isinstance(second, ConfigError)
    assert (second.setting, second.value) == ("cores", ALLOWED + 1)
    assert isinstance(first, RendezvousError)
    assert first.ranks == (1,)
    assert "cores" in str(first)


@pytest.mark.parametrize("value", [0, -1, 65, 1.5, True, "two"])
def test_impossible_numbers_of_cores_are_refused(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        Settings.build({"cores": value}, environment={})
    assert refused.value.setting == "cores"


@several
def test_a_range_needs_a_port_for_each_core_of_each_rank() -> None:
    low = free_port(socket.SOCK_DGRAM, following=3)
    for error in open_all(2, {}, cores=2, port=f"{low}-{low + 2}"):
        assert isinstance(error, RendezvousError)
        assert error.ranks == (0, 1)
        assert f"{low}-{low + 3}" in str(error)


@several
def test_two_users_of_an_engine_need_the_same_cores() -> None:
    store = dist.HashStore()
    settings = {"rendezvous_timeout": 20}
    members = at_once(2, lambda rank: Communicator(store, rank, 2, {**settings, "cores": 1}))
    try:
        again = at_once(2, lambda rank: Communicator(store, rank, 2, {**settings, "cores": 2}))
        for error in again:
            assert isinstance(error, ConfigError | RendezvousError)
        assert any(isinstance(each, ConfigError) and each.setting == "cores" for each in again)
        engine = members[0].engine
        assert isinstance(engine, SharedEngine)
        assert engine.settings.cores == 1
    finally:
        for each in members:
            each.close()
