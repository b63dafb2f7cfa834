"""The lab's own link in virtual time: what comes out, and when."""

import struct
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_lab._link import LinkQueue

US = 1_000
MS = 1_000_000
S = 1_000_000_000


def link(now: int = 0, *, headed: bool = False, seed: int = 1, **options: Any) -> LinkQueue:
    made = LinkQueue(headed=headed, seed=seed)
    made.set(now, **options)
    return made


def number(value: int, size: int = 1514) -> bytes:
    return value.to_bytes(4, "big").ljust(size, b"\0")


def arrivals(made: LinkQueue) -> Iterator[tuple[int, bytes]]:
    """(time, frame) of all that is on its way."""
    while (time := made.next_event()) is not None:
        while (frame := made.take(time)) is not None:
            yield time, frame


def test_a_link_at_rest_hands_on_at_once() -> None:
    made = link()
    made.offer(5, number(7))
    assert list(arrivals(made)) == [(5, number(7))]
    assert made.next_event() is None


def test_each_frame_travels_as_long_as_asked() -> None:
    made = link(delay_ns=10 * MS)
    for i in range(5):
        made.offer(i * US, number(i))
    assert made.take(10 * MS - 1) is None
    assert list(arrivals(made)) == [(10 * MS + i * US, number(i)) for i in range(5)]
    assert made.counters()["delivered"] == 5
    assert made.counters()["held_bytes"] == 0


def test_a_new_delay_is_that_of_later_frames_which_overtake_none() -> None:
    made = link(delay_ns=40 * MS)
    made.offer(0, number(0))
    made.set(1 * MS, delay_ns=10 * MS)
    made.offer(1 * MS, number(1))
    made.offer(35 * MS, number(2))
    assert [(t, f[3]) for t, f in arrivals(made)] == [(40 * MS, 0), (40 * MS, 1), (45 * MS, 2)]


def test_jitter_keeps_the_order_unless_told_otherwise() -> None:
    def run(keep_order: bool) -> list[tuple[int, int]]:
        made = link(delay_ns=1 * MS, jitter_ns=1 * MS, keep_order=keep_order)
        for i in range(1000):
            made.offer(i * 10 * US, number(i))
        return [(time, int.from_bytes(frame[:4], "big")) for time, frame in arrivals(made)]

    ordered, free = run(True), run(False)
    assert [i for _, i in ordered] == list(range(1000))
    assert [i for _, i in free] != list(range(1000))
    assert sorted(i for _, i in free) == list(range(1000))
    extra = [time - 1 * MS - i * 10 * US for time, i in free]
    assert min(extra) >= 0
    assert max(extra) <= 1 * MS
    assert 0.45 * MS < sum(extra) / len(extra) < 0.55 * MS
    assert run(False) == free  # one seed, one run


def test_a_rate_spreads_frames_and_its_queue_drops_the_tail() -> None:
    made = link(rate=1514e3, queue_bytes=4 * 1514, delay_ns=5 * MS)  # a frame takes a millisecond
    for i in range(6):
        made.offer(0, number(i))
    assert [(t, f[3]) for t, f in arrivals(made)] == [((6 + i) * MS, i) for i in range(4)]
    counters = made.counters()
    assert counters["dropped_queue"] == 2
    assert counters["max_queue_bytes"] == 4 * 1514
    made.offer(20 * MS, number(9))  # an idle link saves nothing up
    assert [t for t, _ in arrivals(made)] == [26 * MS]


def test_a_rate_that_changes_meets_what_waits_already() -> None:
    made = link(rate=1514e3, queue_bytes=100_000)
    for i in range(4):
        made.offer(0, number(i))
    made.set(500 * US, rate=2 * 1514e3, queue_bytes=100_000)  # half of the first is out
    assert [t for t, _ in arrivals(made)] == [750 * US, 1250 * US, 1750 * US, 2250 * US]
    for i in range(3):
        made.offer(10 * MS, number(i))
    made.set(10 * MS)  # no rate any more
    assert [t for t, _ in arrivals(made)] == [10 * MS] * 3


@given(
    steps=st.lists(st.tuples(st.integers(0, 3 * MS), st.integers(64, 1514)), max_size=200),
    rate=st.floats(1e5, 1e8),
    queue=st.integers(2048, 50_000),
)
def test_no_rate_is_ever_exceeded_and_no_queue(
    steps: list[tuple[int, int]], rate: float, queue: int
) -> None:
    made = link(rate=rate, queue_bytes=queue)
    now, out = 0, []
    for wait, size in steps:
        now += wait
        while (time := made.next_event()) is not None and time <= now:
            while (frame := made.take(time)) is not None:
                out.append((time, len(frame)))
        made.offer(now, bytes(size))
    out += [(time, len(frame)) for time, frame in arrivals(made)]
    counters = made.counters()
    assert counters["max_queue_bytes"] <= max(queue, 1514)
    assert len(out) + counters["dropped_queue"] == len(steps) == counters["packets"]
    for (before, _), (time, size) in pairwise(out):
        assert (time - before) * 1e-9 * rate >= size - 1


