// A window of bytes that keeps a small standing queue: delay is the signal (in the spirit of Swift,
// SIGCOMM'20). The receiver bounds the credit of all its senders with one, the sender bounds what
// it has in flight to all destinations with another. Loss alone never shrinks it,
// but beside flows that fill the queue themselves (TCP), where giving way would mean to starve, the
// window turns competitive: it then grows and shrinks as theirs does, by loss.
#pragma once

#include <algorithm>
#include <cstdint>

#include "proto/base/time.h"
#include "proto/congestion/competition.h"
#include "proto/congestion/rate_meter.h"
#include "proto/recovery/loss_meter.h"

namespace gradwire {

class DelayWindow {
 public:
  // `buffer`: bytes that may wait unread where they arrive; what is on a long path comes on top.
  DelayWindow(double initial, double minimum, double buffer, Nanos target);

  double bytes() const { return window_; }
  // The standing queue that is aimed at: longer on a long path of a moderate rate.
  Nanos target() const { return target_; }
  Nanos queue_delay() const { return last_delay_; }
  // Doubles each round, because the path's rate has not shown yet.
  bool ramps() const { return ramps_; }
  // How many times the window may be sent where a share `loss` gets lost on the way with no queue
  // to show for it, so that the window's worth arrives.
  double stretch(double loss) const {
    return std::clamp(stretch_, 1.0, 1.0 / (1.0 - std::min(loss, LossMeter::kMost)));
  }
  // What of a sender's own packets gets lost, and the bytes that its receivers' windows have for
  // it: its window stretches step by step up to that. A receiver, whose senders bound themselves,
  // does not say, and its window stretches at once.
  void loss(double share, double told) {
    loss_ = share;
    told_ = told;
  }
  double rate() const { return meter_.bytes_per_second(); }
  bool rate_proven() const { return meter_.proven(); }
  // `bytes` were delivered after `queue` of queueing on a path that took `round` there and
  // back. `lossy`: under heavy loss. `sent`: when the last of them went out, of packets
  // to several receivers; 0: to one.
  void sample(uint64_t bytes, Nanos queue, Nanos round, Nanos rtprop, bool lossy, Nanos now,
              Nanos sent = 0);
  // Packets were marked: a queue is longer than its owner wants, whatever the delay says. To be
  // called once per round.
  void marked();
  // Goes on from `bytes`, the window that ruled in this one's place until heavy loss came, but no
  // further than the rate accounts for, as that one may be stretched. Meanwhile this one has only
  // given way: nothing that it held back could make it grow.
  void resume(double bytes);
  // Packets are missing that were sent while this window held.
  void lost() { lost_ = true; }
  // The window is what holds transmission back (else it does not grow).
  void limited() { limited_ = true; }

 private:
  Nanos aim(Nanos rtprop) const;
  void ramp(Nanos delay, double rate, Nanos rtprop);
  void stretch(Nanos delay, double rate);
  double bound(Nanos delay, Nanos rtprop) const;
  void end_epoch(Nanos round, Nanos rtprop, Nanos now);

  double window_;
  double minimum_;
  double buffer_;
  double maximum_;    // the buffer, and what the path holds
  double threshold_;  // doubling below it, careful growth above
  Nanos shortest_target_;
  Nanos target_;         // of the path that was sampled last
  double enough_;        // what the rate and the way back account for
  double way_back_ = 0;  // ns: smoothed
  RateMeter meter_;
  Nanos epoch_end_ = 0;
  double delay_sum_ = 0;  // weighted by bytes
  double bytes_sum_ = 0;
  Nanos last_delay_ = 0;
  double ceiling_;  // above it the queue overflowed by our own doing
  Competition competition_;
  bool ramps_ = true;
  double loss_ = -1;
  double told_ = 0;
  double stretch_ = 1;
  double overstretch_ = 1e9;  // made a queue
  double ramp_rate_ = 0;      // bytes/s: the best round's
  uint32_t flat_rounds_ = 0;  // in a row, in which that did not grow
  Nanos last_overflow_ = 0;
  Nanos overflow_start_ = 0;
  double ceiling_before_ = 0;
  double overflow_at_ = 0;
  Nanos epoch_start_ = 0;
  bool limited_ = false;
  bool lost_ = false;
  bool lossy_ = false;
};

}  // namespace gradwire
