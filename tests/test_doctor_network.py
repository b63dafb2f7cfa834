"""`gradwire probe` and `gradwire doctor` between hosts of network namespaces, with real faults."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gradwire.doctor import measure, pairs
from gradwire_lab.network.loss_rules import LossRules
from host_ranks import Builder, HostRanks

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("namespaces")]

HERE, THERE = "10.0.0.1", "10.0.0.2"
SECOND = "10.0.0.3"
"""A second address of the host that listens: answers have to come from there."""
listener: list[subprocess.Popen[bytes]] = []


def two_hosts(network: Builder) -> None:
    network.cable(0, 1, "eth0")
    for host, address in enumerate((HERE, THERE)):
        network.address(host, "eth0", address, 24)
        network.address(host, "eth0", f"fd00::{host + 1}", 64)
    network.address(1, "eth0", SECOND, 24)
    for host, addresses in enumerate(((THERE, SECOND), (HERE,))):  # the rules drop ARP as well
        for address in addresses:
            network.neighbour(host, "eth0", address, 1 - host)


@pytest.fixture(scope="module")
def hosts() -> Iterator[HostRanks]:
    """Two hosts; on the second one `gradwire probe --listen` runs."""
    with HostRanks(
        two_hosts, MASTER_ADDR=HERE, MASTER_PORT="29000", GRADWIRE_RENDEZVOUS_TIMEOUT="10"
    ) as ranks:
        ranks.run(listens)
        yield ranks
        ranks.run(ends)


def listens(rank: int, world: int) -> None:
    measure.MEASURE_S, measure.SUM_S = 0.2, 1.0  # short measurements show the same
    pairs.CONTACT_S = 2.0
    if rank == 1:
        command = [sys.executable, "-m", "gradwire.cli", "probe", "--listen", "--json"]
        listener.append(subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0))
        assert heard("listening")["port"] == 28900


def heard(event: str) -> dict[str, Any]:
    """The listener's next line, which has to be of this event."""
    output = listener[0].stdout
    assert output is not None
    assert select.select([output], [], [], 15.0)[0], f"no event {event!r}"
    line: dict[str, Any] = json.loads(output.readline())
    assert line["event"] == event, line
    return line


def ends(rank: int, world: int) -> None:
    if rank == 1:
        listener[0].terminate()
        assert listener[0].wait(10) in (0, 1)


def call(arguments: list[str]) -> dict[str, Any]:
    """Calls `gradwire` with --json in this process; returns what it prints, and its status."""
    from typer.testing import CliRunner

    from gradwire.cli import app

    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return {**json.loads(result.stdout or "{}"), "exit": result.exit_code}


def probes(
    rank: int, world: int, target: str = THERE, patience: float = 5.0, events: tuple[str, ...] = ()
) -> Any:
    """Probes from the first host; the second one returns what its listener prints of that."""
    if rank == 0:
        return call(["probe", target, "--timeout", str(patience)])
    return [heard(event) for event in events]


MEASURED = ("measures", "measured")


def drops(rank: int, world: int, at: int, share: float) -> None:
    """Drops this share of what arrives at a host."""
    if rank == at:
        LossRules().set("eth0", share)


def shortens(rank: int, world: int, longest: int) -> None:
    """The second host drops what is longer (a train counts as one packet)."""
    if rank == 1:
        LossRules().set_longest("eth0", longest)


def texts(result: dict[str, Any], level: str) -> list[tuple[str, str]]:
    return [(each["about"], each["text"]) for each in result["findings"] if each["level"] == level]


def test_a_quiet_path_is_measured_in_both_directions(hosts: HostRanks) -> None:
    result, _ = hosts.run(probes, target="[fd00::2]:28900", events=MEASURED)
    assert result["exit"] == 0, result
    found = result["measurement"]
    for way in (found["there"], found["back"]):
        assert way["datagram"] == found["limit"] == 1452
        assert (way["ecn"], way["trains"]) == ("kept", "pass"), found
        assert way["loss"] < 0.05
        assert way["rate"] > 1e6
    assert 0 < found["rtt_s"] < 1


def test_a_firewall_on_the_way_there_leaves_the_listener_without_a_datagram(
    hosts: HostRanks,
) -> None:
    hosts.run(drops, at=1, share=1.0)
    result, _ = hosts.run(probes, patience=0.2)
    hosts.run(drops, at=1, share=0.0)
    assert (result["status"], result["exit"]) == ("problem", 1)
    assert not result["measurement"]["heard"]
    ((about, _),) = texts(result, "problem")
    assert about == "UDP"
    assert THERE in result["findings"][0]["command"]


def test_a_firewall_on_the_way_back_is_named_by_the_listener(hosts: HostRanks) -> None:
    hosts.run(drops, at=0, share=1.0)
    result, (event,) = hosts.run(probes, patience=0.7, events=("unheard",))
    hosts.run(drops, at=0, share=0.0)
    assert result["exit"] == 1
    assert event["peer"].startswith(f"{HERE}:")
    assert "way back" in event["message"]


