"""CreditPool and ReceiveController, without an endpoint: demands in, shares of the window out."""

import pytest
from _parts import (
    Allowance,
    Arriving,
    Credit,
    CreditPool,
    DelayWindow,
    GrantSlots,
    ReceiveController,
    Rtt,
)
from hypothesis import given
from hypothesis import strategies as st

from part_kit import MS, SECOND, US

WIRE = 1_000  # bytes on the wire of a packet


def window_of(packets: int) -> DelayWindow:
    return DelayWindow(packets * WIRE, 4 * WIRE, 64e6, MS)


class Receiver:
    """A pool with its senders' credit."""

    def __init__(self, senders: int) -> None:
        self.standing = CreditPool.standing_for(senders)
        self.pool = CreditPool(senders, self.standing)
        self.credits = [Credit() for _ in range(senders)]

    def ask(self, demands: list[int]) -> None:
        for credit, demand in zip(self.credits, demands, strict=True):
            self.pool.ask(credit, demand)

    def shares(self, packets: int) -> list[int]:
        window = window_of(packets)
        for credit in self.credits:
            self.pool.share(credit, window, WIRE)
        return [credit.share for credit in self.credits]


# ---------------------------------------------------------------------------- standing credit


@pytest.mark.parametrize(
    ("senders", "standing"), [(1, 12), (2, 12), (3, 8), (4, 6), (24, 1), (64, 1)]
)
def test_the_standing_credit_of_all_senders_together_is_24_packets(
    senders: int, standing: int
) -> None:
    assert CreditPool.standing_for(senders) == standing


@pytest.mark.parametrize("senders", [4, 64])
def test_senders_without_a_backlog_have_the_standing_credit(senders: int) -> None:
    receiver = Receiver(senders)
    assert receiver.shares(300) == [receiver.standing] * senders


def test_the_standing_credit_of_idle_senders_is_kept_of_the_window() -> None:
    receiver = Receiver(4)
    receiver.ask([1_000, 0, 0, 0])
    assert receiver.shares(100) == [100 - 3 * 6, 6, 6, 6]


def test_idle_senders_keep_at_most_half_of_the_window() -> None:
    receiver = Receiver(64)
    receiver.ask([1_000] + [0] * 63)
    assert receiver.shares(100)[0] == 50


# ---------------------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("demands", "packets", "shares"),
    [
        ([1_000, 2_000, 3_000, 4_000], 300, [10, 40, 90, 160]),
        ([1_000] * 4, 300, [75] * 4),
        ([20] * 4, 300, [20] * 4),  # no more than is asked for
        ([100, 10_000, 10_000, 10_000], 300, [6, 99, 99, 99]),  # no less than the standing credit
    ],
)
def test_shares_follow_the_square_of_the_demands(
    demands: list[int], packets: int, shares: list[int]
) -> None:
    receiver = Receiver(4)
    receiver.ask(demands)
    assert receiver.shares(packets) == shares


@pytest.mark.parametrize("senders", [4, 64])
def test_the_senders_together_get_the_window_and_the_standing_credit_at_most(
    senders: int,
) -> None:
    receiver = Receiver(senders)
    receiver.ask([1_000 * (1 + number % 7) for number in range(senders)])
    together = sum(receiver.shares(2_000))
    assert 2_000 - senders <= together <= 2_000 + senders * receiver.standing


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 65_535)), min_size=10, max_size=60))
def test_after_any_course_of_demands_shares_are_those_of_the_last_ones(
    asks: list[tuple[int, int]],
) -> None:
    receiver, anew = Receiver(8), Receiver(8)
    demands = [0] * 8
    for sender, demand in asks:
        receiver.pool.ask(receiver.credits[sender], demand)
        demands[sender] = demand
    anew.ask(demands)
    assert receiver.shares(500) == anew.shares(500)


@pytest.mark.parametrize(("senders", "short", "share"), [(4, 6, 200), (2, 12, 400), (1, 12, 400)])
def test_on_a_long_path_the_window_is_granted_unasked_and_half_of_it_to_a_lone_sender(
    senders: int, short: int, share: int
) -> None:
    receiver = Receiver(senders)
    window = window_of(800)
    receiver.pool.share(receiver.credits[0], window, WIRE, rtprop=5 * MS)
    assert receiver.credits[0].share == short
    receiver.pool.share(receiver.credits[0], window, WIRE, rtprop=40 * MS)
    assert receiver.credits[0].share == share
    assert receiver.credits[0].part >= share


def emptied_by_loss() -> DelayWindow:
    """A window after 300 ms at full rate and some more with little arriving, under heavy loss."""
    window = DelayWindow(300 * WIRE, 4 * WIRE, 300 * WIRE, MS)
    now = 0
    for step in range(500):
        now += MS
        heavy = step >= 300
        window.sample(20_000 if heavy else 100_000, 0, MS, MS, heavy, now)
    return window


