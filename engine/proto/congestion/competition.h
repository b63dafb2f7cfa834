// Competition finds out whether a standing queue is filled by other flows. DelayWindow calls
// observe() once an epoch and multiplies its window by the factor returned; while competes() is
// true it grows and shrinks by loss, as TCP does.
//
// An own queue shrinks with the window. A queue that stays, or takes most of the rate, belongs to
// other flows: some fill it until it overflows (TCP), some do not react at all. A trial
// distinguishes them. A window twice as large raises the rate only if other flows give way. While
// competing, half the window lowers the rate only if other flows take what it leaves. The idea is
// that of Copa's mode switching (NSDI'18) and Nimbus' elasticity detection (SIGCOMM'22); the trials
// are our own.
#pragma once

#include <cstdint>

#include "proto/base/time.h"

namespace gradwire {

class Competition {
 public:
  // Takes one epoch in which the window limited transmission: in `epoch` nanoseconds until `now`,
  // `bytes` were delivered with a queueing delay of `delay`. `slow`: at much less than BtlBw.
  // Returns the factor that the window changes by to begin or end a trial, else 1.
  double observe(double bytes, Nanos epoch, Nanos delay, Nanos target, bool slow, Nanos now);
  // True while other flows would take what this one leaves; the window then grows and shrinks by
  // loss.
  bool competes() const { return competes_; }
  // True while the window is held constant for a trial.
  bool trying() const { return trying_; }

  // A trial's epochs last at least this long, and so do the epochs it is compared with. Under other
  // flows' queue for this long, a trial is due; shorter queues are bursts. After as long with
  // almost no queue, a competition is over. LossLaw's trials are no longer, since the shortest
  // queue costs time on a path that loses by itself.
  static constexpr Nanos kTrial = 50 * kMillisecond;

 private:
  double begin(double factor);
  double end(Nanos now);
  void compete(Nanos now);
  void forget();

  bool competes_ = false;
  bool trying_ = false;
  Nanos quiet_ = 0;    // duration of epochs in a row with almost no queue
  Nanos pressed_ = 0;  // duration of epochs under a queue of others, less those without
  // Sums over the trial, or over the epochs that the next trial is compared with.
  double bytes_ = 0;
  Nanos time_ = 0;
  int64_t epochs_ = 0;
  double rate_before_ = 0;  // bytes/ns
  uint32_t wins_ = 0;       // trials in a row that raised the rate
  uint32_t doubts_ = 0;     // checks in a row in which other flows took nothing
  Nanos next_ = 0;
};

}  // namespace gradwire
