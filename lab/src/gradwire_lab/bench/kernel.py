"""Exact sums over ports with short queues of a kernel, beside Gloo with two congestion controls.

The hosts are faster than the ports, as hosts of 10 Gbit/s behind ports of 1 Gbit/s are, so that
only what a sender does by itself keeps a port from dropping.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire_lab.bench.cases import gradwire_all_reduce
from gradwire_lab.contest.measure import (
    all_reduce_payload,
    environment,
    header_ideal,
    percentile,
)
from gradwire_lab.contest.race import Entry, Race
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import KIB, Preset

GRADWIRE = "gradwire"
CUBIC = "Gloo, CUBIC"
BUCKET = 15 * KIB
"""Bytes that an idle port sends at once."""
BLOCKS = 5
"""Turns of each contestant."""
MOST_OVER, MOST_DROPS = 1.05, 0.02
"""The marks: gradwire's median over that of Gloo with CUBIC, and its dropped share."""
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Shallow:
    """One network of short queues.

    Attributes:
        ranks: number of hosts.
        queue: of each port, in bytes.
        rate: of each port, in bits per second.
        size: of each rank's buffer, in bytes.
        rounds: of each contestant.
    """

    ranks: int
    queue: int
    rate: int = 200_000_000
    size: int = 2048 * KIB
    rounds: int = 60

    @property
    def preset(self) -> Preset:
        """Return the ports, through which no train passes whole."""
        return Preset("shallow", self.rate, self.queue, BUCKET, offloads=False, fast_hosts=True)


def contestants(ranks: int) -> list[Entry]:
    """Return gradwire, and Gloo with those congestion controls that the kernel has."""
    known = _AVAILABLE.read_text(encoding="ascii").split() if _AVAILABLE.exists() else []
    gloo = [
        Entry(
            f"Gloo, {name.upper()}",
            "gradwire_lab.contest.gloo:GlooOver",
            {"congestion_control": name, "workers": ranks, "timeout_s": _TIMEOUT_S},
        )
        for name in ("cubic", "bbr")
        if name in known
    ]
    return [*gloo, gradwire_all_reduce(GRADWIRE)]


def run_shallow(case: Shallow, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the contestants in alternating blocks on one network.

    Args:
        case: The network.
        progress: A function that is called with a line of text at each turn.

    Returns:
        A row: the case, each contestant's median and 90th percentile over the header ideal and the
        share of the packets that the ports dropped in its turns, the machine and the date.

    Raises:
        LabUnavailable: this machine cannot make namespaces.
        RankError: a contestant failed.
    """
    entries = contestants(case.ranks)
    dropped = dict.fromkeys((entry.name for entry in entries), 0)
    came = dict(dropped)
    where = f"{case.ranks} ranks, queues of {case.queue // KIB} KiB"
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(case.ranks, case.preset))
        race = Race(network, entries, case.size, round_seconds=_TIMEOUT_S)
        stack.push(race.__exit__)

        @contextlib.contextmanager
        def around(name: str, count: int) -> Iterator[None]:
            progress(f"{where}: {name}")
            before = _ports(network)
            yield
            after = _ports(network)
            dropped[name] += after[0] - before[0]
            came[name] += sum(after) - sum(before)

        rounds = race.run(case.rounds, block=max(1, case.rounds // BLOCKS), around_turn=around)
    ideal = header_ideal(all_reduce_payload(case.size, case.ranks), case.rate)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {
        **asdict(case),
        "contestants": {
            name: {
                "median": percentile([each.seconds for each in done], 50) / ideal,
                "p90": percentile([each.seconds for each in done], 90) / ideal,
                "dropped": dropped[name] / max(1, came[name]),
            }
            for name, done in rounds.items()
        },
        "machine": environment(),
        "date": now,
    }


def _ports(network: Network) -> tuple[int, int]:
    """Return the packets that the ports have dropped, and those that they have let through."""
    every = [network.port_stats(host).downlink for host in range(network.hosts)]
    return sum(each.drops for each in every), sum(each.packets for each in every)


def marks(row: dict[str, Any]) -> dict[str, Any]:
    """Return gradwire's median over that of Gloo with CUBIC, and whether its marks are met."""
    ours = row["contestants"][GRADWIRE]
    theirs = row["contestants"].get(CUBIC)
    over = None if theirs is None else ours["median"] / theirs["median"]
    return {
        "over": over,
        "met": over is not None and over <= MOST_OVER and ours["dropped"] <= MOST_DROPS,
    }
