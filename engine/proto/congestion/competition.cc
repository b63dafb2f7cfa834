#include "proto/congestion/competition.h"

#include <algorithm>

#include "proto/congestion/queue_delay.h"
#include "proto/recovery/loss_meter.h"

namespace gradwire {

namespace {
// The factor of the window in a trial.
constexpr double kGrowth = 2.0;
// A rate that rises by more than this factor in a trial was taken from other flows, and one that
// falls by more in a check is taken by them.
constexpr double kElastic = 1.3;
// The pause after a trial, and between checks: a trial lengthens the queue, so they are rare.
constexpr Nanos kPause = 2 * kSecond;
// Checks in a row that end a competition: flows that share a port have unsteady rates.
constexpr uint32_t kDoubts = 2;
}  // namespace

double Competition::observe(double bytes, Nanos epoch, Nanos delay, Nanos target, bool slow,
                            Nanos now) {
  bytes_ += bytes;
  time_ += epoch;
  ++epochs_;
  // On a long path each epoch is a round, and few take bursts for a rival.
  const bool long_enough = time_ >= kTrial && static_cast<double>(epochs_) >= LossMeter::kFewest;
  if (trying_) return long_enough ? end(now) : 1.0;
  // Only epochs count: between two ops this window sees no queue.
  quiet_ = some_queue(delay, target) ? 0 : quiet_ + epoch;
  if (competes_ && quiet_ > kTrial) {
    competes_ = false;
    pressed_ = 0;
    next_ = now;
  }
  pressed_ = delay > target || slow ? std::min(pressed_ + epoch, kTrial)
                                    : std::max<Nanos>(0, pressed_ - epoch);
  if (!long_enough) return 1.0;
  if ((competes_ || pressed_ == kTrial) && now >= next_) {
    wins_ = 0;
    return begin(competes_ ? 1 / kGrowth : kGrowth);
  }
  forget();
  return 1.0;
}

double Competition::begin(double factor) {
  trying_ = true;
  rate_before_ = bytes_ / static_cast<double>(time_);
  forget();
  return factor;
}

double Competition::end(Nanos now) {
  const double change = bytes_ / static_cast<double>(time_) / rate_before_;
  trying_ = false;
  pressed_ = 0;
  if (competes_) {
    doubts_ = change * kElastic < 1 ? 0 : doubts_ + 1;
    competes_ = doubts_ < kDoubts;
    next_ = now + kPause;
    return competes_ ? kGrowth : 1.0;
  }
  if (change > kElastic) {
    ++wins_;
    return begin(kGrowth);
  }
  if (wins_ > 0) {
    compete(now);
  } else {
    next_ = now + kPause;
  }
  return 1 / kGrowth;
}

void Competition::compete(Nanos now) {
  competes_ = true;
  doubts_ = 0;
  quiet_ = 0;
  next_ = now + kPause;
}

void Competition::forget() {
  bytes_ = 0;
  time_ = epochs_ = 0;
}

}  // namespace gradwire
