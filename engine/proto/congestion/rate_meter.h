// RateMeter measures BtlBw, the windowed maximum of the delivery rate. Each sample spans tens of
// milliseconds of uninterrupted delivery: arrivals and ACKs come in clumps, so short samples
// overstate.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/overhead.h"
#include "proto/base/time.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

// Datagrams of the shortest train, and of a sender's smallest window: a shorter one would spend a
// send call on few packets.
inline constexpr double kShortestTrain = 4;

// From this share of BtlBw on the rate is what the port carries. A pace of this share lets a queue
// drain.
inline constexpr double kFullRate = 0.95;

class RateMeter {
 public:
  // Adds `bytes` delivered at `now`. `lossy`: they arrived under heavy loss, so their rate is
  // hardly the path's. An interval of mostly such bytes may raise the maximum, but neither replaces
  // nor ages it. `sent`: when the last of these packets was sent, if the sending time shall bound
  // the rate too, else 0. Queues that drain at several far receivers together acknowledge more than
  // this port carries. `losing`: the round-trip time if packets are lost, so that a policer may
  // stand on the way, else 0. Its bucket, which holds as much as a port's queue, has to be a small
  // part of an interval, and is filled in each pause that a sender makes to learn what arrived.
  void add(uint64_t bytes, Nanos now, bool lossy = false, Nanos sent = 0, Nanos losing = 0) {
    if (start_ == 0 || now - last_ > std::max(idle(), 2 * losing)) {
      end_burst();
      sent_ = sent;
      opened_ = now;
      begin(now);
      return;
    }
    const bool other = (sent == 0) != (sent_ == 0);  // an interval has bytes of one kind
    sent_ = other ? sent : std::max(sent_, sent);
    if (other) return begin(now);
    last_ = now;
    // The first clump may come in several parts. It opens the interval, and its bytes were
    // delivered before the interval began.
    if (now - opened_ <= kClump) return begin(now);
    bytes_ += bytes;
    if (lossy) lossy_bytes_ += bytes;
    const bool first = current_ == 0;
    const Nanos took = now - start_;
    if (!whole(took, losing)) return;
    const double rate = rate_until(now);
    const bool is_calm = calm();
    // A rate that was tried and not reached is the path's no more.
    const bool tried = tried_ >= kFullRate * 1e-9 * static_cast<double>(took) * bytes_per_second();
    proven_ = proven_ || lossy_bytes_ == 0;
    begin(now);
    take(rate, is_calm, first, tried ? kTriedWindow : WindowedMin::kWindow, now);
  }
  // Counts bytes that were sent.
  void sent(uint64_t bytes) { tried_ += static_cast<double>(bytes); }
  // The rate is this, whatever was measured before.
  void replace(double rate) {
    proven_ = true;
    current_ = rate;
    previous_ = 0;
    provisional_ = false;
  }
  double bytes_per_second() const { return std::max(previous_, current_); }
  // True once an interval without heavy loss has shown the rate.
  bool proven() const { return proven_; }

 private:
  void begin(Nanos now) {
    start_ = last_ = now;
    sent_start_ = sent_;
    bytes_ = lossy_bytes_ = 0;
    tried_ = 0;
  }
  // True when an interval of this length is whole.
  bool whole(Nanos took, Nanos losing) const {
    if (bytes_ < kLeastBytes) return false;
    if (current_ == 0) return took >= kFirstInterval;
    const Nanos usual = sent_ ? kLongInterval : kInterval;
    if (losing && bytes_ < kWholeBytes) return took >= kWholeTimes * usual;
    return took >= usual;
  }
  // Takes the rate of a whole interval. The second one replaces the first, which is a guess.
  void take(double rate, bool is_calm, bool first, Nanos window, Nanos now) {
    const bool aged = is_calm && now - window_start_ > window / 2;
    const bool replaces = first || provisional_;
    if (aged && !replaces) previous_ = current_;
    const bool counts = is_calm || (replaces && !proven_);
    current_ = counts && (replaces || aged) ? rate : std::max(current_, rate);
    if (replaces || aged) window_start_ = now;
    if (replaces) provisional_ = first;
  }
  // True when at most half of the interval's bytes arrived under heavy loss.
  bool calm() const { return 2 * lossy_bytes_ <= bytes_; }
  // Takes a burst that ended before its interval did, since jobs of short ops have nothing else. It
  // only raises the rate, and a little at a time: an idle port may start faster than it can go on.
  // Very short bursts are pooled, and count only without heavy loss. They must count: without them
  // a rate found too low would last.
  void end_burst() {
    const Nanos took = std::max(last_ - start_, sent_ - sent_start_);
    if (current_ == 0) return;
    const bool enough = took >= kIdle && bytes_ >= kLeastBytes;
    if (!enough && !calm()) return;
    pooled_ns_ = enough ? took : pooled_ns_ + took;
    pooled_bytes_ = enough ? bytes_ : pooled_bytes_ + bytes_;
    if (pooled_ns_ < kIdle || pooled_bytes_ < kLeastBytes) return;
    const double rate = static_cast<double>(pooled_bytes_) * 1e9 / static_cast<double>(pooled_ns_);
    current_ = std::clamp(rate, current_, (provisional_ ? kFirstRise : kShortRise) * current_);
    pooled_ns_ = 0;
    pooled_bytes_ = 0;
  }
  double rate_until(Nanos end) const {
    return static_cast<double>(bytes_) * 1e9 /
           static_cast<double>(std::max(end - start_, sent_ - sent_start_));
  }
  // A pause ends a burst only if it is longer than two trains take at the known rate.
  Nanos idle() const {
    const double rate = bytes_per_second();
    return rate > 0 ? std::max(kIdle, static_cast<Nanos>(kIdleBytes / rate * 1e9)) : kIdle;
  }
  // A sample's duration; clumps of arrivals distort shorter ones.
  static constexpr Nanos kInterval = 20 * kMillisecond;
  // A sample's duration with several far receivers, whose ACKs cover about a millisecond each.
  static constexpr Nanos kLongInterval = 2 * kInterval;
  // The first sample is short, so that windows have a bound before they overshoot. The next
  // replaces it.
  static constexpr Nanos kFirstInterval = 2 * kMillisecond;
  // The time for which a rate counts that is tried; one that is not counts as long as an extreme
  // delay does.
  static constexpr Nanos kTriedWindow = 1 * kSecond;
  // A pause of this length ends a burst. Bursts this long count alone; shorter ones are pooled up
  // to it.
  static constexpr Nanos kIdle = 3 * kMillisecond;
  // Arrivals this close together belong to one clump.
  static constexpr Nanos kClump = 20 * kMicrosecond;
  // The most that a burst raises the rate by.
  static constexpr double kShortRise = 1.1;
  // The same for a first guess, because slow start doubles the rate. ECN over 10 ms needs both.
  static constexpr double kFirstRise = 2 * kShortRise;
  // The bytes of two short trains; an incast over 10 ms takes longer without them.
  static constexpr double kIdleBytes = 2.0 * kShortestTrain * kFullPacket;
  // The bytes that a sample or a pool has at least.
  static constexpr uint64_t kLeastBytes = 32 * 1024;
  // The bytes of an interval where packets are lost, and the usual intervals that it may last.
  static constexpr uint64_t kWholeBytes = 1024 * 1024;
  static constexpr Nanos kWholeTimes = 4;
  Nanos start_ = 0;
  Nanos last_ = 0;
  Nanos sent_ = 0;
  Nanos sent_start_ = 0;
  uint64_t bytes_ = 0;
  double tried_ = 0;  // bytes sent meanwhile
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
