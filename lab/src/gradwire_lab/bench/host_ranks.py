"""This benchmark sums over several ranks a host, and counts what passes the hosts' ports."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from gradwire_lab.contest.measure import (
    all_reduce_payload,
    environment,
    header_ideal,
    percentile,
)
from gradwire_lab.contest.ranks import Ranks
from gradwire_lab.network.addresses import STORE_PORT
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import NETWORKS

CONTESTANTS = ("gloo", "gradwire flat", "gradwire hosts")
TIMEOUT = 600.0


def run_host_ranks(
    network: str,
    hosts: int,
    ranks_a_host: int,
    size: int,
    rounds: int,
    block: int = 5,
) -> dict[str, Any]:
    """Measure all-reduces of all ranks, by contestants that take turns.

    Args:
        network: name of the standard network.
        hosts: the number of hosts.
        ranks_a_host: the number of ranks on each host.
        size: bytes of each rank's gradient.
        rounds: the number of rounds of each contestant.
        block: rounds of one contestant before the next has its turn.

    Raises:
        LabUnavailable: this machine cannot make namespaces.
        RankError: a rank failed; the message names it.
    """
    preset = NETWORKS[network]
    world = hosts * ranks_a_host
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    port_bytes = dict.fromkeys(CONTESTANTS, 0)
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(Network(hosts, preset))

        def spawn(rank: int, *arguments: Any, **options: Any) -> Any:
            return net.spawn(rank // ranks_a_host, *arguments, **options)

        configs = [
            {
                "rank": rank,
                "world": world,
                "store_host": net.address(0),
                "store_port": STORE_PORT,
                "size": size,
            }
            for rank in range(world)
        ]
        ranks = stack.enter_context(Ranks(spawn, "gradwire_lab.bench.host_ranks_worker", configs))
        deadline = time.monotonic() + TIMEOUT
        ranks.gather(deadline)
        left = rounds
        while left > 0:
            for name in CONTESTANTS:
                before = [net.port_stats(host) for host in range(hosts)]
                command = {"command": "sum", "name": name, "rounds": min(block, left)}
                answers = ranks.ask(command, deadline)
                after = [net.port_stats(host) for host in range(hosts)]
                times = zip(*(answer["seconds"] for answer in answers), strict=True)
                seconds[name] += [max(each) for each in times]
                port_bytes[name] += max(
                    now.uplink.bytes - then.uplink.bytes
                    for now, then in zip(after, before, strict=True)
                )
            left -= block
        ranks.ask({"command": "close"}, deadline)
    ideal = header_ideal(all_reduce_payload(size, hosts), float(preset.rate))
    return {
        "case": "hosts",
        "network": network,
        "hosts": hosts,
        "ranks_a_host": ranks_a_host,
        "bytes": size,
        "rounds": rounds,
        "ideal_seconds": ideal,
        "contestants": {
            name: {
                "median_seconds": percentile(seconds[name], 50),
                "p90_seconds": percentile(seconds[name], 90),
                "port_bytes": port_bytes[name] / rounds,
                "seconds": seconds[name],
            }
            for name in CONTESTANTS
        },
        "environment": environment(),
    }
