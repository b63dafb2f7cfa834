// Stretch is the factor by which a window may be exceeded so that a window's worth arrives where a
// share of the packets is lost without a queue. A receiver's stretches at once, because its senders
// bound themselves. A sender's stretches step by step, up to the windows that its receivers report.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "proto/base/time.h"
#include "proto/congestion/queue_delay.h"
#include "proto/congestion/rate_meter.h"
#include "proto/recovery/loss_meter.h"

namespace gradwire {

// The factor of a window at a mark (RFC 8511 §3), or at a loss beside flows that heed only that; no
// epoch shrinks a window by more. A sender stretches below this share of BtlBw: a policer lets
// nearly all of it pass.
inline constexpr double kSignalCut = 0.8;

class Stretch {
 public:
  // True when the factor may exceed 1.
  bool any() const { return factor_ > 1; }
  // The factor where the share `loss` is lost.
  double factor(double loss) const { return any() ? std::clamp(factor_, 1.0, most(loss)) : 1.0; }
  // For a sender: `share` of its packets is lost, and its receivers' windows for it have `told`
  // bytes.
  void loss(double share, double told) {
    loss_ = share;
    told_ = told;
  }
  // The share of BtlBw that arrived when it was judged last.
  double use() const { return use_; }
  // Packets have queued for so long.
  void queued(Nanos delay) { least_.add(delay); }
  // Counts bytes delivered in so many nanoseconds.
  void delivered(double bytes, Nanos took) {
    bytes_ += bytes;
    took_ += took;
  }
  // True when enough was counted: in a short time little of BtlBw arrives wherever packets come in
  // clumps.
  bool due() const { return took_ >= kJudged; }
  // A switch marks packets.
  void marked() { factor_ = std::max(1.0, kSignalCut * factor_); }
  // Judges one epoch. With loss but no queue, and a rate below what the port carries, more may be
  // sent. A queue or the full rate ends that; loss that our own packets cause comes with one of
  // them. Beside a queue that stands nothing more is sent: its buffer may be short. `rate`: BtlBw.
  // `limited`: the window held transmission back.
  void epoch(double window, double rate, Nanos delay, Nanos target, bool limited) {
    const double use = bytes_ * 1e9 / static_cast<double>(took_) / rate;
    use_ += (use - use_) / kSmoothing;
    bytes_ = 0;
    took_ = 0;
    const bool sender = loss_ >= 0;
    const bool queued = !short_queue(delay, target);
    const bool stands = some_queue(std::exchange(least_, {}).get(), target);
    const bool starves = sender && loss_ > kHeavyLoss && use < kSignalCut;
    if (queued) {
      if (sender) learn(use);
      factor_ *= std::max(kSignalCut,
                          kShortQueue * static_cast<double>(target) / static_cast<double>(delay));
    } else if (use >= kFullRate) {
      factor_ *= kSignalCut;
    } else if (!sender) {
      factor_ *= kGrowth;
    } else if (limited && starves && !stands) {
      const double more = kGrowth * factor_;
      factor_ = more < queued_at_ ? more : std::max(queued_at_, kRetry * factor_);
    }
    if (sender && loss_ < kHeavyLoss) queued_at_ = std::numeric_limits<double>::infinity();
    factor_ = std::clamp(factor_, 1.0, upper(window));
  }

 private:
  // The rate that comes through beside a queue is what the path carries.
  void learn(double use) {
    if (factor_ > 1) queued_at_ = std::clamp(use / (1.0 - loss_), kSignalCut * factor_, factor_);
  }
  double upper(double window) const {
    if (loss_ < 0) return most(LossMeter::kMost);
    return std::clamp(told_ / window, 1.0, most(loss_));
  }
  static double most(double loss) { return 1.0 / (1.0 - std::min(loss, LossMeter::kMost)); }

  // The least time by which it is judged.
  static constexpr Nanos kJudged = 2 * kMillisecond;
  // The growth of the stretch per epoch.
  static constexpr double kGrowth = 2;
  // Its growth beyond a value that made a queue before.
  static constexpr double kRetry = 1.02;
  double loss_ = -1;  // -1: of a receiver
  double told_ = 0;
  double factor_ = 1;
  double use_ = 1;
  // Delivered since it was judged last, and in which time.
  double bytes_ = 0;
  Nanos took_ = 0;
  LeastDelay least_;
  double queued_at_ = std::numeric_limits<double>::infinity();  // a stretch that led to a queue
};

}  // namespace gradwire
