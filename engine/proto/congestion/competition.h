// Whose queue is it? Our own shrinks when the window does. One that stays whatever we do, or takes
// most of the rate, is somebody else's: a flow that fills it until it overflows (TCP), or one that
// nothing moves. Trials tell. Twice the window brings more of the rate only where somebody gives
// way; half of it costs rate only where somebody takes that. (In the spirit of Copa's mode
// switching, NSDI'18, and of Nimbus' elasticity, SIGCOMM'22; the trials are ours.)
#pragma once

#include <cstdint>

#include "proto/base/time.h"

namespace gradwire {

class Competition {
 public:
  // One epoch in which the window was what held transmission back: `bytes` came through after
  // `delay` of queueing in `epoch` until `now`; `slow`: at much less than BtlBw. The factor by
  // which the window changes for a trial, or after one.
  double observe(double bytes, Nanos epoch, Nanos delay, Nanos target, bool slow, Nanos now);
  // Ends a trial that heavy loss has kept from telling anything for long: the factor that undoes
  // it. Before, 1.
  double abandon(Nanos now);
  // Somebody takes what giving way would leave: the window grows and shrinks by loss.
  bool competes() const { return competes_; }
  // The window is held for a trial.
  bool trying() const { return trying_; }

 private:
  double begin(double factor, Nanos now);
  double end(Nanos now);
  void compete(Nanos now);
  void forget();

  static constexpr Nanos kTrialPause = 500 * kMillisecond;

  bool competes_ = false;
  bool trying_ = false;
  Nanos begun_ = 0;           // the trial
  Nanos calm_ = 0;            // epochs in a row with no queue to speak of
  Nanos competed_until_ = 0;  // 0: not yet, or what was taken for a rival was none
  Nanos pressed_ = 0;         // epochs under somebody else's queue, less those without
  // Of the trial, or of what a trial would be compared with.
  double bytes_ = 0;
  Nanos time_ = 0;
  int64_t epochs_ = 0;
  double rate_before_ = 0;  // bytes/ns
  uint32_t wins_ = 0;       // trials in a row that brought more
  uint32_t doubts_ = 0;     // checks in a row in which nobody took what half left
  Nanos pause_ = kTrialPause;
  Nanos next_ = 0;
};

}  // namespace gradwire
