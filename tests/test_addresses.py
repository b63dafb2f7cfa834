"""Which addresses an endpoint announces, and what all make of the introductions."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.core.errors import ConfigError, RendezvousError
from gradwire.transport.addresses import (
    LocalAddress,
    describe_interfaces,
    host_identity,
    local_addresses,
    reachable_interfaces,
    route_mtu,
)
from gradwire.transport.communicator import Communicator
from gradwire.transport.introductions import Introduction, agree_datagram, check_introductions
from gradwire.transport.meeting import Meeting, Outcome


def addresses_of(interface: object, towards: str | None) -> list[str]:
    return [each.address for each in local_addresses(interface, towards)]


# ------------------------------------------------------------------- what one announces


def test_the_address_leads_towards_the_stores_host() -> None:
    assert addresses_of(None, "127.0.0.1")[0] == "127.0.0.1"
    assert addresses_of(None, "localhost")[0] == "127.0.0.1"
    assert addresses_of("lo", "8.8.8.8")[0] == "127.0.0.1"


def test_an_address_of_loopback_is_announced_alone() -> None:
    """All of 127.0.0.0/8 is this host's, though only one is listed."""
    assert addresses_of("127.0.0.1", None) == ["127.0.0.1"]
    assert addresses_of("127.1.2.3", "8.8.8.8") == ["127.1.2.3"]


@pytest.mark.parametrize("towards", [None, "0.0.0.0", "no-such-host.invalid", "x" * 300, ""])
def test_without_a_way_to_the_store_there_is_an_address_all_the_same(towards: str | None) -> None:
    found = addresses_of(None, towards)
    assert found
    for each in found:
        family = socket.AF_INET6 if ":" in each else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((each, 0))


def test_loopback_has_an_mtu_like_any_interface() -> None:
    (place,) = local_addresses("127.0.0.1", None)
    mtu = mtu_of("lo")
    assert place.mtu == mtu
    assert place.datagram() == min(mtu - 28, 8972)


def mtu_of(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/mtu").read_text())


def test_headers_of_ipv6_are_longer() -> None:
    assert LocalAddress("10.0.0.1", "eth0", 1500).datagram() == 1472
    assert LocalAddress("fd00::1", "eth0", 1500).datagram() == 1452
    assert LocalAddress("fd00::1", "eth0", 1500).datagram(route_mtu=1400) == 1352
    assert LocalAddress("fd00::1").datagram(route_mtu=1400) == 1352
    assert LocalAddress("10.0.0.1", "eth0", 65_536).datagram() == 8972
    assert LocalAddress("10.0.0.1").datagram() == 1472


def test_the_route_decides_where_it_is_known() -> None:
    """That between two addresses of a host passes loopback, whichever interface has them."""
    assert LocalAddress("10.0.0.1", "eth0", 1500).datagram(route_mtu=65_536) == 8972
    assert LocalAddress("10.0.0.1", "eth0", 9000).datagram(route_mtu=1500) == 1472


def test_a_link_local_address_is_bound_with_its_interface() -> None:
    assert LocalAddress("fe80::1", "eth0").bound == "fe80::1%eth0"
    assert LocalAddress("fd00::1", "eth0").bound == "fd00::1"
    assert LocalAddress("169.254.0.1", "eth0").bound == "169.254.0.1"


@pytest.mark.parametrize(
    "interface",
    ["no-such", "203.0.113.7", "2001:db8::7", "fe80::7", "lo\0", "l\udc80", "", 5, ["lo"]],
)
def test_an_interface_that_is_not_here_is_an_error_that_lists_those_that_are(
    interface: object,
) -> None:
    with pytest.raises(ConfigError) as raised:
        local_addresses(interface, None)
    assert raised.value.setting == "interface"
    assert raised.value.value == interface
    assert "lo (127.0.0.1" in raised.value.allowed


def test_a_communicator_of_one_worker_checks_its_interface() -> None:
    for wrong in ("=lo", ["lo"]):
        with pytest.raises(ConfigError) as raised:
            Communicator(dist.HashStore(), 0, 1, {"interface": wrong})
        assert raised.value.setting == "interface"


def test_this_host_is_itself_in_every_process_and_thread() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(host_identity()))
    thread.start()
    thread.join()
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, host_identity().encode())
        os._exit(0)
    found.append(os.read(reader, 1000).decode())
    os.wait()
    os.close(reader)
    os.close(writer)
    assert found == [host_identity()] * 2


