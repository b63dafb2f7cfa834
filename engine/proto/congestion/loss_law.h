// LossLaw finds out by trials what the losses of one port's packets mean. For a moment half of the
// queue is aimed at that stood when they fell, and no more is sent than has arrived. Losses that
// fall then are this end's own: a buffer on the way is shorter than the queue aimed at, or a
// policer limits the rate. From then on a shorter queue is aimed at. Losses that stay are the
// path's, and are borne.
//
// Losses beside a queue that stands are taken for own without a trial. Where several jobs share a
// port with a short queue, each one's trial would only show that the others fill it.
//
// Where the queue was long when packets were lost, its buffer is no shorter than the target, and
// others filled it (the bursts of other traffic); such losses begin no trial. Neither does heavy
// loss that has just begun: what it needs is that packets go again at once, and a trial sends none
// again before they are declared lost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "proto/base/time.h"
#include "proto/congestion/queue_delay.h"

namespace gradwire {

class LossLaw {
 public:
  // The share of the target down to which the queue aimed at is cut: 80 us of 1.3 ms, about what
  // hosts that wake up late add by themselves. With a fourth of it windows starve, with four times
  // it a queue of 131 us at 1 Gbit/s loses a sixth of what four ranks send.
  static constexpr double kLeast = 1.0 / 16;

  // Packets lost before a receiver finds out why, and twice what a trial must expect to lose if it
  // shall show anything.
  static constexpr double kEvidence = 32;

  // `evidence`: the packets that are lost before it finds out why, and that a trial may wait for.
  explicit LossLaw(double evidence);

  // The share of the wanted queue that the network has shown to bear.
  double room() const { return room_; }
  // A trial of less room is under way, or has just shown that losses were this end's own.
  bool pressed() const { return trying_ || (settling_ && own_until_ > 0); }
  // Losses are known to be this end's own.
  bool own(Nanos now) const { return !trying_ && now < own_until_; }
  // Packets are lost, by the path or by this end, or a trial finds out by which. Own losses count
  // until the room is whole again.
  bool loses(Nanos now) const {
    return trying_ || of_path_ > 0 || now < own_until_ || (own_until_ > 0 && room_ < 1);
  }
  // The share of BtlBw that may be sent: a trial sends as much as has arrived.
  double pace() const { return trying_ ? arrived_ : 1.0; }
  // The share of BtlBw that is left once losses were own; 1 after it was asked for.
  double left() { return std::exchange(left_, 1.0); }
  // The share of packets that the path loses whatever is sent; 0 where none is known.
  double of_path() const { return of_path_; }

  // Losses of such a share have shown to be this end's own otherwise than by a trial. `use`: the
  // share of BtlBw that arrives.
  void floods(double loss, double use, Nanos now);
  // A switch has marked packets: its queue is shorter than the target.
  void marked() { cut(0); }
  // Counts packets. `queue`: how long packets queued, in nanoseconds, when some were lost.
  void count(double lost, double arrived, double queue) {
    lost_ += lost;
    packets_ += lost + arrived;
    if (lost > 0) queue_ = std::max(queue_, queue);
  }
  // Packets have queued for so long, lost ones or not.
  void queued(Nanos delay) { least_.add(delay); }

  // Port is what is known of the port now.
  struct Port {
    Nanos round = 0;     // round-trip time
    Nanos target = 0;    // the delay aimed at where there is room for it
    bool lossy = false;  // the last packets were lost heavily
    double use = 1;      // the share of BtlBw that arrived of late
    bool on_short_path = true;
  };
  // Judges what was counted once it is enough; call it after each round trip.
  void judge(const Port& port, Nanos now);

 private:
  bool enough(const Port& port, Nanos now) const;
  bool bursts(const Port& port) const;
  bool short_buffer(const Port& port) const;
  bool outlasts_bursts(bool heavy, Nanos now);
  void begin(Nanos now);
  void act(const Port& port, double loss, bool stands, Nanos now);
  void start_trial(const Port& port, double loss);
  void end_trial(bool others, bool stands, Nanos now);
  void take_for_own(double loss, Nanos now);
  void cut(double loss, double most = 1);
  void bear(double loss);
  void regain(Nanos now);
  void wait(Nanos now);

  double evidence_;
  double room_ = 1;
  double of_path_ = 0;
  double left_ = 1;

  // The present trial.
  bool trying_ = false;
  double before_ = 0;      // share lost before it
  double arrived_ = 1;     // share of BtlBw that arrived before it
  double saved_ = 1;       // room before it
  bool settling_ = false;  // losses may still be those of before a change

  Nanos heavy_since_ = 0;
  Nanos own_until_ = 0;  // losses are known to be this end's own
  Nanos again_ = 0;      // when the next trial may begin, after one that found nothing own
  Nanos pause_;          // until then

  // Since the last judgement.
  Nanos start_ = 0;
  double lost_ = 0;
  double packets_ = 0;
  double queue_ = 0;  // ns
  LeastDelay least_;
};

}  // namespace gradwire