def test_a_port_where_nobody_listens_is_told_from_a_firewall(hosts: HostRanks) -> None:
    result, _ = hosts.run(probes, target=f"{THERE}:4", patience=0.2)
    assert result["exit"] == 1
    assert result["findings"][0]["command"].startswith("gradwire probe --listen 4 ")


def test_a_host_without_a_route_says_so(hosts: HostRanks) -> None:
    result, _ = hosts.run(probes, target="192.0.2.1", patience=0.2)
    assert (result["status"], result["exit"]) == ("problem", 1)
    assert "unreachable" in result["measurement"]["refusal"]


def test_loss_on_the_way_there_is_not_blamed_on_the_way_back(hosts: HostRanks) -> None:
    hosts.run(drops, at=1, share=0.3)
    result, _ = hosts.run(probes, events=MEASURED)
    hosts.run(drops, at=1, share=0.0)
    found = result["measurement"]
    assert result["exit"] == 1
    assert found["there"]["loss"] > 0.1
    assert found["back"]["loss"] < 0.1
    assert [about for about, text in texts(result, "problem") if f"{HERE} → {THERE}" in text] == [
        "loss"
    ]


def test_a_path_that_drops_long_datagrams_has_its_mtu_measured(hosts: HostRanks) -> None:
    hosts.run(shortens, longest=1400)
    result, _ = hosts.run(probes, target=SECOND, events=("measures", "failed"))
    hosts.run(shortens, longest=0)
    found = result["measurement"]
    assert (found["there"]["datagram"], found["back"]["datagram"]) == (1372, 1472)
    (warning,) = [each for each in result["findings"] if each["about"] == "path MTU"]
    assert warning["level"] == "warning"
    assert "GRADWIRE_DATAGRAM=1372" in warning["command"]
    # The rule drops trains as well, as a tunnel that cannot segment them does.
    assert (found["there"]["trains"], found["back"]["trains"]) == ("lost", "pass")
    assert [about for about, _ in texts(result, "problem")] == ["GSO"]


def washes(rank: int, world: int, on: bool) -> bool:
    """The first host clears the ECN field of what arrives there."""
    if rank == 0 and on:
        rules = "add table netdev wash\n"
        rules += "add chain netdev wash in { type filter hook ingress device eth0 priority 0; }\n"
        rules += "add rule netdev wash in ip ecn set not-ect\n"
        done = subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=False)
        return done.returncode == 0
    if rank == 0:
        subprocess.run(["nft", "delete", "table", "netdev", "wash"], check=True)
    return True


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs the program nft")
def test_a_network_that_clears_the_ecn_field_is_noticed_one_way(hosts: HostRanks) -> None:
    if not all(hosts.run(washes, on=True)):
        pytest.skip("the kernel cannot change the ECN field")
    result, _ = hosts.run(probes, events=MEASURED)
    hosts.run(washes, on=False)
    found = result["measurement"]
    assert (found["there"]["ecn"], found["back"]["ecn"]) == ("kept", "cleared")
    assert (result["status"], result["exit"]) == ("warning", 0)


# ---------------------------------------------------------------------------- jobs


def examines(rank: int, world: int, absent: int = -1, deaf: int = -1, wait: str = "") -> Any:
    """Runs `gradwire doctor` as a rank of the job."""
    if rank == absent:
        return None
    if rank == deaf:
        LossRules().set("eth0", 0.0)
    os.environ["GRADWIRE_RENDEZVOUS_TIMEOUT"] = wait or "10"
    return call(["doctor"])


def test_the_hosts_of_a_job_measure_the_path_between_them(hosts: HostRanks) -> None:
    first, second = hosts.run(examines)
    assert (first["exit"], second["exit"]) == (0, 0), first
    assert [host["name"] for host in first["hosts"]] == ["alpha", "beta"]
    (pair,) = first["pairs"]
    assert (pair["from"], pair["to"]) == ("alpha", "beta")
    assert pair["measurement"]["complete"]
    assert pair["measurement"]["there"]["rate"] > 1e6


def test_an_absent_rank_of_a_job_is_named(hosts: HostRanks) -> None:
    present, _ = hosts.run(examines, absent=1, wait="0.2")
    assert present["exit"] == 1
    ((about, text),) = texts(present, "problem")
    assert about == "ranks"
    assert "rank 1 did not join" in text


def silences(rank: int, world: int, on: bool) -> None:
    """The second host drops UDP; the store's TCP passes."""
    if rank == 1:
        verb = "-I" if on else "-D"
        rule = [verb, "INPUT", "-p", "udp", "-j", "DROP"]
        subprocess.run(["iptables", *rule], check=True)


@pytest.mark.skipif(shutil.which("iptables") is None, reason="needs the program iptables")
def test_a_firewall_of_one_host_of_a_job_is_named_with_its_direction(hosts: HostRanks) -> None:
    hosts.run(silences, on=True)
    first, second = hosts.run(examines)
    hosts.run(silences, on=False)
    assert (first["exit"], second["exit"]) == (1, 1)
    problems = texts(first, "problem")
    assert len(problems) == 1, first
    assert problems[0][1].startswith("alpha → beta:")
