"""The interfaces that the engine lists are those of this host."""

import socket

import pytest

from gradwire import _engine


def test_all_interfaces_are_listed_once() -> None:
    names = [each.name for each in _engine.interfaces()]
    assert sorted(names) == sorted(name for _, name in socket.if_nameindex())


def test_loopback_is_known_as_such() -> None:
    found = [each for each in _engine.interfaces() if "127.0.0.1" in each.addresses]
    if not found:
        pytest.skip("no IPv4 loopback here")
    assert [each.loopback for each in found] == [True]
    assert found[0].up
    assert found[0].carrier
    assert found[0].mtu >= 1500


def test_every_address_of_an_interface_that_is_up_can_be_bound() -> None:
    for each in _engine.interfaces():
        for address in each.addresses if each.carrier else ():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            place = socket.getaddrinfo(address, 0, family, socket.SOCK_DGRAM)[0][4]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(place)