def test_interfaces_for_other_hosts_have_no_loopback() -> None:
    assert not any("127.0.0.1" in addresses for addresses in reachable_interfaces().values())


def test_a_long_list_of_interfaces_is_cut() -> None:
    many = {f"veth{n}": [f"10.0.0.{n}"] for n in range(100)}
    text = describe_interfaces(many)
    assert text.startswith("veth0 (10.0.0.0), veth1 (10.0.0.1)")
    assert text.endswith(" and 76 more")


def test_a_route_has_an_mtu() -> None:
    assert route_mtu("127.0.0.1", "127.0.0.1") >= 1500


# ------------------------------------------------------------- what all make of it


def introduction(
    endpoint: int, addresses: str | Iterable[str], *, mtu: int = 1500, **fields: Any
) -> Introduction:
    """Of an endpoint on a host of its own; addresses: separated by spaces."""
    places = tuple(
        LocalAddress(address, "lo" if address.startswith("127.") else "eth0", mtu)
        for address in (addresses.split() if isinstance(addresses, str) else addresses)
    )
    values: dict[str, Any] = {
        "protocol": 1,
        "host": "h",
        "identity": f"host {endpoint}",
        "interfaces": {"eth0": [place.address for place in places]},
    }
    return Introduction(endpoint, addresses=places, **{**values, **fields})


def met(everybody: list[Introduction], servers: int = 0) -> list[str]:
    """The addresses that all would use."""
    workers = len(everybody) - servers
    here = Meeting(dist.HashStore(), "t", endpoint=0, workers=workers, servers=servers, timeout_s=1)
    texts = [json.dumps(asdict(each)) for each in everybody]  # as through the store
    parsed = [Introduction.parse(text) for text in texts]
    return [place.address for place in check_introductions(here, parsed)]


def refused(everybody: list[Introduction], servers: int = 0) -> RendezvousError:
    with pytest.raises(RendezvousError) as raised:
        met(everybody, servers)
    return raised.value


