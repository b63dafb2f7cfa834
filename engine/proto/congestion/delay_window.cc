#include "proto/congestion/delay_window.h"

#include <algorithm>

#include "proto/recovery/rtt.h"

namespace gradwire {

namespace {
constexpr Nanos kShortestEpoch = 300 * kMicrosecond;
constexpr Nanos kLongestEpoch = 300 * kMillisecond;
constexpr double kDeepestCut = 0.6;   // of one epoch
constexpr double kForget = 0.97;      // of the threshold, per cut
constexpr double kCareful = 0.05;     // growth per epoch above the threshold
constexpr double kLongGrowth = 0.25;  // the same, of a long path: each epoch is a round
constexpr double kLongProbe = 0.1;
constexpr double kLongProbeQueue = 2;  // delay targets
constexpr double kOverflowCut = 0.85;
constexpr double kCeilingGrowth = 0.002;  // per epoch: a new try after some tenths of a second
constexpr double kUsualEpoch = 500e3;     // ns: a long path's rounds count for several
constexpr double kMostEpochs = 25;
constexpr double kCeilingPassed = 0.05;  // the same, beyond what once overflowed
constexpr Nanos kOverflowPause = 50 * kMillisecond;
constexpr double kWayBack = 0.85;  // of what is on its way back: part of it waits at others' ports
constexpr double kSlowly = 1.0 / 16;  // a window that wavers makes its senders take turns unevenly
constexpr double kSegment = 1514.0;
constexpr double kSlow = 0.5;  // of BtlBw
constexpr double kCompetitiveCut = 0.8;
// Per round: a port's window stands for the flows of several peers.
constexpr double kCompetitiveGrowth = 3.5 * kSegment;
constexpr double kLongQueue = 64 << 10;  // bytes: a part of what a port's queue holds
constexpr Nanos kLongestTarget = 3 * kMillisecond;
constexpr double kUnbounded = 1e12;
constexpr double kFullRate = 0.6;     // of BtlBw: the port was ours alone
constexpr double kLargest = 256e6;    // bytes on one path
constexpr double kStillGrows = 1.25;  // per round of a ramp (BBR's full pipe)
constexpr uint32_t kFlatRounds = 3;
constexpr double kFull = 0.95;  // of BtlBw
constexpr double kStretchCut = 0.6;
constexpr double kStretchDecay = 0.9;
constexpr double kStretchGrowth = 4;
constexpr double kStretchRetry = 1.02;
constexpr double kStretchBelow = 0.75;
constexpr double kMarkedCut = 0.8;  // RFC 8511, section 3
constexpr double kDrain = 1.25;     // of the queue that is too long, per round of a long path
}  // namespace

DelayWindow::DelayWindow(double initial, double minimum, double buffer, Nanos target)
    : window_(initial),
      minimum_(minimum),
      buffer_(std::max(minimum, buffer)),
      maximum_(buffer_),
      threshold_(kUnbounded),
      shortest_target_(target),
      target_(target),
      enough_(maximum_),
      ceiling_(kUnbounded) {}

void DelayWindow::sample(uint64_t bytes, Nanos queue, Nanos round, Nanos rtprop, bool lossy,
                         Nanos now, Nanos sent) {
  queue = std::max<Nanos>(queue, 0);
  meter_.add(bytes, now, lossy, long_path(rtprop) && !lossy ? sent : 0);
  target_ = aim(rtprop);
  lossy_ = lossy;
  delay_sum_ += static_cast<double>(queue) * static_cast<double>(bytes);
  bytes_sum_ += static_cast<double>(bytes);
  // Below the threshold: half a byte more for each that came through while the queue is short; on a
  // long path one more, because each doubling takes a round.
  const bool is_long = long_path(rtprop);
  const double enough = ramps_ && is_long ? maximum_ : enough_;
  if (limited_ && window_ < std::min(threshold_, enough) && 3 * queue < shortest_target_)
    window_ = std::min({window_ + (is_long ? 1.0 : 0.5) * static_cast<double>(bytes), threshold_,
                        ceiling_, std::max(maximum_, window_)});
  if (now < epoch_end_) return;
  if (epoch_end_ != 0) end_epoch(round, rtprop, now);
  // What was changed shows after a round trip through the present queue.
  epoch_end_ = now + std::clamp(round, kShortestEpoch, kLongestEpoch);
  delay_sum_ = bytes_sum_ = 0;
  epoch_start_ = now;
  limited_ = lost_ = false;
}

void DelayWindow::marked() {
  ramps_ = false;
  window_ = std::max(minimum_, kMarkedCut * window_);
  // No doubling up to where it was marked.
  threshold_ = std::max(minimum_, std::min(threshold_, window_));
  stretch_ = std::max(1.0, kStretchCut * stretch_);
}

void DelayWindow::resume(double bytes) {
  window_ = std::max(window_, std::min({bytes, enough_, maximum_}));
  threshold_ = std::max(threshold_, window_);
  ceiling_ = std::max(ceiling_, window_);
}

// What comes and goes in a round grows with the path: a queue too short for it runs dry, above all
// under an incast. But it has to fit into buffers.
Nanos DelayWindow::aim(Nanos rtprop) const {
  const double rate = meter_.bytes_per_second();
  if (!long_path(rtprop) || ramps_ || rate <= 0) return shortest_target_;
  const auto fits = static_cast<Nanos>(kLongQueue * 1e9 / rate);
  return std::max(shortest_target_, std::min({rtprop / 4, kLongestTarget, fits}));
}

// A ramp ends with a queue, or when more in flight brings no more.
void DelayWindow::ramp(Nanos delay, double rate, Nanos rtprop) {
  if (!ramps_) return;
  if (rate > kStillGrows * ramp_rate_) {
    ramp_rate_ = rate;
    flat_rounds_ = 0;
  } else if (limited_) {
    ++flat_rounds_;
  }
  if (!long_path(rtprop) || 2 * delay > target_ || flat_rounds_ >= kFlatRounds) ramps_ = false;
}

// Loss with no queue, while the rate is below what the port can: more may be sent, until that
// shows as a queue or as the rate. Loss that our own packets cause shows as one of them.
void DelayWindow::stretch(Nanos delay, double rate) {
  const auto target = static_cast<double>(target_);
  const bool sender = loss_ >= 0;
  double most = 1.0 / (1.0 - (sender ? std::min(loss_, LossMeter::kMost) : LossMeter::kMost));
  if (sender) most = std::clamp(told_ / window_, 1.0, most);
  const double use = rate / std::max(1.0, meter_.bytes_per_second());
  if (4 * delay > 3 * target_) {
    // What came through then is what the way carries.
    if (sender && stretch_ > 1)
      overstretch_ = std::clamp(use / (1.0 - loss_), kStretchBelow * stretch_, stretch_);
    stretch_ *= std::max(kStretchCut, 0.75 * target / static_cast<double>(delay));
  } else if (use >= kFull) {
    stretch_ *= kStretchDecay;
  } else if (!sender) {
    stretch_ *= use < 0.5 ? 8 : 2;
  } else if (limited_ && loss_ > kHeavyLoss) {
    const double more = kStretchGrowth * stretch_;
    stretch_ = more < overstretch_ ? more : std::max(overstretch_, kStretchRetry * stretch_);
  }
  if (sender && loss_ < kHeavyLoss) overstretch_ = kUnbounded;
  stretch_ = std::clamp(stretch_, 1.0, most);
}

// What the rate accounts for. On a long path with no queue at all also a little more than there is
// now: a rate that has not shown yet, because losses broke the ramp off, would never show.
double DelayWindow::bound(Nanos delay, Nanos rtprop) const {
  if (!long_path(rtprop) || lossy_ || 2 * delay > target_) return enough_;
  const double queue = kLongProbeQueue * 1e-9 * static_cast<double>(target_) * rate();
  return std::max(enough_, window_ + std::min(kLongProbe * window_, queue));
}

void DelayWindow::end_epoch(Nanos round, Nanos rtprop, Nanos now) {
  const auto delay = static_cast<Nanos>(delay_sum_ / std::max(1.0, bytes_sum_));
  last_delay_ = delay;
  const double target = static_cast<double>(target_);
  // The queue that is wanted, the path, and what is on its way back: more only lengthens the queue.
  const auto sample =
      static_cast<double>(rtprop + std::clamp<Nanos>(round - delay - rtprop, 0, 2 * target_));
  way_back_ += (sample - way_back_) * (way_back_ == 0 ? 1.0 : kSlowly);
  // But never less than what is on its way at this rate and a quarter of the target's queue: a
  // window that holds the rate down could not grow out of it.
  const double least = static_cast<double>(std::max<Nanos>(round - delay, 0)) - 0.75 * target;
  enough_ = meter_.bytes_per_second() > 0 ? meter_.bytes_per_second() * 1e-9 *
                                                (target + std::max(kWayBack * way_back_, least))
                                          : kUnbounded;
  maximum_ =
      std::min(kLargest, buffer_ + meter_.bytes_per_second() * 1e-9 * static_cast<double>(rtprop));
  // Loss while our own traffic fills the port is an overflow of our making (invariant 11). While
  // somebody else's does, or with an empty queue, it tells nothing about this window. Nor under
  // heavy loss, on a long path: packets are missing in every round there.
  const double rate =
      bytes_sum_ * 1e9 / static_cast<double>(std::max<Nanos>(1, now - epoch_start_));
  const bool queued = 2 * delay > target_;
  const bool ours = rate > kFullRate * meter_.bytes_per_second();
  if (lost_ && queued && ours && !(lossy_ && long_path(rtprop))) {
    // One overflow shows over several epochs.
    if (now - last_overflow_ > kOverflowPause) {
      ceiling_before_ = ceiling_;
      overflow_start_ = now;
      overflow_at_ = std::min(window_, ceiling_);
      ceiling_ = std::max(minimum_, kOverflowCut * overflow_at_);
    }
    last_overflow_ = now;
  } else {
    // What goes well now, was not ours alone then.
    const double epochs =
        std::clamp(static_cast<double>(now - epoch_start_) / kUsualEpoch, 1.0, kMostEpochs);
    const double growth = ceiling_ > overflow_at_ ? kCeilingPassed : kCeilingGrowth * epochs;
    ceiling_ = std::min(kUnbounded, ceiling_ * (1.0 + growth));
  }
  // The first epoch of a burst looks like our doing: who takes the port shows in the next ones.
  // An epoch that a pause has stretched does not tell.
  const bool whole = 2 * (now - epoch_end_) < epoch_end_ - epoch_start_;
  if (queued && !ours && whole && now - overflow_start_ < kOverflowPause)
    ceiling_ = std::max(ceiling_, ceiling_before_);
  ramp(delay, rate, rtprop);
  stretch(delay, rate);
  if (whole && limited_ && !lossy_) {
    // On a long path the rate comes and goes with the rounds.
    const bool slow =
        !long_path(rtprop) && 4 * delay > target_ && rate < kSlow * meter_.bytes_per_second();
    const double factor =
        competition_.observe(bytes_sum_, now - epoch_start_, delay, target_, slow, now);
    if (factor != 1.0) window_ = std::clamp(factor * window_, minimum_, maximum_);
  } else if (lossy_ && competition_.trying()) {
    window_ = std::clamp(competition_.abandon(now) * window_, minimum_, maximum_);
  }
  if (competition_.trying()) return;
  if (competition_.competes()) {
    if (lost_) {
      window_ *= kCompetitiveCut;
    } else if (limited_) {
      window_ += kCompetitiveGrowth;
    }
    threshold_ = window_ = std::clamp(window_, minimum_, maximum_);
    return;
  }
  if (delay > target_) {
    // What a burst of other traffic takes away comes back by doubling: the threshold remembers.
    threshold_ =
        threshold_ >= maximum_ ? 0.8 * window_ : std::max(0.9 * window_, kForget * threshold_);
    threshold_ = std::max(minimum_, std::min(threshold_, enough_));
    const double excess = (static_cast<double>(delay) - target) / static_cast<double>(delay);
    double kept = std::max(kDeepestCut, 1.0 - 0.7 * excess);
    // The most of a long path's window is on its way and not in the queue.
    if (long_path(rtprop))
      kept = std::max(kept, 1.0 - kDrain * meter_.bytes_per_second() * 1e-9 *
                                      (static_cast<double>(delay) - 0.5 * target) / window_);
    window_ = std::max(minimum_, window_ * kept);
  } else if (const double most = ramps_ ? maximum_ : bound(delay, rtprop);
             limited_ && window_ < most) {
    // Above the threshold, and below it where the queue is too long for doubling.
    const double room = (target - static_cast<double>(delay)) / target;
    const double growth = long_path(rtprop) ? kLongGrowth : kCareful;
    const double grown = window_ + std::max(kSegment, growth * window_) * room;
    window_ = std::min(maximum_, long_path(rtprop) && !ramps_ ? std::min(grown, most) : grown);
    threshold_ = std::max(threshold_, window_);
  }
  // A window that is too large gives way only to a queue: a long round without one is the doing of
  // busy hosts, and giving way to that would make the rate, and with it the window, ever smaller.
  if (4 * delay > target_ && !ramps_) window_ = std::min(window_, enough_);
  window_ = std::max(minimum_, std::min({window_, ceiling_, maximum_}));
  threshold_ = std::min(threshold_, ceiling_);
}

}  // namespace gradwire
