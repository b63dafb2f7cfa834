// Op is one all-reduce as one endpoint handles it: as a worker, as an aggregator, or both.
//
// It knows other endpoints by number only. It takes their packets, what they have acknowledged and
// when they leave, says which chunk goes to each next, and leaves in its outbox what follows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "proto/base/again.h"
#include "proto/base/config.h"
#include "proto/base/memory.h"
#include "proto/op/aggregator_half.h"
#include "proto/op/op_memory.h"
#include "proto/op/op_report.h"
#include "proto/op/op_spec.h"
#include "proto/op/outbox.h"
#include "proto/op/worker_half.h"
#include "proto/plan/grid.h"
#include "wire/packet.h"

namespace gradwire {

// Fate is what becomes of a packet that arrived for the first time. refused: there was no room.
enum class Fate : uint8_t { taken, refused, malformed };
inline Fate fate_of(bool good) {
  return good ? Fate::taken : Fate::malformed;
}

// Chunks are chunks of an op that go to a peer one after another, of one length.
struct Chunks {
  std::span<const uint32_t> ids;  // until the next call
  wire::Kind kind = wire::Kind::push;
  bool again = false;
  uint16_t flags = 0;
};

class Op {
 public:
  // `works`: the own worker contributes to it. The configuration and the memory outlive it.
  Op(OpSpec spec, const EndpointConfig& config, Memory& memory, bool works, Nanos now);
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  const uint64_t id;
  OpSpec spec;
  const Grid grid;
  const Nanos started;
  Outbox out;
  Traffic traffic;
  Waits waits;
  // Of OpTable: the time of its next timer, and that it is among those that may be drained.
  Nanos due = kNever;
  bool listed = false;

  // ---- what it is
  // The op's result is still awaited here.
  bool working() const { return worker_ && !worker_->done(); }
  // Its result, or its failure, has been reported here.
  bool done() const { return worker_ && worker_->done(); }
  bool commits() const { return spec.plan.pull == Pull::committed; }
  bool probes() const { return spec.plan.control == Control::probe; }
  // Chunks of this kind go in passes.
  bool in_passes(wire::Kind kind) const {
    return probes() && (kind == wire::Kind::push || spec.plan.pull == Pull::lossy);
  }
  // Chunks are summed here, and some of the sums are not complete.
  bool lacks_sums() const { return aggregator_ && !aggregator_->sum().all_final(); }
  bool all_opened() const { return aggregator_ && aggregator_->sum().all_opened(); }
  // The own worker's chunks are encoded before they are sent.
  bool encodes() const { return worker_ && !spec.data.are_payloads(spec.plan.format); }
  // The bytes of its longest packet of a chunk.
  uint32_t longest_packet() const {
    return static_cast<uint32_t>(wire::kHeaderBytes + spec.plan.format.bytes(grid.chunk_elements));
  }

  // ---- events
  // Begins the own worker's half. `longest`: the longest datagram that all paths carry.
  void begin(uint32_t longest, Nanos now);
  // Takes a packet of a peer; follow() is due after it, or after more of the same peer that arrived
  // with it. `stashed`: it was acknowledged before the op started here.
  Fate take(uint16_t peer, const wire::Header& header, std::span<const uint8_t> payload, Nanos now,
            bool stashed = false);
  // Does what follows from the packets taken since the last time.
  void follow(Nanos now);
  // Takes the message OPEN of a worker. The first part is enough to tell another plan.
  bool on_open(uint16_t worker, std::span<const uint8_t> bytes, Nanos now);
  bool same_plan(uint16_t worker, std::span<const uint8_t> open);
  MessageReceiver& open_message(uint16_t worker) { return aggregator_->open_message(worker); }
  // A peer has acknowledged chunks of this kind.
  void acked(uint16_t peer, wire::Kind kind, std::span<const uint32_t> chunks, Nanos now);
  // A packet was lost on its way to a peer, or goes again.
  void lost(uint16_t peer, wire::Kind kind, uint32_t chunk, Again why, Nanos now);
  void control_acked() { out.changed |= --out.unacknowledged == 0; }
  // The peer has left, and sends and needs nothing more of this op.
  void left(uint16_t peer);
  void on_timer(Nanos now);
  Nanos next_timer() const;
  Nanos deadline() const { return working() ? deadline_ : kNever; }
  // Sends the PROBE of each pass that has gone to a peer. `gone`: it takes no results.
  void end_passes(uint16_t peer, bool gone);
  // It ends without a result.
  void abandon();
  // Looks whether the own worker has all that it needs.
  void check(Nanos now);

