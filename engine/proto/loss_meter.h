// The share of packets that one direction of a path has lost of late: a moving mean over some
// hundred packets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/time.h"

namespace gradwire {

// From here on loss on the way is no accident: repeating costs less than waiting.
inline constexpr double kHeavyLoss = 0.25;

class LossMeter {
 public:
  // One packet arrived, after `lost` that did not.
  void add(uint64_t lost, uint64_t arrived, Nanos now) {
    const uint64_t packets = lost + arrived;
    if (packets == 0) return;
    if (now - last_ > kMemory) known_ = 0;
    last_ = now;
    known_ = std::min(kPackets, known_ + packets);
    const double weight =
        std::min(1.0, static_cast<double>(packets) / static_cast<double>(known_));
    mean_ += (static_cast<double>(lost) / static_cast<double>(packets) - mean_) * weight;
  }
  // One that was counted as lost has come after all.
  void late() {
    if (known_) mean_ = std::max(0.0, mean_ - 1.0 / static_cast<double>(known_));
  }
  double share(Nanos now) const {
    return known_ < kFewest || now - last_ > kMemory ? 0.0 : std::min(mean_, kMost);
  }

 private:
  static constexpr Nanos kMemory = 1 * kSecond;
  static constexpr uint64_t kPackets = 256;
  static constexpr uint64_t kFewest = 8;
  static constexpr double kMost = 0.95;
  Nanos last_ = 0;
  uint64_t known_ = 0;
  double mean_ = 0;
};

}  // namespace gradwire
