// Ceiling bounds a window below the size at which its own packets overflowed a queue: loss while
// they alone fill the port is self-inflicted. It rises slowly, since that size may have overflowed
// because of other traffic.
#pragma once

#include <algorithm>

#include "proto/base/time.h"

namespace gradwire {

class Ceiling {
 public:
  // Bytes that the window may have.
  double bytes() const { return bytes_; }
  // The window has been at this size in another way, so the ceiling is not below.
  void raise(double bytes) { bytes_ = std::max(bytes_, bytes); }
  // A window of this many bytes overflows a queue; `minimum`: it never shrinks below.
  void overflow(double window, double minimum, Nanos now) {
    // Losses of one overflow appear in several epochs.
    if (now - last_ > kPause) {
      before_ = bytes_;
      first_ = now;
      overflowed_ = std::min(window, bytes_);
      bytes_ = std::max(minimum, kCut * overflowed_);
    }
    last_ = now;
  }
  // An epoch of this length has passed without an overflow.
  void grow(Nanos epoch) {
    const double epochs = std::clamp(static_cast<double>(epoch) / kUsualEpoch, 1.0, kMostEpochs);
    const double growth = bytes_ > overflowed_ ? kPassedGrowth : kGrowth * epochs;
    bytes_ = std::min(kNone, bytes_ * (1.0 + growth));
  }
  // Other traffic fills the port: the first epoch of its burst looks like an own overflow, and the
  // next ones show which traffic it is.
  void take_back(Nanos now) {
    if (now - first_ < kPause) raise(before_);
  }

 private:
  // The ceiling after an overflow, as a share of the window that overflowed.
  static constexpr double kCut = 0.85;
  // The growth per epoch: a new attempt follows after some tenths of a second.
  static constexpr double kGrowth = 0.002;
  // Nanoseconds: the unit of that growth; a round of a long path counts for several.
  static constexpr double kUsualEpoch = 500e3;
  // Such units that one epoch counts for at most.
  static constexpr double kMostEpochs = 25;
  // The growth per epoch once the ceiling has passed the size that overflowed.
  static constexpr double kPassedGrowth = 0.05;
  // Losses within this time belong to one overflow.
  static constexpr Nanos kPause = 50 * kMillisecond;
  // Bytes: no bound.
  static constexpr double kNone = 1e12;
  double bytes_ = kNone;
  double before_ = 0;      // the ceiling before the last overflow
  double overflowed_ = 0;  // the window that overflowed
  Nanos first_ = 0;        // loss of the last overflow
  Nanos last_ = 0;         // loss of the last overflow
};

}  // namespace gradwire
