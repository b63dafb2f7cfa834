"""Run the transports alone in turn on one network, and count what each of them takes."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire_lab.bench.transport_grid import LOOPBACK, Ground, contestants, takes_part
from gradwire_lab.contest.measure import environment, percentile, processor_time
from gradwire_lab.contest.race import GLOO, Entry, Race, Round
from gradwire_lab.network.network import Network

_TICKS = os.sysconf("SC_CLK_TCK")
_ROUND_SECONDS = 300.0

Around = Callable[[str, int], AbstractContextManager[None]]


def run_ground(
    ground: Ground,
    *,
    names: Collection[str] = (),
    kinds: Mapping[str, Mapping[str, object]] | None = None,
    blocks: int = 5,
    progress: Callable[[str], None] | None = None,
    profile: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure all sizes of a ground.

    Args:
        ground: the network, the ranks and the sizes.
        kinds: settings to compare, see `contestants`.
        progress: a function that is called with a line of text at each turn.
        profile: a folder for a profile of each contestant's turns, by ``perf``.

    Returns:
        A cell for each size: what `gradwire bench transport --json` prints.
    """
    entries = contestants(ground.network, names, kinds)
    with contextlib.ExitStack() as stack:
        together = ground.network.name == LOOPBACK
        network = stack.enter_context(Network(1 if together else ground.ranks, ground.network))
        race = Race(
            network,
            entries,
            max(ground.sizes),
            round_seconds=_ROUND_SECONDS,
            ranks_a_host=ground.ranks if together else 1,
        )
        stack.push(race.__exit__)
        return [
            _cell(race, ground, size, entries, blocks, progress, profile) for size in ground.sizes
        ]


def _cell(
    race: Race,
    ground: Ground,
    size: int,
    entries: Collection[Entry],
    blocks: int,
    progress: Callable[[str], None] | None,
    profile: Path | None,
) -> dict[str, Any]:
    meter = Meter(race)
    where = f"{ground.network.name}, {ground.ranks} ranks, {size / 1024:g} KiB"

    @contextlib.contextmanager
    def around(name: str, count: int) -> Iterator[None]:
        if progress is not None:
            progress(f"{where}: {name}")
        with contextlib.ExitStack() as stack:
            if profile is not None:
                stack.enter_context(_profiled(profile, f"{where}, {name}"))
            with meter.turn(name):
                yield

    rounds = race.run(
        blocks * ground.rounds(size),
        block=ground.rounds(size),
        size=size,
        only=[entry.name for entry in entries if takes_part(entry.name, size)],
        around_turn=around,
    )
    found = {name: meter.found(name, done, size * ground.ranks) for name, done in rounds.items()}
    gloo = found[GLOO.name]
    for each in found.values():
        each["ratio"] = gloo["median"] / each["median"]
        each["block_ratios"] = [
            ours / theirs for ours, theirs in zip(gloo["blocks"], each["blocks"], strict=True)
        ]
    return {
        "case": "transport",
        "network": asdict(ground.network),
        "ranks": ground.ranks,
        "bytes": size,
        "contestants": found,
        "environment": environment(),
    }


class Meter:
    """A meter adds up what contestants take in their turns."""

    def __init__(self, race: Race) -> None:
        self._race = race
        self._sums: dict[str, dict[str, float]] = {}
        self._peaks: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._resident = [each["resident"] for each in race.usage()]

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Count what is taken in this context for a contestant."""
        before = self._now(name)
        yield
        after = self._now(name)
        sums = self._sums.setdefault(name, dict.fromkeys(after, 0.0))
        for key in after:
            sums[key] += after[key] - before[key]
        self._turns[name] = self._turns.get(name, 0) + 1

    def _now(self, name: str) -> dict[str, float]:
        ranks = self._race.usage()
        machine = processor_time().wanted / _TICKS
        grown = [each["peak"] - before for each, before in zip(ranks, self._resident, strict=True)]
        self._peaks[name] = max(self._peaks.get(name, 0.0), *grown)
        self._resident = [each["resident"] for each in ranks]
        now = {
            key: sum(each[key] for each in ranks)
            for key in ("processor", "aside", "wakeups", "file_calls", "tcp_packets")
        }
        now["machine"] = machine - now.pop("aside")
        engine = [report.get("engine", {}) for report in self._race.reports()[name]]
        now["datagrams"] = _total(engine, "packets_sent", "acks_sent")
        now["datagram_calls"] = _total(engine, "send_calls", "receive_calls", "wakeups")
        return now

    def found(self, name: str, rounds: list[Round], moved: int) -> dict[str, Any]:
        """Return what a contestant took.

        Args:
            name: the contestant's.
            moved: bytes of all ranks' buffers together.
        """
        seconds = [each.seconds for each in rounds]
        block = len(seconds) // self._turns[name]
        sums, gigabytes = self._sums[name], len(rounds) * moved / 1e9
        uses_datagrams = sums["datagrams"] > 0
        return {
            "rounds": len(seconds),
            "median": percentile(seconds, 50),
            "p90": percentile(seconds, 90),
            "blocks": [
                percentile(seconds[at : at + block], 50) for at in range(0, len(seconds), block)
            ],
            "processor_per_gb": sums["processor"] / gigabytes,
            "machine_per_gb": sums["machine"] / gigabytes,
            "packets": (sums["datagrams"] if uses_datagrams else sums["tcp_packets"])
            / len(seconds),
            "calls": (sums["datagram_calls"] if uses_datagrams else sums["file_calls"])
            / len(seconds),
            "wakeups": sums["wakeups"] / len(seconds),
            "peak_bytes": self._peaks[name],
            "seconds": seconds,
        }


def _total(counters: list[Mapping[str, float]], *keys: str) -> float:
    return sum(each.get(key, 0.0) for each in counters for key in keys)


@contextlib.contextmanager
def _profiled(folder: Path, name: str) -> Iterator[None]:
    """Let ``perf`` sample the machine; a later turn of the same name replaces the earlier one."""
    data = folder / f"{name.replace(', ', '-').replace(' ', '')}.data"
    command = ["perf", "record", "-e", "cpu-clock", "-a", "-g", "-F", "997", "-o", str(data)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as perf:
        try:
            yield
        finally:
            perf.terminate()
            perf.wait()
