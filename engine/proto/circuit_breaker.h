// Against collapse (RFC 8084 in spirit): when most of what is sent stays lost for seconds, whatever
// delay and bounds say, the sending rate is halved and halved again, and comes back once packets
// get through. Bursts, and single rounds of heavy loss, are shorter than what trips it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/time.h"

namespace gradwire {

class CircuitBreaker {
 public:
  void sent() { ++sent_; }
  void lost() { ++lost_; }

  // Call at least every few hundred milliseconds. `told`: the share that gets lost, by the peers'
  // word: what is sent again early is never declared lost.
  void tick(Nanos now, double told) {
    if (start_ == 0) start_ = now;
    if (now - start_ < kInterval) return;
    start_ = now;
    const double loss =
        sent_ < kFewest ? 0.0
                        : std::max(told, static_cast<double>(lost_) / static_cast<double>(sent_));
    sent_ = lost_ = 0;
    if (loss > kBad) {
      // A cut after which as much gets lost as before has shown that the loss is not our doing.
      if (++bad_ >= kPatience && loss < kHelped * before_) {
        factor_ = std::max(kSmallest, factor_ / 2);
        before_ = loss;
      }
    } else {
      bad_ = 0;
      before_ = kUnknown;
      if (loss < kGood) factor_ = std::min(1.0, factor_ * 2);
    }
  }
  // What of the usual rate and window may be used, in (0, 1].
  double factor() const { return factor_; }

 private:
  static constexpr Nanos kInterval = 1 * kSecond;
  static constexpr uint32_t kPatience = 5;  // intervals
  static constexpr uint64_t kFewest = 20;
  static constexpr double kBad = 0.5;
  static constexpr double kGood = 0.25;
  static constexpr double kHelped = 0.95;
  static constexpr double kUnknown = 2.0;  // more than all
  static constexpr double kSmallest = 1.0 / 32;
  Nanos start_ = 0;
  uint64_t sent_ = 0;
  uint64_t lost_ = 0;
  uint32_t bad_ = 0;
  double before_ = kUnknown;  // what was lost at the last cut
  double factor_ = 1.0;
};

}  // namespace gradwire
