"""Faults of hosts and networks, end to end between network namespaces: what their errors name."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from host_ranks import Builder, HostRanks

from gradwire.communicator import Communicator
from gradwire.errors import RendezvousError
from gradwire.lab.loss_rules import LossRules

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

stores = itertools.count()


def three_hosts(network: Builder) -> None:
    """A cable between each two of them."""
    for host in range(3):
        network.address(host, "lo", f"10.0.0.{host + 1}", 32)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        name = f"to{first}{second}"
        network.cable(first, second, name)
        for host, other in ((first, second), (second, first)):
            network.route(host, name, f"10.0.0.{other + 1}/32", prefsrc=f"10.0.0.{host + 1}")
            network.neighbour(host, name, f"10.0.0.{other + 1}", other)


@pytest.fixture(scope="module")
def three() -> Iterator[HostRanks]:
    with HostRanks(three_hosts, hosts=3, places=(0, 1, 2), names=("a", "b", "c")) as ranks:
        yield ranks


def deafen(rank: int) -> None:
    """This rank's host drops all that comes to it."""
    rules = LossRules()
    for first, second in ((0, 1), (0, 2), (1, 2)):
        if rank in (first, second):
            rules.set(f"to{first}{second}", 1.0)
    rules.close()


def undo(rank: int) -> None:
    rules = LossRules()
    for first, second in ((0, 1), (0, 2), (1, 2)):
        if rank in (first, second):
            rules.set(f"to{first}{second}", 0.0)
    rules.close()


def joins(rank: int, world: int, store: str, deaf: int, at_first: bool) -> dict[str, Any]:
    """Joins, and sums until the deaf rank's host has dropped what comes to it for long."""
    logged: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("gradwire")
    log.addHandler(watch)
    log.setLevel(logging.INFO)
    there = dist.FileStore(store, world)
    config = {"rendezvous_timeout": 3.0, "timeout": 20.0, "peer_timeout": 2.0}
    communicator = None
    if rank == deaf and at_first:
        deafen(rank)
    try:
        config["interface"] = f"10.0.0.{rank + 1}"
        communicator = Communicator(there, rank, world, config)
        for step in range(1000):
            if rank == deaf and step == 3:
                deafen(rank)
            communicator.all_reduce(np.ones(50_000, np.float32), step=step).wait(30)
        outcome: dict[str, Any] = {}
    except RuntimeError as error:
        outcome = {"kind": type(error).__name__, "text": str(error), **vars(error)}
    finally:
        if rank == deaf:
            time.sleep(0.5)
            undo(rank)
        if communicator is not None:
            communicator.close()
        log.removeHandler(watch)
    return {**outcome, "logged": logged}


@pytest.mark.parametrize("deaf", [0, 1])
def test_who_hears_whom_is_told_where_not_all_reach_each_other(
    three: HostRanks, deaf: int, tmp_path: Path
) -> None:
    outcomes = three.run(joins, store=str(tmp_path / "store"), deaf=deaf, at_first=True)
    others = [rank for rank in range(3) if rank != deaf]
    for outcome in outcomes:
        assert outcome["kind"] == RendezvousError.__name__, outcome
        assert outcome["ranks"] == (deaf,)
        assert f"rank {deaf} hears nobody" in outcome["text"]
        assert outcome["text"] == outcomes[0]["text"]
    assert f"rank {others[0]} hears" not in outcomes[0]["text"]


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_host_that_hears_none_of_its_peers_names_itself(
    three: HostRanks, deaf: int, tmp_path: Path
) -> None:
    outcomes = three.run(joins, store=str(tmp_path / "store"), deaf=deaf, at_first=False)
    for outcome in outcomes:
        assert (outcome["kind"], outcome["rank"], outcome["cause"]) == (
            "TransferError",
            deaf,
            "silence",
        ), outcome
        assert f"rank {deaf} hears none of its 2 peers" in outcome["text"]
    for rank, outcome in enumerate(outcomes):
        assert f"rank {rank}: UDP 10.0.0.{rank + 1}:" in outcome["logged"][0]
    (summary,) = [line for line in outcomes[0]["logged"] if "3 endpoints have met" in line]
    assert summary.count("UDP 10.0.0.") == 3
