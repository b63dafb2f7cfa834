// DelayWindow is a window in bytes that aims at a small standing queue, with delay as its signal
// (Swift, SIGCOMM'20). A receiver bounds the credit of all its senders with one, a sender what it
// has in flight to all destinations with another. Feed it sample() for what is delivered, lost()
// and marked() for congestion, limited() when the window holds transmission back; read bytes().
//
// Loss shrinks no window by itself. Where the network bears no longer queue than a short one, the
// queue aimed at shrinks (LossLaw). Beside flows that fill the queue themselves (TCP) a window that
// keeps the queue short would starve, so it then grows and shrinks by loss as theirs do
// (Competition).
#pragma once

#include <cstdint>

#include "proto/base/time.h"
#include "proto/congestion/competition.h"
#include "proto/congestion/loss_law.h"
#include "proto/congestion/rate_meter.h"
#include "proto/congestion/slow_start.h"
#include "proto/congestion/stretch.h"

namespace gradwire {

class DelayWindow {
 public:
  struct Bounds {
    double minimum = 0;  // bytes of the smallest window
    double buffer = 0;   // bytes that may wait unread at the receiver; a long path may hold more
    Nanos target = 0;    // the standing queue aimed at
    // Packets whose loss lets LossLaw begin a trial.
    double evidence = 0;
    // Losses shorten the queue aimed at, and make the smallest window one of so many bytes; 0: they
    // do neither.
    double fewest = 0;
  };
  DelayWindow(double initial, const Bounds& bounds);

  double bytes() const { return window_; }
  // The standing queue aimed at; longer on a long path whose rate is moderate.
  Nanos target() const { return target_; }
  Nanos queue_delay() const { return last_delay_; }
  // True in slow start: the path's rate is not known yet, because no queue has shown.
  bool ramps() const { return slow_start_.on(); }
  // The factor by which the window may be exceeded so that a window's worth arrives, when the share
  // `loss` is lost on the path without a queue. Losses that are not heavy have to be the path's.
  double stretch(double loss) const {
    const bool may = loss >= kHeavyLoss || law_.of_path() > 0;
    return may && !law_.pressed() ? stretch_.factor(loss) : 1.0;
  }
  // For a sender: `share` of its packets is lost, and its receivers' windows for it have `told`
  // bytes. Its window stretches step by step up to these. A receiver does not call this; its window
  // stretches at once, because its senders bound themselves.
  void loss(double share, double told) { stretch_.loss(share, told); }
  // The share of the wanted queue that the network has shown to bear (LossLaw).
  double room() const { return law_.room(); }
  // Losses are known to be this end's own: the port's queue is a short one.
  bool overflows(Nanos now) const { return law_.own(now); }
  // The share of BtlBw that may be sent.
  double pace() const { return law_.pace(); }
  // Too much was lost a moment ago.
  bool pressed() const { return law_.pressed(); }
  // Counts packets that were sent under this window. `queue`: how long packets queued, in
  // nanoseconds, when some were lost.
  void count(double lost, double arrived, double queue) { law_.count(lost, arrived, queue); }
  double rate() const { return meter_.bytes_per_second(); }
  bool rate_proven() const { return meter_.proven(); }
  // Takes `bytes` delivered after `queue` nanoseconds of queueing, on a path with the round-trip
  // time `round`. `lossy`: under heavy loss. `sent`: the time when the last of these packets was
  // sent, when packets go to several receivers; else 0.
  void sample(uint64_t bytes, Nanos queue, Nanos round, Nanos rtprop, bool lossy, Nanos now,
              Nanos sent = 0);
  // Shrinks for ECN marks: a switch reports its queue too long, whatever the delay is. Call it once
  // per round.
  void marked();
  // Bytes were sent under this window.
  void sent(uint64_t bytes) { meter_.sent(bytes); }
  // So large a share of the packets is lost because too many are sent.
  void floods(double loss, Nanos now) { law_.floods(loss, stretch_.use(), now); }
  // Packets are missing that were sent under this window.
  void lost() { lost_ = true; }
  // The window limits transmission; without that it does not grow.
  void limited() { limited_ = true; }

 private:
  // Losses make the smallest window smaller.
  double smallest() const;
  Nanos aim(Nanos rtprop) const;
  void end_epoch(Nanos round, Nanos rtprop, Nanos now);
  void account(Nanos delay, Nanos round, Nanos rtprop);
  bool compete(Nanos delay, double rate, const PathProfile& path, Nanos now);
  void steer(Nanos delay, const PathProfile& path, Nanos now);

  Bounds bounds_;
  double window_;
  double maximum_;       // the buffer, and what the path holds
  Nanos target_;         // for the path sampled last
  double enough_;        // bytes that rate, target and return path account for
  double way_back_ = 0;  // ns: what a round takes beyond RTprop and the queue here, smoothed
  RateMeter meter_;
  Nanos epoch_end_ = 0;
  double delay_sum_ = 0;  // weighted by bytes
  double bytes_sum_ = 0;
  Nanos last_delay_ = 0;
  Competition competition_;
  SlowStart slow_start_;
  LossLaw law_;
  Stretch stretch_;
  Nanos epoch_start_ = 0;
  bool limited_ = false;
  bool lost_ = false;
  bool lossy_ = false;
};

}  // namespace gradwire
