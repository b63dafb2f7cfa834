"""Hosts of a lab network have fixed addresses."""

from __future__ import annotations

INTERFACE = "eth0"
"""Name of a host's only interface besides its loopback."""

PREFIX_LENGTH = 24
DISCARD_NETWORK = "10.78.0.0/24"
MAX_HOSTS = 200

STORE_PORT = 29400
"""Port of torch's store on rank 0's host, where all ports are free."""

ADDRESS_VARIABLE = "GRADWIRE_LAB_ADDRESS"
"""Environment variable in which a program on a host finds the host's own address."""


def host_address(number: int) -> str:
    """Return the IPv4 address of a host."""
    return f"10.77.0.{number + 1}"


def discard_address(number: int) -> str:
    """Return an address behind a host's port that the host silently drops.

    Cross traffic goes there: it crosses the port's queue, and costs the host neither a socket
    nor an error message to the sender.
    """
    return f"10.78.0.{number + 1}"


def host_mac(number: int) -> str:
    """Return the Ethernet address of a host."""
    return f"02:00:00:00:00:{number + 1:02x}"
