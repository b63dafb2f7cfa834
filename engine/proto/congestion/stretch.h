// Stretch is the factor by which a window may be exceeded so that a window's worth arrives where a
// share of the packets is lost without a queue. A receiver's stretches at once, because its senders
// bound themselves. A sender's stretches step by step, up to the windows that its receivers report.
#pragma once

#include <algorithm>
#include <limits>

#include "proto/base/time.h"
#include "proto/congestion/queue_delay.h"
#include "proto/recovery/loss_meter.h"

namespace gradwire {

// The factor of a window at a mark (RFC 8511 §3), or at a loss beside flows that heed only that.
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
  // A switch marks packets.
  void marked() { factor_ = std::max(1.0, kSignalCut * factor_); }
  // Judges one epoch. With loss but no queue, and a rate below what the port carries, more may be
  // sent. A queue or the full rate ends that; loss that our own packets cause comes with one of
  // them. `use`: the delivered rate as a share of BtlBw. `limited`: the window held transmission
  // back.
  void epoch(double window, double use, Nanos delay, Nanos target, bool limited) {
    const bool sender = loss_ >= 0;
    double upper = most(sender ? loss_ : LossMeter::kMost);
    if (sender) upper = std::clamp(told_ / window, 1.0, upper);
    if (!short_queue(delay, target)) {
      // The rate that came through then is what the path carries.
      if (sender && factor_ > 1)
        queued_at_ = std::clamp(use / (1.0 - loss_), kSignalCut * factor_, factor_);
      factor_ *= std::max(kSignalCut,
                          kShortQueue * static_cast<double>(target) / static_cast<double>(delay));
    } else if (use >= kFull) {
      factor_ *= kSignalCut;
    } else if (!sender) {
      factor_ *= kGrowth;
    } else if (limited && loss_ > kHeavyLoss) {
      const double more = kGrowth * factor_;
      factor_ = more < queued_at_ ? more : std::max(queued_at_, kRetry * factor_);
    }
    if (sender && loss_ < kHeavyLoss) queued_at_ = std::numeric_limits<double>::infinity();
    factor_ = std::clamp(factor_, 1.0, upper);
  }

 private:
  static double most(double loss) { return 1.0 / (1.0 - std::min(loss, LossMeter::kMost)); }

  // From this share of BtlBw on the rate is what the port carries; the circuit breaker needs it.
  static constexpr double kFull = 0.95;
  // The growth of the stretch per epoch.
  static constexpr double kGrowth = 4;
  // Its growth beyond a value that made a queue before.
  static constexpr double kRetry = 1.02;
  double loss_ = -1;  // -1: of a receiver
  double told_ = 0;
  double factor_ = 1;
  double queued_at_ = std::numeric_limits<double>::infinity();  // a stretch that led to a queue
};

}  // namespace gradwire
