"""Chunks there and back: what each encoding keeps, how far it is off, what it refuses."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from gradwire import _engine
from scenarios import Array, same_bits

F32_MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
LOSSY = ["f16", "bf16", "int8"]
BF16_MAX = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
KEPT = 0.1
BYTES = {
    "f32": lambda n: 4 * n,
    "f16": lambda n: 2 + 2 * n,
    "bf16": lambda n: 2 * n,
    "half": lambda n: 2 * n,
    "int8": lambda n: 4 + n,
    "topk": lambda n: 6 * entries(n),
}


def entries(elements: int, kept: float = KEPT) -> int:
    return max(1, int(np.ceil(kept * elements - 1e-9)))


def kept_of(encoding: str) -> float:
    return KEPT if encoding == "topk" else 1.0


def there_and_back(values: Array, encoding: str) -> Array:
    payload = _engine.encode_chunk(values, encoding, kept_of(encoding))
    assert len(payload) == BYTES[encoding](len(values))
    return _engine.decode_chunk(payload, len(values), encoding, kept_of(encoding))


def largest(values: Array) -> float:
    finite = np.abs(values[np.isfinite(values)]).astype(np.float64)
    return float(finite.max()) if len(finite) else 0.0


def allowed_error(values: Array, encoding: str) -> Any:
    """Per element, in float64."""
    magnitudes = np.abs(values).astype(np.float64)
    top = largest(values)
    if encoding == "f16":
        # 11 bits down to 2^-28 of the largest; below 2^-112 the shift itself has an end.
        least = 2.0**-25 * max(top * 2.0**-13, 2.0**-126)
        # A chunk of the largest floats saturates one step early.
        return np.maximum(magnitudes * 2.0 ** (-10 if top > 2.0**127 else -11), least)
    if encoding == "bf16":
        return np.maximum(magnitudes * 2.0**-8, 2.0**-134)
    if encoding == "int8":
        return np.full(len(values), max(top / 252 * (1 + 1e-5), 126 * TINY))
    return np.zeros(len(values))


wide = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
held = st.floats(-BF16_MAX, BF16_MAX, width=32)
gradient = st.floats(-1.0, 1.0, width=32)


def arrays(elements: Any) -> Any:
    return stnp.arrays(np.float32, st.integers(1, 300), elements=elements)


@given(values=arrays(wide))
def test_f32_is_the_bits_themselves(values: Array) -> None:
    assert same_bits(there_and_back(values, "f32"), values)
    assert _engine.encode_chunk(values, "f32") == values.tobytes()


@pytest.mark.parametrize("encoding", LOSSY)
@given(values=st.one_of(arrays(held), arrays(gradient)))
def test_the_error_is_bounded_and_what_is_finite_stays_finite(encoding: str, values: Array) -> None:
    back = there_and_back(values, encoding)
    assert np.isfinite(back).all()
    error = np.abs(back.astype(np.float64) - values.astype(np.float64))
    assert (error <= allowed_error(values, encoding)).all()
    # What was sent and what it lost add up again, to the rounding of the loss.
    lost = values - back
    assert np.isfinite(lost).all()


@pytest.mark.parametrize("encoding", LOSSY)
@given(values=arrays(st.one_of(held, st.sampled_from([np.nan, np.inf, -np.inf]))))
def test_what_is_not_finite_passes_unchanged(encoding: str, values: Array) -> None:
    back = there_and_back(values, encoding)
    assert (np.isnan(back) == np.isnan(values)).all()
    infinite = np.isinf(values)
    assert (np.isinf(back) == infinite).all()
    assert (back[infinite] == values[infinite]).all()
    # And does not disturb its neighbours.
    ordinary = np.isfinite(values)
    error = np.abs(back[ordinary].astype(np.float64) - values[ordinary].astype(np.float64))
    assert (error <= allowed_error(values, encoding)[ordinary]).all()


@pytest.mark.parametrize("encoding", LOSSY)
@given(values=arrays(gradient), power=st.integers(-60, 60))
def test_powers_of_two_change_nothing(encoding: str, values: Array, power: int) -> None:
    """So a gradient scaler, or the size of a gradient, does not matter."""
    values = np.where(np.abs(values) < 1e-6, np.float32(0), values)
    factor = np.float32(2.0**power)
    scaled = there_and_back(values * factor, encoding)
    np.testing.assert_array_equal(scaled, there_and_back(values, encoding) * factor)


def test_values_beyond_65504_are_no_infinities_in_f16() -> None:
    values = np.array([1e5, -3e38, F32_MAX, -F32_MAX, 65_520.0], np.float32)
    for count in range(1, len(values) + 1):
        back = there_and_back(values[:count], "f16")
        np.testing.assert_allclose(back[-1:], values[count - 1 : count], rtol=2.0**-10, atol=3e35)
        assert np.isfinite(back).all()


def test_halves_are_ieee_halves_to_nearest_even() -> None:
    """Every half comes back as itself, and what lies between two goes where numpy sends it."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1:] + halves[:-1]) / 2
    above = np.nextafter(between, np.float32(np.inf))
    for group in (halves, between, above):
        group = group[group < 2.0**15]
        for values in (group, -group):
            # A leading 2^14 fixes the shift to 0.
            chunk = np.concatenate([np.float32([2.0**14]), values])
            payload = _engine.encode_chunk(chunk, "f16")
            assert struct.unpack_from("<h", payload) == (0,)
            expected = chunk.astype(np.float16)
            assert payload[2:] == expected.tobytes()
            back = _engine.decode_chunk(payload, len(chunk), "f16")
            assert same_bits(back, expected.astype(np.float32))


