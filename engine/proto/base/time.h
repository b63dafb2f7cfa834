// Nanos is a time or a duration in nanoseconds of a monotonic clock. proto reads no clock: every
// time is an argument.
#pragma once

#include <cstdint>
#include <limits>

namespace gradwire {

using Nanos = int64_t;

// The time of what never happens: a timer that is not set.
inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();
inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;

// A time as it travels in packets: the low 32 bits of its microseconds.
inline uint32_t us(Nanos time) {
  return static_cast<uint32_t>(time / kMicrosecond);
}

}  // namespace gradwire
