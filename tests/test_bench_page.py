"""The page of benchmarks: what its pictures are drawn from, and that page and figures agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app
from gradwire_lab.bench.page import NAME, TITLES, render
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
        "racks": {"cells": [{"rate_bps": 1e9, "queue": 500_000, "time": 1.0, "drops": 0.0}]},
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
    assert "draw racks" in page


def test_the_page_is_what_the_figures_say() -> None:
    assert (DOCS / NAME).read_text() == render(DOCS)


def test_a_page_without_a_picture_is_not_written(tmp_path: Path) -> None:
    result = RUNNER.invoke(app, ["page", "page", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("arguments", [["nothing"], ["sizes", "--out", "/nowhere"]])
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
