"""The page of benchmarks: what its pictures are drawn from, and that page and figures agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app, network_marks, networks_page
from gradwire_lab.bench.network_groups import GROUPS, far, grid
from gradwire_lab.bench.page import NAME, TITLES, render
from gradwire_lab.bench.page_command import PARTS
from gradwire_lab.bench.pictures import SIZE_GROUNDS, measure_sizes
from gradwire_lab.bench.transport_grid import NETWORKS, Ground
from gradwire_lab.bench.where import GIGABIT, LOSSES, ROUND_TRIPS, SIZES, cells, tcp_rate
from gradwire_lab.bench.where import tcp_seconds as estimate

DOCS = Path(__file__).resolve().parent.parent / "docs"
RUNNER = CliRunner()


# ---------------------------------------------------------------------------- the estimate of TCP


def test_a_flow_that_loses_nothing_fills_the_port() -> None:
    assert tcp_rate(0.1, 0.0) == pytest.approx(GIGABIT * 1432 / 1514)
    assert tcp_rate(1e-5, 0.01) == tcp_rate(0.1, 0.0)  # so does one that loses on a short path


def test_losses_bound_a_flow_as_rfc_9438_says() -> None:
    # Section 5.1.2 and table 1 of RFC 8312: average windows in packets, C = 0.4.
    for trip, loss, window in ((0.1, 1e-3, 38.7), (0.1, 1e-4, 187), (0.01, 1e-2, 12.2)):
        packets = tcp_rate(trip, loss, rate=1e12) * trip / 1448
        assert packets == pytest.approx(window, rel=0.15)
    rates = [tcp_rate(0.04, loss) for loss in LOSSES]
    assert rates == sorted(rates, reverse=True)


def test_a_ring_waits_for_half_a_round_trip_in_each_of_its_rounds() -> None:
    assert estimate(4, 0.1, 0.0) == pytest.approx(6 * 0.05, rel=1e-3)
    assert estimate(16 << 20, 0.0002, 0.0) == pytest.approx(0.213, abs=0.002)


def test_the_map_has_each_place_once() -> None:
    names = {cell.name for cell in cells()}
    assert len(names) == len(SIZES) * len(ROUND_TRIPS) * len(LOSSES)


# ---------------------------------------------------------------------------- page and figures


def _networks(folder: Path) -> None:
    """A rack and a far host, as `gradwire bench networks` keeps them."""
    rack = next(each for each in grid(rates=(1,), ranks=(4,)) if each.link.queue > 1 << 18)
    figures = {"first": 1.5, "time": 1.07, "worst": 1.2, "drops": 0.004, "payload": 1.0}
    rows = [
        {"group": each.group, "name": each.name, **figures, "acks": 0.1, "date": day, "seeds": 5}
        for each, day in ((rack, "2026-01-02T03:04:05"), (next(far()), "2026-01-03T03:04:05"))
    ]
    _keep(folder, rows)


def _keep(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    (folder / networks_page.FIGURES).write_text(json.dumps({"machine": {}, "rows": rows}))


def _change(folder: Path, **more: Any) -> None:
    """Give more to each of the rows that a folder has."""
    rows = json.loads((folder / networks_page.FIGURES).read_text())["rows"]
    _keep(folder, [{**row, **more} for row in rows])


def test_the_command_draws_the_map_of_networks_and_writes_their_page(tmp_path: Path) -> None:
    _figures(tmp_path)
    _networks(tmp_path)
    result = RUNNER.invoke(app, ["page", "networks", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / networks_page.NAME).read_text()
    assert page == networks_page.render(tmp_path)
    (rack,) = (line for line in page.splitlines() if line.startswith("| 1 Gbit/s | 4 |"))
    assert "| 1.07 | 1.20 | 0.4 % |" in rack
    assert "costs nothing" in page
    assert "2026-01-02 to 2026-01-03" in " ".join(page.split())
    assert "10 ms away" in page
    for form in ("networks.svg", "networks-dark.svg"):
        assert "1.07 · 0.4 %" in (tmp_path / form).read_text()


def test_the_page_of_networks_has_a_kernels_table_where_it_was_measured(tmp_path: Path) -> None:
    _figures(tmp_path)
    _networks(tmp_path)
    assert "BBR" not in networks_page.render(tmp_path)
    found = {"median": 1.08, "p90": 1.3, "dropped": 0.125}
    contestants = dict.fromkeys(("Gloo, CUBIC", "Gloo, BBR", "gradwire"), found)
    machine = {"cpu": "some", "cores": 2, "load": 0.1, "kernel": "6.1", "torch": "2.9"}
    case = {"ranks": 2, "queue": 16 << 10, "rate": 200e6, "size": 2 << 20, "rounds": 60}
    row = {**case, "contestants": contestants, "machine": machine, "date": "2026-01-04T00:00:00"}
    (tmp_path / networks_page.KERNEL).write_text(json.dumps([row]))
    page = networks_page.render(tmp_path)
    assert "| 2 | 16 KiB | Gloo, BBR | 1.08 | 1.30 | 12.5 % |" in page
    assert "2026-01-04" in page


def test_a_network_on_which_a_run_did_not_end_has_its_rows(tmp_path: Path) -> None:
    """One of each table: of racks, of other networks, of scenes, and of marks that are missed."""
    _figures(tmp_path)
    _networks(tmp_path)
    rows = json.loads((tmp_path / networks_page.FIGURES).read_text())["rows"]
    mark = {"figure": "time", "most": 1.1, "least": None, "met": False}
    failure = {"failure": "seed 2: op 0 is not done", "failed": 1, "marks": [mark]}
    stuck = [
        {key: row[key] for key in ("group", "name", "date", "seeds")} | failure
        for row in (*rows, {**rows[0], "group": "tcp", "name": "beside flows"})
    ]
    _keep(tmp_path, stuck)
    page = networks_page.render(tmp_path)
    words = "1 of 5 runs did not end"
    assert [line for line in page.splitlines() if line.startswith("| 1 Gbit/s | 4 |")] == [
        f"| 1 Gbit/s | 4 | 488 KiB | {words} | – | – | – | – | – |"
    ]
    assert f"\n| {rows[1]['name']} | – | {words} | – | – | – | – |\n" in page
    assert f"\n| beside flows | – | {words} |\n" in page
    for row, title in zip(stuck, ("Racks", "One host elsewhere", "Flows of TCP"), strict=True):
        assert f"| {title} | {row['name']} | – | – | {words} ({failure['failure']}) |" in page
    top = " ".join(page.partition("## At a glance")[0].split())
    assert "**0 of 3 marks are met**" in top
    assert "On 3 of 3 networks some runs did not end." in top
    networks_page.write(tmp_path)
    assert "did not end" in (tmp_path / "networks.svg").read_text()


def test_marks_that_are_missed_have_a_row_each(tmp_path: Path) -> None:
    _figures(tmp_path)
    _networks(tmp_path)
    bounds = (("time", 1.05, None), ("drops", 0.00396, None), ("acks", None, 0.5))
    missed = [dict(zip(("figure", "most", "least"), each, strict=True)) for each in bounds]
    met = {"figure": "worst", "most": 9.0, "least": None, "met": True}
    compared = {"figure": "time_over", "most": 1.05, "least": None, "met": False}
    _change(tmp_path, marks=[*({**each, "met": False} for each in missed), met, compared])
    page = networks_page.render(tmp_path)
    assert "**2 of 8 marks are met**, and" in page
    assert "| all | 2 | 0 | 8 | 2 | 6 |" in page
    name = next(far()).name
    assert [line for line in page.splitlines() if f"| {name} | " in line and "≤" in line] == [
        f"| One host elsewhere | {name} | time over the header ideal | ≤ 1.05 | 1.07 |",
        f"| One host elsewhere | {name} | own drops | ≤ 0.396 % | 0.40 % |",
    ]
    assert f"| One host elsewhere | {name} | ACKs | ≥ 0.5 | 0.10 |" in page


def test_networks_are_compared_with_the_engine_before_by_the_same_seeds(tmp_path: Path) -> None:
    """By the median and the longest of as many seeds; a run that did not end is no better."""
    _figures(tmp_path)
    _networks(tmp_path)
    rows = json.loads((tmp_path / networks_page.FIGURES).read_text())["rows"]
    common = {**rows[1], "group": "known", "marks": [], "seeds": 3}
    ended = [{**common, "name": name} for name in ("as fast", "slow", "new", "more seeds")]
    ended[-1]["seeds"] = 5
    failure = {"group": "known", "name": "stuck", "failure": "no", "failed": 2, "marks": []}
    stuck = {**failure, "date": common["date"], "seeds": 3}
    _keep(tmp_path, [*rows, *ended, stuck])
    times = {"as fast": [1.06, 1.02, 1.2, 9.0], "slow": [0.5, 1.07, 0.9, 9.0]}
    times |= {"stuck": [1.0] * 4, "more seeds": [1.0] * 4}
    was = [
        {"group": "known", "name": name, "time": each, "worst": [1.1, 1.05, 1.0, 9.0]}
        for name, each in times.items()
    ]
    before = {"engine": "0123abc", "what": "an old one", "made": "by hand", "rows": was}
    (tmp_path / networks_page.BEFORE).write_text(json.dumps(before))
    page = networks_page.render(tmp_path)
    ends = {
        line.split(" | ")[0][2:]: line.split(" | ")[-2:]
        for line in page.partition("## The lab's networks")[2].splitlines()
        if line.startswith("| ")
    }
    assert ends["as fast"] == ["1.01", "1.09 |"]
    assert ends["slow"] == ["1.19", "1.09 |"]
    assert ends["new"] == ends["more seeds"] == ends["stuck"] == ["–", "– |"]
    flat = " ".join(page.split())
    assert "1 of 3 networks take at most 1.05" in flat
    assert "0123abc, an old one" in flat
    assert "**3 of 6 marks are met**" in flat
    named = [line for line in page.splitlines() if line.startswith("| The lab's networks | slow")]
    assert named == [
        "| The lab's networks | slow | time over that of the engine before | ≤ 1.05 | 1.19 |"
    ]


def test_the_figures_of_the_engine_before_are_of_networks_that_there_are() -> None:
    before = json.loads((DOCS / networks_page.BEFORE).read_text())
    there = {("known", cell.name) for cell in GROUPS["known"]()}
    assert {(row["group"], row["name"]) for row in before["rows"]} <= there
    assert {len(row[key]) for row in before["rows"] for key in ("time", "worst")} == {
        before["seeds"]
    }


def test_the_page_has_a_title_for_each_group_and_a_row_for_each_network() -> None:
    assert list(network_marks.TITLES) == list(GROUPS)
    page = networks_page.render(DOCS)
    for row in json.loads((DOCS / networks_page.FIGURES).read_text())["rows"]:
        assert row["group"] == "grid" or f"| {row['name']} |" in page, row["name"]


@pytest.mark.parametrize(
    ("time", "drops", "level"),
    [(1.1, 0.005, 0), (1.1, 0.006, 1), (1.25, 0.02, 1), (1.26, 0.0, 2), (1.0, 0.021, 2)],
)
def test_a_network_costs_what_its_time_and_its_drops_say(
    time: float, drops: float, level: int
) -> None:
    assert networks_page.verdict(time, drops) == level


def test_the_page_of_networks_is_what_the_figures_say() -> None:
    assert (DOCS / networks_page.NAME).read_text() == networks_page.render(DOCS)


def _figures(folder: Path) -> None:
    """Figures of every picture, as few as the page needs."""
    entry = {"timed_steps": 9, "comm_max_s": 0.2, "comm_median_s": 0.1, "steps_per_s": 4.0}
    both = {name: {**entry, "speed_over_peer": 1.5} for name in ("adaptive", "gloo-fp16")}
    demo = {"contestants": both, "round_trip_s": 0.01, "loss": 0.01}
    found: dict[str, dict[str, Any]] = {
        "step-times": demo,
        "far-times": demo,
        "where-it-pays": {
            "cells": [
                {"bytes": 1 << 20, "round_trip_s": trip, "loss": loss, "times_as_fast": 7.0}
                for trip in ROUND_TRIPS
                for loss in LOSSES
            ]
        },
        "sizes": {"rows": [{"kib": kib, "exact": 0.25 + 1 / kib} for kib in (1, 4096)]},
    }
    for name, values in found.items():
        head = {"date": "2026-01-02T03:04:05", "command": f"draw {name}"}
        machine = {"machine": {"cores": 2, "cpu": "some", "load": 1.0}}
        (folder / f"{name}.json").write_text(json.dumps({**head, **machine, **values}))


def test_the_command_writes_the_page_from_the_figures(tmp_path: Path) -> None:
    _figures(tmp_path)
    result = RUNNER.invoke(app, ["page", "page", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / NAME).read_text()
    assert page == render(tmp_path)
    page = " ".join(page.split())
    assert "1.50 times as fast" in page
    assert "7 times as fast with 1 MiB" in page
    assert "1.25 to 1.25 times as fast as Gloo's up to 256 KiB" in page
    for name in TITLES:
        assert f"({name}-dark.svg#only-dark)" in page


def test_the_page_is_what_the_figures_say() -> None:
    assert (DOCS / NAME).read_text() == render(DOCS)
    for name in TITLES:
        command = json.loads((DOCS / f"{name}.json").read_text())["command"]
        _, drawn, parts = command.partition("gradwire bench page")
        named = parts.partition(" --")[0].split()
        assert not drawn or {*named} <= {*PARTS}, command


@pytest.mark.parametrize("part", ["page", "networks"])
def test_a_page_without_figures_is_not_written(tmp_path: Path, part: str) -> None:
    result = RUNNER.invoke(app, ["page", part, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert not (tmp_path / NAME).exists()
    assert not (tmp_path / networks_page.NAME).exists()


@pytest.mark.parametrize("arguments", [["nothing"], ["sizes", "--out", "/dev/null/none"]])
def test_what_cannot_be_is_refused(arguments: list[str]) -> None:
    assert RUNNER.invoke(app, ["page", *arguments]).exit_code == 2


def test_sizes_are_of_four_ranks_on_each_network() -> None:
    drawn = json.loads((DOCS / "sizes.json").read_text())
    assert (
        {ground.ranks for ground in SIZE_GROUNDS} == {4} == {row["ranks"] for row in drawn["rows"]}
    )
    measured = {(row["network"], row["kib"]) for row in drawn["rows"]}
    assert len(measured) == len(drawn["rows"]) == sum(len(ground.sizes) for ground in SIZE_GROUNDS)
    assert {network for network, _ in measured} == {"unshaped", "10 Gbit/s", "5 Gbit/s", "1 Gbit/s"}


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_sizes_are_measured_beside_gloo() -> None:
    ground = Ground(NETWORKS["1g"], 2, (4096, 65536))
    small, large = measure_sizes([ground], lambda _: None, blocks=1)
    assert (small["network"], small["kib"], large["kib"]) == ("1 Gbit/s", 4, 64)
    assert all(row[name] > 0 for row in (small, large) for name in ("exact", "int8"))
