"""`gradwire bench transport`: which cells it has, what it measures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app
from gradwire_lab.bench.auth import costs
from gradwire_lab.bench.transport_grid import NETWORKS, contestants, grounds, quick_grounds
from gradwire_lab.network import Network
from gradwire_lab.network.presets import MAX_TRAIN


def test_the_quick_grid_has_the_cells_of_the_marks() -> None:
    found = quick_grounds("on")
    assert sum(len(ground.sizes) for ground in found) == 37
    assert {(ground.network.name, ground.ranks) for ground in found} == {
        ("unshaped", 2),
        ("unshaped", 4),
        ("unshaped", 8),
        ("unshaped-9000", 4),
        ("loopback", 2),
        ("10g", 4),
        ("5g", 4),
        ("1g", 4),
    }


def test_large_buffers_get_fewer_rounds_and_none_gets_less_than_two() -> None:
    (ground,) = grounds(["1g"], [8], [4096, 64 << 20], "on")
    assert ground.rounds(4096) > ground.rounds(4 << 20) >= ground.rounds(64 << 20) == 2


def test_every_contestant_has_a_name_of_its_own() -> None:
    names = [entry.name for entry in contestants(NETWORKS["1g"])]
    assert names[0] == "gloo"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=lambda network: network.name)
def test_a_train_passes_every_port_whole(network: object) -> None:
    assert network.bucket >= MAX_TRAIN  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--network", "2g"], "2g"),
        (["--offloads", "half"], "half"),
        (["--contestant", "nobody"], "nobody"),
        (["--ranks", "1"], "1"),
        *((["--size", size], "--size") for size in ("0", "nan", "inf", "1e12")),
        (["--quick", "--ranks", "4"], "--quick"),
        (["--plot", "/proc/none/plot.svg"], "/proc/none"),
        (["--auth", "--contestant", "exact"], "--auth"),
        (["--auth", "--cores", "1"], "--auth"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(arguments: list[str], wrong: str) -> None:
    result = CliRunner().invoke(app, ["transport", *arguments])
    assert result.exit_code == 2
    assert wrong in result.output


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_ways_to_authenticate_are_compared_over_none() -> None:
    asked = ["--network", "unshaped", "--ranks", "2", "--size", "1024", "--blocks", "2"]
    result = CliRunner().invoke(app, ["transport", *asked, "--auth", "--json"])
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(result.stdout)
    found = costs(cell["contestants"])
    assert list(found) == ["auth none", "auth session", "auth whole", "key"]
    assert found["auth none"] == (1.0, 1.0)
    assert all(processor > 0.5 for _, processor in found.values())


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("offloads", ["on", "tso"])
def test_all_contestants_sum_in_one_run(offloads: str, tmp_path: Path) -> None:
    plot = tmp_path / "ratios.svg"
    arguments = ["--ranks", "2", "--size", "64", "--size", "1024", "--blocks", "2", "--json"]
    command = ["transport", "--network", "unshaped", *arguments, "--offloads", offloads]
    result = CliRunner().invoke(app, [*command, "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    small, large = json.loads(result.stdout)
    assert set(large["contestants"]) - set(small["contestants"]) == {"adaptive"}
    for found in large["contestants"].values():
        assert found["rounds"] == len(found["seconds"]) >= 4
        assert len(found["block_ratios"]) == 2
        assert found["packets"] * 1500 >= found["calls"] > 0
        assert found["processor_per_gb"] > 0
    assert large["contestants"]["gloo"]["ratio"] == 1.0
    assert large["contestants"]["exact"]["packets"] > 1.8 * large["contestants"]["f16"]["packets"]
    assert plot.read_text().startswith("<svg")


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_ports_without_a_rate_have_no_queue_that_counts() -> None:
    with (
        Network(2, NETWORKS["unshaped"]) as network,
        pytest.raises(Exception, match="queue"),
    ):
        network.port_stats(0)


def test_ports_without_a_rate_allow_no_cross_traffic() -> None:
    with pytest.raises(ValueError, match="rate"):
        Network(2, NETWORKS["unshaped"], extra_hosts=1)


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_bfloats_of_the_same_memory_are_summed_beside_gloo() -> None:
    command = ["transport", "--network", "unshaped", "--ranks", "2", "--size", "64"]
    command += ["--contestant", "bf16", "--contestant", "gloo bf16", "--blocks", "1", "--json"]
    ran = CliRunner().invoke(app, command)  # the contestants check their sums
    assert ran.exit_code == 0, ran.output
    (cell,) = json.loads(ran.stdout)
    assert set(cell["contestants"]) == {"gloo", "gloo bf16", "bf16"}
