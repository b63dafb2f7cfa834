"""Which address each rank announces and binds, end to end between hosts of network namespaces."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from gradwire._engine import TAG_BYTES
from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.transport.communicator import Communicator
from host_ranks import Builder, HostRanks

pytestmark = pytest.mark.usefixtures("namespaces")

TIMEOUT_S = 20.0
ports = itertools.count(29_000)


def two_hosts(network: Builder) -> None:
    network.cable(0, 1, "eth0")
    network.cable(0, 1, "wide0", mtu=4000)
    network.cable(0, 1, "huge0", mtu=20_000)
    network.cable(0, 1, "tiny0", mtu=1290)
    network.cable(0, 1, "six0", mtu=1400)
    network.cable(0, 1, "mixed0")
    network.cable(0, 1, "slow0")
    network.cable(0, 1, "tun0")
    for host in (0, 1):
        here = host + 1
        network.address(host, "eth0", f"10.0.0.{here}", 24)
        network.address(host, "eth0", f"10.99.0.{here}", 24)
        network.address(host, "eth0", f"fd00:a::{here}", 64)
        network.address(host, "wide0", f"10.1.0.{here}", 24)
        network.address(host, "wide0", f"10.1.1.{here}", 24)
        network.address(host, "wide0", f"fd00:b::{here}", 64)
        network.address(host, "huge0", f"10.2.0.{here}", 24)
        network.address(host, "tiny0", f"10.3.0.{here}", 24)
        network.address(host, "tiny0", f"fd00:d::{here}", 64)
        network.set(host, "tiny0", mtu=200)  # IPv6 goes away below 1280
        network.address(host, "six0", f"fd00:c::{here}", 64)
        network.address(host, "slow0", f"10.6.0.{here}", 24)
        network.route(host, "slow0", f"10.6.0.{3 - here}/32", metrics={"mtu": 1200})
        network.address(host, "tun0", f"10.7.0.{3 - here}", 32, local=f"10.7.0.{here}")
        network.lonely(host, "docker0")
        network.address(host, "docker0", "172.17.0.1", 16)
        network.lonely(host, "dark0")
        network.address(host, "dark0", f"10.5.0.{here}", 24)
        network.set(host, "dark0", state="down")
        # Addresses that the kernel takes though no interface lists them.
        network.route(host, "lo", f"10.98.{here}.0/24", table=255, type="local", scope="host")
        network.route(host, "wide0", f"10.98.{3 - here}.0/24", gateway=f"10.1.0.{3 - here}")
        network.sysctl(host, "ipv6/ip_nonlocal_bind", 1)  # IPv6 asks for more than the route
        network.route(host, "lo", f"fd00:f{here}::/64", table=255, type="local")
        network.route(host, "wide0", f"fd00:f{3 - here}::/64", gateway=f"fd00:b::{3 - here}")
    network.sysctl(0, "ipv4/ip_nonlocal_bind", 1)  # as where addresses move between hosts
    network.address(0, "mixed0", "10.4.0.1", 24)
    network.address(1, "mixed0", "fd00:e::2", 64)


@pytest.fixture(scope="module")
def apart() -> Iterator[HostRanks]:
    """A rank on each of two hosts that have the same name."""
    with HostRanks(two_hosts, names=("same", "same")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def together() -> Iterator[HostRanks]:
    """Two ranks in one network namespace, under two host names."""
    with HostRanks(two_hosts, places=(0, 0), names=("one", "two")) as ranks:
        yield ranks


def join(
    rank: int,
    world: int,
    store: str = "10.0.0.1",
    store_port: int = 0,
    master: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Joins and sums once; what came of it. store: an address, or the path of a FileStore."""
    os.environ.pop("MASTER_ADDR", None)
    if master is not None:
        os.environ["MASTER_ADDR"] = master
    there: Any
    if store.startswith("/"):
        there = dist.FileStore(store, world)
    else:
        there = dist.TCPStore(store, store_port, world, is_master=rank == 0)
    began = time.monotonic()
    communicator = None
    try:
        config = {"rendezvous_timeout": TIMEOUT_S, "timeout": TIMEOUT_S, **settings}
        communicator = Communicator(there, rank, world, config)
        array = np.full(5000, rank + 1.0, np.float32)
        communicator.all_reduce(array).wait(TIMEOUT_S)
        outcome: dict[str, Any] = {"sum": float(array.max()), "datagram": communicator.datagram}
        outcome["counters"] = communicator.counters()
    except (ConfigError, RendezvousError) as error:
        outcome = {"kind": type(error).__name__, "text": str(error), **vars(error)}
    outcome["seconds"] = time.monotonic() - began
    there.add("done", 1)
    while rank == 0 and there.add("done", 0) < world:  # the store is rank 0's
        time.sleep(0.01)
    if communicator is not None:
        communicator.close()
    return outcome


