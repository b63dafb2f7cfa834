// Against collapse (RFC 8084 in spirit): when most of what is sent stays lost for seconds, whatever
// delay and bounds say, the sending rate is halved, and halved again as long as that lowers the
// loss; it comes back once packets get through, or when a cut was of no use, until the next
// attempt. Bursts, and most single rounds of heavy loss, are shorter than what trips it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"

namespace gradwire {

class CircuitBreaker {
 public:
  // `told`: the share that gets lost now, by the peers' word: what is sent again early is never
  // declared lost.
  void sent(uint64_t bytes, double told) {
    ++sent_;
    bytes_ += static_cast<double>(bytes);
    told_ += told * static_cast<double>(bytes);
  }
  void lost() { ++lost_; }

  // Call at least every few hundred milliseconds.
  void tick(Nanos now) {
    if (start_ == 0) start_ = now;
    if (now - start_ < kInterval) return;
    start_ = now;
    const double declared = static_cast<double>(lost_) / static_cast<double>(sent_);
    const double loss = sent_ < kFewest ? 0.0 : std::max(told_ / bytes_, declared);
    sent_ = lost_ = 0;
    bytes_ = told_ = 0;
    if (loss <= kBad) {
      bad_ = tried_ = 0;
      next_ = kPatience;
      rest_ = kRest;
      if (loss < kGood) factor_ = std::min(1.0, factor_ * 2);
      return;
    }
    ++bad_;
    if (tried_ == 0) {
      if (bad_ >= next_) cut(loss);
    } else if (loss < kHelped * before_) {
      cut(loss);
    } else {
      take_back(loss);
    }
  }
  // What of the usual rate and window may be used, in (0, 1].
  double factor() const { return factor_; }

 private:
  void cut(double loss) {
    if (factor_ <= kSmallest) return;
    if (tried_ == 0) first_ = loss;
    factor_ /= 2;
    before_ = loss;
    tried_ = bad_;
  }
  // As much gets lost as before: the loss is not our doing, and less of ours is of no use to
  // anybody. Nor were the cuts before that one where as much gets lost as before the first.
  void take_back(double loss) {
    factor_ = loss < kHelped * first_ ? std::min(1.0, factor_ * 2) : 1.0;
    tried_ = 0;
    next_ = bad_ + rest_;
    rest_ = std::min(kLongestRest, rest_ * 2);
  }

  static constexpr Nanos kInterval = 1 * kSecond;
  // Intervals: until the first cut, and from one that was of no use to the next. One later a cut
  // has its verdict.
  static constexpr uint32_t kPatience = 5;
  static constexpr uint32_t kRest = 10;
  static constexpr uint32_t kLongestRest = 80;
  static constexpr uint64_t kFewest = 20;
  static constexpr double kBad = 0.5;
  static constexpr double kGood = 0.25;
  static constexpr double kHelped = 0.95;
  static constexpr double kSmallest = 1.0 / 32;
  Nanos start_ = 0;
  uint64_t sent_ = 0;
  uint64_t lost_ = 0;
  double bytes_ = 0;           // sent
  double told_ = 0;            // times bytes
  uint32_t bad_ = 0;           // intervals running
  uint32_t tried_ = 0;         // `bad_` at the cut that has no verdict yet; 0: there is none
  uint32_t next_ = kPatience;  // `bad_` at the next first cut
  uint32_t rest_ = kRest;
  double first_ = 0;   // what was lost at the first cut of several running
  double before_ = 0;  // at the last one
  double factor_ = 1.0;
};

}  // namespace gradwire
