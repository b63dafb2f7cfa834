#include "codec/int8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/bits.h"

namespace gradwire::codec {

namespace {

// The code of the largest finite magnitude; the codes beyond it are the special ones below.
constexpr float kMostCode = 126.0f;
constexpr int8_t kCodeInfinity = 127;
constexpr int8_t kCodeMinusInfinity = -127;
constexpr int8_t kCodeNan = -128;

// Adding it rounds a float of small magnitude to nearest even, in the low bits.
constexpr float kRound = 12'582'912.0f;  // 1.5 × 2^23
constexpr uint32_t kRoundBits = 0x4b400000u;

float choose_scale(const float* values, uint32_t count) {
  const float largest = std::bit_cast<float>(largest_finite(values, count));
  float scale = largest / kMostCode;
  // A chunk below 126 × 2^-126 decodes to zero, because its scale would have no inverse.
  if (scale < std::numeric_limits<float>::min()) return 0.0f;
  if (scale * kMostCode > std::numeric_limits<float>::max()) scale = std::nextafter(scale, 0.0f);
  return scale;
}

}  // namespace

GRADWIRE_VECTORISED static void quantise(const float* values, uint32_t count, float inverse,
                                         int8_t* out) {
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    const uint32_t magnitude = bits & kMagnitude;
    const float scaled = std::min(std::max(values[i] * inverse, -kMostCode), kMostCode);
    const auto code = static_cast<int32_t>(std::bit_cast<uint32_t>(scaled + kRound) - kRoundBits);
    const int32_t infinite = bits & kSignBit ? kCodeMinusInfinity : kCodeInfinity;
    const int32_t special = magnitude > kInfinity ? kCodeNan : infinite;
    out[i] = static_cast<int8_t>(magnitude < kInfinity ? code : special);
  }
}

GRADWIRE_VECTORISED static void restore(const int8_t* in, uint32_t count, float scale, float* out) {
  for (uint32_t i = 0; i < count; ++i) {
    const int32_t code = in[i];
    const uint32_t finite = std::bit_cast<uint32_t>(static_cast<float>(code) * scale);
    const uint32_t infinite = code == kCodeInfinity ? kInfinity : kInfinity | kSignBit;
    const uint32_t special = code == kCodeNan ? 0x7fc00000u : infinite;
    out[i] = std::bit_cast<float>(code >= -126 && code <= 126 ? finite : special);
  }
}

void encode_int8(const float* values, uint32_t count, uint8_t* out) {
  const float scale = choose_scale(values, count);
  std::memcpy(out, &scale, sizeof scale);
  quantise(values, count, scale > 0.0f ? 1.0f / scale : 0.0f,
           reinterpret_cast<int8_t*>(out + kInt8Prefix));
}

bool valid_int8(const uint8_t* payload) {
  float scale;
  std::memcpy(&scale, payload, sizeof scale);
  return scale >= 0.0f && std::isfinite(scale * kMostCode);
}

void decode_int8(const uint8_t* payload, uint32_t count, float* out) {
  float scale;
  std::memcpy(&scale, payload, sizeof scale);
  restore(reinterpret_cast<const int8_t*>(payload + kInt8Prefix), count, scale, out);
}

}  // namespace gradwire::codec