@pytest.mark.parametrize("loss", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("burst", [0.0, 12.0])
def test_losses_have_the_share_and_the_run_length_asked_for(loss: float, burst: float) -> None:
    made = link(loss=loss, loss_burst=burst)
    count = 100_000
    for i in range(count):
        made.offer(i, number(i, 60))
    passed = {int.from_bytes(frame[:4], "big") for _, frame in arrivals(made)}
    lost = [i not in passed for i in range(count)]
    assert made.counters()["dropped_loss"] == sum(lost)
    assert sum(lost) / count == pytest.approx(loss, rel=0.12)
    runs = [len(list(run)) for bad, run in groupby(lost) if bad]
    assert sum(runs) / len(runs) == pytest.approx(burst or 1 / (1 - loss), rel=0.12)


def test_a_cut_link_loses_all_and_heals() -> None:
    made = link(delay_ns=1 * MS)
    made.offer(0, number(0))
    made.set(10, loss=1.0, loss_burst=5.0, delay_ns=1 * MS)
    made.offer(20, number(1))
    made.set(30, delay_ns=1 * MS)
    made.offer(40, number(2))
    assert [f[3] for _, f in arrivals(made)] == [0, 2]


def test_memory_is_bounded() -> None:
    made = link(delay_ns=1 * S, memory_bytes=200_000)
    for i in range(1000):
        made.offer(i, number(i))
        assert made.counters()["held_bytes"] <= 200_000
    assert made.counters()["dropped_memory"] == 1000 - 200_000 // 1514
    assert len(list(arrivals(made))) == 200_000 // 1514


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"delay_ns": -1}, "delay"),
        ({"jitter_ns": 61 * S}, "jitter"),
        ({"rate": -1.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": 1e6, "queue_bytes": 100}, "queue_bytes"),
        ({"ecn_bytes": 5000}, "ecn_bytes"),
        ({"rate": 1e6, "queue_bytes": 5000, "ecn_bytes": 5000}, "ecn_bytes"),
        ({"loss": 1.1}, "loss"),
        ({"loss_burst": 0.5}, "loss_burst"),
        ({"loss": 0.9, "loss_burst": 2.0}, r"loss_burst is 2\.0.* with loss 0\.9"),
        ({"memory_bytes": 1}, "memory_bytes"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        link(**options)


# ---------------------------------------------------------------------------- trains

UDP, TCP4, TCP6 = 5, 1, 4
MSS = 1000


def checksum(data: bytes, start: int = 0) -> int:
    """RFC 1071, not complemented."""
    total = start + sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) & ~1]))
    total += data[-1] << 8 if len(data) % 2 else 0
    while total > 0xFFFF:
        total = (total >> 16) + (total & 0xFFFF)
    return total


def train(kind: int, payload: bytes) -> bytes:
    """A train as the kernel hands it to a TAP device, checksums left to be finished."""
    transport = 14 + (40 if kind == TCP6 else 20)
    if kind == UDP:
        inner = struct.pack("!HHHH", 1, 2, 8 + len(payload), 0)
        offset, protocol = 6, 17
    else:
        flags = 0x80 | 0x10 | 0x08 | 0x01  # CWR ACK PSH FIN
        inner = struct.pack("!HHIIBBHHH", 1, 2, 0xFFFFFF00, 5, 8 << 4, flags, 64, 0, 0)
        inner += bytes(12)  # options
        offset, protocol = 16, 6
    length = len(inner) + len(payload)
    if kind == TCP6:
        addresses = bytes(range(32))
        ip = struct.pack("!IHBB", 6 << 28, length, protocol, 64) + addresses
    else:
        addresses = bytes([10, 77, 0, 1, 10, 77, 0, 2])
        ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, 65_530, 0, 64, protocol, 0)
        ip += addresses
        ip = ip[:10] + struct.pack("!H", ~checksum(ip) & 0xFFFF) + ip[12:]
    partial = checksum(addresses, length + protocol)
    inner = inner[:offset] + struct.pack("!H", partial) + inner[offset + 2 :]
    ethernet = bytes(12) + (b"\x86\xdd" if kind == TCP6 else b"\x08\x00")
    headers = ethernet + ip + inner
    vnet = struct.pack("=BBHHHH", 1, kind, len(headers), MSS, transport, offset)
    return vnet + headers + payload


