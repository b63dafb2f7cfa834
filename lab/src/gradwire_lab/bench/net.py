"""Run one case on a lab network and measure it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gradwire_lab.bench.cases import Case
from gradwire_lab.contest.measure import (
    all_reduce_payload,
    environment,
    header_ideal,
    push_payload,
    summarize,
)
from gradwire_lab.contest.race import Race
from gradwire_lab.network.bursts import BurstTraffic
from gradwire_lab.network.network import Network

BURST_TARGET = 1
"""The host whose port the cross traffic goes into."""


def run_case(
    case: Case,
    rounds: int | None = None,
    *,
    block: int = 20,
    progress: Callable[[str, int], None] | None = None,
) -> dict[str, Any]:
    """Measure one case.

    Args:
        rounds: the number of rounds of each contestant; the case's own number if None.
        block: rounds of one contestant before the next has its turn.
        progress: a function that is called with a contestant's name and its rounds so far.

    Returns:
        What `gradwire bench net --json` prints.
    """
    rate = float(case.network.rate)
    payload = (
        push_payload(case.size, case.hosts - 1)
        if case.push
        else all_reduce_payload(case.size, case.hosts)
    )
    ideal = header_ideal(payload, rate)
    with contextlib.ExitStack() as stack:
        extra = 1 if case.bursts else 0
        network = stack.enter_context(Network(case.hosts, case.network, extra_hosts=extra))
        bursts = None
        if case.bursts:
            bursts = stack.enter_context(BurstTraffic(network, case.bursts, target=BURST_TARGET))
        race = Race(network, case.entries, case.size)
        stack.push(race.__exit__)
        lost_before = network.lost_packets()
        results = race.run(rounds or case.rounds, block=block, bursts=bursts, progress=progress)
        lost = network.lost_packets() - lost_before
        reports = race.reports()
        return {
            "case": case.name,
            "network": asdict(case.network),
            "hosts": case.hosts,
            "bytes": case.size,
            "bursts": asdict(case.bursts) if case.bursts else None,
            "ideal_seconds": ideal,
            "packets_lost_at_ports": lost,
            "contestants": {
                name: {
                    **asdict(summarize([r.seconds for r in done], ideal)),
                    "seconds": [r.seconds for r in done],
                    "starts": [r.start for r in done],
                    "reports": reports[name],
                }
                for name, done in results.items()
            },
            "environment": environment(),
        }
