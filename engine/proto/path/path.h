// Path is what one endpoint keeps about the way to and from one peer: packet numbers, loss,
// round-trip time, credit in both directions, waiting control frames, signs of life.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "proto/base/reassembly.h"
#include "proto/congestion/ecn.h"
#include "proto/congestion/rate_meter.h"
#include "proto/path/path_limit.h"
#include "proto/plan/lanes.h"
#include "proto/recovery/loss_meter.h"
#include "proto/recovery/received_packets.h"
#include "proto/recovery/rtt.h"
#include "proto/recovery/sent_packets.h"
#include "wire/packet.h"

namespace gradwire {

// ControlFrame is a reliable control packet, kept until it is acknowledged.
struct ControlFrame {
  uint64_t op = 0;
  wire::Kind kind = wire::Kind::open;
  uint32_t part = 0;
  std::vector<uint8_t> payload;
};

// ControlFrames keeps the frames of one path in slots. A packet in flight refers to its frame by a
// handle (slot and generation), which becomes invalid when the frame is acknowledged. Frames beyond
// the last slot wait for one.
class ControlFrames {
 public:
  void push(ControlFrame frame) {
    if (free_.empty() && slots_.size() == kMostSlots) {
      without_slot_.push_back(std::move(frame));
      return;
    }
    uint32_t slot;
    if (free_.empty()) {
      slot = static_cast<uint32_t>(slots_.size());
      slots_.emplace_back();
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    slots_[slot].frame = std::move(frame);
    slots_[slot].live = true;
    queue_.push_back(handle(slot));
  }
  // The number of frames that are not acknowledged.
  size_t open() const { return slots_.size() - free_.size() + without_slot_.size(); }
  bool waiting() {
    while (!queue_.empty() && !live(queue_.front())) queue_.pop_front();
    return !queue_.empty();
  }
  uint32_t take() {
    const uint32_t handle = queue_.front();
    queue_.pop_front();
    return handle;
  }
  bool live(uint32_t handle) const {
    const uint32_t slot = handle & 0xffff;
    return slot < slots_.size() && slots_[slot].live && slots_[slot].generation == handle >> 16;
  }
  const ControlFrame& at(uint32_t handle) const { return slots_[handle & 0xffff].frame; }
  void again(uint32_t handle) {
    if (live(handle)) queue_.push_back(handle);
  }
  void release(uint32_t handle) {
    Slot& slot = slots_[handle & 0xffff];
    slot.live = false;
    slot.generation = (slot.generation + 1) & 0xffff;
    slot.frame.payload.clear();
    free_.push_back(handle & 0xffff);
    if (without_slot_.empty()) return;
    ControlFrame next = std::move(without_slot_.front());
    without_slot_.pop_front();
    push(std::move(next));
  }

 private:
  // A handle has 16 bits for the slot.
  static constexpr size_t kMostSlots = 1u << 16;
  struct Slot {
    ControlFrame frame;
    uint32_t generation = 0;
    bool live = false;
  };
  uint32_t handle(uint32_t slot) const { return slot | slots_[slot].generation << 16; }
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::deque<uint32_t> queue_;  // handles
  std::deque<ControlFrame> without_slot_;
};

// QueueDelay estimates queueing as one-way delay above its minimum of the last seconds. The two
// ends' clocks need not agree.
class QueueDelay {
 public:
  Nanos sample(uint32_t sent_us, Nanos arrival, Nanos now) {
    const auto difference = static_cast<uint32_t>(arrival / kMicrosecond) - sent_us;
    if (!any_) {
      any_ = true;
      base_ = difference;
    }
    const Nanos delay = Nanos{static_cast<int32_t>(difference - base_)} * kMicrosecond;
    // Only data is sampled, not pings. In a long pause the clocks may drift apart, and beside an
    // old minimum every packet would seem to have queued for the drift.
    minimum_.forget_old(now);
    minimum_.add(delay, now);
    return delay - minimum_.get();
  }

 private:
  bool any_ = false;
  uint32_t base_ = 0;
  WindowedMin minimum_;
};

// SmoothedDelay is a moving mean of the queueing delay over about one round.
class SmoothedDelay {
 public:
  void add(Nanos delay, uint64_t bytes, Nanos now) {
    const double weight =
        now - last_ > kFresh ? 1.0 : std::min(1.0, static_cast<double>(bytes) / kMemory);
    mean_ += (static_cast<double>(delay) - mean_) * weight;
    last_ = now;
  }
  bool fresh(Nanos now) const { return last_ != 0 && now - last_ <= kFresh; }
  Nanos mean() const { return static_cast<Nanos>(mean_); }

 private:
  // A mean older than this does not describe the present queue.
  static constexpr Nanos kFresh = 5 * kMillisecond;
  // The bytes that the mean covers.
  static constexpr double kMemory = 16 * 1514.0;
  double mean_ = 0;
  Nanos last_ = 0;
};

struct Path {
  uint16_t peer = 0;

