#include "proto/delay_window.h"

#include <algorithm>

namespace gradwire {

namespace {
constexpr Nanos kShortestEpoch = 300 * kMicrosecond;
constexpr Nanos kLongestEpoch = 50 * kMillisecond;
constexpr double kDeepestCut = 0.6;  // of one epoch
}  // namespace

DelayWindow::DelayWindow(double initial, double minimum, double maximum, Nanos target)
    : window_(initial),
      minimum_(minimum),
      maximum_(maximum),
      threshold_(maximum),
      target_(target) {}

void DelayWindow::sample(uint64_t bytes, Nanos queue, Nanos round, Nanos now) {
  if (epoch_end_ == 0)
    epoch_end_ = now + std::clamp(round, kShortestEpoch, kLongestEpoch);
  epoch_bytes_ += bytes;
  epoch_delay_ = std::min(epoch_delay_, std::max<Nanos>(queue, 0));
  if (now < epoch_end_) return;
  end_epoch(now);
  epoch_end_ = now + std::clamp(round, kShortestEpoch, kLongestEpoch);
}

void DelayWindow::end_epoch(Nanos) {
  const Nanos delay = epoch_delay_ == kNever ? 0 : epoch_delay_;
  last_delay_ = delay;
  if (delay > target_) {
    // What a burst takes away comes back by doubling: the threshold remembers where we stood.
    if (delay < 4 * target_) threshold_ = std::max(minimum_, window_ * 0.8);
    const double excess = static_cast<double>(delay - target_) / static_cast<double>(delay);
    window_ = std::max(minimum_, window_ * std::max(kDeepestCut, 1.0 - 0.8 * excess));
  } else if (limited_) {
    const double room = static_cast<double>(target_ - delay) / static_cast<double>(target_);
    if (window_ < threshold_ && room > 0.3) {
      window_ *= 1.0 + std::min(1.0, room);
    } else {
      window_ += std::max(1514.0, 0.1 * window_) * room;
      threshold_ = std::max(threshold_, window_);
    }
    window_ = std::min(window_, maximum_);
  }
  epoch_delay_ = kNever;
  epoch_bytes_ = 0;
  limited_ = false;
}

}  // namespace gradwire