def joined(ranks: HostRanks, **arguments: Any) -> list[dict[str, Any]]:
    return ranks.run(join, store_port=next(ports), **arguments)


def assert_works(outcomes: list[dict[str, Any]], datagram: int) -> None:
    for outcome in outcomes:
        assert outcome.get("sum") == 3.0, outcome
        assert outcome["datagram"] == datagram - TAG_BYTES
        assert outcome["counters"]["send_too_long"] == 0


def assert_refused_at_once(outcomes: list[dict[str, Any]], *ranks: int) -> str:
    """All raise the same RendezvousError, which names these ranks; returns its text."""
    for outcome in outcomes:
        assert outcome.get("kind") == "RendezvousError", outcome
        assert outcome["ranks"] == ranks
        assert outcome["text"] == outcomes[0]["text"]
        assert outcome["seconds"] < TIMEOUT_S / 2
    text: str = outcomes[0]["text"]
    return text


# ------------------------------------------------------------- addresses that can be bound


@pytest.mark.parametrize(
    ("addresses", "datagram"),
    [
        (("10.99.0.1", "10.99.0.2"), 1472),
        (("10.1.1.1", "10.1.1.2"), 3972),
        (("10.2.0.1", "10.2.0.2"), 8972),
        (("10.98.1.7", "10.98.2.9"), 3972),
        (("fd00:f1::7", "fd00:f2::9"), 3952),
        (("fd00:b::1", "fd00:b::2"), 3952),
        (("::ffff:10.1.0.1", "10.1.0.2"), 3972),
        (("wide0", "wide0"), 3972),
        (("six0", "fd00:c::2"), 1352),
        (("tun0", "10.7.0.2"), 1472),
        (("wide0", "eth0"), 1472),
    ],
)
def test_any_address_that_can_be_bound_does_with_the_mtu_of_its_interface(
    apart: HostRanks, addresses: tuple[str, str], datagram: int
) -> None:
    per_rank = [{"interface": each} for each in addresses]
    assert_works(joined(apart, per_rank=per_rank), datagram)


@pytest.mark.parametrize("interface", ["10.1.1.1", "fd00:c::1", "10.98.1.7"])
def test_between_ranks_of_one_host_the_mtu_of_loopback_counts(
    together: HostRanks, interface: str
) -> None:
    assert_works(joined(together, interface=interface), 8972)


def test_link_local_addresses_work(apart: HostRanks) -> None:
    addresses = apart.run(link_local, name="six0")
    per_rank = [{"interface": each} for each in addresses]
    assert_works(joined(apart, per_rank=per_rank), 1352)


def link_local(rank: int, world: int, name: str) -> str:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, device = line.split()
        if digits.startswith("fe80") and device == name:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)) + "%" + name
    raise AssertionError(name)


WRONG = [
    *("=eth0", "^docker0,lo", "eth0,wide0", "eth", ["eth0", "wide0"]),  # lists and patterns
    *("dark0", "10.5.0.1", "203.0.113.7", "fe80::1%eth0", "fe80::1"),  # down, or elsewhere
    *("0.0.0.0", "::", "224.0.0.1", "ff02::1", "10.0.0.255", "127.255.255.255"),  # of several hosts
    "10.0.0.77",  # the kernel lets it be bound all the same
]


def test_what_is_no_interface_lists_those_that_are_with_their_addresses(apart: HostRanks) -> None:
    errors, _ = apart.run(refused, interfaces=WRONG)
    assert len(errors) == len(WRONG)
    for interface, error in zip(WRONG, errors, strict=True):
        assert error["setting"] == "interface"
        assert error["value"] == interface
        for known in ("eth0", "10.0.0.1", "10.99.0.1", "fd00:a::1", "docker0", "172.17.0.1"):
            assert known in error["allowed"]


def refused(rank: int, world: int, interfaces: list[Any]) -> list[dict[str, Any]]:
    """The errors of a job of one worker."""
    errors = []
    for interface in interfaces:
        try:
            Communicator(dist.HashStore(), 0, 1, {"interface": interface})
        except ConfigError as error:
            errors.append(dict(vars(error)))
    return errors


def test_a_wrong_interface_is_known_to_the_others_at_once(apart: HostRanks) -> None:
    mine, other = joined(apart, per_rank=[{"interface": ["eth0", "wide0"]}, {}])
    assert mine["kind"] == "ConfigError"
    assert other["kind"] == "RendezvousError"
    assert other["ranks"] == (0,)
    assert other["seconds"] < TIMEOUT_S / 2


def test_an_mtu_that_carries_no_datagram_is_an_error(apart: HostRanks) -> None:
    text = assert_refused_at_once(joined(apart, interface="tiny0"), 0, 1)
    assert "tiny0" in text
    assert "200" in text


