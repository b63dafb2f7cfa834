// SlowStart lets a window grow beyond what its rate accounts for until the first queue, because
// until then the rate may be the window's and not the path's.
#pragma once

#include <cstdint>

#include "proto/recovery/rtt.h"

namespace gradwire {

class SlowStart {
 public:
  // True while it goes on.
  bool on() const { return on_; }
  // True until a switch marks packets: its queue is shorter than the delay target, so a window that
  // doubles would always be marked.
  bool doubles() const { return doubles_; }
  void marked() { on_ = doubles_ = false; }
  // Judges one round, in which `rate` bytes per second were delivered. `ends`: it showed a queue,
  // or something else that ends slow start. On a long path (`ramps`) slow start also ends when more
  // bytes in flight bring no higher rate (BBR's full pipe). `limited`: the window held transmission
  // back.
  void round(double rate, bool ends, bool limited, bool ramps) {
    if (!on_) return;
    if (rate > kStillGrows * best_rate_) {
      best_rate_ = rate;
      flat_rounds_ = 0;
    } else if (limited) {
      ++flat_rounds_;
    }
    if (ends || (ramps && flat_rounds_ >= kInARow)) on_ = false;
  }

  // The rate grows by this factor per round while the pipe is not full (BBR). A long path is paced
  // at as many windows per round; 1 would keep the window from doubling.
  static constexpr double kStillGrows = 1.25;

 private:
  bool on_ = true;
  bool doubles_ = true;
  double best_rate_ = 0;      // bytes/s: of one round
  uint32_t flat_rounds_ = 0;  // rounds in a row in which that did not grow
};

}  // namespace gradwire
