// One all-reduce (op) as one endpoint sees it: as a worker, as an aggregator, or both.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "proto/base/memory.h"
#include "proto/base/message.h"
#include "proto/endpoint/endpoint.h"
#include "proto/endpoint/op_memory.h"
#include "proto/plan/grid.h"
#include "proto/pull/pull.h"
#include "proto/pull/pull_ledger.h"
#include "proto/push/aggregator.h"
#include "proto/push/passes.h"
#include "proto/push/push_sender.h"

namespace gradwire {

// Whether an op of this plan ends with CLOSE, which says what counted.
inline bool ends_with_close(const Plan& plan) {
  return !plan.exact() || plan.pull != Pull::exact;
}

struct Op {
  std::optional<Reserved> reserved;  // where it is aggregated
  uint64_t id = 0;
  uint64_t place = 0;  // how many ops, of all lanes, were made here before it
  OpSpec spec;
  Grid grid;
  bool exact = true;
  bool committed = false;
  bool pulls = true;
  bool lossy_pull = false;
  bool probes = false;           // control "probe"
  bool has_close = false;        // it ends with CLOSE
  uint64_t longest_message = 0;  // bytes
  Nanos started = 0;
  Nanos deadline = kNever;

  // As a worker.
  bool worker = false;
  bool done = false;                     // spec.data belongs to the caller again
  std::vector<PushSender> push;          // per aggregator
  std::vector<uint32_t> early;           // per aggregator: chunks pushed before it had started
  std::vector<PullReceiver> pull;        // per aggregator
  std::vector<PullLedger> ledgers;       // per aggregator, of a lossy pull
  std::vector<PassReceiver> pull_asked;  // per aggregator
  std::vector<MessageReceiver> closes;
  std::vector<MessageReceiver> commits;
  MessageReceiver fold;
  bool folded = false;
  uint16_t agreed = 0;  // the longest datagram that all workers' paths carry; 0: as at the start
  Stats stats{};
  Nanos push_done = 0;
  Nanos first_result = 0;

  // As an aggregator.
  bool aggregates = false;
  uint16_t shard = 0;
  std::unique_ptr<Aggregator> aggregator;
  std::vector<PullSender> back;          // per worker
  std::vector<PassReceiver> push_asked;  // per worker
  std::vector<MessageReceiver> opens;
  std::vector<Stats> votes;
  std::vector<uint16_t> longest;      // per worker, as `agreed`
  std::vector<uint8_t> result_class;  // per chunk of the shard, where the plan's classes have DSCPs
  size_t passed_on = 0;               // finished chunks that the own worker has
  bool fold_sent = false;
  bool close_sent = false;
  bool commit_sent = false;
  Bitmap withheld;
  std::vector<uint64_t> withheld_elements;  // per region
  uint32_t withheld_count = 0;

  uint32_t control_open = 0;  // control frames not yet acknowledged
  uint64_t bytes_sent = 0;
  uint64_t packets_sent = 0;
  uint64_t retransmissions = 0;

  const Grid::Shard& own_shard() const { return grid.shards[shard]; }
};

}  // namespace gradwire
