"""Run contestants in turn on the same hosts, and time their rounds."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire_lab.contest.job import Job
from gradwire_lab.network.bursts import BurstTraffic, phase_of
from gradwire_lab.network.clock import sleep_until
from gradwire_lab.network.network import Network

_ROUND_SECONDS = 60.0
_LEAD_SECONDS = 0.003


@dataclass(frozen=True)
class Entry:
    """An entry is a contestant that takes part in a race.

    Attributes:
        name: what tables call it.
        factory: ``module:class`` of a `gradwire_lab.contest.contestant.Contestant`.
        options: keyword arguments of that class, as JSON.
    """

    name: str
    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)


GLOO = Entry("gloo", "gradwire_lab.contest.gloo:GlooAllReduce")


def tcp_push(congestion_control: str) -> Entry:
    """Return the entry of a raw-TCP push with a given congestion control."""
    return Entry(
        f"tcp-{congestion_control}",
        "gradwire_lab.contest.tcp_push:TcpPush",
        {"congestion_control": congestion_control},
    )


@dataclass(frozen=True)
class Round:
    """A round is one timed transfer of a contestant.

    Attributes:
        start: the moment that all ranks started, in seconds of ``time.monotonic()``.
        ranks: each rank's time from then until it was done, in seconds.
        details: each rank's counters of the round, as its contestant keeps them.
    """

    start: float
    ranks: tuple[float, ...]
    details: tuple[Mapping[str, Any], ...] = ()

    @property
    def seconds(self) -> float:
        """Return the seconds from the common start until the last rank was done."""
        return max(self.ranks)


class Race(Job):
    """A race has one process per host, in which all contestants take turns in blocks of rounds.

    Blocks are interleaved so that whatever disturbs the machine disturbs all alike. All ranks
    start a round at the same moment of the clock that the hosts share, so no barrier crosses the
    network, and only one round is under way at a time.
    """

    def __init__(
        self,
        network: Network,
        entries: Sequence[Entry],
        size: int,
        *,
        env: Mapping[str, str] | None = None,
        round_seconds: float = _ROUND_SECONDS,
        pause: float = 0.0,
        ranks_a_host: int = 1,
    ) -> None:
        """Start ranks on every host (not on the extra ones) and set all contestants up.

        Args:
            network: the hosts; the ranks of a host follow each other.
            entries: the contestants, with different names.
            size: bytes of each rank's buffer, a multiple of 4.
            pause: seconds before each round, in which a job would compute.

        Raises:
            ValueError: a size or a set of names that makes no sense.
        """
        if size <= 0 or size % 4:
            raise ValueError("the buffer must have a positive number of float32 elements")
        if not entries or len({entry.name for entry in entries}) != len(entries):
            raise ValueError("a race needs contestants with different names")
        self.network = network
        self.size = size
        self._entries = list(entries)
        self._pause = pause
        self._verified: set[tuple[str, int]] = set()
        worker, entered = "gradwire_lab.contest.race_worker", [asdict(entry) for entry in entries]
        super().__init__(
            network, worker, round_seconds, ranks_a_host, env=env, bytes=size, entries=entered
        )

    def run(
        self,
        rounds: int,
        *,
        block: int = 20,
        warm_up: int = 2,
        bursts: BurstTraffic | None = None,
        progress: Callable[[str, int], None] | None = None,
        around: Callable[[str], AbstractContextManager[Any]] | None = None,
        around_turn: Callable[[str, int], AbstractContextManager[Any]] | None = None,
        only: Collection[str] | None = None,
        size: int | None = None,
        rotate: bool = False,
        turns: Callable[[], None] | None = None,
    ) -> dict[str, list[Round]]:
        """Time rounds of every contestant.

        Args:
            block: rounds of one contestant before the next has its turn.
            warm_up: rounds at the start of each block that are not counted.
            bursts: cross traffic; each block then starts at the same phase of it.
            progress: a function that is called with a contestant's name and the number of its
                rounds so far.
            around: a context for each counted round, made from the contestant's name.
            around_turn: a context for each block's counted rounds together, made from the
                contestant's name and their number.
            only: the contestants that run; all if not given.
            size: bytes of each rank's buffer, at most those of the race; all if not given.
            rotate: whether each turn begins at another phase of the bursts.
            turns: a function that is called before each contestant has its next turn.

        Returns:
            The counted rounds by contestant, in order.

        Raises:
            RankError: a rank failed, gave a wrong result, or did not come back.
            ValueError: a size that the race does not have.
        """
        names = [entry.name for entry in self._entries if only is None or entry.name in only]
        size = self.size if size is None else size
        if not 0 < size <= self.size or size % 4:
            raise ValueError(f"size={size}: float32 elements of at most {self.size} bytes")
        results: dict[str, list[Round]] = {name: [] for name in names}
        alone = around or contextlib.nullcontext
        together = around_turn or (lambda name, count: contextlib.nullcontext())
        for turn in itertools.count():
            if len(results[names[-1]]) >= rounds:
                return results
            if turns is not None:
                turns()
            for name, done in results.items():
                if bursts is not None:
                    offset = phase_of(turn, bursts.burst) if rotate else 0.0
                    sleep_until(bursts.next_phase(offset) - _LEAD_SECONDS)
                for _ in range(warm_up):
                    self._rest()
                    self._round(name, size)
                count = min(block, rounds - len(done))
                with together(name, count):
                    for _ in range(count):
                        self._rest()
                        with alone(name):
                            done.append(self._round(name, size))
                if progress is not None:
                    progress(name, len(done))
        raise AssertionError("turns do not end")

    def _rest(self) -> None:
        """Pause before a round, outside of what surrounds it, so that its loss has not begun."""
        time.sleep(self._pause)

    def _round(self, name: str, size: int) -> Round:
        start = time.monotonic() + _LEAD_SECONDS
        verify = (name, size) not in self._verified
        self._verified.add((name, size))
        answers = self.ask("round", contestant=name, start=start, size=size, verify=verify)
        return Round(
            start,
            tuple(float(answer["seconds"]) for answer in answers),
            tuple(answer["details"] for answer in answers),
        )

    def reports(self) -> dict[str, list[dict[str, Any]]]:
        """Return the reports of each contestant's ranks, by contestant and in rank order."""
        answers = self.ask("report")
        return {entry.name: [answer[entry.name] for answer in answers] for entry in self._entries}

    def usage(self) -> list[dict[str, float]]:
        """Return what each rank's process has used so far, see `gradwire_lab.contest.usage`."""
        return self.ask("usage")
