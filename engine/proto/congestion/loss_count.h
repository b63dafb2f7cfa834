// LossCount counts the packets of one path that are lost. A packet that is missing counts as lost
// once a period has ended in which it could have come late, so reordering is no loss.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"
#include "proto/recovery/path_profile.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

class LossCount {
 public:
  struct Period {
    double lost = 0;
    double arrived = 0;
    double queue = 0;  // ns: the longest that a packet after a missing one has queued
  };
  // Takes new packets with consecutive numbers from `number` on, which have queued for `queue`;
  // true when a period has ended. `largest`: the largest number before them, 0 for none.
  bool add(uint64_t number, uint64_t packets, uint64_t largest, Nanos queue, Nanos now) {
    const auto arrived = static_cast<double>(packets);
    Period& at = number < since_ ? before_ : now_;
    at.arrived += arrived;
    if (number < largest) {
      at.lost = std::max(0.0, at.lost - arrived);
    } else if (largest && number > largest + 1) {
      at.lost += std::min(static_cast<double>(number - largest - 1), kRun);
      at.queue = std::max(at.queue, static_cast<double>(queue));
    }
    if (now - start_ < kTime) return false;
    start_ = now;
    ended_ = before_;
    before_ = now_;
    now_ = {};
    since_ = std::max(number + packets - 1, largest) + 1;
    return true;
  }
  // The period before the one that has ended.
  const Period& ended() const { return ended_; }

  // Packets: a longer run is one loss of the path, however long.
  static constexpr double kRun = kInARow;
  // The time of a period at least: packets that come later count as lost.
  static constexpr Nanos kTime = kLongRtprop;

 private:
  uint64_t since_ = 0;  // the first number of this period
  Nanos start_ = 0;
  Period now_, before_, ended_;
};

}  // namespace gradwire
