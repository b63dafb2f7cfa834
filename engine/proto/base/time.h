// Time is an argument everywhere in proto: nanoseconds of a monotonic clock that somebody else
// reads.
#pragma once

#include <cstdint>
#include <limits>

namespace gradwire {

using Nanos = int64_t;

inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;

// As times travel: microseconds, the low 32 bits.
inline uint32_t us(Nanos time) {
  return static_cast<uint32_t>(time / kMicrosecond);
}

}  // namespace gradwire
