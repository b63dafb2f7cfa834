"""ECN on real sockets: what the kernel takes and tells, through a relay that marks and bleaches."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from engine_kit import connected, engine, sum_exactly
from gradwire import _engine

SECOND = 1_000_000_000
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
TOS = {
    socket.AF_INET: (socket.IPPROTO_IP, socket.IP_TOS, socket.IP_RECVTOS),
    socket.AF_INET6: (socket.IPPROTO_IPV6, socket.IPV6_TCLASS, socket.IPV6_RECVTCLASS),
}
ECT0, CE = 2, 3
ACK = 16  # the kind of a datagram (engine/wire/packet.h)


class Relay:
    """Two sockets between two engines, each of which takes one for the other engine."""

    def __init__(self, family: socket.AddressFamily, changes: dict[int, int]) -> None:
        # By thread, so that no count is lost.
        self._seen = [[0] * 4 for _ in range(2)]
        self._numbered = [[0] * 4 for _ in range(2)]
        self._family = family
        self._changes = changes  # what becomes of the field; of others, what they were
        self._sockets = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(2)]
        for each in self._sockets:
            each.bind((LOOPBACK[family], 0))
            each.setsockopt(TOS[family][0], TOS[family][2], 1)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            each.settimeout(0.1)
        self.addresses = [each.getsockname()[:2] for each in self._sockets]
        self._targets: list[tuple[str, int]] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._carry, args=(n,)) for n in range(2)]

    @property
    def seen(self) -> list[int]:
        """Datagrams that came, by the field."""
        return [sum(each) for each in zip(*self._seen, strict=True)]

    @property
    def numbered(self) -> list[int]:
        """Those of them that have a packet number, which ACKs and pings have not."""
        return [sum(each) for each in zip(*self._numbered, strict=True)]

    def start(self, targets: list[tuple[str, int]]) -> None:
        self._targets = targets
        for thread in self._threads:
            thread.start()

    def _carry(self, number: int) -> None:
        """What comes to socket n is for engine n, and comes to it from the other socket."""
        level, kind, _ = TOS[self._family]
        while not self._over.is_set():
            try:
                data, ((_, _, raw),), _, _ = self._sockets[number].recvmsg(65_536, 64)
            except TimeoutError:
                continue
            ecn = raw[0] & 3
            self._seen[number][ecn] += 1
            self._numbered[number][ecn] += data[1] < ACK
            control = [(level, kind, struct.pack("i", self._changes.get(ecn, ecn)))]
            out = self._sockets[1 - number]
            with contextlib.suppress(OSError):
                out.sendmsg([data], control, 0, self._targets[number])

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for each in self._sockets:
            each.close()


@contextlib.contextmanager
def pair(
    family: socket.AddressFamily, changes: dict[int, int], **options: bool
) -> Iterator[tuple[list[_engine.Engine], Relay]]:
    try:
        relay = Relay(family, changes)
    except OSError as error:
        pytest.skip(f"no {LOOPBACK[family]} here: {error}")
    engines = [engine(n, 2, address=LOOPBACK[family], **options) for n in range(2)]
    relay.start([each.address for each in engines])
    places = [[engines[0].address, relay.addresses[1]], [relay.addresses[0], engines[1].address]]
    try:
        with connected(engines, places):
            yield engines, relay
    finally:
        relay.close()


def counted(engines: list[_engine.Engine], name: str) -> list[float]:
    return [each.counters()[name] for each in engines]


@pytest.mark.parametrize("family", LOOPBACK, ids=["IPv4", "IPv6"])
def test_a_path_that_carries_ect_keeps_it(family: socket.AddressFamily) -> None:
    with pair(family, {}) as (engines, relay):
        assert all(each.features()["ecn"] for each in engines)
        for op in range(3):
            sum_exactly(engines, op, 30_000)
        assert counted(engines, "ecn_failed") == counted(engines, "marked") == [0, 0]
        # On a busy machine a path stalls, and is doubted until an ECT packet is acknowledged.
        assert relay.seen[ECT0] == relay.numbered[ECT0] > 10 * relay.numbered[0]
        assert relay.seen[0] > relay.numbered[0]  # ACKs and pings
        assert relay.seen[1] == relay.seen[CE] == 0


@pytest.mark.parametrize("family", LOOPBACK, ids=["IPv4", "IPv6"])
def test_marks_are_read_and_echoed(family: socket.AddressFamily) -> None:
    with pair(family, {ECT0: CE}) as (engines, _):
        for op in range(3):
            sum_exactly(engines, op, 30_000)
        assert counted(engines, "ecn_failed") == [0, 0]
        assert min(counted(engines, "marked")) > 50
        assert min(counted(engines, "mark_cuts")) >= 2  # its own, and by the peer's word


@pytest.mark.parametrize("ecn", [{ECT0: 0}, {ECT0: 1}], ids=["cleared", "ECT(1)"])
def test_a_path_that_changes_ect_is_found_out(ecn: dict[int, int]) -> None:
    with pair(socket.AF_INET, ecn) as (engines, relay):
        sum_exactly(engines, 0, 30_000)
        assert counted(engines, "ecn_failed") == [1, 1]
        before = relay.seen[ECT0]
        sum_exactly(engines, 1, 30_000)
        assert relay.seen[ECT0] == before


def test_ecn_can_be_switched_off() -> None:
    with pair(socket.AF_INET, {}, ecn=False) as (engines, relay):
        sum_exactly(engines, 0, 30_000)
        assert relay.seen[ECT0] == 0
        assert counted(engines, "ecn_failed") == [0, 0]
