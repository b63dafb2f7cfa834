// Lanes: ops are numbered 0, 1, 2, … within a lane and start in that order, alike on all workers.
// Ops of different lanes are in no order: it may differ from worker to worker.
#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace gradwire {

// An op's id holds its number and its lane, so that its low 32 bits, which travel, are 20 bits of
// the number and 12 of the lane. Ids of a lane are in the order of their numbers.
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

// What an endpoint keeps of one lane, by number.
struct Lane {
  uint64_t next = 0;              // workers: the next op to start
  uint64_t done_below = 0;        // all ops below are finished here
  std::set<uint64_t> done_ahead;  // finished ones at or above done_below

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
