// Repetition sends packets again before their loss is known. On a long path that loses, Twins says
// how many copies go at once with a packet whose loss would cost a round. Under heavy loss, packets
// in flight go again before an ACK can arrive: Repeats says after which time what goes again,
// Copies how many packets may, and FirstRound which rate to use before any is known.
#pragma once

#include <algorithm>

#include "proto/base/time.h"
#include "proto/base/token_bucket.h"
#include "proto/recovery/loss_meter.h"

namespace gradwire {

// PathLoss is the share of packets that a path loses in each direction.
struct PathLoss {
  double to = 0;    // as the peer reports
  double from = 0;  // as measured here

  // So much is lost that packets go again before an ACK can arrive.
  bool heavy() const { return std::max(to, from) >= kHeavyLoss; }
};

// Twins are the copies that go at once with a packet on a long path. They take a share of what has
// arrived, so that what is lost earns none.
class Twins {
 public:
  // A packet has arrived.
  void arrived(uint64_t packets) { left_ += kShare * static_cast<double>(packets); }
  // The twins of a packet that goes again, where the share `loss` is lost.
  uint32_t of_lost(double loss) const;
  // The same for a chunk near the end of an op, which goes for the first time.
  uint32_t of_last(double loss) const { return std::min(1U, of_lost(loss)); }
  void take() { left_ -= 1; }
  // The peer reports a queue that is not short.
  void queued(Nanos now) { queued_ = now; }
  // True when no queue was reported for a round, so that the path loses packets by itself.
  bool apt(Nanos round, Nanos now) const { return now - queued_ > round; }

  // The share of an op's chunks whose loss would make it longer, where each of so many `others`
  // loses the share `loss`: as many sums come a round later.
  static double last(double loss, size_t others) {
    return std::min(1.0, static_cast<double>(others) * loss);
  }

 private:
  // The share of the packets that have arrived which their copies may take.
  static constexpr double kShare = 0.5;
  double left_ = 0;
  Nanos queued_ = -kSecond;
};

// The time after which a packet in flight goes again without an ACK; kNever without heavy loss.
// `queued`: the queue here is not short.
Nanos repeat_after(PathLoss loss, Nanos round, bool queued);

// Repeats is the time after which control frames and data of a path go again. `more`: other data
// waits; `blocked`: that may not go now.
struct Repeats {
  Repeats(PathLoss loss, Nanos round, bool queued, bool more, bool blocked);

  Nanos control;
  Nanos data;
};

// Copies limits the packets that go again, to a rate and to some at once.
class Copies {
 public:
  // Packets go, for the first time or again.
  void sent(uint32_t packets) { tokens_.spend(packets, -kAtOnce); }
  // Begins a choice of packets that go again, at a rate of so many a second.
  void refill(double per_second, Nanos now) {
    tokens_.refill(per_second, kAtOnce, now);
    left_ = tokens_.tokens();
    per_second_ = per_second;
    lacking_ = false;
  }
  // When the next packet of this choice may go.
  Nanos next(Nanos now) {
    if (left_ >= 1) return 0;
    lacking_ = true;
    return now + TokenBucket::time_of(1 - left_, per_second_) + 1;
  }
  void take() { left_ -= 1; }
  double left() const { return left_; }
  // True when packets were due and there were no copies for them.
  bool lacking() const { return lacking_; }

 private:
  // Packets that may go again at once: a train of a short path.
  static constexpr double kAtOnce = 16;
  TokenBucket tokens_;
  double left_ = 0;
  double per_second_ = 0;
  bool lacking_ = false;
};

// FirstRound is what all paths may carry in a round while only heavy loss has shown a rate: a
// window, as in any first round. With less the paths' rate would never show.
class FirstRound {
 public:
  // Adds a path: its round-trip time if packets are in flight, else 0, and its receiver's window in
  // bytes if it was reported lately, else 0.
  void add(Nanos round, double window) {
    round_ = std::max(round_, round);
    windows_ += window;
  }
  // The rate in bytes/s. `window`: the sender's own, in bytes.
  double rate(double window) const {
    return (windows_ > 0 ? std::min(window, windows_) : window) * 1e9 / static_cast<double>(round_);
  }

 private:
  Nanos round_ = 1 * kMillisecond;  // at least, so that the rate of a rack is no burst
  double windows_ = 0;
};

}  // namespace gradwire
