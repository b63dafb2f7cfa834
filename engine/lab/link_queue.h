// LinkQueue is one direction of the lab's own link, in virtual time: a rate with a drop-tail queue,
// then a wire with loss, delay and jitter. offer() frames and take() them when they have arrived.
// It keeps the frames and reads no clock.
#pragma once

#include <cstdint>
#include <deque>
#include <queue>
#include <span>
#include <string>
#include <vector>

#include "lab/train.h"
#include "proto/base/time.h"
#include "sim/random.h"

namespace gradwire::lab {

struct WireOptions {
  Nanos delay = 0;
  Nanos jitter = 0;                  // each frame takes up to this much longer, uniformly …
  bool keep_order = true;            // … but overtakes no other
  double rate = 0.0;                 // bytes/s; 0: no limit
  uint64_t queue_bytes = 0;          // of the queue before the rate
  uint64_t ecn_bytes = 0;            // with more waiting, ECT packets get CE; 0: none
  double loss = 0.0;                 // share of packets lost; 1: all
  double loss_burst = 0.0;           // mean length of a run of losses; 0: independent
  uint64_t memory_bytes = 64 << 20;  // bytes that may wait and travel at most

  // An empty string, or what is wrong.
  std::string validate() const;
};

// WireCounters counts packets, except for bytes; a train counts as its packets.
struct WireCounters {
  uint64_t packets = 0;  // offered
  uint64_t bytes = 0;    // of these, with Ethernet headers
  uint64_t delivered = 0;
  uint64_t dropped_queue = 0;
  uint64_t dropped_queue_bytes = 0;
  uint64_t marked = 0;  // got CE because of this queue
  uint64_t dropped_loss = 0;
  uint64_t dropped_memory = 0;
  uint64_t max_queue_bytes = 0;
  uint64_t queue_bytes = 0;  // waiting now
};

// LossProcess decides which packets are lost: independently, or in runs (Gilbert model; see
// proto/base/loss_runs.h).
class LossProcess {
 public:
  explicit LossProcess(uint64_t seed) : random_(seed) {}
  bool next(double loss, double burst);
  sim::Random& random() { return random_; }

 private:
  sim::Random random_;
  bool bad_ = false;
};

class LinkQueue {
 public:
  // `headed`: frames have a virtio-net header and may be trains (lab/train.h).
  LinkQueue(bool headed, uint64_t seed) : headed_(headed), loss_(seed) {}

  // Sets the options from now on; frames under way arrive when they were due. The options must be
  // valid.
  void set_options(Nanos now, const WireOptions& options);
  const WireOptions& options() const { return options_; }

  void offer(Nanos now, std::span<const uint8_t> frame);
  // Takes the next frame that has arrived by now; false when there is none.
  bool take(Nanos now, std::vector<uint8_t>& frame);
  // The time when there is something to take or to do; kNever when no frame is under way.
  Nanos next_event() const;

  WireCounters counters() const;
  uint64_t held_bytes() const { return held_bytes_; }

 private:
  struct Frame {
    std::vector<uint8_t> data;
    Shape shape;
  };
  struct Travelling {
    Nanos arrival;
    uint64_t number;
    Frame frame;
  };
  struct Later {
    bool operator()(const Travelling& a, const Travelling& b) const {
      return a.arrival != b.arrival ? a.arrival > b.arrival : a.number > b.number;
    }
  };

  Nanos service_time(const Frame& frame) const;
  void advance(Nanos now);
  Frame part_of(const Frame& frame, uint32_t first, uint32_t count) const;
  uint32_t below_threshold(const Shape& shape) const;
  void queue_up(Nanos now, Frame frame);
  void start_wire(Nanos now, Frame frame);
  void travel(Nanos now, Frame frame);

  bool headed_;
  LossProcess loss_;
  WireOptions options_;
  WireCounters counters_;
  std::deque<Frame> waiting_;  // the first one is being sent
  Nanos sent_ = 0;             // when the first one will be sent completely
  uint64_t waiting_bytes_ = 0;
  std::vector<Travelling> travelling_;  // a heap
  Nanos last_arrival_ = 0;
  uint64_t number_ = 0;
  uint64_t held_bytes_ = 0;
};

}  // namespace gradwire::lab