def test_a_share_stretches_by_the_senders_loss_when_little_arrives() -> None:
    receiver = Receiver(4)
    receiver.ask([40, 0, 0, 0])
    window = emptied_by_loss()
    assert not window.ramps()
    for loss, share in [(0.0, 40), (0.5, 80), (0.75, 160)]:
        receiver.pool.share(receiver.credits[0], window, WIRE, loss=loss)
        assert receiver.credits[0].share == share
    # A window of 300 packets is not exceeded for a sender that has shown no higher rate.
    receiver.ask([10_000, 0, 0, 0])
    receiver.pool.share(receiver.credits[0], window, WIRE, loss=0.9)
    assert receiver.credits[0].share == window.bytes() // WIRE


# ---------------------------------------------------------------------------- grants


def test_the_grant_follows_what_has_arrived_and_is_never_taken_back() -> None:
    receiver = Receiver(4)
    for demand, packets, largest, granted in [
        (0, 300, 0, 6),
        (100, 300, 0, 100),
        (100, 300, 50, 150),
        (100, 60, 60, 150),  # a smaller share: no more is granted, and nothing taken back
        (100, 300, 70, 170),
    ]:
        receiver.pool.ask(receiver.credits[0], demand)
        receiver.pool.share(receiver.credits[0], window_of(packets), WIRE, largest=largest)
        assert receiver.credits[0].granted == granted


def test_a_stalled_sender_gets_no_credit_until_there_is_room_again() -> None:
    receiver = Receiver(4)
    receiver.ask([100, 0, 0, 0])
    credit, window = receiver.credits[0], window_of(300)
    assert not receiver.pool.share(credit, window, WIRE, stalled=True)
    assert credit.granted == 0
    assert receiver.pool.share(credit, window, WIRE)
    assert credit.granted == 100


@pytest.mark.parametrize(
    ("demand", "sent", "largest", "hurry"),
    [
        (100, 100, 49, False),  # more than half of the share is left
        (100, 100, 50, True),
        (0, 6, 5, False),  # without a backlog the next ACK is soon enough
    ],
)
def test_an_ack_goes_at_once_when_a_sender_may_run_out_of_credit(
    demand: int, sent: int, largest: int, hurry: bool
) -> None:
    receiver = Receiver(4)
    credit = receiver.credits[0]
    receiver.pool.ask(credit, demand)
    credit.granted_sent = sent
    assert receiver.pool.share(credit, window_of(300), WIRE, largest=largest) == hurry


@pytest.mark.parametrize(("demand", "hurry"), [(2, False), (3, True)])
def test_no_ack_goes_at_once_for_one_more_packet(demand: int, hurry: bool) -> None:
    receiver = Receiver(24)
    credit = receiver.credits[0]
    receiver.pool.ask(credit, demand)
    credit.granted_sent = 51
    assert receiver.pool.share(credit, window_of(300), WIRE, largest=50) == hurry


@pytest.mark.parametrize(
    ("credit", "following", "left"), [(0, 1, 0), (10, 1, 10), (10, 10, 1), (10, 11, 0), (10, 90, 0)]
)
def test_a_sender_may_send_up_to_the_highest_number_allowed(
    credit: int, following: int, left: int
) -> None:
    allowance = Allowance()
    allowance.credit = credit
    assert allowance.left(following) == left


# ---------------------------------------------------------------------------- slots


def asked(demands: list[int]) -> GrantSlots:
    slots = GrantSlots(len(demands))
    for peer, demand in enumerate(demands):
        slots.ask(peer, 0, demand)
    return slots


def test_two_senders_have_slots_at_a_time_those_that_want_most() -> None:
    slots = asked([10, 40, 0, 30, 40])
    for peer in (1, 4):
        assert slots.next(0) == peer
        assert slots.grant(peer, 20, MS)
    assert slots.next(0) is None
    assert slots.due() == MS


def test_a_slot_is_free_once_all_that_was_granted_has_arrived() -> None:
    slots = asked([40, 30, 20])
    for _ in range(2):
        slots.grant(slots.next(0), 20, MS)
    slots.ask(0, 19, 21)
    assert slots.next(0) is None
    slots.ask(0, 20, 20)
    assert slots.next(0) == 0


def test_a_slot_is_free_when_what_was_granted_should_have_arrived() -> None:
    """And who was not heard of meanwhile gets none before."""
    slots = asked([40, 30, 20])
    for _ in range(2):
        slots.grant(slots.next(0), 20, MS)
    assert slots.next(MS - 1) is None
    assert [slots.next(MS), slots.next(MS)] == [2, None]
    slots.ask(1, 21, 10)
    assert slots.next(MS) == 1


def test_a_sender_without_a_slot_is_granted_nothing() -> None:
    slots = asked([40, 30, 20])
    assert not slots.grant(0, 20, MS)
    assert slots.next(0) == 0
    assert slots.grant(0, 20, MS)
    assert not slots.grant(0, 40, MS)  # once a slot


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 400), st.integers(0, 9)), min_size=40),
)
def test_after_any_course_of_events_two_senders_have_slots_at_most(
    events: list[tuple[int, int, int]],
) -> None:
    slots = GrantSlots(8)
    ends = {}  # by peer: the end of its grant and the time until which it counts
    now = 0
    for peer, demand, later in events:
        now += later * 10 * US
        end, _ = ends.pop(peer, (0, 0))
        slots.ask(peer, end, demand)
        while (following := slots.next(now)) is not None:
            assert following not in {p for p, (_, until) in ends.items() if now < until}
            ends[following] = (demand + 20, now + MS)
            assert slots.grant(following, *ends[following])
        assert sum(now < until for _, until in ends.values()) <= 2


