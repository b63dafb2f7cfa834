// BtlBw: the windowed maximum of the delivered rate, each sample over a few milliseconds of
// uninterrupted delivery, because arrivals and ACKs come in clumps and short samples overstate.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/time.h"

namespace gradwire {

class RateMeter {
 public:
  // `lossy`: most does not arrive, so that this rate says little about the way: it neither takes
  // the place of a better one nor makes it older.
  void add(uint64_t bytes, Nanos now, bool lossy = false) {
    if (start_ == 0 || now - last_ > idle()) {
      // Where all bursts are shorter than an interval they are all there is to learn from. They
      // only raise the rate, and a little at a time: an idle port may begin faster than it can go
      // on.
      if (current_ > 0 && last_ - start_ >= kShortInterval && bytes_ >= kLeastBytes)
        current_ = std::clamp(rate_until(last_), current_,
                              (provisional_ ? kFirstRise : kShortRise) * current_);
      // The first clump opens the interval; its bytes were delivered before it.
      start_ = last_ = now;
      bytes_ = 0;
      return;
    }
    last_ = now;
    bytes_ += bytes;
    const bool first = current_ == 0;
    if (now - start_ < (first ? kFirstInterval : kInterval) || bytes_ < kLeastBytes) return;
    const double rate = rate_until(now);
    start_ = now;
    bytes_ = 0;
    proven_ = proven_ || !lossy;
    if (first || provisional_) {
      current_ = lossy ? std::max(current_, rate) : rate;
      provisional_ = first;
      window_start_ = now;
    } else if (lossy) {
      current_ = std::max(current_, rate);
    } else if (now - window_start_ > kWindow / 2) {
      previous_ = current_;
      current_ = rate;
      window_start_ = now;
    } else {
      current_ = std::max(current_, rate);
    }
  }
  double bytes_per_second() const { return std::max(previous_, current_); }
  // The rate has shown without heavy loss.
  bool proven() const { return proven_; }

 private:
  double rate_until(Nanos end) const {
    return static_cast<double>(bytes_) * 1e9 / static_cast<double>(end - start_);
  }
  // Two trains at the known rate are no pause, however slow that is.
  Nanos idle() const {
    const double rate = bytes_per_second();
    return rate > 0 ? std::max(kIdle, static_cast<Nanos>(kIdleBytes / rate * 1e9)) : kIdle;
  }
  static constexpr Nanos kInterval = 20 * kMillisecond;
  // A first guess, so that the windows have a bound before they overshoot; the next interval
  // replaces it.
  static constexpr Nanos kFirstInterval = 2 * kMillisecond;
  static constexpr Nanos kIdle = 3 * kMillisecond;
  static constexpr Nanos kShortInterval = 4 * kMillisecond;
  static constexpr double kShortRise = 1.1;
  static constexpr double kFirstRise = 2.2;  // of a first guess: a ramp doubles
  static constexpr double kIdleBytes = 8 * 1514.0;
  static constexpr uint64_t kLeastBytes = 32 * 1024;
  static constexpr Nanos kWindow = 10 * kSecond;
  Nanos start_ = 0;
  Nanos last_ = 0;
  uint64_t bytes_ = 0;
  Nanos window_start_ = 0;
  double current_ = 0;
  double previous_ = 0;
  bool provisional_ = false;
  bool proven_ = false;
};

}  // namespace gradwire
