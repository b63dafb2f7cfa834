// PullSender and PullReceiver carry results back. An aggregator has one PullSender per worker over
// one shared list of finished chunks; a worker has one PullReceiver per aggregator.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "proto/base/bitmap.h"
#include "proto/base/fifo.h"
#include "proto/base/zeroed.h"
#include "proto/plan/grid.h"
#include "proto/plan/plan.h"
#include "proto/push/aggregator.h"
#include "proto/push/passes.h"

namespace gradwire {

class PullSender {
 public:
  PullSender(const Plan& plan, const Grid& grid, const Grid::Shard& shard,
             const std::vector<uint32_t>& finished);

  uint32_t backlog() const {
    const size_t fresh = finished_->size() - cursor_;
    if (passes_) return passes_->settled() ? 0 : static_cast<uint32_t>(fresh) + passes_->backlog();
    return static_cast<uint32_t>(fresh + lost_.size());
  }
  bool next(uint32_t& chunk, bool& again);
  // The chunk that next() would return.
  bool peek(uint32_t& chunk);
  void acked(uint32_t chunk);
  void lost(uint32_t chunk);
  void forget(uint32_t chunk);  // its worker needs it no more
  // True while the chunk is sent and neither acknowledged nor lost. A chunk sent twice may have
  // arrived.
  bool in_flight(uint32_t chunk) const { return state_[chunk - begin_] == State::flight; }
  uint32_t acked_count() const { return acked_; }

  // ---- a lossy pull
  // The passes under control "probe", else null.
  PassSender* passes() { return passes_ ? &*passes_ : nullptr; }
  // No results follow: the first pass is complete.
  void seal();
  // Handles ENOUGH: the worker needs no more of this region.
  void stop_region(uint32_t region);
  // True once the worker needs nothing more of this shard.
  bool settled() const { return passes_ ? passes_->settled() : regions_left_ == 0; }

 private:
  void join();
  bool pop_lost(uint32_t& chunk);
  bool pop_fresh(uint32_t& chunk);

  enum class State : uint8_t { idle, flight, acked, queued, forgotten };
  uint32_t begin_;
  const Grid* grid_;
  bool lossy_;
  const std::vector<uint32_t>* finished_;
  Zeroed<State> state_;
  size_t cursor_ = 0;
  ChunkFifo lost_;  // chunks to be sent again
  uint32_t acked_ = 0;
  std::vector<uint8_t> region_open_;  // lossy pull, by region: more is needed
  uint32_t regions_left_ = 0;
  std::optional<PassSender> passes_;
};

class PullReceiver {
 public:
  explicit PullReceiver(const Grid::Shard& shard)
      : begin_(shard.begin), missing_(shard.size()), arrived_(shard.size()) {}

  // Records an arrival; true when the chunk had not arrived before.
  bool insert(uint32_t chunk);
  bool has(uint32_t chunk) const { return arrived_.test(chunk - begin_); }
  // Handles CLOSE: which chunks of this worker counted, and which chunks have a result.
  void close(Bitmap counted, Bitmap applied);
  // Handles COMMIT: the results that all workers apply.
  void commit(Bitmap committed);

  bool closed() const { return closed_; }
  bool committed() const { return committed_; }
  // The wanted chunks that have not arrived. All of the shard is wanted until CLOSE or COMMIT.
  uint32_t missing() const { return missing_; }
  bool counted(uint32_t chunk) const { return !closed_ || counted_mask_.test(chunk - begin_); }
  bool wanted(uint32_t chunk) const { return !narrowed_ || wanted_.test(chunk - begin_); }

 private:
  void want(Bitmap wanted);

  uint32_t begin_;
  uint32_t missing_;
  bool closed_ = false;
  bool committed_ = false;
  bool narrowed_ = false;
  Bitmap arrived_;
  Bitmap counted_mask_;
  Bitmap wanted_;
};

}  // namespace gradwire
