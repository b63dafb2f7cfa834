// A window of bytes that keeps a small standing queue: delay is the signal (Swift, SIGCOMM'20, in
// spirit). The receiver bounds the credit of all its senders with one, the sender bounds what it has
// in flight to all destinations with another; each looks at the smallest queueing delay over its
// paths, which is the delay of the queue they share. Loss alone never shrinks it.
#pragma once

#include <cstdint>

#include "proto/time.h"

namespace gradwire {

class DelayWindow {
 public:
  DelayWindow(double initial, double minimum, double maximum, Nanos target);

  double bytes() const { return window_; }
  Nanos queue_delay() const { return last_delay_; }
  // `queue`: queueing delay of one path; `round`: that path's present round-trip time.
  void sample(uint64_t bytes, Nanos queue, Nanos round, Nanos now);
  // The window is what holds transmission back (else it does not grow).
  void limited() { limited_ = true; }

 private:
  void end_epoch(Nanos now);

  double window_;
  double minimum_;
  double maximum_;
  double threshold_;  // doubling below it, careful growth above
  Nanos target_;
  Nanos epoch_end_ = 0;
  Nanos epoch_delay_ = kNever;
  Nanos last_delay_ = 0;
  uint64_t epoch_bytes_ = 0;
  bool limited_ = false;
};

}  // namespace gradwire