def parse(frame: bytes) -> dict[str, Any]:
    """What a receiver finds in a frame; checks lengths and checksums on the way."""
    flags, kind, header, segment, transport, offset = struct.unpack("=BBHHHH", frame[:10])
    assert flags == 1
    proper = frame[10:]
    version6 = proper[12:14] == b"\x86\xdd"
    ip, inner, payload = proper[14:transport], proper[transport:header], proper[header:]
    length = len(inner) + len(payload)
    if version6:
        assert struct.unpack("!H", ip[4:6])[0] == length
        protocol, addresses, identity = ip[6], ip[8:40], 0
    else:
        assert struct.unpack("!H", ip[2:4])[0] == 20 + length
        assert checksum(ip) == 0xFFFF
        protocol, addresses, identity = ip[9], ip[12:20], struct.unpack("!H", ip[4:6])[0]
    partial = struct.unpack("!H", inner[offset : offset + 2])[0]
    assert partial == checksum(addresses, length + protocol)
    found = {"kind": kind, "segment": segment, "payload": payload, "id": identity}
    if protocol == 6:
        found["sequence"] = struct.unpack("!I", inner[4:8])[0]
        found["flags"] = inner[13]
    else:
        assert struct.unpack("!H", inner[4:6])[0] == length
    return found


@pytest.mark.parametrize("kind", [UDP, TCP4, TCP6])
def test_a_train_counts_as_its_packets_and_passes_whole(kind: int) -> None:
    whole = train(kind, bytes(9 * MSS + 1))
    headers = len(whole) - 10 - 9 * MSS - 1
    made = link(headed=True, rate=1e6, queue_bytes=100_000)
    made.offer(0, whole)
    assert made.counters()["packets"] == 10
    wire = 9 * MSS + 1 + 10 * headers
    assert made.counters()["bytes"] == wire
    assert list(arrivals(made)) == [(wire * 1000, whole)]


@pytest.mark.parametrize("kind", [UDP, TCP4, TCP6])
def test_of_a_train_what_lies_between_losses_goes_on(kind: int) -> None:
    payload = bytes(i % 251 for i in range(39 * MSS + 17))
    packets = [payload[i : i + MSS] for i in range(0, len(payload), MSS)]
    ends = {"whole": 0, "tail": 0}
    for seed in range(40):
        made = link(headed=True, seed=seed, loss=0.2, loss_burst=2.0)
        made.offer(0, train(kind, payload))
        next_packet = received = 0
        for _, frame in arrivals(made):
            found = parse(frame)
            first = next(
                i for i in range(next_packet, 40) if found["payload"].startswith(packets[i])
            )
            count = -(-len(found["payload"]) // MSS)
            assert found["payload"] == b"".join(packets[first : first + count])
            assert (found["kind"], found["segment"]) == ((kind, MSS) if count > 1 else (0, 0))
            if kind != TCP6:
                assert found["id"] == (65_530 + first) & 0xFFFF
            if kind != UDP:
                assert found["sequence"] == (0xFFFFFF00 + first * MSS) & 0xFFFFFFFF
                last = first + count == 40
                assert bool(found["flags"] & 0x09) == last  # PSH, FIN
                assert bool(found["flags"] & 0x80) == (first == 0)  # CWR
                ends["tail"] += last
            next_packet = first + count + 1  # what follows a run is lost
            received += count
        counters = made.counters()
        assert received == counters["delivered"] == 40 - counters["dropped_loss"]
        assert counters["held_bytes"] == 0
        ends["whole"] += received
    assert 0.7 * 1600 < ends["whole"] < 0.9 * 1600


def test_of_a_train_the_queue_takes_as_many_packets_as_find_room() -> None:
    whole = train(UDP, bytes(20 * MSS))
    made = link(headed=True, rate=1e6, queue_bytes=8 * (MSS + 42))
    made.offer(0, whole)
    made.offer(0, whole)
    assert made.counters()["dropped_queue"] == 32
    ((_, frame),) = arrivals(made)
    assert len(parse(frame)["payload"]) == 8 * MSS


@given(
    kind=st.sampled_from([UDP, TCP4, TCP6]),
    changes=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 255)), max_size=6),
    length=st.integers(0, 300),
    seed=st.integers(0, 100),
)
def test_a_train_that_is_none_passes_or_is_lost(
    kind: int, changes: list[tuple[int, int]], length: int, seed: int
) -> None:
    made = link(headed=True, seed=seed, loss=0.5, rate=1e6, queue_bytes=4096)
    frame = bytearray(train(kind, bytes(3 * MSS)))
    for place, value in changes:
        frame[place] = value
    made.offer(0, bytes(frame[:length]))
    made.offer(0, bytes(frame))
    counters = made.counters()
    received = len(list(arrivals(made)))
    assert received <= counters["packets"]
    assert made.counters()["held_bytes"] == 0


