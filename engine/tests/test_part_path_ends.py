"""One end of a path, without an endpoint: what is due, farewells, starvation, the stash, silence;
and two ends that talk over a network which loses, repeats and reorders.
"""

import heapq
import random

import pytest
from _parts import NEVER, PathEnd, StartedOps, failure_of_silence

from part_kit import MS, SECOND, US

ACK, PING, PONG, ERROR, BYE = 16, 17, 18, 19, 20


def kind_of(datagram: bytes) -> int:
    return datagram[1]


def signals(end: PathEnd, now: int) -> list[int]:
    """The kinds of all that the end sends now beside packets of ops."""
    kinds = []
    while (datagram := end.write_signal(now)) is not None:
        kinds.append(kind_of(datagram))
    return kinds


# ---------------------------------------------------------------------------- what is due


def test_a_backlog_without_credit_is_starved_until_it_ends() -> None:
    end = PathEnd(0)
    assert signals(end, 0) == [PING]
    end.adapt(0, 0)
    assert not end.awaits()
    credit = end.credit()
    for _ in range(credit):
        end.push(10)
        end.write_control(0)
    assert end.credit() == 0
    end.adapt(3, 5 * MS)
    assert end.awaits()
    due = end.next_check(5 * MS)
    assert due < 5 * SECOND
    end.on_timer(3, due)
    end.take_lost()
    assert end.most_packets(True, 0) == 2  # probes go whatever credit and window say
    assert end.most_packets(False, 100) == 0
    end.adapt(0, due)
    assert end.probes() == 0


def test_what_is_due_changes_nothing() -> None:
    end = PathEnd(0)
    end.push(10)
    end.write_control(0)
    end.adapt(7, 1 * MS)
    state = (end.in_flight(), end.probes(), end.credit(), end.awaits())
    due = (end.next_send(), end.next_check(0))
    for _ in range(3):
        assert (end.next_send(), end.next_check(0)) == due
    assert (end.in_flight(), end.probes(), end.credit(), end.awaits()) == state


def test_no_more_goes_than_credit_and_window_allow() -> None:
    end = PathEnd(0)
    credit = end.credit()
    assert end.most_packets(False, 0) == 0
    assert end.most_packets(False, 1) <= 1
    assert end.most_packets(False, 1 << 20) <= credit


def test_a_control_frame_is_acknowledged_at_once() -> None:
    end, peer = PathEnd(0), PathEnd(1)
    signals(peer, 0)
    end.push(10)
    datagram = end.write_control(0)
    assert datagram is not None
    assert peer.take_packet(datagram, 1 * MS) == 1
    assert peer.next_send() == 0
    assert signals(peer, 1 * MS) == [ACK]
    assert peer.take_packet(datagram, 2 * MS) == 0  # a duplicate is acknowledged again
    assert signals(peer, 2 * MS) == [ACK]


# ---------------------------------------------------------------------------- peers come and go


def test_the_first_pong_connects() -> None:
    end, peer = PathEnd(0), PathEnd(1)
    ping = end.write_signal(0)
    assert ping is not None
    assert len(ping) == 1472  # so that a path which does not carry it shows at the start
    assert peer.take_ping(ping, False, 100 * US)
    pong = peer.write_signal(100 * US)
    assert pong is not None
    assert kind_of(pong) == PONG
    assert end.take_ping(pong, True, 200 * US)
    assert end.connected()


def test_a_failed_end_sends_three_errors_and_says_goodbye_as_often() -> None:
    end = PathEnd(0)
    signals(end, 0)
    end.fail(0)
    sent = []
    for now in range(0, 200 * MS, MS):
        sent += [kind for kind in signals(end, now) if kind != PING]
    assert sent == [ERROR] * 3


def test_an_end_that_leaves_says_so_to_a_peer_it_never_heard_a_few_times() -> None:
    end = PathEnd(0)
    signals(end, 0)
    end.leave(0)
    sent = []
    for now in range(0, 500 * MS, MS):
        sent += [kind for kind in signals(end, now) if kind != PING]
    assert sent == [BYE] * 3
    assert end.next_send() > 500 * MS


@pytest.mark.parametrize(("bytes", "fails"), [(1471, False), (256, False), (255, True)])
def test_a_limit_below_the_least_datagram_ends_the_job(bytes: int, fails: bool) -> None:
    end = PathEnd(0)
    signals(end, 0)
    why = end.lower_limit(bytes, MS)
    assert bool(why) == fails
    if not fails:
        assert end.next_send() == 0  # a ping says so


# ---------------------------------------------------------------------------- ops to come


def test_packets_of_ops_to_come_are_kept_while_memory_allows() -> None:
    end = PathEnd(0, memory=1 << 16)
    kept = 0
    while end.keep(5, bytes(1000)):
        kept += 1
    assert 0 < end.held() <= (1 << 16) // 8
    assert not end.keep(6, bytes(1000))
    assert end.release(6) == 0
    assert end.release(5) == kept
    assert end.held() == 0
    assert end.keep(6, bytes(1000))


