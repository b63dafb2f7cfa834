// SendController bounds what one endpoint sends to all its peers: a window of bytes in flight, a
// pace, and the length of trains. DelayWindow finds the window; CircuitBreaker finds out floods
// while most packets stay lost.
//
// Feed it on_sent(), on_left() and on_lost() for packets, on_ack() for what ACKs report, marked()
// for ECN. Before each train ask pace(), room() and wait(); after it call train_sent().
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "proto/base/time.h"
#include "proto/base/token_bucket.h"
#include "proto/congestion/circuit_breaker.h"
#include "proto/congestion/delay_window.h"
#include "proto/congestion/queue_delay.h"
#include "proto/recovery/loss_meter.h"
#include "proto/recovery/recovery.h"
#include "proto/recovery/repetition.h"

namespace gradwire {

class SendController {
 public:
  // `engines`: how many of them share the port; each has its part of the windows.
  SendController(uint32_t wire_bytes, Nanos delay_target, bool pacing, size_t paths,
                 double engines = 1)
      : wire_bytes_(wire_bytes),
        pacing_(pacing),
        window_(kFirst / engines * wire_bytes,
                {kShortestTrain / engines * wire_bytes, 1.0 * SentPackets::kMost * wire_bytes,
                 delay_target, kEvidence}),
        departing_(paths),
        longest_(paths),
        told_(paths, 1.0) {}

  const DelayWindow& window() const { return window_; }
  // Packets are lost so often that the circuit breaker has tripped: half the rate is tried.
  bool throttled() const { return breaker_.factor() < 1; }

  // ---- packets
  void on_sent(uint64_t bytes, Nanos now, uint32_t packets = 1);
  // So many bytes are in flight no more, acknowledged or not.
  void on_left(uint64_t bytes) { in_flight_ -= bytes; }
  // A packet was declared lost.
  void on_lost() {
    breaker_.lost();
    ++lost_;
    window_.lost();
  }
  // So many packets were only late.
  void on_spurious(uint32_t packets) { lost_ -= std::min<uint64_t>(lost_, packets); }
  // Report is what an ACK of one path reports.
  struct Report {
    size_t path = 0;
    uint64_t bytes = 0;  // acknowledged, on the wire
    double loss = 0;     // share of packets lost on this path
    Nanos queue = 0;     // queueing delay
    Nanos round = 0;
    Nanos rtprop = 0;
    Nanos last_sent = 0;  // of the acknowledged packets
  };
  // A receiver's port has shown to bear this share of the wanted queue.
  void told(size_t path, double room);
  // `windows` sums the windows of all receivers for this sender, in bytes. It is asked for under
  // loss, because they bound how far loss may stretch this one.
  void on_ack(const Report& report, const std::function<double()>& windows, Nanos now);
  // A switch has marked packets, the last of them sent at `sent`; true when the window shrinks.
  // There is one congestion event a round: marks on packets sent before the window shrank do not
  // concern its present size (RFC 9002 §7.3.2 and appendix B.6).
  bool marked(Nanos sent, Nanos now);
  void on_timer(Nanos now) {
    if (breaker_.tick(now)) window_.floods(loss_.share(now), now);
  }

  // ---- trains
  // LongPaths is what is known of the long paths that have a backlog.
  struct LongPaths {
    uint32_t count = 0;
    Nanos rtprop = 0;   // the longest
    Nanos round = 0;    // the longest smoothed round-trip time
    double window = 0;  // bytes of the receivers' windows
    uint32_t near = 0;  // short paths that have a backlog

    // The receiver of the only destination bounds everything that goes.
    bool alone() const { return count == 1 && near == 0; }
    // Each long path is paced by its own part of its receiver's window.
    bool apart() const { return count > 0 && !alone(); }
  };
  // Turn is what receivers have granted whose senders take turns.
  struct Turn {
    double bytes = 0;
    double rate = 0;  // bytes/s at which it goes
  };
  // Decides the pace of what goes next. `rate`: BtlBw in bytes/s as far as it is known; `unproven`:
  // the rate to use while only heavy loss has shown one.
  void pace(const LongPaths& far, double rate, double unproven, const Turn& turn, Nanos now);
  // True when the receiver's window sets the pace, because it is the only destination.
  bool led_by_receiver() const { return led_by_receiver_; }
  // The bytes that the window still admits; negative when more is in flight.
  double room(Nanos now) const;
  // The window limits transmission.
  void limited() { window_.limited(); }
  // The packets of the next train at most.
  uint32_t quantum() const { return quantum_; }
  double quantum_bytes() const { return 1.0 * quantum_ * wire_bytes_; }
  // 0 when a train may go now, else the time when one may.
  Nanos wait(Nanos now);
  void train_sent(double bytes) {
    if (paced_) tokens_.spend(bytes);
  }
  // The same for a train that goes whatever the windows are, after a probe time-out. A longer debt
  // than one time-out's would hold back what follows.
  void probe_sent(double bytes) { tokens_.spend(bytes, -1.0 * kFirstWindow * wire_bytes_); }
  // Holds back a train of a path that has its own part of the receiver's window: nanoseconds, or 0.
  Nanos hold(TokenBucket& tokens, double window, Nanos round, Nanos now) const;

  // ---- repetition (under heavy loss)
  // The queue here is not short.
  bool queued() const { return !short_queue(window_.queue_delay(), window_.target()); }
  // The packets that may go again now, at the rate that the paths carry; the rates are pace()'s.
  Copies& copies(double rate, double unproven, Nanos now);

 private:
  // The share of the wanted queue that the ways from here bear.
  double bears() const { return std::min(window_.room(), least_told_); }
  // The share of the pace above BtlBw that they bear: none with the least room, since a policer
  // drops all of it.
  double spare() const { return (bears() - LossLaw::kLeast) / (1.0 - LossLaw::kLeast); }
  // In slow start on a long path, the pace is a multiple of a window per round.
  double ramp() const { return window_.ramps() ? SlowStart::kStillGrows : 1.0; }
  double led(const LongPaths& far) const;
  // Sets window and pace for a turn; false when there is none.
  bool takes(const Turn& turn);
  void spread(const LongPaths& far, double window);

  // `late`: seconds that a late timer may catch up on.
  void refill(TokenBucket& tokens, double rate, double late, Nanos now) const;
  Nanos awaited(const TokenBucket& tokens, double rate) const;

  // Packets of the first window: several go to each peer, and fit the shortest queues.
  static constexpr double kFirst = 32;
  // Packets lost before a trial: more than a receiver waits for, since what is lost at its port is
  // its matter first.
  static constexpr double kEvidence = LossMeter::kPackets;
  uint32_t wire_bytes_;  // of a full packet
  bool pacing_;
  DelayWindow window_;
  PortDelay departing_;  // of the queue behind this port, as peers report
  LossMeter loss_;       // of all packets sent
  CircuitBreaker breaker_;
  std::vector<double> longest_;  // ns, by path: the longest queueing delay of late
  std::vector<double> told_;     // by path: the room that its receiver has told
  double least_told_ = 1;
  uint64_t lost_ = 0;       // packets declared lost since the last ACK
  uint64_t in_flight_ = 0;  // bytes
  Nanos cut_ = 0;           // last reduction for marks
  TokenBucket tokens_;      // pacing, bytes
  Copies copies_;
  double led_ = 0;   // bytes: the window of the only receiver, on a long path
  double rate_ = 0;  // the pace in bytes/s; 0: none
  uint32_t quantum_ = 0;
  bool far_ = false;  // some destination is far
  bool paced_ = false;
  bool led_by_receiver_ = false;
};

}  // namespace gradwire
