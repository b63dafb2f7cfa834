"""Encodings of chunks on a bucket's device, so that fewer bytes cross to the host.

The engine encodes the host's values once more, chunk by chunk. Its codec (engine/codec/codec.h)
maps the values that are decoded here to themselves, so the payload on the wire is the one made
here, and nothing is lost twice. For this the chunks are those of the plan's grid. In two cases the
engine's codec would not map its own values to themselves, so they are avoided here:

int8  The scale is the largest magnitude / 126, rounded. 126 times the scale, divided by 126 again,
      may be the neighbouring float, which maps to itself, so that one is used.
f16   A largest magnitude that rounds up to a power of two gets a shift that is smaller by one.

The code uses only operations of torch on whole tensors, which are the same on every device, and
rounds to nearest even. A division by a Python number is none of these, because on CUDA devices
torch multiplies by the rounded reciprocal instead; so divisors are tensors. On the host the
engine's own codec decodes, in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.transport.native import load_engine

__all__ = ["ENCODABLE", "Payload", "decode", "decode_on_host", "encode", "finite_chunks"]

ENCODABLE = ("f16", "bf16", "half", "int8")

OWN_TYPES = {"half": torch.float16, "bf16": torch.bfloat16}
"""The encodings whose codes are numbers of a type of torch, and the type."""

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
TOP_EXPONENT, LEAST_SHIFT, MOST_SHIFT = 14, -113, 126
MOST_HALF, MOST_AT_THE_TOP = 65_504.0, 32_752.0
MOST_CODE = 126.0
SMALLEST = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Payload:
    """An encoded bucket.

    Attributes:
        codes: int16 (f16, bf16, half) or int8, one per element.
        heads: One per chunk: the shift of f16 (int32) or the scale of int8 (float32); empty for
            bf16 and half.
    """

    codes: torch.Tensor
    heads: torch.Tensor

    def to_host(self, *, pinned: bool) -> Payload:
        """Returns a copy in host memory; a copy to pinned memory is queued on the stream."""
        return Payload(_to_host(self.codes, pinned), _to_host(self.heads, pinned))


def encode(values: torch.Tensor, lengths: torch.Tensor, encoding: str) -> Payload:
    """Encodes values on their device.

    Args:
        values: float32, 1-D.
        lengths: int64, the chunks' lengths in the order of the elements, on the same device.
        encoding: One of ENCODABLE.

    Returns:
        The payload, on the same device.
    """
    if encoding in OWN_TYPES:
        codes = values.to(OWN_TYPES[encoding]).view(torch.int16)
        return Payload(codes, lengths.new_zeros(0))
    magnitude = torch.where(torch.isfinite(values), values.abs(), 0.0)
    largest = torch.segment_reduce(magnitude, "max", lengths=lengths, unsafe=True)
    if encoding == "f16":
        return _encode_f16(values, lengths, largest)
    return _encode_int8(values, lengths, largest)


def decode(payload: Payload, lengths: torch.Tensor, encoding: str) -> torch.Tensor:
    """Returns the float32 values of a payload, on its device."""
    codes = payload.codes
    if encoding in OWN_TYPES:
        return codes.view(OWN_TYPES[encoding]).to(torch.float32)
    if encoding == "f16":
        factor = _spread(_power_of_two(-payload.heads), lengths, codes)
        return codes.view(torch.float16).to(torch.float32) * factor
    values = codes.to(torch.float32) * _spread(payload.heads, lengths, codes)
    values = torch.where(codes == 127, torch.inf, values)
    values = torch.where(codes == -127, -torch.inf, values)
    return torch.where(codes == -128, torch.nan, values)


def decode_on_host(
    payload: Payload, lengths: torch.Tensor, encoding: str, out: torch.Tensor
) -> None:
    """Decodes a payload into `out`, all in host memory.

    Unlike `decode` it makes no further tensors, and does not hold the interpreter's lock.

    Args:
        payload: The payload.
        lengths: int64, the chunks' lengths in the order of the elements.
        encoding: One of ENCODABLE.
        out: float32, 1-D, for the values.
    """
    heads = payload.heads.to(torch.int16) if encoding == "f16" else payload.heads
    load_engine().decode_chunks(
        out.numpy(), lengths.numpy(), _bytes(heads), _bytes(payload.codes), encoding
    )


def finite_chunks(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns for each element whether all values of its chunk are finite."""
    each = torch.isfinite(values).to(torch.float32)
    whole = torch.segment_reduce(each, "min", lengths=lengths, unsafe=True) > 0.5
    return _spread(whole, lengths, values)


def _encode_f16(values: torch.Tensor, lengths: torch.Tensor, largest: torch.Tensor) -> Payload:
    rounded = largest.view(torch.int32) + 0x1000  # carries where 11 bits round up to 2^n
    exponent = (rounded >> 23) - 127
    shift = torch.clamp(TOP_EXPONENT - exponent, LEAST_SHIFT, MOST_SHIFT)
    limit = torch.where(shift == LEAST_SHIFT, MOST_AT_THE_TOP, MOST_HALF)
    scaled = values * _spread(_power_of_two(shift), lengths, values)
    most = _spread(limit, lengths, values)
    codes = torch.minimum(torch.maximum(scaled, -most), most).to(torch.float16).view(torch.int16)
    return Payload(_with_specials(values, codes, 0x7C00, 0x7E00), shift)


def _encode_int8(values: torch.Tensor, lengths: torch.Tensor, largest: torch.Tensor) -> Payload:
    most = torch.full_like(largest, MOST_CODE)
    scale = largest / most
    none = scale < SMALLEST
    # With a larger scale a code of 126 would be decoded to infinity.
    over = torch.nextafter(scale, torch.zeros_like(scale))
    scale = torch.where(scale * most > LARGEST, over, scale)
    scale = scale * most / most
    scale = torch.where(none | (scale < SMALLEST), 0.0, scale)
    inverse = torch.where(scale > 0.0, torch.reciprocal(scale), 0.0)
    scaled = values * _spread(inverse, lengths, values)
    codes = torch.clamp(torch.nan_to_num(torch.round(scaled)), -MOST_CODE, MOST_CODE)
    codes = torch.where(torch.isposinf(values), 127.0, codes)
    codes = torch.where(torch.isneginf(values), -127.0, codes)
    codes = torch.where(torch.isnan(values), -128.0, codes)
    return Payload(codes.to(torch.int8), scale)


def _with_specials(
    values: torch.Tensor, codes: torch.Tensor, infinity: int, nan: int
) -> torch.Tensor:
    """Returns the 16-bit codes with those of infinities and NaN in place, signs kept."""
    magnitude = values.view(torch.int32) & MAGNITUDE
    special = torch.where(magnitude > INFINITY, nan, infinity).to(torch.int16)
    special = torch.where(torch.signbit(values), special | -0x8000, special)
    return torch.where(magnitude < INFINITY, codes, special)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Returns 2^exponent as float32, for exponents of normal numbers (int32)."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)


def _spread(each: torch.Tensor, lengths: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Spreads one value per chunk over the chunk's elements."""
    return torch.repeat_interleave(each, lengths, output_size=like.numel())


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.numpy().view(np.uint8)


def _to_host(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)
