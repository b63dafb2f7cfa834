"""TAP devices are network devices whose wire is a file descriptor."""

from __future__ import annotations

import fcntl
import os
import struct

_TUN = "/dev/net/tun"


class TapUnavailable(OSError):
    """This machine lets the caller make no TAP devices; the message says why."""


# These numbers are from <linux/if_tun.h>.
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 0x01
_TUN_F_TSO = 0x02 | 0x04 | 0x08  # TSO4, TSO6, TSO_ECN
_TUN_F_USO = 0x20 | 0x40  # USO4, USO6, which kernels have from 6.2 on


def open_tap(name: str, *, offloads: bool) -> tuple[int, bool]:
    """Make a TAP device in the present network namespace; it goes when its descriptor is closed.

    Frames have a virtio-net header, so that checksums are left out, as on a veth pair.

    Returns:
        The descriptor, and whether UDP trains pass whole too (TCP ones always do).

    Raises:
        TapUnavailable: there are no such devices here, or the caller may not make one.
    """
    try:
        tap = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TapUnavailable(f"no links with delay here: {_TUN}: {error.strerror}") from error
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        return tap, _switch_offloads(tap, offloads)
    except OSError as error:
        os.close(tap)
        raise TapUnavailable(f"no links with delay here: TAP device: {error.strerror}") from error


def _switch_offloads(tap: int, on: bool) -> bool:
    if not on:
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM)
        return False
    try:
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO | _TUN_F_USO)
        return True
    except OSError:
        fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO)
        return False