@pytest.mark.parametrize(
    ("offers", "chosen"),
    [
        (["10.0.0.1 fd00::1", "10.0.0.2 fd00::2"], ["10.0.0.1", "10.0.0.2"]),
        (["fd00::1 10.0.0.1", "fd00::2 10.0.0.2"], ["fd00::1", "fd00::2"]),
        (["fd00::1 10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
        (["10.0.0.1 fd00::1", "fd00::2"], ["fd00::1", "fd00::2"]),
        (["10.0.0.1 fd00::1", "fd00::2 10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
        (
            ["10.0.0.1 fd00::1", "fd00::2 10.0.0.2", "fd00::3 10.0.0.3"],
            ["fd00::1", "fd00::2", "fd00::3"],
        ),
    ],
)
def test_the_version_of_ip_is_one_that_all_have_and_most_prefer(
    offers: list[str], chosen: list[str]
) -> None:
    assert met([introduction(rank, offer) for rank, offer in enumerate(offers)]) == chosen


def test_the_few_without_the_version_that_most_have_are_named() -> None:
    error = refused(
        [introduction(0, "fd00::1"), introduction(1, "10.0.0.2"), introduction(2, "10.0.0.3")]
    )
    assert error.ranks == (0,)
    assert "fd00::1" in str(error)
    assert refused([introduction(0, "10.0.0.1"), introduction(1, "")]).ranks == (1,)


def test_loopback_is_for_ranks_of_one_host() -> None:
    alike = {"identity": "one", "mtu": 0}
    one = [introduction(0, "127.0.0.1", **alike), introduction(1, "127.0.0.2", **alike)]
    assert met(one) == ["127.0.0.1", "127.0.0.2"]
    error = refused([*one, introduction(2, "10.0.0.3")])
    assert error.ranks == (0, 1)
    assert "GRADWIRE_INTERFACE" in str(error)


def test_hosts_of_one_address_are_named_servers_too() -> None:
    here = ("10.0.0.1", "172.17.0.1", "172.17.0.1")
    error = refused([introduction(e, address) for e, address in enumerate(here)], servers=1)
    assert error.ranks == (1, 2)
    assert "rank 1 and server 0" in str(error)
    assert "172.17.0.1" in str(error)


def test_an_address_that_another_host_has_on_an_unused_interface_is_named() -> None:
    both = {"docker0": ["172.17.0.1"], "eth0": ["10.0.0.2"]}
    error = refused([introduction(0, "172.17.0.1"), introduction(1, "10.0.0.2", interfaces=both)])
    assert error.ranks == (0,)


def test_link_local_addresses_may_be_on_every_host() -> None:
    met([introduction(0, "fe80::1"), introduction(1, "fe80::2", interfaces={"br0": []})])
    assert refused([introduction(0, "fe80::1"), introduction(1, "fe80::1")]).ranks == (0, 1)


def test_a_port_of_one_address_has_one_taker_and_a_range_has_as_many_as_ports() -> None:
    alike = {"identity": "one", "port": 7000}
    error = refused([introduction(0, "10.0.0.1", **alike), introduction(1, "10.0.0.1", **alike)])
    assert error.ranks == (0, 1)
    assert "port=7000" in str(error)
    assert "port='7000-7001'" in str(error)  # what would be enough
    alike = {"identity": "one", "port": "7000-7001"}
    three = [introduction(endpoint, "10.0.0.1", **alike) for endpoint in range(3)]
    met(three[:2])
    error = refused(three)
    assert error.ranks == (0, 1, 2)
    assert "port='7000-7002'" in str(error)
    met([introduction(0, "10.0.0.1", **alike), introduction(1, "10.0.1.1", **alike)])
    met([introduction(0, "10.0.0.1", port=7000), introduction(1, "10.0.0.2", port=7000)])
    met([introduction(0, "10.0.0.1", identity="one"), introduction(1, "10.0.0.1", identity="one")])


@pytest.mark.parametrize(("mtu", "datagram"), [(1400, 1372), (9000, 8972), (65_536, 8972)])
def test_the_smallest_mtu_sets_the_datagram(mtu: int, datagram: int) -> None:
    assert agreed([{"mtu": 65_536}, {"mtu": mtu}]) == datagram
    assert agreed([{"mtu": mtu}, {"datagram": 1000, "mtu": 9000}]) == 1000


def test_an_mtu_that_carries_too_little_is_named() -> None:
    with pytest.raises(RendezvousError) as raised:
        agreed([{}, {"mtu": 200}])
    assert raised.value.ranks == (1,)
    for known in ("eth0", "200", "256"):
        assert known in str(raised.value)


def test_ranks_of_one_host_use_the_mtu_of_the_way_between_them() -> None:
    """It is loopback's, also where they would use an interface whose MTU is smaller."""
    loopback = min(mtu_of("lo") - 28, 8972)
    assert agreed([{"mtu": 1500}, {"mtu": 1400}], address="127.0.0.1") == loopback
    assert agreed([{"mtu": 1500}, {"datagram": 1000}], address="127.0.0.1") == 1000


def agreed(fields: list[dict[str, Any]], address: str = "10.0.0.1") -> int:
    """The datagram of endpoints on one host."""
    everybody = [
        introduction(rank, address, identity="one", **each) for rank, each in enumerate(fields)
    ]
    here = Meeting(dist.HashStore(), "t", endpoint=0, workers=len(fields), servers=0, timeout_s=1)
    return agree_datagram(here, everybody, check_introductions(here, everybody))


def check_seconds(hosts: int) -> float:
    """The processor time for which a rank checks the introductions of so many hosts, at best."""
    texts = [
        json.dumps(
            asdict(
                Introduction(
                    rank,
                    protocol=1,
                    addresses=(LocalAddress(f"10.0.{rank // 256}.{rank % 256}", "eth0", 1500),),
                    identity=str(rank),
                    interfaces={
                        "eth0": [f"10.0.{rank // 256}.{rank % 256}"],
                        "eth1": ["172.17.0.1"],
                    },
                )
            )
        )
        for rank in range(hosts)
    ]
    here = Meeting(dist.HashStore(), "t", endpoint=0, workers=hosts, servers=0, timeout_s=1.0)
    everybody = [Introduction.parse(text) for text in texts]
    seconds = []
    for _ in range(3):
        begun = time.thread_time()
        check_introductions(here, everybody)
        seconds.append(time.thread_time() - begun)
    return min(seconds)


def test_checks_take_time_in_proportion_to_the_hosts() -> None:
    assert check_seconds(1600) < 20 * check_seconds(200)


def test_what_every_rank_reads_of_all_is_short() -> None:
    texts = [
        f'"10.0.{rank // 256}.{rank % 256}", {"the same everywhere " * 20}' for rank in range(999)
    ]
    published = Outcome(texts=texts).dump()
    assert len(published) < sum(map(len, texts)) / 10
    assert Outcome.load(published, len(texts)).texts == texts
