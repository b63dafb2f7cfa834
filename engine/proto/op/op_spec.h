// OpSpec is what the caller asks of one op.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/elements.h"
#include "proto/base/time.h"
#include "proto/plan/plan.h"

namespace gradwire {

inline constexpr size_t kStatSlots = 8;  // the first four are summed, the last four maximised
using Stats = std::array<double, kStatSlots>;

struct OpSpec {
  uint64_t op = 0;  // its id (proto/plan/lanes.h)
  uint64_t step = 0;
  Plan plan;
  codec::Elements data;            // plan.elements values, replaced by the result
  std::vector<uint32_t> critical;  // chunk ids
  // Order priority: the class of each chunk, 0 first; empty: all alike.
  std::vector<uint8_t> priorities;
  Stats stats{};
  Nanos timeout = 1800 * kSecond;
  std::string timeout_from;  // where the time-out comes from, for texts: "given to attach"
};

}  // namespace gradwire