def test_bfloats_are_rounded_to_nearest_even() -> None:
    values = np.float32([1.0, 1.00390625, 1.01171875, -1.00390625, 1.0039064, F32_MAX])
    back = there_and_back(values, "bf16")
    np.testing.assert_array_equal(back, [1.0, 1.0, 1.015625, -1.0, 1.0078125, np.inf])
    assert there_and_back(np.float32([BF16_MAX]), "bf16")[0] == BF16_MAX


@given(values=arrays(st.one_of(wide, st.floats(-70_000.0, 70_000.0, width=32), gradient)))
def test_halves_are_rounded_as_ieee_754_does(values: Array) -> None:
    """Subnormals and what becomes infinite included; a NaN stays one."""
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    numbers = ~np.isnan(values)
    payload = np.frombuffer(_engine.encode_chunk(values, "half"), np.float16)
    assert same_bits(payload[numbers].astype(np.float32), expected[numbers].astype(np.float32))
    assert np.isnan(payload[~numbers]).all()


@pytest.mark.parametrize(("encoding", "prefix"), [("half", 0), ("f16", 2), ("bf16", 0)])
def test_values_are_coded_alike_alone_and_in_blocks(encoding: str, prefix: int) -> None:
    """Blocks of eight take another way than the rest of a chunk, where the processor has one."""
    seed = 20_26
    random = np.random.default_rng(seed)
    bits = random.integers(0, 1 << 32, 4096, dtype=np.uint32)
    bits[:8] = [
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0xFFFFFFFF,
        0x477FF000,
        0x33000001,
        1,
    ]
    values = bits.view(np.float32)
    if encoding == "f16":  # its shift follows the largest value, so each chunk gets the same one
        values = np.where(np.abs(values) < 2.0**15, values, np.float32(2.0**14))
    fixed = np.float32([2.0**14])
    whole = _engine.encode_chunk(np.concatenate([fixed, values]), encoding)
    codes = np.frombuffer(whole[prefix:], np.uint16)[1:]
    back = _engine.decode_chunk(whole, len(values) + 1, encoding)[1:]
    for at, value in enumerate(values):
        alone = _engine.encode_chunk(np.concatenate([fixed, [value]]), encoding)
        assert codes[at] == np.frombuffer(alone[prefix:], np.uint16)[1], (seed, hex(bits[at]))
        again = _engine.decode_chunk(alone, 2, encoding)[1:]
        assert again.view(np.uint32)[0] == back[at : at + 1].view(np.uint32)[0], (seed, at)


def test_largest_floats_stay_finite_in_blocks() -> None:
    back = there_and_back(np.full(17, F32_MAX, np.float32), "f16")
    assert np.isfinite(back).all()
    assert (back == back[16]).all()  # the last one is in no block