# ---------------------------------------------------------------------------- the controller


def controller(*, workers: int = 4, server: bool = False) -> ReceiveController:
    return ReceiveController(
        endpoints=workers + 1, workers=workers, wire_bytes=WIRE, target=MS, server=server
    )


def path_of(rtprop: int) -> Rtt:
    rtt = Rtt()
    rtt.sample(rtprop, 0, 0)
    return rtt


@pytest.mark.parametrize(("workers", "packets"), [(4, 24), (64, 64)])
def test_the_first_window_holds_what_peers_may_send_unasked(workers: int, packets: int) -> None:
    assert controller(workers=workers).window().bytes() == packets * WIRE


def test_marks_shrink_the_receive_window_once_a_round() -> None:
    receiver = controller(workers=64)
    receiver.arrived(Arriving(), 0, WIRE)
    for now, shrinks in [(MS, True), (2 * MS - 1, False), (2 * MS, True)]:
        assert receiver.marked(MS, now) == shrinks


def test_the_queue_is_the_mean_over_bytes_of_what_has_arrived_since_the_last_sample() -> None:
    receiver, source, rtt = controller(), Arriving(), path_of(MS)
    for now in range(10 * MS, 100 * MS, 10 * MS):
        receiver.arrived(source, 100 * US, 1_000)
        receiver.arrived(source, 400 * US, 2_000)
        receiver.sample(1, source, rtt, now)
    assert receiver.window().queue_delay() == 300 * US


def test_the_window_grows_where_a_sender_has_more_and_no_credit() -> None:
    for limited in (False, True):
        receiver, source, rtt = controller(), Arriving(), path_of(MS)
        for now in range(MS, 20 * MS, MS):
            receiver.arrived(source, 0, 10 * WIRE, limited)
            receiver.sample(1, source, rtt, now)
        assert (receiver.window().bytes() > 24 * WIRE) == limited


@pytest.mark.parametrize(
    ("server", "no_room", "granted"),
    [
        (True, False, 6),
        (True, True, 0),
        (False, True, 6),  # a worker's peers limit by themselves what they send early
    ],
)
def test_a_server_gives_no_credit_for_what_it_has_no_room_for(
    server: bool, no_room: bool, granted: int
) -> None:
    receiver, grant = controller(server=server), Credit()
    receiver.share(grant, Arriving(), path_of(MS), 0, no_room=no_room)
    assert grant.granted == granted


def test_eight_peers_have_their_turn_after_each_batch() -> None:
    receiver = controller(workers=19)
    assert receiver.others() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert receiver.others() == [9, 10, 11, 12, 13, 14, 15, 16]
    assert receiver.others() == [17, 18, 19, 0, 1, 2, 3, 4]
    assert controller(workers=2).others() == [1, 2, 0]


@pytest.mark.parametrize(
    ("rtprop", "demand", "outdated"),
    [
        (40 * MS, 100, True),
        (40 * MS, 0, False),
        (5 * MS, 100, False),  # the next report comes at once
    ],
)
def test_a_stop_outdates_a_demand_on_a_long_path(rtprop: int, demand: int, outdated: bool) -> None:
    receiver = controller()
    grant = Credit()
    receiver.credit.ask(grant, demand)
    assert grant.outdated(rtprop) == outdated


def test_a_demand_is_lowered_and_never_raised() -> None:
    receiver = controller()
    grant = Credit()
    receiver.credit.ask(grant, 100)
    for most, demand in [(200, 100), (40, 40), (1 << 40, 40), (0, 0)]:
        receiver.credit.lower(grant, most)
        assert grant.demand == demand


@pytest.mark.parametrize(("lossy", "packets"), [(False, 4), (True, 1)])
def test_three_acks_go_for_each_share_and_one_a_packet_under_heavy_loss(
    lossy: bool, packets: int
) -> None:
    receiver, grant = controller(), Credit()
    receiver.credit.ask(grant, 1_000)
    receiver.share(grant, Arriving(), path_of(MS), 0)
    assert grant.share == 12
    assert ReceiveController.packets_per_ack(grant, lossy) == packets


def test_the_loss_of_a_sender_shows_by_the_numbers_of_its_packets() -> None:
    source = Arriving()
    largest = 0
    for number in range(2, 400, 2):
        source.count(number, largest, WIRE, number * MS)
        largest = number
    assert source.loss(SECOND // 2) == pytest.approx(0.5, rel=0.02)
    assert source.rate() == pytest.approx(WIRE * 1_000, rel=0.05)  # with what is lost
    for number in range(399, 300, -2):
        source.count(number, largest, WIRE, SECOND // 2)  # they were only late
    assert source.loss(SECOND // 2) < 0.05
