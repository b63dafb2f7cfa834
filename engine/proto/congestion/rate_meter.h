// BtlBw: the windowed maximum of the delivered rate, each sample over tens of milliseconds of
// uninterrupted delivery, because arrivals and ACKs come in clumps and short samples overstate.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"

namespace gradwire {

class RateMeter {
 public:
  // `lossy`: most does not arrive, so that this rate says little about the way: where it was so for
  // most bytes, the rate neither takes the place of a better one nor makes it older.
  // `sent`: when the last of them went out, where that is to bound the rate, too (0: not): queues
  // that drain at several far receivers together acknowledge more than the way from here carries.
  void add(uint64_t bytes, Nanos now, bool lossy = false, Nanos sent = 0) {
    if (start_ == 0 || now - last_ > idle()) {
      end_burst();
      sent_ = sent;
      opened_ = now;
      begin(now);
      return;
    }
    const bool other = (sent == 0) != (sent_ == 0);  // an interval is of one kind
    sent_ = other ? sent : std::max(sent_, sent);
    if (other) return begin(now);
    last_ = now;
    // The first clump, which may come in several parts, opens the interval; its bytes were
    // delivered before it.
    if (now - opened_ <= kClump) return begin(now);
    bytes_ += bytes;
    if (lossy) lossy_bytes_ += bytes;
    const bool first = current_ == 0;
    const Nanos whole = sent ? kLongInterval : kInterval;
    if (now - start_ < (first ? kFirstInterval : whole) || bytes_ < kLeastBytes) return;
    const double rate = rate_until(now);
    const bool is_calm = calm();
    proven_ = proven_ || lossy_bytes_ == 0;
    begin(now);
    if (first || provisional_) {
      current_ = is_calm ? rate : std::max(current_, rate);
      provisional_ = first;
      window_start_ = now;
    } else if (!is_calm) {
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
  void begin(Nanos now) {
    start_ = last_ = now;
    sent_start_ = sent_;
    bytes_ = lossy_bytes_ = 0;
  }
  bool calm() const { return 2 * lossy_bytes_ <= bytes_; }
  // Where all bursts are shorter than an interval they are all there is to learn from. They only
  // raise the rate, and a little at a time: an idle port may begin faster than it can go on. The
  // shortest tell something only several together, where they are calm; but did they tell nothing,
  // a rate found too low would last for good once it makes an op as long as what counts.
  void end_burst() {
    const Nanos took = std::max(last_ - start_, sent_ - sent_start_);
    if (current_ == 0 || took < kShortestBurst || bytes_ < kFewestBytes) return;
    const bool enough = took >= kShortInterval && bytes_ >= kLeastBytes;
    if (!enough && !calm()) return;
    pooled_ns_ = enough ? took : pooled_ns_ + took;
    pooled_bytes_ = enough ? bytes_ : pooled_bytes_ + bytes_;
    if (pooled_ns_ < kShortInterval || pooled_bytes_ < kLeastBytes) return;
    const double rate = static_cast<double>(pooled_bytes_) * 1e9 / static_cast<double>(pooled_ns_);
    current_ = std::clamp(rate, current_, (provisional_ ? kFirstRise : kShortRise) * current_);
    pooled_ns_ = 0;
    pooled_bytes_ = 0;
  }
  double rate_until(Nanos end) const {
    return static_cast<double>(bytes_) * 1e9 /
           static_cast<double>(std::max(end - start_, sent_ - sent_start_));
  }
  // Two trains at the known rate are no pause, however slow that is.
  Nanos idle() const {
    const double rate = bytes_per_second();
    return rate > 0 ? std::max(kIdle, static_cast<Nanos>(kIdleBytes / rate * 1e9)) : kIdle;
  }
  static constexpr Nanos kInterval = 20 * kMillisecond;
  // Of ACKs from far receivers, each of which tells of a millisecond at once: the largest of
  // shorter samples is a twentieth too much.
  static constexpr Nanos kLongInterval = 50 * kMillisecond;
  // A first guess, so that the windows have a bound before they overshoot; the next interval
  // replaces it.
  static constexpr Nanos kFirstInterval = 2 * kMillisecond;
  static constexpr Nanos kIdle = 3 * kMillisecond;
  static constexpr Nanos kShortInterval = 4 * kMillisecond;
  static constexpr Nanos kShortestBurst = 1 * kMillisecond;
  static constexpr Nanos kClump = 20 * kMicrosecond;
  static constexpr double kShortRise = 1.1;
  static constexpr double kFirstRise = 2.2;  // of a first guess: a ramp doubles
  static constexpr double kIdleBytes = 8 * 1514.0;
  static constexpr uint64_t kLeastBytes = 32 * 1024;
  static constexpr uint64_t kFewestBytes = 4 * 1024;  // of a burst that counts
  static constexpr Nanos kWindow = 10 * kSecond;
  Nanos start_ = 0;
  Nanos last_ = 0;
  Nanos sent_ = 0;
  Nanos sent_start_ = 0;
  uint64_t bytes_ = 0;
  uint64_t lossy_bytes_ = 0;
  Nanos opened_ = 0;
  Nanos pooled_ns_ = 0;  // of short bursts
  uint64_t pooled_bytes_ = 0;
  Nanos window_start_ = 0;
  double current_ = 0;
  double previous_ = 0;
  bool provisional_ = false;
  bool proven_ = false;
};

}  // namespace gradwire
