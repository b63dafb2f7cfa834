// ReceiveController bounds what all peers together send to one endpoint: a window, which credit
// divides among them. It is the counterpart of SendController.
//
// Feed it arrived(), missing() and marked() for packets, and sample() for each peer after a batch
// of them. share() sets a peer's credit; after a batch it is due for the peers of add_others().
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "proto/base/time.h"
#include "proto/base/train.h"
#include "proto/congestion/delay_window.h"
#include "proto/congestion/loss_count.h"
#include "proto/congestion/queue_delay.h"
#include "proto/congestion/rate_meter.h"
#include "proto/credit/credit.h"
#include "proto/credit/grant_slots.h"
#include "proto/recovery/loss_meter.h"
#include "proto/recovery/rtt.h"

namespace gradwire {

// Arriving measures what comes from one peer.
struct Arriving {
  QueueDelay delay;
  LossMeter loss;
  LossCount lost;
  RateMeter rate;  // of what the peer sends, with what is lost
  // Since the last sample: queueing delay times bytes, and bytes.
  double queued = 0;
  uint64_t bytes = 0;

  // Measures loss and rate by new packets of `size` bytes together with consecutive numbers from
  // `number` on. `largest`: the largest one before them; what came before the first is not known.
  void count(uint64_t number, uint64_t packets, uint64_t largest, uint64_t size, Nanos now) {
    if (number < largest) {
      loss.late(packets);
      return;
    }
    const uint64_t lost = largest ? number - largest - 1 : 0;
    const uint64_t first = largest ? 0 : 1;
    if (packets == first) return;
    loss.add(static_cast<double>(lost), static_cast<double>(packets - first), now);
    rate.add((packets - first + lost) * size / packets, now);
  }
};

class ReceiveController {
 public:
  struct Setup {
    size_t endpoints = 0;
    uint32_t senders = 0;
    uint32_t workers = 0;
    uint32_t wire_bytes = 0;  // of a full packet
    double buffer = 0;        // bytes that may wait unread here
    Nanos target = 0;         // the queue aimed at
    bool server = false;
    uint32_t engines = 1;  // that share the port
  };
  explicit ReceiveController(const Setup& setup);

  const DelayWindow& window() const { return window_; }
  CreditPool credit;

  // ---- packets
  // Counts packets by their numbers, as Arriving does. `queue`: their queueing delay.
  void count(Arriving& from, uint64_t number, uint64_t packets, uint64_t largest, uint64_t size,
             Nanos queue, Nanos now) {
    from.count(number, packets, largest, size, now);
    if (!from.lost.add(number, packets, largest, queue, now)) return;
    const LossCount::Period& ended = from.lost.ended();
    window_.count(ended.lost, ended.arrived, ended.queue);
  }
  // New packets of `bytes` together have arrived after queueing for `queue`.
  // `limited`: their sender had more to send, and no credit.
  void arrived(Arriving& from, Nanos queue, uint64_t bytes, bool limited) {
    from.queued += static_cast<double>(queue) * static_cast<double>(bytes);
    from.bytes += bytes;
    if (limited) window_.limited();
  }
  // Packets are missing before one that has arrived.
  void missing() { window_.lost(); }
  // A packet with a mark has arrived; true when the window shrinks, once per round. It does so
  // here too because under incast it bounds all senders together.
  bool marked(Nanos round, Nanos now);
  // Takes what has arrived of a peer since the last time.
  void sample(size_t peer, Arriving& from, const Rtt& rtt, Nanos now);

  // ---- credit
  // Sender is what the endpoint knows of a sender.
  struct Sender {
    size_t peer = 0;
    const Arriving& from;
    const Rtt& rtt;
    uint64_t largest = 0;  // packet number that has arrived
    bool no_room = false;  // a packet found no room
  };
  // Sets a sender's share, and grants it. True when it should get an ACK at once.
  bool share(Credit& grant, const Sender& sender, Nanos now);
  // The sender that gets a slot, whose share is due then, or GrantSlots::kNone. Call it until then
  // after each batch, and at slot_due().
  size_t next_slot(Nanos now) { return now < turns_until_ ? slots_.next(now) : GrantSlots::kNone; }
  // When it has to be called though nothing arrives.
  Nanos slot_due() const { return slots_.due() < turns_until_ ? slots_.due() : kNever; }
  // Appends the peers whose share is computed after a batch although nothing arrived from them:
  // all in turn, since what arrives changes the share of every sender.
  void add_others(std::vector<uint16_t>& peers);
  // The packets of a sender after which it gets an ACK, those of a train at most. At least three go
  // for each share of credit: with fewer the sender waits, and each takes as much of the return
  // path as a tenth of a chunk. For all of a slot one goes. `lossy`: ACKs are lost heavily; with
  // fewer, what has arrived would be sent again.
  static uint32_t packets_per_ack(const Credit& grant, bool lossy) {
    const uint32_t share = grant.turns ? grant.share : grant.share / kAcksPerShare;
    return lossy ? 1 : std::min<uint32_t>(share, Train::kMaxSegments);
  }

 private:
  // True when a sender at this distance takes turns.
  bool takes_turns(Nanos rtprop, Nanos now);
  // Grants a sender what it may send in its slot; true when it has got one.
  bool grant_slot(Credit& grant, const Sender& sender, Nanos now);

  // ACKs for each share of credit.
  static constexpr uint32_t kAcksPerShare = 3;
  size_t endpoints_;
  uint32_t wire_bytes_;
  bool server_;
  Nanos target_;
  bool many_;  // senders of a server: they may take turns
  DelayWindow window_;
  PortDelay delay_;  // of the queue in front of this port
  GrantSlots slots_;
  Nanos turns_until_ = 0;  // its queue is known to be too short for all senders
  Nanos cut_ = 0;          // last reduction of the window for marks
  size_t other_ = 0;       // the last of add_others()
};

}  // namespace gradwire