def test_a_datagram_above_the_mtu_is_an_error(apart: HostRanks) -> None:
    outcomes = joined(apart, interface="wide0", datagram=4000)
    assert {each["kind"] for each in outcomes} <= {"ConfigError", "RendezvousError"}
    for each in outcomes:
        assert each["seconds"] < TIMEOUT_S / 2
        assert "datagram=4000" in each["text"]
        assert "3972" in each["text"]


# ------------------------------------------------------------------------------- hosts


def test_loopback_between_hosts_of_one_name_is_an_error_at_once(
    apart: HostRanks, tmp_path: Path
) -> None:
    outcomes = joined(apart, store=str(tmp_path / "store"), master="127.0.1.1")
    text = assert_refused_at_once(outcomes, 0, 1)
    for known in ("interface=", "127.0.0.1", "eth0", "10.0.0.1", "10.0.0.2", "fd00:a::1"):
        assert known in text
    assert "dark0" not in text


def test_without_a_store_host_the_default_route_is_taken(tmp_path: Path) -> None:
    """The hosts' name is of loopback, as often in /etc/hosts."""
    with HostRanks(default_routes, names=("localhost", "localhost")) as ranks:
        assert_works(joined(ranks, store=str(tmp_path / "store")), 1472)


def default_routes(network: Builder) -> None:
    network.cable(0, 1)
    for host in (0, 1):
        network.address(host, "eth0", f"10.0.0.{host + 1}", 24)
        network.route(host, "eth0", "default", gateway=f"10.0.0.{2 - host}")


def test_one_rank_alone_on_loopback_is_named(apart: HostRanks) -> None:
    outcomes = joined(apart, per_rank=[{"interface": "lo"}, {}])
    text = assert_refused_at_once(outcomes, 0)
    assert "10.0.0.1" in text


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1", "127.0.1.1", "::1"])
def test_one_host_under_two_names_may_use_loopback(together: HostRanks, interface: str) -> None:
    assert_works(joined(together, interface=interface), 8972)


@pytest.mark.parametrize("port", [0, 7000])
def test_hosts_with_one_address_are_named(apart: HostRanks, port: int) -> None:
    text = assert_refused_at_once(joined(apart, interface="docker0", port=port), 0, 1)
    for known in ("172.17.0.1", "eth0", "10.0.0.1", "10.0.0.2"):
        assert known in text


def test_an_address_that_another_host_has_as_well_is_an_error(apart: HostRanks) -> None:
    text = assert_refused_at_once(joined(apart, per_rank=[{"interface": "docker0"}, {}]), 0)
    assert "172.17.0.1" in text


def test_two_ranks_of_one_host_cannot_have_one_port(together: HostRanks) -> None:
    text = assert_refused_at_once(joined(together, port=7000), 0, 1)
    assert "port=7000" in text


def test_two_hosts_may_have_one_port(apart: HostRanks) -> None:
    assert_works(joined(apart, port=7000), 1472)


def test_a_route_that_is_not_there_is_an_error_at_once(apart: HostRanks) -> None:
    per_rank = [{"interface": "six0"}, {"interface": "mixed0"}]
    text = assert_refused_at_once(joined(apart, per_rank=per_rank), 0, 1)
    assert "fd00:e::2" in text


def test_a_route_may_have_an_mtu_of_its_own(apart: HostRanks) -> None:
    assert_works(joined(apart, interface="slow0"), 1172)


# ------------------------------------------------------------------------------- IPv6


@pytest.mark.parametrize(
    ("store", "datagram"), [("fd00:a::1", 1452), ("fd00:b::1", 3952), ("fd00:c::1", 1352)]
)
def test_a_store_over_ipv6_is_enough(apart: HostRanks, store: str, datagram: int) -> None:
    assert_works(joined(apart, store=store), datagram)


def test_a_store_of_a_link_local_address_is_enough(apart: HostRanks) -> None:
    store, _ = apart.run(link_local, name="six0")
    assert_works(joined(apart, store=store), 1352)


def test_a_store_on_the_ipv6_loopback_is_enough(together: HostRanks) -> None:
    assert_works(joined(together, store="::1"), 8972)


def test_the_family_is_one_that_all_ranks_have(apart: HostRanks) -> None:
    """The store is reached over IPv6, one rank wants an IPv4 address."""
    outcomes = joined(apart, store="fd00:b::1", per_rank=[{"interface": "10.1.1.1"}, {}])
    assert_works(outcomes, 3972)


def test_ranks_without_a_common_family_are_named(apart: HostRanks) -> None:
    text = assert_refused_at_once(joined(apart, interface="mixed0"), 1)
    assert "10.4.0.1" in text
    assert "fd00:e::2" in text
