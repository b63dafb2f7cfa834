"""The DSCP of what the engine sends, as the kernel of the other side sees it; and a kernel that
refuses to set one."""

import contextlib
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gradwire import _engine
from scenarios import EAGER

SECOND = 1_000_000_000
HEADER = struct.Struct("<BBHIIIIIHH")  # engine/wire/packet.h
PUSH, OPEN, ACK, PING, PONG = 1, 3, 16, 17, 18
TABLE = [40, 24, 8]
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

Seen = list[tuple[int, int, int]]  # kind, chunk, DSCP of each datagram


@contextlib.contextmanager
def pair(family: socket.AddressFamily, **options: Any) -> Iterator[tuple[Any, socket.socket]]:
    """An engine, and the socket that it takes for its peer."""
    with socket.socket(family, socket.SOCK_DGRAM) as peer:
        try:
            peer.bind((LOOPBACK[family], 0))
        except OSError as error:
            pytest.skip(f"no {LOOPBACK[family]} here: {error}")
        if family == socket.AF_INET6:
            peer.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVTCLASS, 1)
        else:
            peer.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        peer.settimeout(0.2)
        engine = _engine.Engine(
            endpoint=0, workers=2, servers=0, session=99, address=LOOPBACK[family], **options
        )
        try:
            engine.connect([engine.address, peer.getsockname()[:2]])
            yield engine, peer
        finally:
            engine.close()


def listen(peer: socket.socket, kind: int, count: int) -> Seen:
    """Answers pings; what came until `count` chunks of that kind have."""
    seen: Seen = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and len({c for k, c, _ in seen if k == kind}) < count:
        try:
            data, ancillary, _, source = peer.recvmsg(65_536, 64)
        except TimeoutError:
            continue
        # One byte for IPv4, an int for IPv6.
        (raw,) = [value for _, _, value in ancillary]
        byte = raw[0]
        # ECT(0) on what is acknowledged, until the path has shown that it carries none.
        assert byte & 3 in ((0, 2) if data[1] < ACK else (0,))
        seen.append((data[1], HEADER.unpack_from(data)[7] if data[1] < ACK else 0, byte >> 2))
        if data[1] == PING:
            answer = struct.pack("<BBHI", data[0], PONG, 1, 99) + data[8:16]
            peer.sendto(answer, source)
    return seen


@pytest.mark.parametrize("family", LOOPBACK, ids=["IPv4", "IPv6"])
def test_the_receiver_sees_each_chunks_class(family: socket.AddressFamily) -> None:
    elements = 18 * 361
    made = _engine.Plan(
        elements=elements, regions=[(0, elements, 0.0)], order="priority", class_dscp=TABLE
    )
    owner = _engine.chunk_grid(made, 1472, 2)[3]
    classes = (np.arange(len(owner)) % 3).astype(np.uint8)
    with pair(family, dscp=2) as (engine, peer):
        before = listen(peer, PING, 1)
        segmented = engine.features()["udp_segment"]
        data = np.ones(elements, np.float32)
        engine.all_reduce(op=0, step=0, plan=made, data=data, priorities=classes)
        seen = listen(peer, PUSH, int((owner == 1).sum()))
        # A train that the kernel had refused with both would have gone out piece by piece.
        assert engine.features()["udp_segment"] == segmented
        assert engine.counters()["send_errors"] == 0
    assert {dscp for _, _, dscp in before} == {2}
    pushed = {chunk: dscp for kind, chunk, dscp in seen if kind == PUSH}
    assert pushed == {int(c): TABLE[classes[c]] for c in np.flatnonzero(owner == 1)}
    assert {dscp for kind, _, dscp in seen if kind == OPEN} == {TABLE[0]}


@pytest.mark.parametrize("family", LOOPBACK, ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("dscp", [0, 46])
def test_all_traffic_has_the_engines_dscp_where_the_plan_gives_none(
    family: socket.AddressFamily, dscp: int
) -> None:
    elements = 12 * 361
    made = _engine.Plan(
        elements=elements,
        regions=[(0, elements, 0.3)],
        spend="anything",
        schedule=EAGER,
        order="priority",
    )
    with pair(family, dscp=dscp) as (engine, peer):
        engine.all_reduce(op=0, step=0, plan=made, data=np.ones(elements, np.float32))
        seen = listen(peer, PUSH, 5)
    assert {kind for kind, _, _ in seen} >= {PUSH, OPEN}
    assert {found for _, _, found in seen} == {dscp}


def test_impossible_dscps_are_named() -> None:
    for wrong in (-1, 64):
        with pytest.raises(ValueError, match=f"dscp is {wrong}; allowed are 0 to 63"):
            _engine.Engine(
                endpoint=0, workers=1, servers=0, session=1, address="127.0.0.1", dscp=wrong
            )


# A filter for system calls (seccomp) that turns one of them down in a process of its own: the
# kernel that refuses. Arguments: system call, argument and value that it looks at, and its errno.
REFUSE = """
    import ctypes, struct, sys
    import numpy as np
    from gradwire import _engine

    def refuse(call, argument, mask, value, errno):
        load, equal, both, back = 0x20, 0x15, 0x54, 0x06
        program = [
            (load, 0, 0, 0), (equal, 0, 4, call),
            (load, 0, 0, 16 + 8 * argument), (both, 0, 0, mask), (equal, 0, 1, value),
            (back, 0, 0, 0x00050000 | errno), (back, 0, 0, 0x7FFF0000),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *p) for p in program))
        packed = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
        header = ctypes.create_string_buffer(packed)
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(38, 1, 0, 0, 0) or prctl(22, 2, header, 0, 0):
            print("no filter")
            sys.exit()

    def engine(**options):
        return _engine.Engine(
            endpoint=0, workers=2, servers=0, session=1, address="127.0.0.1", **options
        )
"""


def refused(code: str) -> str:
    if sys.platform != "linux" or not hasattr(socket, "AF_PACKET") or struct.calcsize("P") != 8:
        pytest.skip("the filter is for 64-bit Linux")
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the system calls are those of x86-64")
    program = textwrap.dedent(REFUSE) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    if done.stdout == "no filter\n":
        pytest.skip("no system call filters here")
    return done.stdout


def test_a_kernel_that_refuses_a_dscp_is_an_error_that_names_the_setting() -> None:
    said = refused(
        """
        refuse(54, 2, 0xFFFFFFFF, 1, 1)  # setsockopt(IP_TOS): EPERM
        engine(dscp=0).close()  # asks for nothing
        try:
            engine(dscp=46)
        except ValueError as error:
            print(error)
        """
    )
    assert said == (
        "dscp=46: the kernel refuses IP_TOS (Operation not permitted); 0 leaves it alone\n"
    )


def test_a_kernel_that_takes_no_dscp_for_each_datagram_is_an_error_before_the_first_step() -> None:
    said = refused(
        """
        refuse(46, 2, 0x10, 0x10, 22)  # sendmsg(MSG_PROBE): EINVAL
        one = engine()
        print(one.features()["dscp"])
        one.connect([one.address, ("127.0.0.1", 9)])
        made = _engine.Plan(
            elements=10, regions=[(0, 10, 0.0)], order="priority", class_dscp=[40, 8]
        )
        try:
            one.all_reduce(op=0, step=0, plan=made, data=np.zeros(10, np.float32))
        except RuntimeError as error:
            print(error)
        one.close()
        """
    )
    assert said.startswith("False\nclass_dscp: the kernel takes no DSCP for each datagram")
