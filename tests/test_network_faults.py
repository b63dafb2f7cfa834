"""Faults of hosts and networks, end to end between network namespaces: what their errors name."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.errors import RendezvousError
from gradwire.transport.communicator import Communicator
from gradwire_lab.network.loss_rules import LossRules
from gradwire_lab.network.offloads import switch_offloads_off
from host_ranks import Builder, HostRanks

pytestmark = pytest.mark.usefixtures("namespaces")

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


# ---------------------------------------------------------------------------- shorter datagrams


def a_router_between(network: Builder) -> None:
    """Hosts 0 and 1 reach each other by host 2."""
    for host in (0, 1):
        name = f"eth{host}"
        network.cable(host, 2, name)
        network.address(host, name, f"10.0.{host}.1", 24)
        network.address(2, name, f"10.0.{host}.2", 24)
        network.route(host, name, f"10.0.{1 - host}.0/24", gateway=f"10.0.{host}.2")
    network.sysctl(2, "ipv4/ip_forward", 1)


@pytest.fixture
def routed() -> Iterator[HostRanks]:
    with HostRanks(
        a_router_between, hosts=3, places=(0, 1, 2), names=("a", "b", "router")
    ) as ranks:
        yield ranks


def shrinks(rank: int, world: int, store: str, how: str) -> dict[str, Any]:
    """Trains over two hosts, until the path carries 1,400 bytes of IP only, and goes on.

    own: rank 0's interface has a smaller MTU. told: the router's has, and it says so. mute: the
    router drops what is longer without a word.
    """
    there = dist.FileStore(store, world)
    if rank == 2:
        while there.add("shorten", 0) < 2:
            time.sleep(0.01)
        if how == "told":
            subprocess.run(["ip", "link", "set", "eth1", "mtu", "1400"], check=True)
        elif how == "mute":
            for device in ("eth0", "eth1"):
                LossRules().set_longest(device, 1400)
        there.add("shortened", 1)
        return {}
    if how == "mute":  # a rule by length would take a whole train for one datagram
        switch_offloads_off(f"eth{rank}")
    logged: list[str] = []
    watch = logging.Handler()
    watch.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(watch)
    os.environ["GLOO_SOCKET_IFNAME"] = f"eth{rank}"
    dist.init_process_group("gloo", store=dist.PrefixStore("group", there), rank=rank, world_size=2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(300, 300))
    config = {"interface": f"10.0.{rank}.1", "timeout": 20.0}
    attachment = gradwire.attach(ddp, "reliable", **config)
    times = []
    for step in range(12):
        if step == 5:
            there.add("shorten", 1)
            while there.add("shortened", 0) < 1:
                time.sleep(0.01)
            if rank == 0 and how == "own":
                subprocess.run(["ip", "link", "set", "eth0", "mtu", "1400"], check=True)
        began = time.monotonic()
        ddp(torch.full((2, 300), rank + 1.0)).sum().backward()
        times.append(time.monotonic() - began)
        fragmented = attachment.counters()["fragmented"]
        if step == 8:
            settled = fragmented
    return {
        "gradient": ddp.module.weight.grad.double().sum().item(),
        "slowest": max(times),
        "limit": attachment.counters()["path_limit"],
        "in parts at first": settled,
        "in parts later": fragmented - settled,
        "logged": logged,
    }


@pytest.mark.parametrize("how", ["own", "told", "mute"])
def test_training_goes_on_where_a_path_comes_to_carry_less(
    routed: HostRanks, how: str, tmp_path: Path
) -> None:
    first, second, _ = routed.run(shrinks, store=str(tmp_path / "store"), how=how)
    for outcome in (first, second):
        assert outcome["gradient"] == first["gradient"]
        assert outcome["slowest"] < 5.0, outcome
        assert outcome["limit"] == 1372, outcome
        assert outcome["in parts later"] == 0, outcome
        assert any("datagrams of 1372 bytes" in line for line in outcome["logged"])
    assert first["in parts at first"] + second["in parts at first"] > 0
