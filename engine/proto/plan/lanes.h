// A lane numbers the ops of one attachment 0, 1, 2, …; its ops start in that order on every worker.
// Ops of different lanes have no order, and may start in a different one on each worker.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>

namespace gradwire {

// An op's id joins its number and its lane. The low 32 bits travel: 20 bits of the number, 12 of
// the lane. Within a lane, ids are in the order of the numbers.
inline constexpr uint64_t kLanes = 4096;

constexpr uint64_t id_of(uint64_t number, uint64_t lane) {
  return number * kLanes + lane;
}
constexpr uint64_t number_of(uint64_t id) {
  return id / kLanes;
}
constexpr uint16_t lane_of(uint64_t id) {
  return static_cast<uint16_t>(id % kLanes);
}
inline std::string op_name(uint64_t id) {
  std::string name = "op " + std::to_string(number_of(id));
  if (lane_of(id)) name += " of lane " + std::to_string(lane_of(id));
  return name;
}

// Lane is one endpoint's record of one lane; it counts ops by number.
struct Lane {
  uint64_t next = 0;                // workers: the next op to start
  uint64_t done_below = 0;          // all ops below it are finished here
  std::set<uint64_t> done_ahead;    // finished ops at or above done_below
  uint64_t abandoned = UINT64_MAX;  // workers: the first op that failed

  // Workers that leave: all ops below it were complete.
  uint64_t complete_below() const { return std::min(next, abandoned); }

  bool finished(uint64_t number) const {
    return number < done_below || done_ahead.contains(number);
  }
  void finish(uint64_t number) {
    done_ahead.insert(number);
    while (!done_ahead.empty() && *done_ahead.begin() == done_below) {
      done_ahead.erase(done_ahead.begin());
      ++done_below;
    }
  }
};

}  // namespace gradwire
