#include "proto/delay_window.h"

#include <algorithm>

namespace gradwire {

namespace {
constexpr Nanos kShortestEpoch = 300 * kMicrosecond;
constexpr Nanos kFeedback = 200 * kMicrosecond;  // of batching and delayed acknowledgement
constexpr double kDeepestCut = 0.6;              // of one epoch
constexpr double kForget = 0.97;                 // of the threshold, per cut
constexpr double kCareful = 0.05;                // growth per epoch above the threshold
}  // namespace

DelayWindow::DelayWindow(double initial, double minimum, double maximum, Nanos target)
    : window_(initial),
      minimum_(minimum),
      maximum_(maximum),
      threshold_(maximum),
      target_(target) {}

void DelayWindow::sample(uint64_t bytes, Nanos queue, Nanos rtprop, Nanos now) {
  queue = std::max<Nanos>(queue, 0);
  meter_.add(bytes, now);
  delay_sum_ += static_cast<double>(queue) * static_cast<double>(bytes);
  bytes_sum_ += static_cast<double>(bytes);
  // Below the threshold: one byte more for each that came through while the queue is short.
  if (limited_ && window_ < threshold_ && queue < target_ / 2)
    window_ = std::min({window_ + static_cast<double>(bytes), threshold_, maximum_});
  if (now < epoch_end_) return;
  if (epoch_end_ != 0) end_epoch(rtprop);
  // What was changed shows after a round trip through the present queue.
  epoch_end_ = now + std::max(kShortestEpoch, rtprop + queue + kFeedback);
  delay_sum_ = bytes_sum_ = 0;
  limited_ = false;
}

void DelayWindow::end_epoch(Nanos rtprop) {
  const auto delay = static_cast<Nanos>(delay_sum_ / std::max(1.0, bytes_sum_));
  last_delay_ = delay;
  const double target = static_cast<double>(target_);
  // More than this much in flight only lengthens the queue.
  const double enough = meter_.bytes_per_second() > 0
                            ? 1.25 * meter_.bytes_per_second() * 1e-9 *
                                  static_cast<double>(target_ + rtprop + kFeedback)
                            : maximum_;
  if (delay > target_) {
    // What a burst of other traffic takes away comes back by doubling: the threshold remembers.
    threshold_ =
        threshold_ >= maximum_ ? 0.8 * window_ : std::max(0.9 * window_, kForget * threshold_);
    threshold_ = std::max(minimum_, std::min(threshold_, enough));
    const double excess = (static_cast<double>(delay) - target) / static_cast<double>(delay);
    window_ = std::max(minimum_, window_ * std::max(kDeepestCut, 1.0 - 0.7 * excess));
  } else if (limited_ && window_ >= threshold_) {
    const double room = (target - static_cast<double>(delay)) / target;
    window_ = std::min(maximum_, window_ + std::max(1514.0, kCareful * window_) * room);
    threshold_ = window_;
  }
  window_ = std::max(minimum_, std::min(window_, enough));
}

}  // namespace gradwire
