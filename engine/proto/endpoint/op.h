// Op is one all-reduce as one endpoint handles it: as a worker, as an aggregator, or both.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "proto/base/memory.h"
#include "proto/base/message.h"
#include "proto/endpoint/endpoint.h"
#include "proto/endpoint/op_memory.h"
#include "proto/plan/grid.h"
#include "proto/pull/committed_pull.h"
#include "proto/pull/pull_receiver.h"
#include "proto/push/aggregator.h"
#include "proto/push/chunk_sender.h"
#include "proto/push/passes.h"
#include "wire/packet.h"

namespace gradwire {

// WorkerPart is an op at an endpoint that contributes to it and wants its result. Its vectors are
// by aggregator.
struct WorkerPart {
  bool done = false;  // spec.data belongs to the caller again
  std::vector<std::unique_ptr<ChunkSender>> push;
  std::vector<uint32_t> early;  // chunks pushed before the op was known to have started there
  std::vector<PullReceiver> pull;
  std::vector<MessageReceiver> closes;
  std::vector<MessageReceiver> commits;
  MessageReceiver fold;
  bool folded = false;
  // The longest datagram that all workers' paths carry; 0: as agreed at the start.
  uint16_t agreed = 0;
  Stats stats{};
  uint16_t settled = 0;   // aggregators below it need no more of the push
  uint16_t complete = 0;  // aggregators below it have sent all that is needed
  Nanos push_done = 0;
  Nanos first_result = 0;
};

// AggregatorPart is an op at the endpoint that sums one shard of it. Its vectors are by worker.
struct AggregatorPart {
  AggregatorPart(const Plan& plan, const Grid& grid, uint16_t own_shard, uint16_t workers, int self,
                 codec::Elements own, Memory& memory, std::span<const uint8_t> priorities)
      : shard(own_shard),
        sum(plan, grid, grid.shards[own_shard], workers, self, own, memory, priorities),
        passes(plan.control == Control::probe ? workers : 0),
        opens(workers),
        votes(workers),
        longest(workers) {}

  // How far a worker's push is under control "probe", else null.
  PassReceiver* passes_of(uint16_t worker) { return passes.empty() ? nullptr : &passes[worker]; }

  uint16_t shard;
  Aggregator sum;
  std::vector<std::unique_ptr<ChunkSender>> back;
  std::vector<PassReceiver> passes;  // of the pushes under control "probe", else empty
  std::vector<MessageReceiver> opens;
  std::vector<Stats> votes;
  std::vector<uint16_t> longest;  // like WorkerPart::agreed
  // By chunk of the shard, when the plan's classes have DSCPs.
  std::vector<uint8_t> result_class;
  size_t passed_on = 0;  // finished chunks applied for the own worker
  size_t counted = 0;    // finished chunks that the scheduler knows of
  bool fold_sent = false;
  bool close_sent = false;
  std::optional<CommittedPull> committed;  // of a committed pull
};

struct Op {
  Op(OpSpec what, const EndpointConfig& config, Memory& memory, Nanos now)
      : id(what.op),
        spec(std::move(what)),
        plan_hash(spec.plan.hash()),
        has_close(ends_with_close(spec.plan)),
        grid(spec.plan, config.datagram_bytes, config.aggregators()),
        reserved(memory, memory_of(spec.plan, config)),
        started(now) {}

  uint64_t id;
  OpSpec spec;
  uint64_t plan_hash;  // each OPEN that is sent or arrives needs it
  bool has_close;      // it ends with CLOSE
  Grid grid;
  Reserved reserved;             // where it is aggregated
  uint64_t longest_message = 0;  // bytes
  Nanos started;
  Nanos deadline = kNever;
  std::unique_ptr<WorkerPart> worker;
  std::unique_ptr<AggregatorPart> aggregator;
  uint32_t control_open = 0;  // control frames without an acknowledgement
  Traffic traffic;
  Waits waits;
  Nanos due = kNever;    // its time in the agenda
  bool changed = false;  // it may be drained now

  // The op's result is still awaited here.
  bool working() const { return worker && !worker->done; }
  bool commits() const { return spec.plan.pull == Pull::committed; }
  // Chunks of this kind go in passes.
  bool in_passes(wire::Kind kind) const {
    return spec.plan.control == Control::probe &&
           (kind == wire::Kind::push || spec.plan.pull == Pull::lossy);
  }
  // Its result, or its failure, has been reported here.
  bool done() const { return worker && worker->done; }
  // The chunks that are summed here.
  const Grid::Shard& own_shard() const { return grid.shards[aggregator->shard]; }
};

}  // namespace gradwire
