"""Sealed datagrams: what opens, what does not, and that no key has a nonce twice."""

import hashlib
import hmac
import itertools
import random

import _parts
import pytest
from _parts import Cipher, Mode, Opener, ReplayWindow, Sealer, Verdict

from gradwire import _engine
from gradwire.core.settings import Settings
from gradwire.transport.keys import KeyMaker

PUSH, ACK = 1, 16
SECRET = bytes(range(32))
MODES = [Mode.headers, Mode.whole, Mode.secret]
CIPHERS = [Cipher.aes_128_gcm, Cipher.chacha20_poly1305]
ALL = list(itertools.product(MODES, CIPHERS))


def head(kind: int = PUSH, size: int = 28) -> bytes:
    return bytes([_engine.PROTOCOL_VERSION, kind, 7, 0]) + bytes(range(size - 4))


def ends(mode: Mode, cipher: Cipher, secret: bytes = SECRET) -> tuple[Sealer, Opener]:
    return Sealer(mode, cipher, secret), Opener(mode, cipher, secret)


@pytest.mark.parametrize(("mode", "cipher"), ALL)
@pytest.mark.parametrize("kind", [PUSH, ACK])
def test_what_a_peer_seals_opens_as_it_was(mode: Mode, cipher: Cipher, kind: int) -> None:
    sealer, opener = ends(mode, cipher)
    for body in (b"", b"x", bytes(1400)):
        first = head(kind)
        sealed = sealer.seal(first, body)
        assert len(sealed) == len(first) + len(body) + _engine.TAG_BYTES
        session = int.from_bytes(first[4:8], "little")
        assert opener.open(sealed, session) == first + body
        if len(body) > 1:
            assert (body in sealed) == (mode != Mode.secret)


@pytest.mark.parametrize(("mode", "cipher"), ALL)
def test_no_bit_may_change_and_no_byte_be_missing(mode: Mode, cipher: Cipher) -> None:
    """But for the values of a chunk, where headers alone are authenticated."""
    sealer, opener = ends(mode, cipher)
    sealed = sealer.seal(head(), b"value")
    free = range(44, 49) if mode == Mode.headers else range(0)
    for at in range(8 * len(sealed)):
        if at // 8 in free:
            continue
        changed = bytearray(sealed)
        changed[at // 8] ^= 1 << at % 8
        assert opener.open(bytes(changed)) in (Verdict.forged, Verdict.replayed), at
    for size in range(len(sealed)):
        assert opener.open(sealed[:size]) == Verdict.forged
    assert opener.open(sealed + b"\0") == Verdict.forged
    assert opener.open(bytes(9000)) == Verdict.forged
    assert isinstance(opener.open(sealed), bytes)


@pytest.mark.parametrize("mode", MODES)
def test_a_datagram_of_another_key_does_not_open(mode: Mode) -> None:
    sealer = Sealer(mode, CIPHERS[0], SECRET)
    opener = Opener(mode, CIPHERS[0], bytes(32))
    assert opener.open(sealer.seal(head(), b"")) == Verdict.forged


def test_a_datagram_opens_once_in_any_order() -> None:
    sealer, opener = ends(Mode.whole, CIPHERS[0])
    sealed = [sealer.seal(head(), bytes([n])) for n in range(200)]
    order = random.Random(1).sample(sealed, len(sealed))
    for each in order:
        assert isinstance(opener.open(each), bytes)
    for each in sealed:
        assert opener.open(each) == Verdict.replayed


def test_the_window_by_a_set() -> None:
    chance = random.Random(2)
    window, seen, highest = ReplayWindow(), set(), 0
    for _ in range(20_000):
        ahead = chance.choice([1, 3, 64, 5_000, 40_000])
        number = max(0, highest + chance.randrange(-ahead, ahead))
        known = number > highest or number + ReplayWindow.NUMBERS > highest
        assert window.fresh(number) == (known and number not in seen)
        if window.fresh(number):
            window.record(number)
            seen.add(number)
            highest = max(highest, number)


def test_each_epoch_has_a_key_of_its_own_and_is_entered_in_turn() -> None:
    sealer, opener = ends(Mode.secret, CIPHERS[0])
    epoch = 1 << _parts.EPOCH_BITS
    zeros = bytes(64)
    first = sealer.seal(head(), zeros)
    sealer.skip(epoch - 3)
    last, newer, newest = (sealer.seal(head(), zeros) for _ in range(3))
    assert isinstance(opener.open(first), bytes)
    assert isinstance(opener.open(newer), bytes)
    assert isinstance(opener.open(last), bytes)
    assert isinstance(opener.open(newest), bytes)
    assert opener.open(first) == Verdict.replayed
    assert len({each[44:108] for each in (first, last, newer, newest)}) == 4
    sealer.skip(2 * epoch)
    assert opener.open(sealer.seal(head(), zeros)) == Verdict.forged  # no correct peer is there


@pytest.mark.parametrize("key", [None, "5a" * 32])
def test_no_key_has_a_nonce_twice(key: str | None) -> None:
    """Over restarts, directions, engines of one process and pairs: the key stream shows both."""
    settings = Settings.build({"key": key}, environment={})
    streams: set[bytes] = set()
    count = 0
    for _life in range(3):
        makers = [KeyMaker(rank, settings) for rank in range(3)]
        hellos = [maker.hello for maker in makers]
        assert len({maker.proof(hellos) for maker in makers}) == 1
        made = [maker.engine_options(hellos, 2)["secrets"] for maker in makers]
        for one, other, core in itertools.product(range(3), range(3), (0, 1)):
            if one == other:
                continue
            to, back = made[one][3 * core + other]
            assert (back, to) == made[other][3 * core + one]
            sealer = Sealer(Mode.secret, CIPHERS[0], to)
            for _ in range(5):
                streams.add(sealer.seal(head(), bytes(64))[44:108])
                count += 1
    assert len(streams) == count


@pytest.mark.parametrize("key", [None, "5a" * 32])
@pytest.mark.parametrize("own", [0, 1])
def test_who_writes_the_store_cannot_bring_back_keys(own: int, key: str | None) -> None:
    """By what was published in an earlier life, the endpoint's own part included."""
    settings = Settings.build({"key": key}, environment={})
    hellos = [KeyMaker(rank, settings).hello for rank in range(2)]
    found = [KeyMaker(own, settings).engine_options(hellos)["secrets"] for _life in range(2)]
    secrets = [secret for life in found for pair in life if pair for secret in pair]
    assert len(set(secrets)) == 4


def test_the_functions_are_those_of_the_standards() -> None:
    """RFC 7748 (5.2), RFC 5869 (A.1), and HKDF-Expand-Label by Python's HMAC."""
    scalar = "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4"
    point = "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c"
    shared = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert _engine.x25519(bytes.fromhex(scalar), bytes.fromhex(point)).hex() == shared
    a, b = bytes([1]) * 32, bytes([2]) * 32
    assert _engine.x25519(a, _engine.x25519_public(b)) == _engine.x25519(
        b, _engine.x25519_public(a)
    )
    with pytest.raises(ValueError, match="secret"):
        _engine.x25519(a, bytes(32))
    assert _engine.hkdf_extract(bytes(range(13)), b"\x0b" * 22).hex() == (
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5"
    )
    info = b"\x00\x20" + bytes([len(b"gradwire label")]) + b"gradwire label" + b"\x03abc"
    expected = hmac.new(SECRET, info + b"\x01", hashlib.sha256).digest()
    assert _engine.hkdf_expand_label(SECRET, "label", b"abc") == expected
