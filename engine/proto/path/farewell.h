// Farewell keeps how one path ends: with BYE, which each end repeats until the other has
// acknowledged it, or with ERROR.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "proto/base/time.h"
#include "proto/plan/lanes.h"

namespace gradwire {

class Farewell {
 public:
  bool gone = false;          // the peer has sent BYE, for all of its lanes
  bool acknowledged = false;  // the peer has acknowledged our BYE
  bool answer = false;        // the peer's BYE is not acknowledged yet
  uint32_t errors_left = 0;   // ERRORs that are still to be sent
  size_t next_lane = 0;       // the first lane in the next BYE
  Nanos next = 0;             // when the next BYE or ERROR is due

  // The number of lanes in a peer's BYE.
  void lanes(size_t count) {
    if (count > complete_below_.size()) complete_below_.resize(count, kUnknown);
  }
  // The peer's ops of a lane were complete below this number when it left.
  void note(size_t lane, uint64_t number) {
    uint64_t& below = complete_below_[lane];
    below = below == kUnknown ? number : std::max(below, number);
  }
  // True once the peer's BYEs have named all of its lanes.
  bool told() const {
    return std::ranges::find(complete_below_, kUnknown) == complete_below_.end();
  }
  // True when the peer has left and sends nothing more that this op could need.
  bool complete(uint64_t op) const {
    return gone && lane_of(op) < complete_below_.size() &&
           number_of(op) < complete_below_[lane_of(op)];
  }
  void fail(Nanos now) {
    errors_left = kFarewells;
    next = now;
  }
  void error_sent(Nanos now) {
    --errors_left;
    next = now + kInterval;
  }
  // This endpoint leaves. `reliable`: what it sends hardly gets lost.
  void leave(bool reliable, Nanos now) {
    acknowledged = false;
    // A peer that left before has been answered, but the answer may have been lost.
    enough_ = gone && reliable ? 1 : kMostFarewells;
    next = now;
  }
  // Counts a BYE of an endpoint that leaves.
  void bye_sent(Nanos now) {
    ++byes_;
    const uint32_t doublings = byes_ - std::min(byes_, kQuickFarewells);
    next = now + (kInterval << std::min(doublings, kDoublings));
  }
  // True when the peer needs no more BYEs. Either it has acknowledged one, or enough were sent to a
  // peer that may never answer: it leaves too, was never here (`met`), or this endpoint has failed.
  bool over(bool met, bool failed) const {
    if (acknowledged) return true;
    if (!met || failed) return byes_ >= std::min(enough_, kFarewells);
    return gone && byes_ >= enough_;
  }

 private:
  // No BYE has named the lane.
  static constexpr uint64_t kUnknown = UINT64_MAX;
  // BYEs and ERRORs to peers from which no answer is expected.
  static constexpr uint32_t kFarewells = 3;
  // BYEs to peers that leave as well: these may be gone, or may have missed earlier ones.
  static constexpr uint32_t kMostFarewells = 6;
  // The interval of the first farewells (BYE, ERROR).
  static constexpr Nanos kInterval = 10 * kMillisecond;
  // Farewells at that interval; each further one doubles it.
  static constexpr uint32_t kQuickFarewells = 3;
  // Doublings at most.
  static constexpr uint32_t kDoublings = 2;
  std::vector<uint64_t> complete_below_;  // by the peer's lane
  uint32_t byes_ = 0;                     // BYEs sent since this endpoint leaves
  uint32_t enough_ = 0;                   // BYEs after which no answer is waited for
};

}  // namespace gradwire
