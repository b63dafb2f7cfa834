// QueueDelay and PortDelay estimate how long packets queue: at one path, smoothed,
// and at the port of an endpoint, which all its paths share.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
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

// LeastDelay is the least queueing delay of a while: a queue that stands delays every packet, and a
// late host only some.
class LeastDelay {
 public:
  void add(Nanos delay) { least_ = std::min(least_, delay); }
  // 0 where nothing has been added.
  Nanos get() const { return least_ == kNever ? 0 : least_; }

 private:
  Nanos least_ = kNever;
};

// ClockDrift estimates how fast the clocks of two hosts run apart, by the least one-way delays of
// three windows in each of which the way there and back once had no queue, as round trips show. The
// rate is the smaller slope between them, since a delay within a window may all have been queueing.
class ClockDrift {
 public:
  // Takes a one-way delay, and by how much the last round trip was above the shortest. True when a
  // window has ended after which delays count from its least().
  bool add(Nanos delay, Nanos excess, Nanos now) {
    const bool ended = now - now_.start >= kWindow;
    const bool changed = ended && excess_ < kEmpty && take();
    if (ended) {
      now_ = {now, delay, now};
      excess_ = kNever;
    }
    if (delay < now_.least) now_ = {now_.start, delay, now};
    excess_ = std::min(excess_, excess);
    return changed;
  }
  // What a delay would be if the clocks had not drifted since the least delay of the last window.
  Nanos corrected(Nanos delay, Nanos now) const {
    return delay - static_cast<Nanos>(rate_ * static_cast<double>(now - last_.at));
  }
  Nanos least() const { return last_.least; }

 private:
  // Three of them show a drift, in a multiple of the time by which late hosts blur a slope.
  static constexpr Nanos kWindow = 2 * kSecond;
  // Late hosts alone lengthen the shortest round trip of a window by less.
  static constexpr auto kEmpty = static_cast<Nanos>(kHostQueue * kHostDelay);
  // Beside less the minimum of WindowedMin is young enough.
  static constexpr double kLittle = static_cast<double>(kEmpty) / WindowedMin::kWindow;

  struct Window {
    Nanos start = 0;
    Nanos least = 0;  // delay
    Nanos at = 0;     // the time when it was met
  };
  bool take() {
    const double slope = last_.start ? static_cast<double>(now_.least - last_.least) /
                                           static_cast<double>(now_.start - last_.start)
                                     : 0;
    const double smaller =
        slope * slope_ <= 0 ? 0 : std::copysign(std::min(std::abs(slope), std::abs(slope_)), slope);
    const double before = std::exchange(rate_, std::abs(smaller) < kLittle ? 0 : smaller);
    slope_ = slope;
    last_ = now_;
    return rate_ != 0 || before != 0;
  }

  Window now_{-kWindow};
  Nanos excess_ = kNever;  // in the present window, at least
  Window last_;            // that ended without a queue
  double slope_ = 0;
  double rate_ = 0;
};

// QueueDelay estimates queueing as one-way delay above its minimum of the last seconds. The two
// ends' clocks need not agree. Where one of them jumps, as that of a suspended machine does, the
// measurement begins anew with the second packet that shows it: a single one has a damaged stamp.
class QueueDelay {
 public:
  // `excess`: by how much the last round trip was above the shortest.
  Nanos sample(uint32_t sent_us, Nanos arrival, Nanos excess, Nanos now) {
    const auto difference = static_cast<uint32_t>(arrival / kMicrosecond) - sent_us;
    const bool jumps = any_ && std::abs(since_base(difference) - last_) > Rtt::kLongest;
    if (jumps && !std::exchange(jumped_, true)) return 0;
    if (!any_ || jumps) {
      *this = QueueDelay();
      any_ = true;
      base_ = difference;
    }
    jumped_ = false;
    last_ = since_base(difference);
    if (drift_.add(last_, excess, now)) {
      minimum_ = WindowedMin();
      minimum_.add(drift_.least(), now);
    }
    const Nanos delay = drift_.corrected(last_, now);
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
  ClockDrift drift_;
  WindowedMin minimum_;
};

// PortDelay is the delay of the queue at this endpoint's port, which the paths in use share: the
// smallest of their delays, each a moving mean over about a round. Of many paths only those heard
// last count, because a small sum hears each path once, and the first ones find an empty queue.
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
    Mean& own = paths_[path];
    while (ends_.earliest() < now || (!own.in_use && in_use_ == kLast))
      forget(ends_.due(ends_.earliest()));
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
  // Packets that a mean covers, and paths that count as being in use.
  static constexpr uint64_t kLast = 16;
  static constexpr double kMemory = kLast * kFullPacket;
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
