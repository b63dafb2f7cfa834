// CircuitBreaker lowers the sending rate while most packets stay lost (RFC 8084). The sender calls
// sent() and lost() for each packet and tick() from its timer; factor() scales its usual rate and
// window.
//
// It trips when more than half of the packets have been lost for kPatience seconds in a row; bursts
// are shorter than that. It halves the rate again as long as that lowers the loss: of what a sender
// alone causes, half the rate loses 2 L - 1 where the whole lost L, and half of that fall is
// enough. A cut that does not help is undone, and the next attempt comes after twice the time. The
// rate returns once most packets arrive.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "proto/base/time.h"
#include "proto/recovery/loss_meter.h"

namespace gradwire {

class CircuitBreaker {
 public:
  // Counts packets. `told`: the share of packets that peers now report as lost. It counts packets
  // that were repeated, which are never declared lost.
  void sent(uint64_t bytes, double told, uint32_t packets = 1) {
    sent_ += packets;
    bytes_ += static_cast<double>(bytes);
    told_ += told * static_cast<double>(bytes);
  }
  void lost() { ++lost_; }

  // Judges the last interval once it is over. Call it at least every few hundred milliseconds.
  void tick(Nanos now) {
    if (start_ == 0) start_ = now;
    if (now - start_ < kInterval) return;
    start_ = now;
    if (factor_ == 1.0) usual_ = bytes_ * 1e9 / kInterval;
    const double declared = static_cast<double>(lost_) / static_cast<double>(sent_);
    const double loss =
        static_cast<double>(sent_) < LossMeter::kFewest ? 0.0 : std::max(told_ / bytes_, declared);
    sent_ = lost_ = 0;
    bytes_ = told_ = 0;
    if (loss <= kHalf) {
      bad_ = tried_ = 0;
      next_ = kPatience;
      if (loss < kHeavyLoss) factor_ = std::min(1.0, factor_ / kHalf);
      return;
    }
    ++bad_;
    if (tried_ == 0) {
      if (bad_ >= next_) cut(loss);
    } else if (loss < before_ - kHalf * (1.0 - before_)) {
      cut(loss);
    } else {
      take_back();
    }
  }
  // The share of the usual rate and window that may be used, in (0, 1].
  double factor() const { return factor_; }
  // The most that may be sent, in bytes/s: that share of what was sent before the first cut, since
  // a pace that is not reached would hide the cut.
  double most() const {
    return factor_ < 1 ? factor_ * usual_ : std::numeric_limits<double>::infinity();
  }

 private:
  void cut(double loss) {
    factor_ *= kHalf;
    before_ = loss;
    tried_ = bad_;
  }
  // Undoes a cut after which as much was lost as before: other traffic causes the loss, so a lower
  // rate of ours helps nobody.
  void take_back() {
    factor_ = std::min(1.0, factor_ / kHalf);
    tried_ = 0;
    next_ = 2 * bad_;
  }

  // The loss of one interval decides; long enough for a rate to be judged by.
  static constexpr Nanos kInterval = 1 * kSecond;
  // The intervals of heavy loss in a row before the first cut: longer than any burst.
  static constexpr uint32_t kPatience = 5;
  // The share of lost packets above which an interval counts as bad, and what a cut leaves.
  static constexpr double kHalf = 0.5;
  Nanos start_ = 0;
  uint64_t sent_ = 0;
  uint64_t lost_ = 0;
  double bytes_ = 0;           // of the packets sent in this interval
  double told_ = 0;            // the peers' reported loss, weighted by bytes
  uint32_t bad_ = 0;           // bad intervals in a row
  uint32_t tried_ = 0;         // bad_ at the cut that is being judged; 0: none is
  uint32_t next_ = kPatience;  // bad_ at which the next first cut comes
  double before_ = 0;          // the loss at the last cut
  double factor_ = 1.0;
  double usual_ = 0;  // bytes/s, before the first cut
};

}  // namespace gradwire
