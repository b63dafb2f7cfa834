// Rtt estimates the round-trip time of one path: smoothed value and deviation (RFC 9002 §5, with a
// timer granularity of a millisecond), and RTprop as a windowed minimum (BBR).
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"
#include "proto/recovery/path_profile.h"

namespace gradwire {

// WindowedMin is the minimum of the last 5 to 10 s. After a pause the values before it count for
// 5 s more, unless forget_old() drops them.
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
  // Drops the values when all of them are older than the window.
  void forget_old(Nanos now) {
    if (now - start_ > kWindow) any_ = false;
  }
  bool any() const { return any_; }
  Nanos get() const { return std::min(previous_, current_); }

  // An extreme value is forgotten after 5 to 10 s, long enough to meet an empty queue now and then
  // (BBR).
  static constexpr Nanos kWindow = 10 * kSecond;

 private:
  bool any_ = false;
  Nanos start_ = 0;
  Nanos current_ = 0;
  Nanos previous_ = 0;
};

// Packets of a first window, before anything is known of the path: what a receiver lets all its
// senders send unasked, and what a probe time-out of a path that is worth it sends.
inline constexpr uint32_t kFirstWindow = 24;

// So many in a row are no chance: packets that overtake a missing one while none was reordered (RFC
// 8985 §6.2), rounds in which a rate does not grow (BBR), time-outs.
inline constexpr uint32_t kInARow = 3;

// A new sample is one part of so many of a moving mean (RFC 9002 §5.3).
inline constexpr Nanos kSmoothing = 8;
// A time-out adds so many deviations, whose mean covers as many samples (RFC 9002 §5.3, §6.2.1).
inline constexpr Nanos kDeviations = 4;
// Hosts wake up, and read the packets of one train, about this late. Half of it sends packets again
// that are only late, and leaves ports idle; twice of it waits as long for nothing.
inline constexpr Nanos kHostDelay = 500 * kMicrosecond;

// A peer from which a packet has arrived within this time is neither dead nor cut off, even if it
// has sent BYE.
inline constexpr Nanos kHeardOf = 1 * kSecond;

class Rtt {
 public:
  void sample(Nanos latest, Nanos ack_delay, Nanos now) {
    latest = std::clamp<Nanos>(latest, 1, kLongest);
    const bool first = !any();
    // The minimum is not dropped after a pause: the first packets after it may have queued.
    min_.add(latest, now);
    latest_ = latest;
    // The peer's reported ACK delay never brings a sample below the minimum (RFC 9002 §5.3).
    const Nanos adjusted = std::max(latest - ack_delay, min_.get());
    if (first) {
      smoothed_ = adjusted;
      deviation_ = adjusted / 2;
      held_ = latest - adjusted;
      return;
    }
    const Nanos error = adjusted > smoothed_ ? adjusted - smoothed_ : smoothed_ - adjusted;
    deviation_ += (error - deviation_) / kDeviations;
    smoothed_ += (adjusted - smoothed_) / kSmoothing;
    held_ += (latest - adjusted - held_) / kSmoothing;
  }
  bool any() const { return min_.any(); }
  Nanos smoothed() const { return any() ? smoothed_ : kInitial; }
  // The smoothed time from sending a packet to receiving its ACK, with the peer's ACK delay.
  Nanos round() const { return smoothed() + held_; }
  Nanos minimum() const { return min_.get(); }  // 0 before the first sample
  // How far the latest sample lies above the minimum.
  Nanos excess() const { return any() ? latest_ - min_.get() : kLongest; }
  const PathProfile& profile() const { return profile_of(minimum()); }
  // The probe time-out before backoff (RFC 9002 §6.2.1).
  Nanos probe_timeout() const {
    if (!any()) return kInitial;
    return smoothed_ + std::max(kDeviations * deviation_, kGranularity) +
           std::max(kMaxAckDelay, 2 * held_);
  }

  // The longest round-trip time: what seems longer is a host that was suspended.
  static constexpr Nanos kLongest = 1 * kSecond;
  // The longest that a peer delays its ACKs (Acknowledger::kDelay), rounded up.
  static constexpr Nanos kMaxAckDelay = 1 * kMillisecond;

 private:
  // The round-trip time assumed before the first sample.
  static constexpr Nanos kInitial = 20 * kMillisecond;
  // The timer granularity (RFC 9002 §6.2.1): drivers may wake up about this late.
  static constexpr Nanos kGranularity = 1 * kMillisecond;
  Nanos smoothed_ = 0;
  Nanos deviation_ = 0;
  Nanos held_ = 0;
  Nanos latest_ = 0;
  WindowedMin min_;
};

}  // namespace gradwire
