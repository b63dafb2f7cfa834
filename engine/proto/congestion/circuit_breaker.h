// CircuitBreaker finds out whether a sender floods a path that loses most packets (RFC 8084). The
// sender calls sent() and lost() for each packet, arrived() for what ACKs report, and tick() from
// its timer; factor() and most() bound what it sends.
//
// It trips when more than half of the packets have been lost for kPatience seconds in a row; bursts
// are shorter than that. For a second half the rate goes. If about as much arrives as before, the
// sender itself causes the loss. Shares of losses cannot tell, as the highest are not measured. If
// less arrives, other traffic causes it, so a lower rate of ours helps nobody; if more does, the
// loss has ended. The next attempt comes after twice the time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

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
  void arrived(uint64_t bytes) { arrived_ += static_cast<double>(bytes); }

  // Judges the last interval once it is over; true when it has shown that the sender floods the
  // path. Call it at least every few hundred milliseconds.
  bool tick(Nanos now) {
    if (start_ == 0) start_ = now;
    if (now - start_ < kInterval) return false;
    start_ = now;
    const double declared = static_cast<double>(lost_) / static_cast<double>(sent_);
    const double loss =
        static_cast<double>(sent_) < LossMeter::kFewest ? 0.0 : std::max(told_ / bytes_, declared);
    const double sent = std::exchange(bytes_, 0);
    const double arrived = std::exchange(arrived_, 0);
    sent_ = lost_ = 0;
    told_ = 0;
    bad_ = loss > kHalf ? bad_ + 1 : 0;
    if (bad_ == 0) next_ = kPatience;
    if (std::exchange(trying_, false)) {
      const bool floods = arrived > kStays * before_ && kStays * arrived < before_;
      if (floods) bad_ = 0;
      next_ = bad_ ? 2 * bad_ : kPatience;
      return floods;
    }
    trying_ = bad_ >= next_;
    before_ = arrived;
    most_ = kHalf * sent * 1e9 / kInterval;
    return false;
  }
  // The share of the usual rate and window that may be used.
  double factor() const { return trying_ ? kHalf : 1; }
  // The most that may be sent, in bytes/s: half of what was sent before, since a pace that is not
  // reached would hide the cut.
  double most() const { return trying_ ? most_ : std::numeric_limits<double>::infinity(); }

 private:
  // The loss of one interval decides; long enough for a rate to be judged by.
  static constexpr Nanos kInterval = 1 * kSecond;
  // The intervals of heavy loss in a row before the first attempt: longer than any burst.
  static constexpr uint32_t kPatience = 5;
  // The share of lost packets above which an interval counts as bad, and of the rate that is tried.
  static constexpr double kHalf = 0.5;
  // The share of what arrived before that arrives of half the rate where the sender floods the
  // path, at least: the middle between half, where a path loses whatever is sent, and all.
  static constexpr double kStays = (1.0 + kHalf) / 2;
  Nanos start_ = 0;
  uint64_t sent_ = 0;
  uint64_t lost_ = 0;
  double bytes_ = 0;           // of the packets sent in this interval
  double told_ = 0;            // the peers' reported loss, weighted by bytes
  double arrived_ = 0;         // bytes
  uint32_t bad_ = 0;           // bad intervals in a row
  uint32_t next_ = kPatience;  // bad_ at which the next attempt begins
  bool trying_ = false;        // half the rate goes
  double before_ = 0;          // bytes that arrived in the interval before the attempt
  double most_ = 0;            // bytes/s
};

}  // namespace gradwire
