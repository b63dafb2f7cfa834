#include "proto/congestion/competition.h"

#include <algorithm>

namespace gradwire {

namespace {
// Under other flows' queue for this long, a trial is due; shorter queues are bursts.
constexpr Nanos kPressed = 100 * kMillisecond;
// A trial's epochs last at least this long, and so do the epochs it is compared with.
constexpr Nanos kTrial = 30 * kMillisecond;
// Epochs of a trial at least: the rate of fewer varies too much.
constexpr int64_t kTrialEpochs = 8;
// The factor of the window in a trial.
constexpr double kGrowth = 2.0;
// A rate that rises by more than this in a trial was taken from other flows.
constexpr double kElastic = 1.3;
// A rate that falls below this share in a check is taken by other flows.
constexpr double kInelastic = 0.9;
// A trial is abandoned after this time of heavy loss.
constexpr Nanos kLongestTrial = 300 * kMillisecond;
// The longest pause between trials.
constexpr Nanos kLongestPause = 2 * kSecond;
// The pause between checks whether the competition goes on.
constexpr Nanos kCheckPause = 2 * kSecond;
// Checks in a row that end a competition: flows that share a port have unsteady rates.
constexpr uint32_t kDoubts = 5;
// After this time with almost no queue, a competition is over.
constexpr Nanos kCalm = 50 * kMillisecond;
// A competitor that returns within this time is recognised without a trial.
constexpr Nanos kMemory = 60 * kSecond;
}  // namespace

double Competition::observe(double bytes, Nanos epoch, Nanos delay, Nanos target, bool slow,
                            Nanos now) {
  bytes_ += bytes;
  time_ += epoch;
  ++epochs_;
  const bool long_enough = time_ >= kTrial && epochs_ >= kTrialEpochs;
  if (trying_) return long_enough ? end(now) : 1.0;
  // Only epochs count: between two ops this window sees no queue.
  calm_ = 2 * delay >= target ? 0 : calm_ + epoch;
  if (competes_ && calm_ > kCalm) {
    competes_ = false;
    competed_until_ = now;
    pressed_ = 0;
    next_ = now;
  }
  pressed_ = delay > target || slow ? std::min(pressed_ + epoch, kPressed)
                                    : std::max<Nanos>(0, pressed_ - epoch);
  // A recent competitor is assumed to be back. A trial may miss it, and a window that gives way
  // until the next trial would starve.
  if (2 * pressed_ >= kPressed && !competes_ && competed_until_ != 0 &&
      now - competed_until_ < kMemory) {
    compete(now);
    pressed_ = 0;
    forget();
    return 1.0;
  }
  if (!long_enough) return 1.0;
  if ((competes_ || pressed_ == kPressed) && now >= next_) {
    wins_ = 0;
    return begin(competes_ ? 1 / kGrowth : kGrowth, now);
  }
  if (2 * time_ > kPressed) forget();
  return 1.0;
}

double Competition::begin(double factor, Nanos now) {
  trying_ = true;
  begun_ = now;
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
    if (!competes_) competed_until_ = 0;
    pause_ = kTrialPause;
    next_ = now + (!competes_ ? kTrialPause : doubts_ ? kPressed : kCheckPause);
    return competes_ ? kGrowth : 1.0;
  }
  if (change > kElastic) {
    ++wins_;
    return begin(kGrowth, now);
  }
  if (wins_ > 0) {
    compete(now);
  } else {
    next_ = now + pause_;
    pause_ = std::min(2 * pause_, kLongestPause);
  }
  return 1 / kGrowth;
}

void Competition::compete(Nanos now) {
  competes_ = true;
  doubts_ = 0;
  calm_ = 0;
  pause_ = kTrialPause;
  next_ = now + kCheckPause;
}

double Competition::abandon(Nanos now) {
  // An overflow that the trial itself caused is soon over.
  if (now - begun_ < kLongestTrial) return 1.0;
  trying_ = false;
  pressed_ = 0;
  next_ = now + pause_;
  forget();
  return competes_ ? kGrowth : 1 / kGrowth;
}

void Competition::forget() {
  bytes_ = 0;
  time_ = epochs_ = 0;
}

}  // namespace gradwire
