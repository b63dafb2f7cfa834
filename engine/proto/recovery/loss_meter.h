// LossMeter keeps the share of packets that one direction of a path has lost: a moving mean over
// about a hundred packets.
#pragma once

#include <algorithm>

#include "proto/base/time.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

// From this share on loss is heavy: repeating packets costs less than waiting for ACKs.
inline constexpr double kHeavyLoss = 0.25;

class LossMeter {
 public:
  void add(double lost, double arrived, Nanos now) {
    const double packets = lost + arrived;
    if (packets <= 0) return;
    if (now - last_ > kMemory) known_ = 0;
    last_ = now;
    known_ = std::min(kPackets, known_ + packets);
    if (lost == 0 && mean_ == 0) return;
    const double weight = std::min(1.0, packets / known_);
    mean_ += (lost / packets - mean_) * weight;
  }
  // Takes back packets that were counted as lost and have arrived late.
  void late(uint64_t packets) {
    if (known_ > 0) mean_ = std::max(0.0, mean_ - static_cast<double>(packets) / known_);
  }
  double share(Nanos now) const {
    return known_ < kFewest || now - last_ > kMemory ? 0.0 : std::min(mean_, kMost);
  }

  // A mean older than this is not used: the path may have changed.
  static constexpr Nanos kMemory = 1 * kSecond;
  // The largest share reported; it keeps 1 / (1 - share) finite.
  static constexpr double kMost = 0.95;
  // Packets that the mean covers: enough to judge a share by.
  static constexpr double kPackets = 96;
  // Packets below which a share is too uncertain to report: each would be more of it than a sample
  // is of a moving mean.
  static constexpr double kFewest = kSmoothing;

 private:
  Nanos last_ = 0;
  double known_ = 0;
  double mean_ = 0;
};

}  // namespace gradwire
