#include "codec/half.h"

#include <algorithm>
#include <cstring>

#include "codec/bits.h"

namespace gradwire::codec {

namespace {

using LooseHalf = uint16_t __attribute__((aligned(1), may_alias));

// The largest magnitude goes to [2^14, 2^15), as high as rounding permits.
constexpr int kTopExponent = 14;
constexpr int kLeastShift = kTopExponent - 127;
constexpr int kMostShift = 126;  // 2^shift and 2^-shift are normal floats

// Limits as bits of floats. The second is 2^15 less one step: at the smallest shift, 2^15 would
// decode to 2^128.
constexpr auto kMostHalf = std::bit_cast<uint32_t>(65'504.0f);
constexpr auto kMostAtTheTop = std::bit_cast<uint32_t>(32'752.0f);
// Without a limit: 2^16 and what rounds to it have the bits of infinity.
constexpr auto kNoLimit = std::bit_cast<uint32_t>(65'536.0f);

struct Shift {
  int16_t shift;
  uint32_t limit;
};

Shift choose_shift(const float* values, uint32_t count) {
  const uint32_t largest = largest_finite(values, count);
  const int exponent = static_cast<int>(largest >> 23) - 127;  // subnormals are below the clamp
  const int shift = std::clamp(kTopExponent - exponent, kLeastShift, kMostShift);
  return {static_cast<int16_t>(shift), shift == kLeastShift ? kMostAtTheTop : kMostHalf};
}

// Rounds to nearest even; finite values stay within the limit.
inline uint16_t to_half(float value, uint32_t limit) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t a = std::min(magnitude, limit);
  // Normal: the exponent is rebiased and 13 bits are rounded away.
  const uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Subnormal: adding 0.5 makes the float adder round at 2^-24.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  // Masks choose the result: the compiler does not vectorise conditions here.
  const uint32_t is_small = a < 0x38800000u ? ~0u : 0u;
  const uint32_t is_finite = magnitude < kInfinity ? ~0u : 0u;
  const uint32_t is_nan = magnitude > kInfinity ? ~0u : 0u;
  const uint32_t finite = (small & is_small) | (normal & ~is_small);
  const uint32_t special = 0x7c00u | (0x200u & is_nan);
  return static_cast<uint16_t>((finite & is_finite) | (special & ~is_finite) |
                               ((bits & kSignBit) >> 16));
}

inline float from_half(uint16_t half, float factor) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
  // The factor 2^112 corrects the bias, of subnormals too, and is exact.
  const float finite = std::bit_cast<float>(rest) * 0x1p112f * factor;
  const uint32_t special = kInfinity | (rest & 0x007fffffu);
  return std::bit_cast<float>(
      ((half & 0x7c00u) == 0x7c00u ? special : std::bit_cast<uint32_t>(finite)) | sign);
}

}  // namespace

GRADWIRE_VECTORISED static void pack_halves(const float* values, uint32_t count, float factor,
                                            uint32_t limit, uint8_t* bytes) {
  LooseHalf* out = reinterpret_cast<LooseHalf*>(bytes);
  for (uint32_t i = 0; i < count; ++i) out[i] = to_half(values[i] * factor, limit);
}

GRADWIRE_VECTORISED static void unpack_halves(const uint8_t* bytes, uint32_t count, float factor,
                                              float* out) {
  const LooseHalf* in = reinterpret_cast<const LooseHalf*>(bytes);
  for (uint32_t i = 0; i < count; ++i) out[i] = from_half(in[i], factor);
}

void encode_f16(const float* values, uint32_t count, uint8_t* out) {
  const Shift chosen = choose_shift(values, count);
  std::memcpy(out, &chosen.shift, sizeof chosen.shift);
  pack_halves(values, count, power_of_two(chosen.shift), chosen.limit, out + kF16Prefix);
}

bool valid_f16(const uint8_t* payload) {
  int16_t shift;
  std::memcpy(&shift, payload, sizeof shift);
  return shift >= kLeastShift && shift <= kMostShift;
}

void decode_f16(const uint8_t* payload, uint32_t count, float* out) {
  int16_t shift;
  std::memcpy(&shift, payload, sizeof shift);
  unpack_halves(payload + kF16Prefix, count, power_of_two(-shift), out);
}

GRADWIRE_VECTORISED void encode_bf16(const float* values, uint32_t count, uint8_t* bytes) {
  LooseHalf* out = reinterpret_cast<LooseHalf*>(bytes);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
    const uint32_t special = magnitude > kInfinity ? 0x7fc0u : 0x7f80u;
    out[i] = static_cast<uint16_t>((magnitude < kInfinity ? rounded : special) |
                                   ((bits & kSignBit) >> 16));
  }
}

GRADWIRE_VECTORISED void decode_bf16(const uint8_t* bytes, uint32_t count, float* out) {
  const LooseHalf* in = reinterpret_cast<const LooseHalf*>(bytes);
  for (uint32_t i = 0; i < count; ++i)
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(in[i]) << 16);
}

void encode_half(const float* values, uint32_t count, uint8_t* out) {
  pack_halves(values, count, 1.0f, kNoLimit, out);
}

void decode_half(const uint8_t* payload, uint32_t count, float* out) {
  unpack_halves(payload, count, 1.0f, out);
}

}  // namespace gradwire::codec
