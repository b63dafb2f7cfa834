"""Authenticated engines on real sockets, and one who reads and writes what travels between them."""

import pytest

from engine_kit import SECOND, all_reduce, connected, sum_exactly
from gradwire import _engine
from hostile import MODES, Hostile, authentic, pair
from scenarios import gradients, plan, same_bits


@pytest.mark.parametrize("cipher", ["aes-128-gcm", "chacha20-poly1305"])
@pytest.mark.parametrize("auth", MODES)
def test_authenticated_engines_sum_to_the_bit(auth: str, cipher: str) -> None:
    with pair(auth=auth, cipher=cipher) as engines:
        for op in range(3):
            sum_exactly(engines, op, 60_000)
        for each in engines:
            assert each.counters()["forged"] == 0
            assert each.counters()["malformed"] == 0


def test_a_train_is_as_long_as_the_kernel_takes() -> None:
    """Of datagrams whose tags make the most of it: 64 of them leave no room."""
    engines = [authentic(i, 2, auth="whole", datagram_bytes=1016) for i in range(2)]
    with connected(engines):
        for op in range(2):
            sum_exactly(engines, op, 200_000)
        for each in engines:
            assert each.counters()["send_too_long"] == 0
            assert each.features()["udp_segment"]


@pytest.mark.parametrize("auth", MODES)
def test_who_reads_and_writes_the_wire_changes_no_bit(auth: str) -> None:
    """Where headers alone are authenticated, but for the values of chunks."""
    hostile = Hostile(auth)
    with pair(hostile, auth=auth) as engines:
        for op in range(6):
            sum_exactly(engines, op, 30_000)
        counters = [each.counters() for each in engines]
    assert hostile.sent > 500
    assert sum(each["forged"] for each in counters) > 100
    assert sum(each["replayed"] for each in counters) > 100
    assert sum(each["malformed"] for each in counters) == 0


def test_a_chunk_that_cannot_be_decoded_is_sent_again() -> None:
    """Its number is used up, so the true one that follows counts as a replay. The first chunks of a
    result are altered, because nobody gets one before his op has begun."""
    pull, payload_at, most = 2, _engine.TAG_BYTES + 28, 3
    altered = []

    def ones(to: int, datagram: bytes) -> list[bytes]:
        if datagram[_engine.TAG_BYTES + 1] != pull or len(altered) == most:
            return []
        altered.append(datagram)
        return [datagram[:payload_at] + b"\xff" * (len(datagram) - payload_at)]

    values = gradients(2, 60_000, 0)
    results = []
    for more in (ones, lambda to, datagram: []):
        with pair(more, before=True, auth="headers") as engines:
            results += all_reduce(engines, 0, plan(60_000, encoding="int8"), values)
            counters = [each.counters() for each in engines]
        hit = most if more is ones else 0
        assert sum(each["malformed"] for each in counters) == hit
        assert sum(each["replayed"] for each in counters) == hit
    assert all(same_bits(each, results[0]) for each in results)


def test_engines_of_other_secrets_do_not_hear_each_other() -> None:
    engines = [
        authentic(0, 2, auth="whole"),
        authentic(1, 2, auth="whole", secrets=[(bytes(32), bytes(32)), None]),
    ]
    for each in engines:
        each.connect([one.address for one in engines])
    assert engines[0].wait_connected(SECOND // 2) == [1]
    assert not any(peer.heard for each in engines for peer in each.peers())
    assert all(each.counters()["forged"] > 0 for each in engines)
    for each in engines:
        each.fail("over")
        each.close()


def test_an_engine_refuses_secrets_that_are_missing_or_short() -> None:
    for wrong in ([None, None], [None], [None, (b"", b"")]):
        with pytest.raises(ValueError, match="secret"):
            authentic(0, 2, auth="whole", secrets=wrong)