  // ---- chunks
  struct Backlog {
    uint32_t sure = 0;   // results, and chunks that go again
    uint32_t fresh = 0;  // chunks of a push that go for the first time
  };
  Backlog backlog(uint16_t peer) const;
  // Takes the next chunks for a peer, so many at most. `fresh`: pushes may include chunks that were
  // not sent before.
  Chunks next(uint16_t peer, bool fresh, size_t most);
  // The payload of a chunk that goes now, encoded in `memory` if the op encodes.
  const void* payload(wire::Kind kind, uint32_t chunk, uint8_t* memory) const;
  // Chunks differ in nothing but their number.
  bool alike() const {
    return spec.priorities.empty() && spec.plan.class_dscp.empty() && !encodes();
  }
  // The DSCP of the chunk that goes to a peer next. `usual`: where no class has one of its own.
  uint8_t next_dscp(uint16_t peer, bool fresh, uint8_t usual) const {
    return spec.plan.class_dscp.empty() ? usual : dscp_of_class(peer, fresh, usual);
  }
  // True for a chunk from which on less than this share of all follows.
  bool in_last(uint16_t peer, wire::Kind kind, double share) const {
    return sender(peer, kind).in_last(share);
  }

  // ---- what it waits for
  // The own worker lacks something that only this peer can send.
  bool needs(uint16_t peer) const;
  // The most packets that a peer can still want to send here.
  uint64_t most_wanted(uint16_t peer) const;
  // No peer needs anything of it from here any more.
  bool drained() const;
  // The endpoints that keep it from its end, and what of.
  struct Missing {
    const char* what;
    std::vector<uint16_t> endpoints;
  };
  Missing missing() const;

 private:
  // True when the op's chunks of this worker are summed here.
  bool sums_for(uint16_t worker) const { return aggregator_ && worker < config_.workers; }
  // True when the own worker takes results of this endpoint.
  bool pulls_from(uint16_t peer) const {
    return worker_ && config_.aggregator_at(peer) != kNoAggregator;
  }
  ChunkSender& sender(uint16_t peer, wire::Kind kind) const {
    return kind == wire::Kind::push ? worker_->push(config_.aggregator_at(peer))
                                    : aggregator_->back(peer);
  }
  Fate on_push(uint16_t worker, const wire::Header& header, std::span<const uint8_t> payload,
               Nanos now, bool stashed);
  Fate on_open_part(uint16_t worker, uint32_t part, std::span<const uint8_t> payload, Nanos now);
  Fate on_forgive(uint16_t worker, std::span<const uint8_t> payload, Nanos now);
  Fate for_worker(uint16_t peer, const wire::Header& header, std::span<const uint8_t> payload,
                  Nanos now);
  Fate on_pass_packet(uint16_t peer, const wire::Header& header, std::span<const uint8_t> payload,
                      Nanos now);
  bool on_probe(uint16_t peer, const wire::Pass& pass);
  bool on_pass_answer(uint16_t peer, const wire::Header& header, const wire::Pass& pass,
                      std::span<const uint8_t> missing, Nanos now);
  bool on_enough(uint16_t peer);
  bool on_stop(uint16_t peer, std::span<const uint8_t> payload);
  void after_sum(Nanos now, uint16_t by = Waits::kNobody);
  void try_commit(Nanos now);
  void give_up(uint16_t peer);
  void report(Nanos now);
  uint8_t dscp_of_class(uint16_t peer, bool fresh, uint8_t usual) const;

  const EndpointConfig& config_;
  uint64_t hash_;                 // of the plan: each OPEN that is sent or arrives needs it
  uint64_t longest_message_ = 0;  // bytes
  Reserved reserved_;             // where it is aggregated
  Nanos deadline_;
  // Of the packets taken since the last follow(): who completed sums; one may complete the result.
  uint16_t summed_by_ = Waits::kNobody;
  bool news_ = false;
  std::vector<uint8_t> left_;  // by endpoint: it has left, and needs nothing more
  uint32_t left_count_ = 0;
  // The worker's half outlives the aggregator's, which refers to it.
  std::unique_ptr<WorkerHalf> worker_;
  std::unique_ptr<AggregatorHalf> aggregator_;
};

}  // namespace gradwire