def test_codes_of_halves_are_decoded_alike_alone_and_in_blocks() -> None:
    """Those of signalling NaNs, too, which no encoder writes."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    payload = codes.tobytes()
    whole = np.concatenate(
        [
            _engine.decode_chunk(payload[at : at + 1024], 512, "half").view(np.uint32)
            for at in range(0, len(payload), 1024)
        ]
    )
    alone = [
        _engine.decode_chunk(payload[at : at + 2], 1, "half").view(np.uint32)[0]
        for at in range(0, len(payload), 2)
    ]
    np.testing.assert_array_equal(whole, alone)


@pytest.mark.parametrize("encoding", ["half", "bf16"])
def test_all_numbers_of_a_type_of_two_bytes_pass_unchanged(encoding: str) -> None:
    codes = np.concatenate([np.arange(0x8000, dtype=np.uint16), [np.uint16(0xFC00)]])
    payload = codes.tobytes()
    count = len(payload) // 2
    values = _engine.decode_chunk(payload, count, encoding)
    again = np.frombuffer(_engine.encode_chunk(values, encoding), np.uint16)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(again[numbers], codes[numbers])
    if encoding == "half":
        assert same_bits(values[numbers], codes.view(np.float16).astype(np.float32)[numbers])


def test_int8_reaches_its_ends() -> None:
    values = np.float32([-2.0, 0.0, 2.0, np.inf, -np.inf, np.nan, 1.0])
    payload = _engine.encode_chunk(values, "int8")
    assert list(np.frombuffer(payload[4:], np.int8)) == [-126, 0, 126, 127, -127, -128, 63]
    for extreme in (F32_MAX, TINY, 1e-45, 0.0):
        back = there_and_back(np.float32([extreme, -extreme]), "int8")
        assert np.isfinite(back).all()
        assert back[0] == -back[1]


@given(values=arrays(finite))
def test_topk_keeps_the_largest_and_nothing_else(values: Array) -> None:
    back = there_and_back(values, "topk")
    order = np.lexsort((np.arange(len(values)), -np.abs(values)))
    keep = np.sort(order[: entries(len(values))])
    expected = np.zeros_like(values)
    expected[keep] = values[keep]
    np.testing.assert_array_equal(back, expected)
    # What is left is exact: either all of an element or nothing of it.
    np.testing.assert_array_equal(back + (values - back), values)


@given(values=arrays(wide))
def test_topk_takes_what_is_not_finite_first_and_never_loses_any(values: Array) -> None:
    back = there_and_back(values, "topk")
    bad = ~np.isfinite(values)
    if np.count_nonzero(bad) > entries(len(values)):
        assert np.isnan(back).all()
    else:
        assert (np.isnan(back) == np.isnan(values)).all()
        assert (np.isinf(back) == np.isinf(values)).all()
        assert (back[np.isinf(values)] == values[np.isinf(values)]).all()


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 65_535),
    kept=st.floats(1e-5, 0.1),
    levels=st.sampled_from([2, 50, 10**9]),
    bad=st.sampled_from([0, 0, 1, 5, 60]),
)
def test_topk_of_large_chunks(seed: int, count: int, kept: float, levels: int, bad: int) -> None:
    """Where most of a chunk is looked at only once; with many equals, and with what is not finite
    in any place."""
    random = np.random.default_rng(seed)
    values = (random.integers(-levels, levels + 1, count) / 3).astype(np.float32)
    values[random.integers(0, count, bad)] = random.choice([np.nan, np.inf, -np.inf], bad)
    entries = max(1, int(np.ceil(kept * count - 1e-9)))
    payload = _engine.encode_chunk(values, "topk", kept)
    assert len(payload) == 6 * entries
    back = _engine.decode_chunk(payload, count, "topk", kept)
    if np.count_nonzero(~np.isfinite(values)) > entries:
        assert np.isnan(back).all()
        return
    # NaN before infinity before the rest; the first of equals.
    order = np.argsort(-np.abs(np.where(np.isnan(values), np.inf, values)), kind="stable")
    order = order[np.argsort(~np.isnan(values[order]), kind="stable")]
    expected = np.zeros_like(values)
    keep = order[:entries]
    expected[keep] = values[keep]
    np.testing.assert_array_equal(back, expected)


def test_topk_of_a_whole_chunk() -> None:
    """As many elements as indices go round, all alike: the first are taken."""
    values = np.ones(65_535, np.float32)
    payload = _engine.encode_chunk(values, "topk", 0.001)
    assert len(payload) == 6 * 66
    back = _engine.decode_chunk(payload, 65_535, "topk", 0.001)
    assert list(np.flatnonzero(back)) == list(range(66))


@pytest.mark.parametrize("encoding", BYTES)
@given(values=arrays(wide))
def test_the_same_values_are_the_same_bytes(encoding: str, values: Array) -> None:
    kept = kept_of(encoding)
    first = _engine.encode_chunk(values, encoding, kept)
    assert first == _engine.encode_chunk(values.copy(), encoding, kept)


# ---------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("encoding", "kept", "elements"),
    [
        ("f32", 1.0, 361),
        ("f16", 1.0, 721),
        ("bf16", 1.0, 722),
        ("half", 1.0, 722),
        ("int8", 1.0, 1440),
        ("topk", 1.0, 240),
        ("topk", 0.1, 2400),
        ("topk", 0.01, 24_000),
        ("topk", 0.001, 65_535),
    ],
)
def test_a_datagram_carries(encoding: str, kept: float, elements: int) -> None:
    assert _engine.chunk_elements(encoding, kept, 1472) == elements


@given(
    encoding=st.sampled_from(list(BYTES)),
    kept=st.floats(1e-6, 1.0),
    datagram=st.integers(256, 8972),
)
def test_the_most_elements_fit_and_one_more_does_not(
    encoding: str, kept: float, datagram: int
) -> None:
    kept = kept if encoding == "topk" else 1.0
    room = datagram - _engine.HEADER_BYTES
    most = _engine.chunk_elements(encoding, kept, datagram)
    assert 1 <= most <= 65_535

    def bytes_of(elements: int) -> int:
        return 6 * entries(elements, kept) if encoding == "topk" else BYTES[encoding](elements)

    assert bytes_of(most) <= room
    assert most == 65_535 or bytes_of(most + 1) > room
    assert len(_engine.encode_chunk(np.ones(most, np.float32), encoding, kept)) == bytes_of(most)


# ---------------------------------------------------------------------------- malformed


def refuses(payload: bytes, elements: int, encoding: str) -> None:
    with pytest.raises(ValueError, match="no valid chunk"):
        _engine.decode_chunk(payload, elements, encoding, kept_of(encoding))


@pytest.mark.parametrize("encoding", BYTES)
def test_a_wrong_length_is_no_chunk(encoding: str) -> None:
    payload = _engine.encode_chunk(np.ones(100, np.float32), encoding, kept_of(encoding))
    for wrong in (payload[:-1], payload + b"\0", payload[:1], b""):
        refuses(wrong, 100, encoding)


def test_a_wrong_scale_is_no_chunk() -> None:
    for scale in (np.nan, np.inf, -np.inf, -1.0, 1e38):
        refuses(struct.pack("<f", scale) + bytes(10), 10, "int8")
    for shift in (-114, 127, 32_767, -32_768):
        refuses(struct.pack("<h", shift) + bytes(20), 10, "f16")


@pytest.mark.parametrize(
    "indices",
    [[3, 3], [4, 3], [0, 20], [19, 20], [0, 0xFFFF], [0xFFFF, 0], [0xFFFF, 1], [65_534, 0xFFFF]],
)
def test_wrong_indices_are_no_chunk(indices: list[int]) -> None:
    refuses(struct.pack("<2H2f", *indices, 1.0, 2.0), 20, "topk")


def test_the_last_index_and_none_at_all_are_chunks() -> None:
    back = _engine.decode_chunk(struct.pack("<2H2f", 0, 19, 1.0, 2.0), 20, "topk", KEPT)
    assert (back[0], back[19]) == (1.0, 2.0)
    nothing = _engine.decode_chunk(struct.pack("<2H2f", 0xFFFF, 0xFFFF, 0, 0), 20, "topk", KEPT)
    assert np.isnan(nothing).all()


@pytest.mark.parametrize("encoding", BYTES)
@given(payload=st.binary(max_size=200), elements=st.integers(1, 300))
def test_garbage_is_refused_or_decodes(encoding: str, payload: bytes, elements: int) -> None:
    try:
        back = _engine.decode_chunk(payload, elements, encoding, kept_of(encoding))
    except ValueError:
        return
    assert back.shape == (elements,)


def test_a_chunk_has_as_many_elements_as_indices_reach() -> None:
    for count in (0, 65_536):
        with pytest.raises(ValueError, match="1 to 65535"):
            _engine.encode_chunk(np.zeros(count, np.float32), "f16")
        with pytest.raises(ValueError, match="1 to 65535"):
            _engine.decode_chunk(b"", count, "f16")
