#include "proto/congestion/competition.h"

#include <algorithm>

namespace gradwire {

namespace {
// Under other flows' queue for this long, a trial is due; shorter queues are bursts. After as long
// with almost no queue, a competition is over.
constexpr Nanos kPressed = 50 * kMillisecond;
// Below this share of the delay target there is almost no queue: a rival that fills the port leaves
// more even when it has just given way, so a longer one counts as a rival's.
constexpr double kQuiet = 0.5;
// A trial's epochs last at least this long, and so do the epochs it is compared with.
constexpr Nanos kTrial = 30 * kMillisecond;
// Epochs of a trial at least; on a long path each is a round, and fewer take bursts for a rival.
constexpr int64_t kTrialEpochs = 8;
// The factor of the window in a trial.
constexpr double kGrowth = 2.0;
// A rate that rises by more than this in a trial was taken from other flows.
constexpr double kElastic = 1.3;
// A rate that falls below this share in a check is taken by other flows.
constexpr double kInelastic = 0.9;
// The pause after a trial, and between checks: a trial lengthens the queue, so they are rare.
constexpr Nanos kPause = 2 * kSecond;
// Checks in a row that end a competition: flows that share a port have unsteady rates.
constexpr uint32_t kDoubts = 3;
}  // namespace

double Competition::observe(double bytes, Nanos epoch, Nanos delay, Nanos target, bool slow,
                            Nanos now) {
  bytes_ += bytes;
  time_ += epoch;
  ++epochs_;
  const bool long_enough = time_ >= kTrial && epochs_ >= kTrialEpochs;
  if (trying_) return long_enough ? end(now) : 1.0;
  // Only epochs count: between two ops this window sees no queue.
  quiet_ = static_cast<double>(delay) >= kQuiet * static_cast<double>(target) ? 0 : quiet_ + epoch;
  if (competes_ && quiet_ > kPressed) {
    competes_ = false;
    pressed_ = 0;
    next_ = now;
  }
  pressed_ = delay > target || slow ? std::min(pressed_ + epoch, kPressed)
                                    : std::max<Nanos>(0, pressed_ - epoch);
  if (!long_enough) return 1.0;
  if ((competes_ || pressed_ == kPressed) && now >= next_) {
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
    doubts_ = change < kInelastic ? 0 : doubts_ + 1;
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
