"""`gradwire bench idle`: how long a port is idle, and which reason the timelines give for it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from gradwire.sim.fabric import Fabric, Link
from gradwire.transport.native import load_engine
from gradwire_lab.bench import app
from gradwire_lab.bench.idle import REASONS, Entry, Found, PortFound, explain

RATE = 1e9
"""Bytes per second, so that a byte takes a nanosecond."""
END = 100_000


def found_of(*entries: tuple[int, str, int | None, int]) -> PortFound:
    """Return what is found of the way out of rank 0, which did this; rank 1 did nothing."""
    around = ((0, "begun", None, 0), (END, "ended", None, 0))
    first = sorted([around[0], *entries, around[1]], key=lambda entry: entry[0])
    ranks = [[[Entry(*entry) for entry in each]] for each in (first, around)]
    return explain(ranks, RATE).ports[0]


def microseconds(port: PortFound) -> dict[str, float]:
    return {reason: round(seconds * 1e6, 3) for reason, seconds in port.idle.items() if seconds}


def test_a_port_is_idle_where_nothing_queues_for_the_reason_of_that_time() -> None:
    found = found_of(
        (0, "sent", 1, 20_000),
        (1_000, "credit", 1, 0),
        (30_000, "read", 1, 30_000),
        (30_000, "window", 1, 0),
        (60_000, "timer", None, 60_000),
        (60_000, "sent", 1, 30_000),
        (60_000, "done", 1, 0),
    )
    assert found.sent == pytest.approx(50e-6)
    assert microseconds(found) == {"credit": 10.0, "window": 30.0, "done": 10.0}


def test_a_late_thread_counts_only_where_a_train_follows() -> None:
    entries = [(0, "sent", 1, 10_000), (0, "credit", 1, 0), (60_000, "read", 1, 40_000)]
    sent = [(60_000, "sent", 1, 40_000)]
    assert microseconds(found_of(*entries, *sent)) == {"credit": 30.0, "read": 20.0}
    stopped = [(60_000, "credit", 1, 0)]
    assert microseconds(found_of(*entries, *stopped)) == {"credit": 90.0}


def test_a_thread_without_a_processor_is_told_from_one_that_works() -> None:
    found = found_of(
        (0, "turn", None, 0),
        (0, "read", 1, 0),
        (80_000, "turn", None, 20_000),
        (80_000, "sent", 1, 20_000),
        (100_000, "turn", None, 40_000),
    )
    assert microseconds(found) == {"working": 20.0, "preempted": 60.0}


def test_the_first_reason_of_any_destination_is_that_of_the_port() -> None:
    found = found_of((0, "sum", 1, 0), (0, "window", 2, 0), (0, "done", 3, 0))
    assert microseconds(found) == {"window": 100.0}


def test_only_the_fastest_sums_count_where_that_is_asked() -> None:
    begun = [(0, "begun", None, 0), (200_000, "begun", None, 1)]
    ended = [(END, "ended", None, 0), (220_000, "ended", None, 1)]
    entries = [Entry(*each) for each in sorted(begun + ended)]
    ranks = [[entries], [entries]]
    assert explain(ranks, RATE).ops == pytest.approx((20e-6, 100e-6))
    assert explain(ranks, RATE, 1).seconds == pytest.approx(20e-6)


def test_a_timeline_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="whole"):
        found_of((50_000, "full", None, 0))


# ---------------------------------------------------------------------------- in virtual time


GIGABIT = 125e6


def summed(
    fabric: Fabric, op: int, rate: float, *, late: float = 0.0, elements: int = 1 << 18
) -> Found:
    """Sum, the last rank `late` seconds later, and explain the ports."""
    plan = load_engine().Plan(elements=elements, regions=[(0, elements, 0.0)])
    values = [np.ones(elements, np.float32)] * fabric.workers
    at = [fabric.now] * (fabric.workers - 1) + [fabric.now + late]
    for host in range(fabric.workers):
        fabric.record(host, 1 << 18)
    fabric.all_reduce(op, plan, values, at=at)
    assert fabric.run(fabric.now + 60)
    entries = [fabric.record(host, 0) for host in range(fabric.workers)]
    return explain([[[Entry(*row) for row in each]] for each in entries], rate)


def met(workers: int = 2, **options: object) -> Fabric:
    """Return a fabric whose ranks have met."""
    fabric = Fabric(workers, seed=1, **options)  # type: ignore[arg-type]
    fabric.run(0.3, until_done=False)
    return fabric


def shares(found: Found, way: str = "out") -> dict[str, float]:
    return {reason: sum_ / found.seconds for reason, sum_ in found.mean(way).idle.items()}


def test_a_sender_that_keeps_to_the_former_rate_is_idle_by_its_pace() -> None:
    fabric = met(link=Link(rate=GIGABIT))
    summed(fabric, 0, GIGABIT, elements=1 << 20)
    for host in range(2):
        fabric.set_link(host, "up", Link(rate=8 * GIGABIT, queue=1 << 20))
        fabric.set_link(host, "down", Link(rate=8 * GIGABIT, queue=1 << 20))
    found = summed(fabric, 1, 8 * GIGABIT, elements=1 << 20)
    assert shares(found)["pace"] > 0.75


def test_a_new_job_on_a_long_path_is_idle_by_windows_and_credit() -> None:
    fabric = met(link=Link(rate=8 * GIGABIT, delay=1e-3, queue=4 << 20), pacing=False)
    found = shares(summed(fabric, 0, 8 * GIGABIT))
    assert found["window"] > 0.1
    assert found["window"] + found["credit"] > 0.7


def test_ranks_that_wait_for_the_last_one_lack_its_sums() -> None:
    fabric = met(4, link=Link(rate=GIGABIT))
    found = summed(fabric, 0, GIGABIT, late=0.1)
    reasons = [max(port.idle, key=port.idle.__getitem__) for port in found.ports[::2]]
    assert reasons == ["sum", "sum", "sum", "nothing"]
    # In whatever it is spent, a port's time is all of the ops' time.
    for port in found.ports[::2]:
        assert port.sent + sum(port.idle.values()) == pytest.approx(found.seconds, rel=0.02)


def test_hosts_that_wake_late_are_named() -> None:
    found = shares(summed(met(host_delay=5e-3, link=Link(rate=GIGABIT)), 0, GIGABIT))
    assert found["timer"] + found["read"] > 0.6


def test_what_is_not_recorded_costs_no_entries() -> None:
    fabric = met(link=Link(rate=GIGABIT))
    assert fabric.record(0, 0) == []


# ---------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--network", "unshaped"], "unshaped"),
        *((["--size", size], "--size") for size in ("0", "nan", "inf", "1e12")),
        (["--fastest", "20", "--rounds", "2"], "--fastest"),
        (["--cores", "4096"], "4096"),
    ],
)
def test_what_cannot_be_explained_is_refused_by_name(arguments: list[str], wrong: str) -> None:
    result = CliRunner().invoke(app, ["idle", *arguments])
    assert result.exit_code == 2
    assert wrong in result.output


def checked(arguments: list[str]) -> None:
    asked = ["--ranks", "2", "--size", "256", "--rounds", "2", *arguments, "--json"]
    result = CliRunner().invoke(app, ["idle", *asked])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["ops"]) == 2
    assert [(port["rank"], port["way"]) for port in found["ports"]] == [
        (0, "out"),
        (0, "in"),
        (1, "out"),
        (1, "in"),
    ]
    for port in found["ports"]:
        assert set(port["idle"]) <= set(REASONS)
        assert port["sent"] > 0
        assert sum(port["idle"].values()) <= found["seconds"] * 1.001


def test_a_table_is_made_in_virtual_time() -> None:
    checked(["--virtual"])


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_table_is_made_on_a_network_of_namespaces() -> None:
    checked([])
