// QueueDelay and PortDelay estimate how long packets queue: at one path, smoothed,
// and at the port of an endpoint, which all its paths share.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "proto/base/agenda.h"
#include "proto/base/overhead.h"
#include "proto/base/time.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

// The share of the delay target that hosts which wake up late make or hide: above it there is a
// queue at all.
inline constexpr double kHostQueue = 0.25;
inline bool some_queue(Nanos delay, Nanos target) {
  return static_cast<double>(delay) > kHostQueue * static_cast<double>(target);
}
// A queue that leaves that much of the target is short: more may be sent than the rate accounts
// for.
inline constexpr double kShortQueue = 1.0 - kHostQueue;
inline bool short_queue(Nanos delay, Nanos target) {
  return static_cast<double>(delay) <= kShortQueue * static_cast<double>(target);
}

// QueueDelay estimates queueing as one-way delay above its minimum of the last seconds. The two
// ends' clocks need not agree. Where one of them jumps, as that of a suspended machine does, the
// measurement begins anew with the second packet that shows it: a single one has a damaged stamp.
class QueueDelay {
 public:
  Nanos sample(uint32_t sent_us, Nanos arrival, Nanos now) {
    const auto difference = static_cast<uint32_t>(arrival / kMicrosecond) - sent_us;
    const bool jumps = any_ && std::abs(since_base(difference) - last_) > Rtt::kLongest;
    if (jumps && !std::exchange(jumped_, true)) return 0;
    if (!any_ || jumps) {
      *this = QueueDelay();
      any_ = true;
      base_ = difference;
    }
    jumped_ = false;
    const Nanos delay = last_ = since_base(difference);
    // Only data is sampled, not pings. In a long pause the clocks may drift apart, and beside an
    // old minimum every packet would seem to have queued for the drift.
    minimum_.forget_old(now);
    minimum_.add(delay, now);
    return std::min(delay - minimum_.get(), Rtt::kLongest);
  }

 private:
  Nanos since_base(uint32_t difference) const {
    return Nanos{static_cast<int32_t>(difference - base_)} * kMicrosecond;
  }

  bool any_ = false;
  bool jumped_ = false;  // the last sample
  Nanos last_ = 0;       // delay since the base
  uint32_t base_ = 0;
  WindowedMin minimum_;
};

// PortDelay is the delay of the queue at this endpoint's port, which the paths in use share: the
// smallest of their delays, each a moving mean over about a round.
class PortDelay {
 public:
  explicit PortDelay(size_t paths) : paths_(paths), delays_(paths), ends_(paths) {}

  // Now is the queue after a sample: its delay, and the number of paths in use.
  struct Now {
    Nanos delay;
    uint64_t in_use;
  };
  // Adds `bytes` of a path that have queued for `delay`, which is not negative. Each path samples a
  // part of the shared queue, so the more are in use, the faster each mean moves.
  Now add(size_t path, Nanos delay, uint64_t bytes, Nanos now) {
    while (ends_.earliest() < now) forget(ends_.due(now - 1));
    Mean& own = paths_[path];
    const uint64_t in_use = std::max<uint64_t>(1, in_use_);
    const double weight = now - own.last > kFresh
                              ? 1.0
                              : std::min(1.0, static_cast<double>(bytes * in_use) / kMemory);
    own.delay += (static_cast<double>(delay) - own.delay) * weight;
    own.last = now;
    in_use_ += !own.in_use;
    own.in_use = true;
    delays_.set(path, std::bit_cast<int64_t>(own.delay));
    ends_.set(path, now + kFresh);
    return {static_cast<Nanos>(std::bit_cast<double>(delays_.earliest())), in_use_};
  }

 private:
  // A mean older than this does not describe the present queue.
  static constexpr Nanos kFresh = kLongRtprop;
  // Bytes that the mean covers.
  static constexpr double kMemory = 16.0 * kFullPacket;
  struct Mean {
    double delay = 0;
    Nanos last = 0;
    bool in_use = false;
  };
  void forget(size_t path) {
    paths_[path].in_use = false;
    --in_use_;
    delays_.set(path, kNever);
    ends_.set(path, kNever);
  }

  std::vector<Mean> paths_;  // by endpoint
  // Of the paths in use: the bits of their delays, which have the order of the delays, and the time
  // when each mean is old.
  Agenda delays_;
  Agenda ends_;
  uint64_t in_use_ = 0;
};

}  // namespace gradwire
