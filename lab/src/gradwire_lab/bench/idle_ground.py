"""Engines keep timelines of exact sums, on the lab's networks and in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gradwire.sim.fabric import Fabric, Link
from gradwire.transport.native import load_engine
from gradwire_lab.bench.cases import gradwire_all_reduce
from gradwire_lab.bench.idle import Entry
from gradwire_lab.bench.networks import HOSTS, WARM_UP
from gradwire_lab.bench.transport_grid import Ground
from gradwire_lab.contest.race import Race
from gradwire_lab.network.network import Network

__all__ = ["kernel_timelines", "virtual_timelines"]

Timelines = list[list[list[Entry]]]
"""By rank and engine thread."""

_ENTRIES = 1 << 20
_ROUND_SECONDS = 300.0
_RUN_SECONDS = 600.0
_RECEIVE_BUFFER = 10 << 20
"""Bytes of a socket's buffer, about what the kernel grants the lab's ranks."""


def kernel_timelines(
    ground: Ground,
    size: int,
    rounds: int,
    *,
    cores: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Timelines:
    """Run rounds on a network of namespaces.

    Args:
        ground: the network and the ranks.
        size: bytes of each rank's buffer.
        cores: engine threads of each rank.
        progress: a function that is called with a line of text at times.
    """
    settings = {"cores": cores} if cores > 1 else None
    entry = gradwire_all_reduce("exact", entries=_ENTRIES, settings=settings)

    def show(name: str, done: int) -> None:
        if progress is not None:
            progress(f"{ground.network.name}, {ground.ranks} ranks: {done} rounds")

    with (
        Network(ground.ranks, ground.network) as network,
        Race(network, [entry], size, round_seconds=_ROUND_SECONDS) as race,
    ):
        done = race.run(rounds, block=rounds, progress=show)["exact"]
    return [
        [
            [Entry(*row) for each in done for row in each.details[rank]["timeline"][thread]]
            for thread in range(cores)
        ]
        for rank in range(ground.ranks)
    ]


def virtual_timelines(
    ground: Ground, size: int, rounds: int, *, warm_up: int = 2, seed: int = 1
) -> Timelines:
    """Run rounds in virtual time, with ports like those of the network.

    Args:
        ground: the network and the ranks.
        size: bytes of each rank's buffer.
        warm_up: rounds that come before.
        seed: of all random events.
    """
    network = ground.network
    link = Link(rate=network.rate / 8, queue=network.queue)
    fabric = Fabric(
        ground.ranks,
        seed=seed,
        link=link,
        **HOSTS,
        receive_buffer=_RECEIVE_BUFFER,
    )
    fabric.run(WARM_UP, until_done=False)
    return record(fabric, size // 4, rounds, warm_up=warm_up, seed=seed)


def record(fabric: Fabric, elements: int, rounds: int, *, warm_up: int, seed: int) -> Timelines:
    """Run sums one after another on a fabric, and return the timelines of the last ones.

    Raises:
        ValueError: a sum does not end.
    """
    random = np.random.default_rng(seed)
    values = [random.standard_normal(elements, dtype=np.float32) for _ in range(fabric.workers)]
    plan = load_engine().Plan(elements=elements, regions=[(0, elements, 0.0)])
    hosts: Sequence[int] = range(fabric.workers)
    for op in range(warm_up + rounds):
        if op == warm_up:
            for host in hosts:
                fabric.record(host, _ENTRIES)
        fabric.all_reduce(op, plan, values, at=fabric.now)
        if not fabric.run(fabric.now + _RUN_SECONDS, check=False):
            raise ValueError(f"op {op} does not end")
        fabric.forget()
    return [[[Entry(*row) for row in fabric.record(host, 0)]] for host in hosts]
