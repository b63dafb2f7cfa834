// The share of packets that one direction of a path has lost of late: a moving mean over some
// hundred packets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"

namespace gradwire {

// From here on loss on the way is no accident: repeating costs less than waiting.
inline constexpr double kHeavyLoss = 0.25;

class LossMeter {
 public:
  void add(double lost, double arrived, Nanos now) {
    const double packets = lost + arrived;
    if (packets <= 0) return;
    if (now - last_ > kMemory) known_ = 0;
    last_ = now;
    known_ = std::min(kPackets, known_ + packets);
    const double weight = std::min(1.0, packets / known_);
    mean_ += (lost / packets - mean_) * weight;
  }
  // One that was counted as lost has come after all.
  void late() {
    if (known_ > 0) mean_ = std::max(0.0, mean_ - 1.0 / known_);
  }
  double share(Nanos now) const {
    return known_ < kFewest || now - last_ > kMemory ? 0.0 : std::min(mean_, kMost);
  }

  static constexpr Nanos kMemory = 1 * kSecond;
  static constexpr double kMost = 0.95;

 private:
  static constexpr double kPackets = 96;
  static constexpr double kFewest = 8;
  Nanos last_ = 0;
  double known_ = 0;
  double mean_ = 0;
};

}  // namespace gradwire
