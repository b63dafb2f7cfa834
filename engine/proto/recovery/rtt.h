// Round-trip time of one path: smoothed, deviation, and RTprop as a windowed minimum (RFC 9002 §5,
// with a granularity of a millisecond; BBR's RTprop filter).
#pragma once

#include <algorithm>

#include "proto/base/time.h"

namespace gradwire {

// The minimum of the last 5 to 10 s. After a pause the last values from before it still count for
// 5 s, unless they are forgotten.
class WindowedMin {
 public:
  void add(Nanos value, Nanos now) {
    if (!any_ || now - start_ > kWindow / 2) {
      previous_ = any_ ? current_ : value;
      current_ = value;
      start_ = now;
      any_ = true;
    } else {
      current_ = std::min(current_, value);
    }
  }
  // Lets go of values that are all older than the window.
  void forget_old(Nanos now) {
    if (now - start_ > kWindow) any_ = false;
  }
  bool any() const { return any_; }
  Nanos get() const { return std::min(previous_, current_); }

 private:
  static constexpr Nanos kWindow = 10 * kSecond;
  bool any_ = false;
  Nanos start_ = 0;
  Nanos current_ = 0;
  Nanos previous_ = 0;
};

// Much longer than the queue that is aimed at: what is in flight is on its way, not in a queue, and
// a burst of it fits no queue.
inline bool long_path(Nanos rtprop) {
  return rtprop > 5 * kMillisecond;
}

class Rtt {
 public:
  void sample(Nanos latest, Nanos ack_delay, Nanos now) {
    latest = std::max<Nanos>(latest, 1);
    // Not forgotten however long the peer was silent: what comes first after that may have queued.
    min_.add(latest, now);
    // The peer's word for its delay never makes a sample shorter than what has been seen.
    const Nanos adjusted = std::max(latest - ack_delay, min_.get());
    if (!any_) {
      any_ = true;
      smoothed_ = adjusted;
      deviation_ = adjusted / 2;
      held_ = latest - adjusted;
      return;
    }
    const Nanos error = adjusted > smoothed_ ? adjusted - smoothed_ : smoothed_ - adjusted;
    deviation_ += (error - deviation_) / 4;
    smoothed_ += (adjusted - smoothed_) / 8;
    held_ += (latest - adjusted - held_) / 8;
  }
  bool any() const { return any_; }
  Nanos smoothed() const { return any_ ? smoothed_ : kInitial; }
  // From sending to hearing of it, the peer's delay of its ACKs included.
  Nanos round() const { return smoothed() + held_; }
  Nanos minimum() const { return min_.any() ? min_.get() : 0; }
  // Time-out of a tail probe, before backoff.
  Nanos probe_timeout() const {
    if (!any_) return kInitial;
    return smoothed_ + std::max(4 * deviation_, kGranularity) + std::max(kMaxAckDelay, 2 * held_);
  }

  static constexpr Nanos kMaxAckDelay = 1 * kMillisecond;

 private:
  static constexpr Nanos kInitial = 20 * kMillisecond;
  static constexpr Nanos kGranularity = 1 * kMillisecond;
  bool any_ = false;
  Nanos smoothed_ = 0;
  Nanos deviation_ = 0;
  Nanos held_ = 0;
  WindowedMin min_;
};

}  // namespace gradwire