# ---------------------------------------------------------------------------- marks

NOT_ECT, ECT1, ECT0, CE = 0, 1, 2, 3


def with_ecn(frame: bytes, ecn: int, dscp: int = 46) -> bytes:
    """A headed frame with this traffic class, its checksum right."""
    changed = bytearray(frame)
    traffic = dscp << 2 | ecn
    if frame[22:24] == b"\x86\xdd":
        changed[24] = 0x60 | traffic >> 4
        changed[25] = (traffic & 0xF) << 4 | 0x0A  # and part of a flow label
        return bytes(changed)
    changed[25] = traffic
    changed[34:36] = b"\0\0"
    changed[34:36] = struct.pack("!H", ~checksum(bytes(changed[24:44])) & 0xFFFF)
    return bytes(changed)


def traffic_class(frame: bytes) -> int:
    if frame[22:24] == b"\x86\xdd":
        assert frame[24] >> 4 == 6
        assert frame[25] & 0xF == 0x0A
        return (frame[24] & 0xF) << 4 | frame[25] >> 4
    assert checksum(frame[24:44]) == 0xFFFF
    return frame[25]


@pytest.mark.parametrize("kind", [UDP, TCP4, TCP6])
@pytest.mark.parametrize("ecn", [NOT_ECT, ECT1, ECT0, CE])
def test_packets_that_come_above_the_threshold_are_marked(kind: int, ecn: int) -> None:
    packet = with_ecn(train(kind, bytes(MSS)), ecn)
    size = len(packet) - 10
    made = link(headed=True, rate=1e6, queue_bytes=20 * size, ecn_bytes=5 * size)
    for _ in range(20):
        made.offer(0, packet)
    marked = 14 if ecn else 0  # the first five find no more, the sixth exactly as much
    assert made.counters()["marked"] == marked
    assert made.counters()["queue_bytes"] == 20 * size
    found = [frame for _, frame in arrivals(made)]
    after = CE if ecn else NOT_ECT
    assert [traffic_class(frame) for frame in found] == [46 << 2 | ecn] * 6 + [46 << 2 | after] * 14
    assert all(frame[26:34] + frame[36:] == packet[26:34] + packet[36:] for frame in found)
    made.offer(100 * S, packet)  # an empty queue marks nothing
    assert [traffic_class(frame) for _, frame in arrivals(made)] == [46 << 2 | ecn]
    assert made.counters()["queue_bytes"] == 0


@pytest.mark.parametrize("kind", [UDP, TCP4, TCP6])
@pytest.mark.parametrize("ecn", [NOT_ECT, ECT0])
def test_of_a_train_those_above_the_threshold_are_marked(kind: int, ecn: int) -> None:
    whole = with_ecn(train(kind, bytes(i % 251 for i in range(10 * MSS))), ecn)
    size = len(whole) - 10 - 9 * MSS
    made = link(headed=True, rate=1e6, queue_bytes=15 * size, ecn_bytes=4 * size)
    made.offer(0, whole)
    made.offer(0, whole)
    counters = made.counters()
    assert counters["marked"] == (10 if ecn else 0)
    assert counters["dropped_queue"] == 5
    assert counters["dropped_queue_bytes"] == 5 * size
    found = [frame for _, frame in arrivals(made)]
    shapes = [(len(parse(frame)["payload"]) // MSS, traffic_class(frame) & 3) for frame in found]
    assert shapes == ([(5, ECT0), (5, CE), (5, CE)] if ecn else [(10, NOT_ECT), (5, NOT_ECT)])
    payload = b"".join(parse(frame)["payload"] for frame in found)
    assert payload == whole[-10 * MSS :] + whole[-10 * MSS : -5 * MSS]


@given(
    kind=st.sampled_from([UDP, TCP4, TCP6]),
    changes=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 255)), max_size=6),
    length=st.integers(0, 300),
    headed=st.booleans(),
)
def test_marking_reads_no_further_than_a_frame(
    kind: int, changes: list[tuple[int, int]], length: int, headed: bool
) -> None:
    made = link(headed=headed, rate=1e6, queue_bytes=60_000, ecn_bytes=1)
    frame = bytearray(with_ecn(train(kind, bytes(3 * MSS)), ECT0))
    for place, value in changes:
        frame[place] = value
    for _ in range(3):
        made.offer(0, bytes(frame))
        made.offer(0, bytes(frame[:length]))
    counters = made.counters()
    assert counters["marked"] <= counters["packets"]
    list(arrivals(made))
    assert made.counters()["held_bytes"] == made.counters()["queue_bytes"] == 0
