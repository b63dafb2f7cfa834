"""Several ranks a host: they sum among themselves, and one of them speaks for the host.

Hosts are network namespaces, so these tests need root or user namespaces.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from ddp_jobs import batch, fingerprint, gradients, local_gradients, model, wrap
from host_ranks import Builder, HostRanks

pytestmark = pytest.mark.usefixtures("namespaces")

ports = itertools.count(28_000)
PAIRS = (0, 0, 1, 1)
UNEQUAL = (0, 0, 1, 0)


def cable(network: Builder) -> None:
    network.cable(0, 1, "eth0")
    for host in (0, 1):
        network.address(host, "eth0", f"10.0.0.{host + 1}", 24)


def hosts(places: tuple[int, ...]) -> HostRanks:
    names = [f"host{place}" for place in places]
    return HostRanks(
        cable,
        places=places,
        names=names,
        GRADWIRE_PEER_TIMEOUT="10",
        GRADWIRE_RENDEZVOUS_TIMEOUT="20",
        GLOO_SOCKET_IFNAME="eth0",
    )


@pytest.fixture(scope="module")
def pairs() -> Iterator[HostRanks]:
    """Ranks 0 and 1 on one host, ranks 2 and 3 on another."""
    with hosts(PAIRS) as ranks:
        ranks.run(join_group, port=next(ports))
        yield ranks


@pytest.fixture(scope="module")
def unequal() -> Iterator[HostRanks]:
    """Ranks 0, 1 and 3 on one host, rank 2 on another."""
    with hosts(UNEQUAL) as ranks:
        ranks.run(join_group, port=next(ports))
        yield ranks


def join_group(rank: int, world: int, port: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://10.0.0.1:{port}", rank=rank, world_size=world
    )


def by_host(local: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """The mean over ranks, summed in rank order within each host and then over hosts."""
    everybody = [torch.empty_like(local) for _ in places]
    dist.all_gather(everybody, local)
    order = list(dict.fromkeys(places))
    share = torch.tensor(len(order) / len(places), dtype=torch.float32)
    sums = []
    for host in order:
        own = [values for values, place in zip(everybody, places, strict=True) if place == host]
        total = own[0].clone()
        for values in own[1:]:
            total += values
        sums.append(total * share)
    mean = sums[0].clone()
    for total in sums[1:]:
        mean += total
    return mean * torch.tensor(1.0 / len(order), dtype=torch.float32)


def exact_steps(rank: int, world: int, places: tuple[int, ...], steps: int) -> dict[str, Any]:
    net, twin = model(), model()
    ddp = wrap(net)
    attachment = gradwire.attach(ddp, "reliable")
    equal = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        equal.append(
            torch.equal(
                gradients(ddp), by_host(local_gradients(twin, batch(rank, step)), places)
            )
        )
    report, counters = attachment.report(), attachment.counters()
    attachment.detach()
    return {"equal": equal, "rank": report.rank, "step": report.step, "counters": counters}


@pytest.mark.parametrize(("name", "places"), [("pairs", PAIRS), ("unequal", UNEQUAL)])
def test_an_exact_mean_is_that_of_a_sum_within_hosts_and_then_over_hosts(
    request: pytest.FixtureRequest, name: str, places: tuple[int, ...]
) -> None:
    ranks = request.getfixturevalue(name)
    outcomes = ranks.run(exact_steps, places=places, steps=4)
    for rank, outcome in enumerate(outcomes):
        assert outcome["equal"] == [True] * 4
        assert (outcome["rank"], outcome["step"]) == (rank, 3)
        speaks = places.index(places[rank]) == rank
        assert bool(outcome["counters"]) == speaks
