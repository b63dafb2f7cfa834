"""Races between contestants on a lab network."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab.contest import race as race_module
from gradwire_lab.contest.race import GLOO, Entry, Race, tcp_push
from gradwire_lab.contest.ranks import RankError
from gradwire_lab.network import BURSTS_A, NETWORK_A, BurstTraffic, Network

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

CONTESTANTS = """
import os, threading, time

class Base:
    def setup(self, rank, world, store): self.rank = rank; self.rounds = 0
    def run_round(self, buffer): self.rounds += 1
    def verify(self, buffer, inputs):
        assert inputs == {0: 1.0, 1: 2.0} and buffer[0] == inputs[self.rank]
    def report(self): return {"rounds": self.rounds}
    def close(self): pass

class Slow(Base):
    def __init__(self, seconds): self.seconds = seconds
    def run_round(self, buffer): super().run_round(buffer); time.sleep(self.seconds * self.rank)

class Failing(Base):
    def run_round(self, buffer):
        if self.rank == 1: raise ValueError("a broken contestant")

class Wrong(Base):
    def verify(self, buffer, inputs): raise ValueError("a wrong sum")

class Stuck(Base):
    def run_round(self, buffer):
        if self.rank == 1: raise ValueError("a broken contestant")
        time.sleep(30)

class Dying(Base):
    def run_round(self, buffer):
        if self.rank == 1: os._exit(7)

class Leaving(Base):
    def run_round(self, buffer):
        if self.rank == 1: threading.Timer(0.5, os._exit, (7,)).start()
        else: time.sleep(30)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Where the ranks find the contestants of these tests."""
    (tmp_path / "contestants_of_the_test.py").write_text(CONTESTANTS)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _entry(name: str, **options: Any) -> Entry:
    return Entry(name.lower(), f"contestants_of_the_test:{name}", options)


def test_baselines_move_the_bytes_at_the_ports_rate() -> None:
    size = 1_000_000
    entries = [GLOO, tcp_push("cubic"), tcp_push("bbr")]
    with Network(3, NETWORK_A) as network, Race(network, entries, size) as race:
        results = race.run(3, block=2, warm_up=1)
        reports = race.reports()
    assert {name: len(rounds) for name, rounds in results.items()} == {
        "gloo": 3,
        "tcp-cubic": 3,
        "tcp-bbr": 3,
    }
    assert all(len(one.ranks) == 3 for rounds in results.values() for one in rounds)
    # The bucket of an idle port lets 72 KiB pass at once, in each direction.
    floor = 8 / NETWORK_A.rate
    assert min(one.seconds for one in results["gloo"]) > floor * (size * 4 / 3 - 150_000)
    assert min(one.seconds for one in results["tcp-cubic"]) > floor * (size * 2 - 150_000)
    assert {report["congestion_control"] for report in reports["tcp-cubic"]} == {"cubic"}
    assert {report["congestion_control"] for report in reports["tcp-bbr"]} == {"bbr"}


def test_contestants_take_turns_and_the_slowest_rank_counts(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(race_module, "sleep_until", waited.append)
    entries = [_entry("Slow", seconds=0.02), _entry("Base")]
    seen: list[tuple[str, int]] = []
    with Network(2, extra_hosts=1) as network, Race(network, entries, 400, env=env) as race:
        with BurstTraffic(network, BURSTS_A) as bursts:
            results = race.run(
                3,
                block=2,
                warm_up=1,
                bursts=bursts,
                progress=lambda name, done: seen.append((name, done)),
            )
            period = BURSTS_A.period
            begun = [
                (until + race_module._LEAD_SECONDS - bursts.origin + period / 2) % period
                - period / 2
                for until in waited
            ]
        assert race.reports() == {"slow": [{"rounds": 5}] * 2, "base": [{"rounds": 5}] * 2}
    assert seen == [("slow", 2), ("base", 2), ("slow", 3), ("base", 3)]
    assert all(one.seconds == max(one.ranks) >= one.ranks[1] > 0.02 for one in results["slow"])
    assert len(begun) == 4
    assert all(phase == pytest.approx(0.0, abs=1e-6) for phase in begun)  # each block's warm-up


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("Failing", "rank 1: .*a broken contestant"),
        ("Wrong", "rank [01]: .*a wrong sum"),
        ("Dying", "rank 1: ended with status 7"),
    ],
)
def test_a_failing_rank_is_named_with_its_cause(env: dict[str, str], name: str, cause: str) -> None:
    with (
        Network(2) as network,
        pytest.raises(RankError, match=f"(?s){cause}"),
        Race(network, [_entry(name)], 400, env=env) as race,
    ):
        race.run(1)


def test_a_rank_that_fails_while_others_hang_is_noticed_at_once(env: dict[str, str]) -> None:
    begun = time.monotonic()
    with (
        Network(2) as network,
        pytest.raises(RankError, match=r"^rank 1: ValueError: a broken contestant$") as caught,
        Race(network, [_entry("Stuck")], 400, env=env) as race,
    ):
        race.run(1)
    assert time.monotonic() - begun < 20  # starting the ranks included
    assert "in run_round" in caught.value.details
    assert caught.value.details in str(caught.value.__cause__)  # so that it is printed, too


def test_a_rank_that_dies_when_it_has_answered_is_noticed_at_once(env: dict[str, str]) -> None:
    begun = time.monotonic()
    with (  # as a server has, long before the workers
        Network(2) as network,
        pytest.raises(RankError, match="rank 1: ended with status 7"),
        Race(network, [_entry("Leaving")], 400, env=env) as race,
    ):
        race.run(1)
    assert time.monotonic() - begun < 25  # and not when rank 0 answers, after 30 s


def test_a_contestant_that_is_not_there_is_named() -> None:
    missing = Entry("missing", "gradwire_lab.contest.gloo:Missing")
    with Network(1) as network, pytest.raises(RankError, match=r"(?s)rank 0: .*Missing"):
        Race(network, [missing], 400)


def test_impossible_races_are_refused() -> None:
    with Network(1) as network:
        with pytest.raises(ValueError, match="different names"):
            Race(network, [GLOO, GLOO], 400)
        with pytest.raises(ValueError, match="elements"):
            Race(network, [GLOO], 3)


def test_what_surrounds_a_round_begins_after_the_pause_before_it(env: dict[str, str]) -> None:
    """Else loss of half a second would be over when the round begins."""
    entered: list[float] = []

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        entered.append(time.monotonic())
        yield

    with (
        Network(2) as network,
        Race(network, [_entry("Base")], 400, env=env, pause=0.3) as race,
    ):
        rounds = race.run(2, warm_up=0, around=around)["base"]
    assert all(one.start - at < 0.1 for one, at in zip(rounds, entered, strict=True))
    assert rounds[1].start - rounds[0].start > 0.3


def test_ranks_ignore_the_keyboard(env: dict[str, str]) -> None:
    with Network(2) as network, Race(network, [_entry("Base")], 400, env=env) as race:
        for rank in range(2):
            race.signal(rank, signal.SIGINT)
        assert len(race.run(1)["base"]) == 1
