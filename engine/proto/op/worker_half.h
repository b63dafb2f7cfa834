// WorkerHalf is an op at an endpoint that contributes to it and wants its result: what it still
// sends to each aggregator, and what it still needs of each.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "proto/base/config.h"
#include "proto/base/message.h"
#include "proto/op/op_messages.h"
#include "proto/op/op_report.h"
#include "proto/op/outbox.h"
#include "proto/plan/grid.h"
#include "proto/pull/pull_receiver.h"
#include "proto/push/chunk_sender.h"
#include "wire/packet.h"

namespace gradwire {

class WorkerHalf {
 public:
  // All outlive it.
  WorkerHalf(const OpSpec& spec, const Grid& grid, const EndpointConfig& config, Outbox& out);

  // The sender of the own chunks to an aggregator, and the record of its results.
  ChunkSender& push(uint16_t aggregator) { return *push_[aggregator]; }
  PullReceiver& pull(uint16_t aggregator) { return pull_[aggregator]; }
  const PullReceiver& pull(uint16_t aggregator) const { return pull_[aggregator]; }
  uint16_t aggregators() const { return static_cast<uint16_t>(pull_.size()); }
  // The result has been reported, or the op's failure: the data belong to the caller again.
  bool done() const { return done_; }

  // ---- events; false for what is malformed
  bool on_pull(uint16_t aggregator, uint32_t chunk, std::span<const uint8_t> payload, Nanos now);
  // Takes a part of CLOSE, COMMIT or FOLD. `longest`: bytes of a message of this op at most.
  bool on_message(uint16_t aggregator, wire::Kind kind, uint32_t part,
                  std::span<const uint8_t> payload, uint64_t longest);
  void on_fold(const Fold& fold) { fold_ = fold; }
  // Takes a result that was summed in this process. `payload`: null where it is in place.
  void take_own(uint16_t aggregator, uint32_t chunk, const uint8_t* payload, Nanos now);
  // Answers what an aggregator has sent of a lossy pull. Before CLOSE it is not known how many
  // results suffice.
  void answer(uint16_t aggregator);
  // The op is over for the caller: nothing more is sent.
  void finish();

  // ---- what is lacking
  // True once all results are here. `sums_final`: the own shard's sum is complete.
  bool complete(bool sums_final, Nanos now);
  // True when it lacks something that only this aggregator can send.
  bool needs(uint16_t aggregator) const {
    return !pull_[aggregator].complete() || (aggregator == 0 && !fold_);
  }
  // Writes what became of the chunks, and the times since `started`.
  void report(OpReport& report, Nanos started, Nanos now) const;

 private:
  bool on_close(uint16_t aggregator, wire::Reader& reader);
  bool on_commit(uint16_t aggregator, wire::Reader& reader);
  void apply(uint32_t chunk, const uint8_t* payload, Nanos now);
  void report_chunks(OpReport& report) const;

  const OpSpec& spec_;
  const Grid& grid_;
  const EndpointConfig& config_;
  Outbox& out_;
  // By aggregator.
  std::vector<std::unique_ptr<ChunkSender>> push_;
  std::vector<PullReceiver> pull_;
  std::map<std::pair<wire::Kind, uint16_t>, MessageReceiver> messages_;  // CLOSE, COMMIT, FOLD
  std::optional<Fold> fold_;
  bool done_ = false;
  uint16_t pushed_ = 0;    // aggregators below it need no more of the push
  uint16_t complete_ = 0;  // aggregators below it have sent all that is needed
  Nanos push_done_ = 0;
  Nanos first_result_ = 0;
};

}  // namespace gradwire