@pytest.mark.parametrize("seed", range(5))
def test_early_chunks_leave_as_much_room_as_their_ops_still_take(seed: int) -> None:
    draw = random.Random(seed)
    started, counts = StartedOps(), dict.fromkeys(range(4), 0)
    for _ in range(500):
        op = draw.randrange(4)
        if draw.random() < 0.9:
            started.add_early(op)
            counts[op] += 1
        else:
            started.forget_early(op)
            counts[op] = 0
        assert started.early_room(100) == max(0, 100 - sum(counts.values())), f"seed {seed}"


def test_an_op_is_early_until_the_peer_has_begun_it() -> None:
    end = PathEnd(0)
    assert end.is_early(4096)
    end.start(8192)
    assert not end.is_early(4096)
    assert end.is_early(8192)


# ---------------------------------------------------------------------------- silence

TIMEOUT = 10 * SECOND


@pytest.mark.parametrize(
    ("heard", "now", "rank", "cause"),
    [
        ([0, 7], 10, None, None),
        ([0, 7], 11, 1, "silence"),  # one of several: it is named
        ([0, 5], 11, 0, "silence"),  # the other one may not have been heard since, either
        ([0], 11, -1, "silence"),  # the only one: either side may be the cause
        ([0, 0, 0], 11, 0, "silence"),  # all: this host is cut off
        ([0, 0, 8], 11, 1, "silence"),  # two of three
    ],
)
def test_who_is_silent_for_the_time_out_is_named(
    heard: list[int], now: int, rank: int | None, cause: str | None
) -> None:
    peers = [(peer + 1, at * SECOND, False) for peer, at in enumerate(heard)]
    text, named, why = failure_of_silence(peers, 4, TIMEOUT, now * SECOND)
    if rank is None:
        assert text == ""
    else:
        assert (named, why) == (rank, cause)
        silent = [peer for peer, at, _ in peers if at == 0 and rank != 0]
        assert all(f"rank {peer}" in text for peer in silent)


def test_a_peer_that_left_and_still_owes_results_has_left() -> None:
    text, rank, cause = failure_of_silence([(2, 0, True)], 4, TIMEOUT, 11 * SECOND)
    assert (rank, cause) == (2, "left")
    assert "peer_timeout=10" in text


# ---------------------------------------------------------------------------- two ends


@pytest.mark.parametrize("seed", range(8))
def test_frames_arrive_whatever_the_network_does_and_leave_flight_once(seed: int) -> None:
    draw = random.Random(seed)
    ends = [PathEnd(0), PathEnd(1)]
    left: set[int] = set()  # numbers of the first end that are in flight no more
    network: list[tuple[int, int, int, bytes]] = []  # time, order, destination, datagram
    taken: set[int] = set()
    order, now, last = 0, 0, 0
    loss = draw.choice([0.0, 0.1, 0.3, 0.6])
    until = 3 * SECOND
    heap_end = until + 20 * SECOND
    pushed = 0
    while now < heap_end:
        if now < until and draw.random() < 0.05 and pushed < 400:
            ends[0].push(draw.randrange(1, 1000))
            pushed += 1
        for index, end in enumerate(ends):
            if end.next_check(last) <= now:
                end.on_timer(0, now)
                for number in end.take_lost():
                    if index == 0:
                        assert number not in left, f"seed {seed}"
                        left.add(number)
                last = now
            end.adapt(0, now)
            datagrams = []
            while end.next_send() <= now and (signal := end.write_signal(now)) is not None:
                datagrams.append(signal)
            while (frame := end.write_control(now)) is not None:
                datagrams.append(frame)
            for datagram in datagrams:
                if now < until and draw.random() < loss:
                    continue
                for _ in range(1 + (draw.random() < 0.05)):
                    delay = draw.randrange(100 * US, 2 * MS)
                    heapq.heappush(network, (now + delay, order, 1 - index, datagram))
                    order += 1
        assert ends[0].in_flight() == ends[0].sent() - len(left), f"seed {seed}"
        if ends[0].in_flight():
            assert ends[0].next_check(now) <= now + 20 * SECOND
        if now >= until and ends[0].open_frames() == 0:
            break
        now += draw.choice([100, 300, 1_000]) * US if network else 5 * MS
        while network and network[0][0] <= now:
            at, _, index, datagram = heapq.heappop(network)
            end, kind = ends[index], kind_of(datagram)
            if kind == ACK:
                acked = end.take_ack(datagram, at)
                assert acked is not None, f"seed {seed}"
                assert len(set(acked)) == len(acked)
                left.update(acked)
                lost = end.take_lost()
                assert not left & set(lost), f"seed {seed}"
                left.update(lost)
            elif kind in (PING, PONG):
                assert end.take_ping(datagram, kind == PONG, at)
            else:
                number = end.take_packet(datagram, at)
                assert number not in taken, f"seed {seed}"
                if number:
                    taken.add(number)
    assert ends[0].open_frames() == 0, f"seed {seed}"
    assert now < NEVER
