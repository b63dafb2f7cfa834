// AggregatorHalf is an op at the endpoint that sums one shard of it: the sum, what each worker has
// sent of it and still needs, and the messages that end it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "proto/base/config.h"
#include "proto/base/memory.h"
#include "proto/base/message.h"
#include "proto/op/op_messages.h"
#include "proto/op/op_report.h"
#include "proto/op/outbox.h"
#include "proto/op/worker_half.h"
#include "proto/plan/grid.h"
#include "proto/pull/committed_pull.h"
#include "proto/push/aggregator.h"
#include "proto/push/chunk_sender.h"
#include "proto/push/passes.h"
#include "wire/packet.h"

namespace gradwire {

class AggregatorHalf {
 public:
  // `own`: the same op's other half in this process, or null. All outlive it.
  AggregatorHalf(const OpSpec& spec, const Grid& grid, const EndpointConfig& config, Memory& memory,
                 WorkerHalf* own, Outbox& out);

  Aggregator& sum() { return sum_; }
  const Grid::Shard& shard() const { return grid_.shards[config_.shard()]; }
  // The sender of the results to a worker.
  ChunkSender& back(uint16_t worker) { return *back_[worker]; }
  // How far a worker's push is under control "probe", else null.
  PassReceiver* passes(uint16_t worker) { return passes_.empty() ? nullptr : &passes_[worker]; }
  MessageReceiver& open_message(uint16_t worker) { return opens_[worker]; }
  // The class of a result, where the plan's classes have DSCPs.
  uint8_t result_class(uint32_t chunk) const { return result_class_[chunk - shard().begin]; }

  // ---- what arrives
  Aggregator::Added add(uint16_t worker, const wire::Header& header,
                        std::span<const uint8_t> payload, Nanos now, bool stashed);
  // True when a contribution that completed no sum has no consequences.
  bool quiet() const {
    return passes_.empty() && !sum_.closes_regions() && sum_.finished().size() == counted_;
  }
  // Takes the rest of an OPEN; false when it is malformed.
  bool open(uint16_t worker, const Open& open, wire::Reader& rest, Nanos now);
  void open_own(uint16_t longest, Nanos now);
  // Answers a worker's push. In passes the answer waits for the worker's OPEN, without which no
  // region closes.
  void answer(uint16_t worker);

  // ---- what follows
  // Tells workers which regions have closed: they need not send more of these.
  void stop_regions();
  // Applies finished results for the own worker, and lets the others have them.
  void pass_on(Nanos now);
  // Folds what all workers' OPENs carry, and sends FOLD; true when it did.
  bool fold();
  // True once the sum is complete and known to be so: results and CLOSE follow.
  bool summed() const {
    return sum_.all_final() && (spec_.plan.pull != Pull::lossy || sum_.all_opened());
  }
  bool close_sent() const { return close_sent_; }
  // Sends CLOSE where the plan has it. The results that follow are all.
  void send_close();
  // A result was lost. True when no worker needs it any more.
  bool withhold(uint32_t chunk);
  // Sends COMMIT once every worker has the results that are not withheld; true when it did. `left`:
  // by endpoint, whether it needs nothing more.
  bool commit(std::span<const uint8_t> left);
  // True when every worker has the results that it needs.
  bool results_taken(std::span<const uint8_t> left) const;
  // True when nothing follows but results that go again.
  bool ended() const {
    return sum_.all_final() && close_sent_ && (config_.shard() != 0 || folded_) &&
           (!committed_ || committed_->over());
  }
  // The caller takes its memory back: results in it that may go again are copied. `left`: as above.
  void keep_results(std::span<const uint8_t> left);
  // What the results leave to this endpoint's residuals.
  void report(OpReport& report);

 private:
  void send(wire::Kind kind, std::span<const uint8_t> body);

  const OpSpec& spec_;
  const Grid& grid_;
  const EndpointConfig& config_;
  WorkerHalf* own_;
  Outbox& out_;
  Aggregator sum_;
  // By worker.
  std::vector<std::unique_ptr<ChunkSender>> back_;
  std::vector<PassReceiver> passes_;  // of the pushes under control "probe", else empty
  std::vector<MessageReceiver> opens_;
  std::vector<Stats> votes_;
  std::vector<uint16_t> longest_;      // datagrams of its paths; 0: as agreed
  std::vector<uint8_t> result_class_;  // by chunk of the shard, or empty
  size_t passed_on_ = 0;               // finished chunks applied for the own worker
  size_t counted_ = 0;                 // finished chunks that wait for the others
  bool folded_ = false;
  bool close_sent_ = false;
  std::optional<CommittedPull> committed_;  // of a committed pull
};

}  // namespace gradwire
