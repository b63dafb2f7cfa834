"""`gradwire bench kernel`: contestants over short queues, rows that are kept, what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire_lab.bench import app
from gradwire_lab.bench.kernel import marks
from gradwire_lab.network.network import Network
from gradwire_lab.network.presets import Preset

RUNNER = CliRunner()


@pytest.mark.parametrize(
    "args",
    [
        ["--ranks", "1"],
        ["--queue", "0"],
        ["--queue", "nan"],
        ["--queue", "1e30"],
        ["--rate", "-200"],
        ["--rate", "1e-9"],
        ["--rate", "1e12"],
        ["--size", "0"],
        ["--size", "nan"],
        ["--size", "1e12"],
        ["--rounds", "0"],
    ],
)
def test_what_cannot_be_is_refused_before_the_run(args: list[str]) -> None:
    result = RUNNER.invoke(app, ["kernel", *args])
    assert result.exit_code == 2
    assert args[0] in result.output


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": 1}', encoding="utf-8")
    assert RUNNER.invoke(app, ["kernel", "--out", str(other)]).exit_code == 2
    assert other.read_text(encoding="utf-8") == '{"rows": 1}'


@pytest.mark.parametrize(
    ("median", "dropped", "met"), [(1.05, 0.02, True), (1.06, 0.0, False), (1.0, 0.021, False)]
)
def test_marks_are_about_the_median_and_the_drops(median: float, dropped: float, met: bool) -> None:
    found = {
        "Gloo, CUBIC": {"median": 1.0, "dropped": 0.1},
        "gradwire": {"median": median, "dropped": dropped},
    }
    assert marks({"contestants": found})["met"] is met
    assert marks({"contestants": {"gradwire": found["gradwire"]}})["met"] is False


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_a_network_that_is_kept_is_not_run_again(tmp_path: Path) -> None:
    kept = tmp_path / "kernel.json"
    args = ["kernel", "--ranks", "2", "--queue", "32", "--size", "64", "--rounds", "2"]
    result = RUNNER.invoke(app, [*args, "--out", str(kept), "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert {"Gloo, CUBIC", "gradwire"} <= set(row["contestants"])
    for found in row["contestants"].values():
        assert 0 < found["median"] <= found["p90"]
        assert 0 <= found["dropped"] < 1
    assert row["date"]
    assert row["machine"]["kernel"]
    again = RUNNER.invoke(app, [*args, "--out", str(kept), "--json"])
    assert json.loads(again.stdout) == [row]  # with its date
    table = RUNNER.invoke(app, [*args, "--out", str(kept)])
    assert "2 ranks, 32 KiB" in table.stdout


@pytest.mark.netns
@pytest.mark.usefixtures("namespaces")
def test_hosts_may_be_faster_than_their_ports() -> None:
    ports = Preset("fast hosts", 100_000, 64 << 10, 16 << 10, offloads=False, fast_hosts=True)
    with Network(2, ports) as network:
        lines = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"for _ in range(300): s.sendto(bytes(1400), ({network.discard_address(1)!r}, 9))"
        )
        network.spawn(0, ["python3", "-c", lines]).wait(60)
        stats = network.port_stats(0).uplink, network.port_stats(1).downlink
    assert stats[0].drops == 0  # 420 KB leave the host at once …
    assert stats[1].drops > 100  # … into a port that holds 80 KB
