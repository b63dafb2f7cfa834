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
#include "proto/pull/pull.h"
#include "proto/pull/pull_ledger.h"
#include "proto/push/aggregator.h"
#include "proto/push/passes.h"
#include "proto/push/push_sender.h"

namespace gradwire {

// True for plans whose ops end with CLOSE, which reports what counted.
inline bool ends_with_close(const Plan& plan) {
  return !plan.exact() || plan.pull != Pull::exact;
}

struct Op {
  std::optional<Reserved> reserved;  // where it is aggregated
  uint64_t id = 0;
  uint64_t place = 0;  // ops of all lanes made here before it
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
  bool done = false;             // spec.data belongs to the caller again
  std::vector<PushSender> push;  // by aggregator
  // By aggregator: chunks pushed before the op was known to have started there.
  std::vector<uint32_t> early;
  std::vector<PullReceiver> pull;        // by aggregator
  std::vector<PullLedger> ledgers;       // by aggregator, for a lossy pull
  std::vector<PassReceiver> pull_asked;  // by aggregator
  std::vector<MessageReceiver> closes;
  std::vector<MessageReceiver> commits;
  MessageReceiver fold;
  bool folded = false;
  // The longest datagram that all workers' paths carry; 0: as agreed at the start.
  uint16_t agreed = 0;
  Stats stats{};
  Nanos push_done = 0;
  Nanos first_result = 0;

  // As an aggregator.
  bool aggregates = false;
  uint16_t shard = 0;
  std::unique_ptr<Aggregator> aggregator;
  std::vector<PullSender> back;          // by worker
  std::vector<PassReceiver> push_asked;  // by worker
  std::vector<MessageReceiver> opens;
  std::vector<Stats> votes;
  std::vector<uint16_t> longest;  // by worker, like `agreed`
  // By chunk of the shard, when the plan's classes have DSCPs.
  std::vector<uint8_t> result_class;
  size_t counted_results = 0;  // finished chunks that the scheduler knows of
  size_t passed_on = 0;        // finished chunks applied for the own worker
  bool fold_sent = false;
  bool close_sent = false;
  bool commit_sent = false;
  Bitmap withheld;
  std::vector<uint64_t> withheld_elements;  // by region
  uint32_t withheld_count = 0;

  uint32_t control_open = 0;  // control frames without an acknowledgement
  uint64_t bytes_sent = 0;
  uint64_t packets_sent = 0;
  uint64_t retransmissions = 0;

  const Grid::Shard& own_shard() const { return grid.shards[shard]; }
};

}  // namespace gradwire
