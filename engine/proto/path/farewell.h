// Farewell keeps how one path ends: with BYE, which each end repeats until the other has
// acknowledged it, or with ERROR.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"

namespace gradwire {

class Farewell {
 public:
  bool gone = false;          // the peer has sent BYE
  uint64_t gone_op = 0;       // ops with a lower place were complete at the peer
  bool acknowledged = false;  // the peer has acknowledged our BYE
  bool answer = false;        // the peer's BYE is not acknowledged yet
  uint32_t errors_left = 0;   // ERRORs that are still to be sent
  Nanos next = 0;             // when the next BYE or ERROR is due

  // True when the peer sends nothing more that this op, by its place, could need.
  bool complete(uint64_t place) const { return gone && gone_op > place; }
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
  uint32_t byes_ = 0;    // BYEs sent since this endpoint leaves
  uint32_t enough_ = 0;  // BYEs after which no answer is waited for
};

}  // namespace gradwire