  // Sending.
  SentPackets sent;
  Rtt rtt;
  LossMeter loss_from;   // of the packets that the peer sends here
  RateMeter sent_meter;  // rate of what the peer sends here, with what is lost
  double loss_told = 0;  // loss of what is sent from here, as the peer reports
  Nanos loss_told_time = 0;
  ControlFrames control;
  std::vector<uint64_t> control_sent;  // packet numbers in order; some may be acknowledged or lost
  uint64_t credit = 0;                 // highest packet number that may be sent
  double window = 0;                   // bytes of the receiver's window for this path
  double tokens = 0;                   // bytes of pacing by that window
  Nanos tokens_time = 0;
  bool held = false;  // a train waited for these tokens
  uint64_t largest_acked = 0;
  Nanos largest_acked_sent = 0;
  uint64_t refused_there = 0;        // highest number that the peer has reported as refused
  Nanos refused_time = -kSecond;     // when that report arrived
  uint64_t lost_floor = UINT64_MAX;  // lowest lost number whose ACK is not recorded yet
  uint64_t packet_threshold = 3;     // RFC 9002 §6.1.1; grows with spurious retransmissions
  Nanos probe_base = 0;              // start of the probe timer
  uint32_t probe_count = 0;          // probe time-outs in a row
  uint32_t probes = 0;               // packets that may go without credit and window
  bool starved = false;              // backlog without credit since probe_base
  uint16_t lane = 0;                 // lane of the last train of chunks
  std::vector<uint64_t> started;     // by lane: ids below it are known to have started at the peer
  uint16_t pinged_lane = 0;          // lane of the last PING or PONG

  PathLimit limit;         // length of datagrams sent, and received as far as reported
  uint32_t fragments = 0;  // datagrams sent in fragments
  Reassembly parts;        // of arriving fragments

  EcnPath ecn;
  bool ecn_told = false;  // the failure of ECN is counted

  // True when the peer is known to have started this op or a later one of its lane.
  bool has_started(uint64_t op) const { return op < next_of(op); }
  uint64_t next_of(uint64_t id) const {
    return lane_of(id) < started.size() ? started[lane_of(id)] : 0;
  }
  // Records that all ids below this one have started in its lane at the peer.
  void note_next(uint64_t id) {
    if (lane_of(id) >= started.size()) started.resize(lane_of(id) + size_t{1});
    started[lane_of(id)] = std::max(started[lane_of(id)], id);
  }

  double loss_to(Nanos now) const {
    return now - loss_told_time > LossMeter::kMemory ? 0.0 : loss_told;
  }

  // Receiving.
  ReceivedPackets received;
  QueueDelay delay;
  EcnSeen ecn_seen;
  uint64_t refused = 0;       // highest packet number refused here
  uint64_t granted = 0;       // highest packet number given as credit
  uint64_t granted_sent = 0;  // credit in the last ACK
  uint64_t largest_told = 0;  // largest number in the last ACK
  uint16_t demand = 0;        // packets that the peer still wants to send
  uint32_t share = 0;         // packets of the window for this path, at most what it wants
  uint32_t part = 0;          // packets of the window for this path, whatever it wants
  uint32_t unacked = 0;
  bool ack_now = false;
  Nanos ack_due = kNever;
  Nanos last_ack = 0;
  Nanos largest_arrival = 0;
  // The sums are queueing delay times bytes, and bytes: of this batch, and since the last ACK.
  SmoothedDelay delay_from;  // of arriving packets
  SmoothedDelay delay_to;    // of sent packets, as the peer reports
  double batch_delay = 0;
  uint64_t batch_bytes = 0;
  double ack_delay = 0;
  uint64_t ack_bytes = 0;
  struct Stashed {
    uint64_t op;
    std::vector<uint8_t> datagram;
    // The bytes held, with the allocation.
    size_t cost() const { return datagram.size() + 64; }
  };
  std::vector<Stashed> stash;  // packets of ops that have not started here
  // A packet was refused for lack of memory, and no such op has started since.
  bool no_room = false;

  // Signs of life.
  Nanos last_heard = 0;
  bool heard = false;
  Nanos last_ping = 0;
  Nanos first_ping = 0;
  bool connected = false;  // a ping of full length has been answered
  bool gone = false;       // it has sent BYE
  uint64_t gone_op = 0;    // ops with a lower place were complete at the peer
  bool ping_now = false;
  bool pong_now = false;
  uint64_t pong_stamp = 0;
  uint32_t errors_left = 0;
  bool bye_acked = false;    // the peer has acknowledged our BYE
  bool answer_bye = false;   // the peer's BYE is not acknowledged yet
  uint32_t byes_sent = 0;    // since close()
  uint32_t byes_enough = 0;  // BYEs after which no answer is waited for
  Nanos next_farewell = 0;
};

}  // namespace gradwire
