// The bits of an IEEE 754 float, as the codecs use them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "codec/vectorised.h"

namespace gradwire::codec {

inline constexpr uint32_t kSignBit = 0x80000000u;
inline constexpr uint32_t kMagnitude = 0x7fffffffu;
inline constexpr uint32_t kInfinity = 0x7f800000u;

// The bits of the largest finite magnitude; 0 when no value is finite.
uint32_t largest_finite(const float* values, size_t count);

// 2^exponent for exponents from -126 to 127.
inline float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

}  // namespace gradwire::codec
