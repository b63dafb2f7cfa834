#include "codec/bits.h"

#include <algorithm>

namespace gradwire::codec {

GRADWIRE_VECTORISED uint32_t largest_finite(const float* values, size_t count) {
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto bits = static_cast<int32_t>(std::bit_cast<uint32_t>(values[i]) & kMagnitude);
    largest = std::max(largest, bits < static_cast<int32_t>(kInfinity) ? bits : 0);
  }
  return static_cast<uint32_t>(largest);
}

}  // namespace gradwire::codec
