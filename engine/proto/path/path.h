// Path is what one endpoint keeps about the way to and from one peer.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/reassembly.h"
#include "proto/congestion/ecn.h"
#include "proto/credit/credit.h"
#include "proto/credit/receive_controller.h"
#include "proto/path/control_frames.h"
#include "proto/path/farewell.h"
#include "proto/path/liveness.h"
#include "proto/path/path_counters.h"
#include "proto/path/path_limit.h"
#include "proto/path/started_ops.h"
#include "proto/recovery/acknowledger.h"
#include "proto/recovery/loss_meter.h"
#include "proto/recovery/recovery.h"
#include "proto/recovery/repetition.h"

namespace gradwire {

// Stash holds the packets of ops that have not started here, by op and in order of arrival.
class Stash {
 public:
  using Datagram = std::vector<uint8_t>;
  // The bytes that a datagram holds, with the allocation.
  static size_t cost(size_t bytes) { return bytes + 64; }
  // Packets of all ops.
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void add(uint64_t op, std::span<const uint8_t> datagram) {
    by_op_[op].emplace_back(datagram.begin(), datagram.end());
    ++size_;
  }
  // Takes out the packets of an op.
  std::vector<Datagram> take(uint64_t op) {
    auto found = by_op_.extract(op);
    if (found.empty()) return {};
    size_ -= found.mapped().size();
    return std::move(found.mapped());
  }
  // A packet was refused for lack of memory, and no such op has started since.
  bool no_room = false;

 private:
  std::map<uint64_t, std::vector<Datagram>> by_op_;
  size_t size_ = 0;
};

// LossReport is the share of packets that is lost on the way to a peer, and for how long they queue
// there, as the peer reports.
struct LossReport {
  double reported = 0;
  Nanos queue = 0;
  Nanos time = 0;

  bool recent(Nanos now) const { return now - time <= LossMeter::kMemory; }
  double share(Nanos now) const { return recent(now) ? reported : 0.0; }
};

// Settled is what a path was when it was last settled.
struct Settled {
  bool spreads = false;   // it is long, and paces what it sends over a round
  bool is_lossy = false;  // it has heavy loss
  bool touched = false;   // its times and counts must be computed again
};

// Fragments are parts of datagrams that are longer than the path carries.
struct Fragments {
  uint32_t sent = 0;  // datagrams sent in fragments
  Reassembly arriving;
};

struct Path {
  explicit Path(uint16_t endpoint) : peer(endpoint) {}

  uint16_t peer;
  Liveness life;
  Farewell farewell;
  StartedOps started;  // by the peer
  PathLimit limit;     // length of datagrams sent, and received as far as reported
  Fragments fragments;
  Ecn ecn;

  // Sending.
  Recovery recovery;
  ControlFrames control;
  LossReport loss_to;
  Twins twins;
  Allowance allowed;
  Hold hold;
  uint64_t early_sent = 0;  // chunks sent of ops that are not known to have started at the peer

  // Receiving. The grant stands before the largest number received, which decides about it.
  Arriving arriving;
  Credit grant;
  Acknowledger acks;
  Stash stash;

  PathLoss loss(Nanos now) const { return {loss_to.share(now), arriving.loss.share(now)}; }

  Settled settled;
  PathCounters counted;

  PathState state(Nanos now) const {
    const Rtt& rtt = recovery.rtt;
    return {counted,
            rtt.minimum(),
            rtt.any() ? rtt.smoothed() : 0,
            loss_to.recent(now) ? loss_to.queue : 0,
            loss_to.share(now),
            arriving.loss.share(now),
            allowed.window,
            recovery.in_flight()};
  }
};

}  // namespace gradwire
